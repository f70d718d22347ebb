"""`make chaos`: faults, one after another, on a real server under load. See docs/troubleshooting.md.

Run from the project's root: python -m tests.chaos
"""

import sys

from tests.bench.places import ROOT

# The starter of the local tritonserver lives among the project's tools, which are scripts and not installed.
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))
