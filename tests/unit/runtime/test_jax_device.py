"""The jax device on the CPU: compiling, caching and freeing."""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime import allocation, cuda
from rsrv.runtime.allocation import aligned_copy
from rsrv.runtime.device import Abandoned, Array, DeviceRows, Executable, OutOfMemory, run
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.models import describe
from rsrv_bundle import read_bundle
from rsrv_bundle.export import export_bundle
from rsrv_bundle.modules import check_signatures
from tests.logged import logged_here
from tests.unit.runtime.conftest import build_here


def test_a_container_that_cannot_see_the_machines_card_serves_from_the_cpu_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container without the machine's card, the runtime serves from the CPU, and the log has a warning.

    The driver shows the machine's cards in each container, also in those that may not use them.
    """
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda, "CARD_SIGNS", ())
    monkeypatch.setattr(cuda, "HIDDEN_CARD_SIGNS", ("/proc",))

    assert JaxDevice("auto").hardware.platform == "cpu"

    (record,) = logged_here(caplog)
    assert "has an NVIDIA card (/proc), which this container cannot see. Start it with" in record.getMessage()


def test_a_built_model_computes_at_every_size(doubling: Path) -> None:
    """Each executable computes with the uploaded weights. Freed weights cannot be used."""
    device = JaxDevice("cpu")
    model = build_here(doubling, device)
    assert model.weights is not None

    for (_, size), executable in model.executables.items():
        x = np.arange(3 * size, dtype=np.float32).reshape(size, 3)
        (y,), seconds = run(device, executable, model.weights, [x])
        np.testing.assert_array_equal(y, 2 * x + 1)
        assert seconds > 0

    assert set(model.program.costs) == {(0, 1), (0, 4), (0, 8)}
    assert model.program.coalesce
    assert model.program.weight_bytes == 12
    device.free(model.weights)
    with pytest.raises(RuntimeError, match="deleted"):
        run(device, next(iter(model.executables.values())), model.weights, [np.zeros((1, 3), np.float32)])


def test_the_interface_says_what_the_modules_take(doubling: Path) -> None:
    """A model's interface has -1 for batch axes, and the compiled extents of the other axes."""
    bundle = read_bundle(doubling)

    interface = describe(bundle, check_signatures(bundle))

    (variant,) = interface.variants
    assert [(t.name, t.dtype, t.dims, t.batch_axis) for t in variant.inputs.tensors] == [
        ("x", "f32", (-1, 3), 0)
    ]
    assert [(t.name, t.dtype, t.dims, t.batch_axis) for t in variant.outputs.tensors] == [
        ("y", "f32", (-1, 3), 0)
    ]
    assert variant.sizes == (1, 4, 8)
    assert not interface.exact


def tensors(count: int, failing: Exception | None = None) -> Iterator[Array]:
    for i in range(count):
        yield np.full((100, 100), i, np.float32)
    if failing is not None:
        raise failing


def test_an_upload_brings_every_tensor_in_order() -> None:
    """Tensors are uploaded in the order of the iterator, and cannot be used after they were freed."""
    device = JaxDevice("cpu")

    buffers = device.upload(tensors(5))

    assert [np.asarray(buffer)[7, 7] for buffer in buffers] == [0, 1, 2, 3, 4]
    device.free(buffers)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(buffers[0])


def test_an_upload_that_ends_early_leaves_nothing() -> None:
    """An upload that is abandoned, or whose source fails, leaves no array."""
    device = JaxDevice("cpu")
    gc.collect()  # Garbage of another test would be freed during this one.
    before = len(jax.live_arrays())
    for given_up_at in (0, 2, 5):
        answers = iter([False] * given_up_at + [True])
        with pytest.raises(Abandoned):
            device.upload(tensors(5), lambda answers=answers: next(answers))  # type: ignore[misc]
    with pytest.raises(OSError, match="disk"):
        device.upload(tensors(3, OSError("disk")))

    assert len(jax.live_arrays()) == before


