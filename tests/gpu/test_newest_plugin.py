"""The newest jax and CUDA plugin that pyproject.toml allows, which a user's pip installs. Other tests use the locked version."""

from __future__ import annotations

import re
from subprocess import CalledProcessError

import numpy as np
import pytest

from rsrv.runtime.cuda import MemoryShare
from rsrv.runtime.jax_device import JaxDevice
from tests.gpu.fake_gpu import INSTALLED, MIB, ROOT, FakeGpu
from tests.gpu.install import install_newest

# The first installation loads 400 MB.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

#: PYTHONPATH for an environment that has rsrv's requirements, but not rsrv.
SOURCES = f"{ROOT / 'triton_backend'}:{ROOT / 'bundles'}"


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return install_newest(INSTALLED)
    except CalledProcessError as error:
        pytest.fail(f"Put Python 3.12 first into PATH, and see uv's message above: {error}")


@pytest.fixture
def newest(gpu: FakeGpu, python: str) -> FakeGpu:
    gpu.python = python
    return gpu


def version() -> str:
    import jax

    return jax.__version__


def test_jax_is_capped_behind_the_newest_release_that_is_tried(newest: FakeGpu) -> None:
    """pyproject.toml allows no jax after the tested one. A higher cap would let pip install a release that no test has tried."""
    tried = newest.run(version, PYTHONPATH=SOURCES)

    major, minor, *_ = map(int, tried.split("."))
    caps = re.findall(r"jax(?:\[cuda\d+\])?>=[\d.]+,<([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert caps == [f"{major}.{minor + 1}"] * 4


def take_more_than_allowed(preallocate: bool) -> int | None:
    """Allow jax half of the card's memory, and check that it refuses more. Return the limit."""
    import jax

    device = JaxDevice("cuda", memory=MemoryShare(0.5, preallocate))
    limit = device.memory_limit
    assert limit is not None
    device.free(device.upload([np.zeros(limit // 2, np.uint8)]))
    # This call avoids rsrv's own check.
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(jax.device_put(np.zeros(limit + MIB, np.uint8)))
    return limit


@pytest.mark.parametrize("preallocate", [True, False])
def test_the_memory_settings_mean_what_they_say(newest: FakeGpu, preallocate: bool) -> None:
    """The plugin takes its share of the memory at once or as needed, and never more."""
    newest.settings.cards[0].memory_bytes = 512 * MIB

    limit = newest.run(take_more_than_allowed, preallocate, PYTHONPATH=SOURCES)

    assert limit == 256 * MIB
    taken = [call.bytes for call in newest.calls("alloc")]
    assert (taken == [limit]) == preallocate
    assert sum(taken) <= limit
