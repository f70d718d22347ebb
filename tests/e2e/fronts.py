"""The front that the tests' models have: the native one with the variable RSRV_STUB__FRONT=native, where a model can."""

from __future__ import annotations

import os

import pytest

NATIVE = os.environ.get("RSRV_STUB__FRONT") == "native"


def python_front(reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs the Python front; `reason` is a sentence."""
    return pytest.mark.skipif(NATIVE, reason=reason)
