"""What runs inside Triton's Python stub processes. Imports numpy and nothing heavier: one process per model does."""
