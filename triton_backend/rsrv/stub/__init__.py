"""The front inside Triton's Python stub processes. Imports numpy and nothing heavier, for each model has a process."""
