"""Weights in the driver's own memory, with a fake driver and jax on the CPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime import jax_device as module
from rsrv.runtime.cuda import CudaError, Driver
from rsrv.runtime.cuda_memory import CPU, WeightMemory
from rsrv.runtime.device import Abandoned, Array, DeviceError, Executable, OutOfMemory, run
from rsrv.runtime.jax_device import JaxDevice
from tests.bench.gpu.client import serving
from tests.bench.gpu.models import WIDTH, Shape, make_models
from tests.bench.gpu.serving import settings_for
from tests.unit.runtime.conftest import build_here
from tests.unit.runtime.fake_cuda import FakeCuda

MakeDevice = Callable[..., JaxDevice]


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> MakeDevice:
    """Return jax's CPU device with weights where a driver puts them."""

    def make(library: FakeCuda, **options: Any) -> JaxDevice:
        monkeypatch.setattr(module, "Driver", partial(Driver, library=library))
        monkeypatch.setattr(module, "WeightMemory", partial(WeightMemory, device_type=CPU))
        return JaxDevice("cpu", weight_memory="driver", **options)

    return make


SOURCES: list[Array] = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.array(2.5, np.float64),
    np.array([True, False, True]),
    np.arange(-4, 4, dtype=np.int8),
    np.arange(100_000, dtype=np.uint64),
    np.full((5, 2), 1.5, jnp.bfloat16),
    np.full(7, 0.5, jnp.float16),
    np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
]
#: Tensors for jax's own memory: empty ones, and types without a name in DLPack.
OTHERS: list[Array] = [np.zeros((0, 3), np.float32), np.full(4, 2, jnp.float8_e5m2)]


def test_tensors_of_every_type_come_and_go(make_device: MakeDevice) -> None:
    """Tensors of each type are placed by the driver and freed without a rest."""
    library = FakeCuda()
    device = make_device(library)

    buffers: list[Any] = device.upload([*SOURCES, *OTHERS])

    for source, buffer in zip([*SOURCES, *OTHERS], buffers, strict=True):
        assert (buffer.dtype, buffer.shape) == (source.dtype, source.shape)
        np.testing.assert_array_equal(np.asarray(buffer), source)
    assert {buffer.unsafe_buffer_pointer() for buffer in buffers[: len(SOURCES)]} == set(library.allocated)
    device.free(buffers)
    assert (library.allocated, library.events, library.depth) == ({}, 0, 0)


def test_an_upload_that_is_given_up_leaves_nothing(make_device: MakeDevice) -> None:
    """An abandoned upload waits for the copies under way and then frees the memory."""
    library = FakeCuda()
    answers = iter([False, False, False, True])

    with pytest.raises(Abandoned):
        make_device(library).upload(SOURCES, lambda: next(answers))

    assert (library.allocated, library.events, library.depth) == ({}, 0, 0)


@pytest.mark.parametrize(
    ("library", "error"),
    [
        (FakeCuda(capacity=200), OutOfMemory),
        (FakeCuda(failing={"cuMemcpyHtoDAsync_v2": 700}), DeviceError),
        (FakeCuda(failing={"cuEventRecord": 700}), DeviceError),
    ],
    ids=["no room", "no copy", "no event"],
)
def test_an_upload_that_fails_leaves_no_memory(
    make_device: MakeDevice, library: FakeCuda, error: type[Exception]
) -> None:
    """An upload that fails frees its memory; a lack of memory differs from a broken device."""
    with pytest.raises(error):
        make_device(library).upload([np.ones(10, np.float32) for _ in range(9)])

    assert (library.allocated, library.depth) == ({}, 0)


def test_a_context_lost_during_an_upload_is_reported_though_nothing_can_be_freed(
    make_device: MakeDevice,
) -> None:
    """The runtime must end: no later load would succeed."""
    lost: list[str] = []
    failing = {"cuEventSynchronize": 700, "cuMemFreeAsync": 700}

    with pytest.raises(DeviceError, match="cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        make_device(FakeCuda(failing=failing), lost=lost.append).upload(SOURCES)

    assert "cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in lost


def test_a_context_lost_before_an_eviction_is_reported(make_device: MakeDevice) -> None:
    """The eviction may be the first call that CUDA answers with the error of a kernel."""
    lost: list[str] = []
    library = FakeCuda()
    device = make_device(library, lost=lost.append)
    buffers = device.upload(SOURCES)
    library.failing["cuMemFreeAsync"] = 700

    with pytest.raises(CudaError):
        device.free(buffers)

    assert lost == ["cuMemFreeAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)"]


def test_without_a_driver_its_memory_is_refused(make_device: MakeDevice) -> None:
    """Without a driver, the error names the setting."""
    with pytest.raises(DeviceError, match=r"runtime.weight_memory 'driver' .* cuInit"):
        make_device(FakeCuda(failing={"cuInit": 100}))


def test_a_model_computes_on_the_drivers_memory(make_device: MakeDevice, doubling: Path) -> None:
    """A model computes on the driver's memory at every compiled size."""
    library = FakeCuda()
    device = make_device(library)
    model = build_here(doubling, device)
    assert model.weights is not None
    assert len(library.allocated) == 1

    for (_, size), executable in model.executables.items():
        x = np.arange(3 * size, dtype=np.float32).reshape(size, 3)
        (y,), _ = run(device, executable, model.weights, [x])
        np.testing.assert_array_equal(y, 2 * x + 1)
    device.free(model.weights)
    assert library.allocated == {}


def test_an_execution_without_room_makes_the_driver_keep_nothing(make_device: MakeDevice) -> None:
    """If an execution finds no memory, the driver trims its pool, so that a retry finds it free."""
    library = FakeCuda()
    device = make_device(library)
    struct: Any = jax.ShapeDtypeStruct
    endless = (
        jax.jit(lambda x: (jnp.broadcast_to(x, (1 << 46,)) + 1,)).lower(struct((), np.float32)).compile()
    )

    with pytest.raises(OutOfMemory):
        run(device, Executable(endless), [], [np.array(1, np.float32)])

    assert library.trimmed == 1


def test_a_runtime_serves_from_the_drivers_memory(
    make_device: MakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three models in room for two are served in turns, and the driver gets all memory back."""
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(tmp_path / "runtime"))
    library = FakeCuda()
    models = make_models(tmp_path, Shape(1 << 20, tensors=5), list("abc"))
    x = np.ones((1, WIDTH), np.float32)

    with serving(make_device(library), settings_for(2 << 20), models) as clients:
        for _ in range(5):
            for client in clients:
                client.ask(x)
        assert len(library.allocated) <= 10

    assert library.allocated == {}
    assert not [array for array in jax.live_arrays() if array.nbytes > 1 << 16]