def test_an_upload_reads_what_it_moves_as_it_goes() -> None:
    """An upload reads the next tensor from its source after it has transferred the one before."""
    device = JaxDevice("cpu")
    gc.collect()  # Garbage of another test would be freed during this one.
    before = len(jax.live_arrays())
    there: list[int] = []

    def reading() -> Iterator[Array]:
        for array in tensors(4):
            there.append(len(jax.live_arrays()) - before)
            yield array

    device.free(device.upload(reading()))

    assert there == [0, 1, 2, 3]


#: More than any address space, so that no system overcommits it.
ENDLESS = (1 << 46,)


def test_an_upload_without_room_says_so_and_leaves_nothing() -> None:
    """An upload without room raises OutOfMemory, and frees the tensors that it has uploaded."""
    device = JaxDevice("cpu")
    gc.collect()  # Garbage of another test would be freed during this one.
    before = len(jax.live_arrays())

    with pytest.raises(OutOfMemory):
        device.upload([np.ones(3, np.float32), np.broadcast_to(np.float32(1), ENDLESS)])

    assert len(jax.live_arrays()) == before


def test_an_execution_without_room_says_so() -> None:
    """An execution without room raises OutOfMemory, and the next one works."""
    device = JaxDevice("cpu")

    def executable(shape: tuple[int, ...]) -> Executable:
        struct: Any = jax.ShapeDtypeStruct
        function = jax.jit(lambda x: (jnp.broadcast_to(x, shape) + 1,))
        return Executable(function.lower(struct((), np.float32)).compile())

    with pytest.raises(OutOfMemory, match="RESOURCE_EXHAUSTED"):
        run(device, executable(ENDLESS), [], [np.array(1, np.float32)])
    (y,), _ = run(device, executable((2,)), [], [np.array(1, np.float32)])
    assert y.tolist() == [2, 2]


def test_a_cpus_memory_has_no_stated_limit() -> None:
    """A CPU has no memory limit, and page-locking does nothing."""
    device = JaxDevice("cpu")

    assert (device.memory_limit, device.memory_in_use()) == (None, None)
    device.page_lock(0, 4096)()


def test_the_scratch_of_an_execution_is_what_it_takes_beside_its_weights(doubling: Path) -> None:
    """For y = 2 x + w, the scratch is the memory of x, of y, and of the tuple that holds y."""
    device = JaxDevice("cpu")
    model = build_here(doubling, device)

    for (_, size), executable in model.executables.items():
        assert 0 <= device.scratch_bytes(executable, 12) - 2 * 12 * size <= 64


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (1000, 33), (1024, 512)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, jnp.bfloat16])
def test_an_upload_to_a_cpu_is_one_copy(shape: tuple[int, ...], dtype: type) -> None:
    """An upload to a CPU copies the tensor once, and does not use the source's memory in place."""
    device = JaxDevice("cpu")
    source: Array = np.full(shape, 3, dtype)
    source.flags.writeable = False

    (buffer,) = device.upload([source])

    assert isinstance(buffer, jax.Array)
    if source.size:
        assert buffer.unsafe_buffer_pointer() != source.ctypes.data
    copy = aligned_copy(source)
    in_place = jax.device_put(copy, buffer.device)
    assert not source.size or in_place.unsafe_buffer_pointer() == copy.ctypes.data
    np.testing.assert_array_equal(np.asarray(buffer), source)
    device.free([buffer])


_ROUNDS = """
import json, os, sys
from pathlib import Path
import numpy as np
from rsrv.runtime.jax_device import JaxDevice
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
first, rounds, *sizes = map(int, sys.argv[1:])
device = JaxDevice("cpu")
sources = [np.full(nbytes, i, np.uint8) for i, nbytes in enumerate(sizes)]
for _ in range(first):
    device.free(device.upload(sources))
before, loaded, freed = resident(), [], []
for _ in range(rounds):
    buffers = device.upload(sources)
    loaded.append(resident() - before)
    device.free(buffers)
    freed.append(resident() - before)
print(json.dumps([before, sum(sizes), min(loaded), max(map(abs, freed))]))
"""


