"""The tests run without the library of the native front, whether this checkout has built it or not. Tests that need it make it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv_gen import plan


@pytest.fixture(autouse=True)
def no_library(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rsrv-gen find no library."""
    monkeypatch.setattr(plan, "LIBRARY", Path(tmp_path_factory.mktemp("library"), "libtriton_rsrv.so"))
