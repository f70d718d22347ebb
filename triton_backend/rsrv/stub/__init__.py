"""The front in Triton's Python stub processes. It imports numpy and nothing heavier, because each model has a process."""
