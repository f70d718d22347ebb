"""`make chaos`: cause one fault after another on a real server under load. See docs/troubleshooting.md.

Run from the project's root: python -m tests.chaos
"""

import sys

from tests.bench.places import ROOT

# The project's tools start the local tritonserver. They are scripts, which are not installed.
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))
