"""Hostile input, made from seeds: bundles, modules, frames, ONNX files and requests (`python -m tests.fuzz`, docs/security.md)."""

import sys

from tests.bench.places import ROOT

# The project's tools make the native front and start a local tritonserver. They are scripts, which are not installed.
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))
