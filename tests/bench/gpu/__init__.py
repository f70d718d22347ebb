"""Moving weights, measured on this machine's device through the real runtime. See docs/scheduler.md.

Run from the project's root: python -m tests.bench.gpu
"""
