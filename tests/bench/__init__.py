"""`make bench`: compare rsrv with a plain Triton model, measured on this machine. See docs/benchmark.md.

Run from the project's root: python -m tests.bench
"""

import sys

from tests.bench.places import ROOT

# The project's tools start the local tritonserver. They are scripts, which are not installed.
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))
