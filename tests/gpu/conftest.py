"""The fake cards, and bundles to execute on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.fake_gpu import INSTALLED, FakeGpu
from tests.unit.runtime.conftest import export_doubling


@pytest.fixture(autouse=True)
def _installed() -> None:
    if not (INSTALLED / ".stamp").exists():
        pytest.skip("there is no fake card; `make test-gpu` installs it")


@pytest.fixture
def gpu(tmp_path: Path) -> FakeGpu:
    """One card of 80 GiB, on a link and with kernels that take no time."""
    return FakeGpu(tmp_path)


@pytest.fixture(scope="session")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_doubling(tmp_path_factory.mktemp("bundles") / "doubling", w=[1, 1, 1])