@pytest.mark.parametrize(
    ("rounds", "sizes"),
    [
        pytest.param(10, [16 << 20] * 4, id="large"),
        pytest.param(10, [1 << 20] * 64, id="middling", marks=pytest.mark.long),
        pytest.param(10, [128 << 10] * 200, id="small", marks=pytest.mark.long),
        pytest.param(
            500,
            [1 << 10] * 60 + [64 << 10] * 40 + [1 << 20] * 12 + [8 << 20] * 2,
            id="a model of all sizes, 500 times",
            marks=pytest.mark.long,
        ),
    ],
)
def test_freed_memory_goes_back_to_the_system(rounds: int, sizes: list[int]) -> None:
    """Freed memory goes back to the system, also after many rounds."""
    command = [sys.executable, "-c", _ROUNDS, "5", str(rounds), *map(str, sizes)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)

    before, total, loaded, freed = json.loads(out.stdout.splitlines()[-1])

    assert loaded > 0.8 * total
    assert freed < 0.02 * before


def watch_blocks(monkeypatch: pytest.MonkeyPatch) -> list[ref[allocation.Bytes]]:
    """Return a list that gets each block that an upload to a CPU allocates."""
    allocate, blocks = allocation.aligned, list[ref[allocation.Bytes]]()

    def aligned(nbytes: int, *, huge_pages: bool = False) -> allocation.Bytes:
        block = allocate(nbytes, huge_pages=huge_pages)
        blocks.append(ref(block))
        return block

    monkeypatch.setattr(allocation, "aligned", aligned)
    return blocks


def test_a_tensor_that_takes_anothers_place_takes_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload reuses the memory of tensors of equal size that were freed for it. Memory that it does not need is freed."""
    device, blocks = JaxDevice("cpu"), watch_blocks(monkeypatch)
    sizes = [1 << 18, 1 << 18, 1 << 19]
    first = device.upload(np.full(size, 1, np.float32) for size in sizes)
    where = [_address(buffer) for buffer in first]
    device.free(first, reuse=True)

    second = device.upload(np.full(size, 2, np.float32) for size in (1 << 18, 1 << 19, 1 << 20))
    third = device.upload([np.full(1 << 18, 3, np.float32)])

    assert {_address(second[0]), _address(second[1])} <= set(where)
    assert len({_address(buffer) for buffer in (*second, *third)}) == 4
    for buffers, value in ((second, 2), (third, 3)):
        assert all((np.asarray(buffer) == value).all() for buffer in buffers)
    assert sum(block() is not None for block in blocks) == 4
    device.free([*second, *third])
    assert not any(block() is not None for block in blocks)


def _address(buffer: Any) -> int:
    address: int = buffer.unsafe_buffer_pointer()
    return address


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_output_may_stay_on_the_device(asynchronous: bool, doubling: Path) -> None:
    """An output kept on the device is an input of the next execution without a copy to the host."""
    device = JaxDevice("cpu", asynchronous_cpu=asynchronous)
    model = build_here(doubling, device)
    assert model.weights is not None
    x = np.arange(12, dtype=np.float32).reshape(4, 3)

    first = device.launch(model.executables[0, 4], model.weights, [x], unread=[0])
    output = device.keep(first, 0)
    (unread,), _ = device.read(first)
    (again,), _ = device.read(device.launch(model.executables[0, 4], model.weights, [output]))

    assert unread.size == 0
    np.testing.assert_array_equal(again, 2 * (2 * x + 1) + 1)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_on_the_device_are_put_together_with_others(axis: int) -> None:
    """Rows of several device tensors are merged with those from the host."""
    device = JaxDevice("cpu")
    rng = np.random.default_rng(3)
    sources = [np.moveaxis(rng.normal(size=(rows, 3)).astype(np.float32), 0, axis) for rows in (4, 2)]
    base = np.moveaxis(rng.normal(size=(8, 3)).astype(np.float32), 0, axis)
    large, small = device.upload(sources)

    merged: Any = device.merge(
        base, axis, [DeviceRows(large, 2, 2, 0), DeviceRows(small, 0, 1, 3), DeviceRows(large, 0, 1, 7)]
    )

    expected = np.moveaxis(base.copy(), axis, 0)
    expected[0:2] = np.moveaxis(sources[0], axis, 0)[2:4]
    expected[3] = np.moveaxis(sources[1], axis, 0)[0]
    expected[7] = np.moveaxis(sources[0], axis, 0)[0]
    np.testing.assert_array_equal(np.asarray(merged), np.moveaxis(expected, 0, axis))


class _Failing:
    """An output of an execution that fails while it runs, as on a GPU."""

    def block_until_ready(self) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: told to")

    def copy_to_host_async(self) -> None: ...


def test_an_execution_whose_outputs_all_stay_on_the_device_does_not_fail_unnoticed() -> None:
    """If all outputs stay on the device, a failure of the execution is still noticed."""
    device = JaxDevice("cpu", asynchronous_cpu=True)
    executable: Any = lambda: [_Failing()]

    with pytest.raises(OutOfMemory, match="told to"):
        device.read(device.launch(executable, [], [], unread={0}))


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("ILLEGAL_ADDRESS", True),
        ("LAUNCH_FAILED", True),
        ("ECC_UNCORRECTABLE", True),
        ("UNKNOWN", True),
        ("LAUNCH_OUT_OF_RESOURCES", False),
        ("INVALID_VALUE", False),
        ("JIT_COMPILER_NOT_FOUND", False),
        ("SHARED_OBJECT_INIT_FAILED", False),
    ],
)
def test_only_an_error_that_ends_the_context_loses_the_device(name: str, ends: bool) -> None:
    """Only an error of CUDA that ends the context loses the device.

    After another error, the device executes other models.
    """
    lost: list[str] = []
    device = JaxDevice("cpu", lost=lost.append)

    def executable() -> None:
        raise RuntimeError(f"INTERNAL: Failed to launch: CUDA_ERROR_{name}: told to")

    with pytest.raises(RuntimeError, match="told to"):
        device.launch(Executable(executable), [], [])

    assert bool(lost) is ends


def test_an_upload_that_the_host_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload to a CPU is refused if the host has no room, because the kernel would kill a process.

    Before a small upload, the memory is not checked.
    """
    device = JaxDevice("cpu")
    monkeypatch.setattr("rsrv.runtime.device_transfers.spare_memory", lambda: 1 << 20)

    def upload(count: int) -> None:
        array = np.zeros(count, np.float32)
        device.free(device.upload([array], kinds=[(array.shape, array.dtype)]))

    for count in (1, 1 << 18):
        upload(count)
    with pytest.raises(OutOfMemory, match="host memory are needed, and 1048576 are free"):
        upload(1 << 19)


