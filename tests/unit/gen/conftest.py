"""The tests run without the native front's library, even if this checkout has built it.

Tests that need the library write a file in its place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv_gen import plan


@pytest.fixture(autouse=True)
def no_library(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rsrv-gen find no library."""
    monkeypatch.setattr(plan, "LIBRARY", Path(tmp_path_factory.mktemp("library"), "libtriton_rsrv.so"))
