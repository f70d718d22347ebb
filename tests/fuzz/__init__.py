"""Hostile input, made from seeds: bundles, modules and frames (`python -m tests.fuzz`, docs/security.md)."""

import sys

from tests.bench.places import ROOT

# The makers of the native front and of a local tritonserver are among the project's tools, which are not installed.
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))
