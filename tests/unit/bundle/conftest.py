"""What all tests of bundles begin with."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def as_jax_begins() -> Iterator[None]:
    """Tests of the runtime, in the same process, may have turned 64 bits on, and its precision."""
    with jax.enable_x64(False), jax.default_matmul_precision(None):
        yield
