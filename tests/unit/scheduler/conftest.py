"""The machine under test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rsrv.scheduler import invariants
from tests.unit.scheduler.driver import Driver


@pytest.fixture
def machine() -> Iterator[Driver]:
    """Yield a driver of a scheduler with default settings and no models. Its invariants are checked after the test."""
    driver = Driver()
    yield driver
    invariants.check(driver.scheduler)
