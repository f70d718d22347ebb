"""`make bench`: rsrv beside a plain Triton model, measured on this machine. See docs/benchmark.md.

Run from the project's root: python -m tests.bench
"""

import sys

from tests.bench.places import ROOT

# The starter of the local tritonserver lives among the project's tools, which are scripts and not installed.
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))
