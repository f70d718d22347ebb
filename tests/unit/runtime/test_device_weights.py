"""Tensors on the device: how many bytes they take, and which ones are freed when a load fails."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from rsrv.runtime.device import OutOfMemory
from rsrv.runtime.host_weights import HostTensor
from rsrv.runtime.weight_mover import DeviceWeights
from rsrv_bundle.weights import TensorKey


class MemoryOfDevice:
    """A fake device that has the names of its tensors. If it is full, an upload raises OutOfMemory."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.full = False

    def upload(self, arrays: Iterable[str], *_: object) -> list[str]:
        if self.full:
            raise OutOfMemory("no memory")
        uploaded = [*arrays]
        self.held |= {*uploaded}
        return uploaded

    def free(self, buffers: Iterable[str], *, reuse: bool = False) -> None:
        self.held -= {*buffers}


@pytest.fixture
def device() -> MemoryOfDevice:
    return MemoryOfDevice()


@pytest.fixture
def on_device(device: MemoryOfDevice) -> DeviceWeights:
    return DeviceWeights(device)  # type: ignore[arg-type]


def weights_of(**sizes: int) -> Any:
    """Return the host's weights of a model. `sizes` has the bytes of each tensor by name."""
    tensors = tuple(HostTensor(TensorKey(name, "u8", (size,)), size) for name, size in sizes.items())
    return SimpleNamespace(tensors=tensors, distinct={tensor.key: tensor.nbytes for tensor in tensors})


def load(on_device: DeviceWeights, weights: Any, pool: Any = None) -> None:
    names = [tensor.key.digest for tensor in weights.tensors]
    on_device.load(weights, names.__getitem__, lambda: False, pool)


def test_a_tensor_kept_for_a_load_that_fails_is_freed(
    device: MemoryOfDevice, on_device: DeviceWeights
) -> None:
    """A tensor of `a` was kept for the load of `b`, which fails.

    The tensor is freed, because no other model would free it.
    """
    a, b = weights_of(own=1, shared=2), weights_of(shared=2, other=4)
    load(on_device, a)
    on_device.free(a, loading_for=b)
    assert (device.held, on_device.nbytes) == ({"shared"}, 2)
    device.full = True

    with pytest.raises(OutOfMemory):
        load(on_device, b)

    assert (device.held, on_device.nbytes) == (set(), 0)


def test_the_state_of_a_model_counts_while_its_weights_are_on_the_device(on_device: DeviceWeights) -> None:
    """A model's state adds to the bytes on the device while its weights are there, for any number of loads and evictions."""
    pool: Any = SimpleNamespace(nbytes=100, load=lambda _: None, unload=lambda _: None)
    weights = weights_of(own=1)
    for _ in range(3):
        load(on_device, weights, pool)
        assert on_device.nbytes == 101
        on_device.free(weights, pool=pool)
        assert on_device.nbytes == 0