def test_weights_that_were_evicted_for_an_upload_leave_it_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the memory of evicted weights is kept, so that an upload can reuse it.

    If the host has too little memory left for an upload, the kept memory is freed first.
    """
    device, blocks = JaxDevice("cpu"), watch_blocks(monkeypatch)

    def spare() -> int:
        return (3 << 20) - sum(block.nbytes for reference in blocks if (block := reference()) is not None)

    monkeypatch.setattr("rsrv.runtime.device_transfers.spare_memory", spare)
    array = np.zeros(2 << 20, np.uint8)
    for _ in range(3):
        device.free(device.upload([array], kinds=[(array.shape, array.dtype)]), reuse=True)


def test_a_cpu_has_executed_when_the_launch_returns(tmp_path: Path) -> None:
    """On a CPU, an execution has ended when the launch returns. The reported seconds include the time of the launch."""
    export_bundle(
        lambda params, x: {"y": jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ params["w"]), x)},
        {"w": np.eye(256, dtype=np.float32)},
        {"x": np.zeros((1, 256), np.float32)},
        batch_sizes=[256],
        out_dir=tmp_path / "long",
    )
    device = JaxDevice("cpu")
    model = build_here(tmp_path / "long", device)
    assert model.weights is not None
    x = np.ones((256, 256), np.float32)

    launched: Any = device.launch(model.executables[0, 256], model.weights, [x])
    ready = [output.is_ready() for output in launched.outputs]
    _, seconds = device.read(launched)

    assert ready == [True]
    assert seconds > 0.001


def test_a_profile_is_in_its_directory_when_it_ends(doubling: Path, tmp_path: Path) -> None:
    """When a profile ends, its file is in its own directory."""
    device = JaxDevice("cpu")
    for name in ("first", "second"):
        directory = tmp_path / name
        directory.mkdir()
        device.start_profile(directory)
        build_here(doubling, device)
        device.stop_profile()

        assert list(directory.rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError):
        device.stop_profile()
