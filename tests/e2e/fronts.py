"""The front of the tests' models. With RSRV_STUB__FRONT=native, each model that can have the native front has it."""

from __future__ import annotations

import os

import pytest

NATIVE = os.environ.get("RSRV_STUB__FRONT") == "native"


def python_front(reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs the Python front; `reason` is a sentence."""
    return pytest.mark.skipif(NATIVE, reason=reason)
