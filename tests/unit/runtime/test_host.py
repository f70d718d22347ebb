"""Weights on the host. Models share one copy of equal tensors. A tensor without a copy is read from its file."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from rsrv.runtime import host_memory
from rsrv.runtime.allocation import LARGE, Bytes
from rsrv.runtime.host_memory import HostMemory, HostMemoryError, SharedMemory, TensorBytes
from rsrv.runtime.host_weights import HostCounts, HostStore
from rsrv_bundle import Bundle, BundleError, dtypes, load_weights, read_bundle
from rsrv_bundle.weights import WeightsFile
from tests.held import open_files
from tests.logged import logged_here
from tests.unit.bundle.forge import make_bundle
from tests.unit.runtime.weights import Array, bundle_of, check_counts, large, small
from tests.waiting import PATIENCE_S, wait_until

MakeBundle = Callable[..., Bundle]


@pytest.fixture
def make(tmp_path: Path) -> MakeBundle:
    """Return a function that writes a bundle with the given weights."""
    count = iter(range(1000))

    def make_one(version: Literal["2.0", "3"] = "3", **arrays: Array) -> Bundle:
        return bundle_of(tmp_path, arrays, f"bundle_{next(count)}", version)

    return make_one


@pytest.fixture(params=["private", "shared"])
def store(request: pytest.FixtureRequest) -> Iterator[HostStore]:
    """Yield a store. At the end, its counts are checked, and nothing of it is left in /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rsrv-test-") as shm:
        memory = HostMemory() if request.param == "private" else SharedMemory(Path(shm))
        store = HostStore(memory)
        yield store
        check_counts(store)
        store.close()
        check_counts(store)
        assert store.counts == HostCounts(0, 0, 0)
        assert list(Path(shm).glob("*/*")) == []


@pytest.fixture
def private() -> HostStore:
    return HostStore(HostMemory())


def weights_file(bundle: Bundle) -> Path:
    assert bundle.weights_file is not None
    return bundle.weights_file


def rewrite(bundle: Bundle, offset: int = -1, *, dated: bool = True) -> None:
    """Change one byte of the weights file in place.

    `dated`: also advance the file's time, which a fast test may not change.
    """
    path = weights_file(bundle)
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (1_000_000 if dated else 0)))


def resident_bytes() -> int:
    """Return how many bytes of this process are in memory, except pages of files, which the kernel may drop at any time."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def test_equal_tensors_of_two_models_are_held_once(store: HostStore, make: MakeBundle) -> None:
    """Two models have an equal tensor. The host has one copy, until the last of the two drops it."""
    first = store.open(make(a=large(1), b=small(2)), keep=True)
    alone = store.counts
    second = store.open(make(x=small(2), y=large(1)), keep=True)

    assert store.counts == HostCounts(2 * alone.logical, alone.physical, 2)
    assert first.tensors == second.tensors[::-1]
    assert np.shares_memory(first.read(0), second.read(1))
    first.close()
    assert store.counts == alone
    assert (second.read(1) == 1).all()


def test_equal_bytes_of_another_type_or_shape_are_another_tensor_in_the_same_memory(
    store: HostStore, make: MakeBundle
) -> None:
    """Tensors with equal bytes and different types or shapes share memory on the host.

    Their keys differ, so a device keeps them apart.
    """
    array = large(1)
    weights = store.open(make(a=array, b=array.view(np.int32), c=array.reshape(-1)), keep=True)

    assert len({tensor.key for tensor in weights.tensors}) == 3
    assert len({tensor.key.digest for tensor in weights.tensors}) == 1
    assert store.counts.tensors == 1
    for index, expected in enumerate([array, array.view(np.int32), array.reshape(-1)]):
        read = weights.read(index)
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("keep", [True, False])
def test_both_format_versions_give_the_modules_arguments(
    store: HostStore, make: MakeBundle, keep: bool
) -> None:
    """Format 2.0 stores transposed tensors. A tensor has the same key and the same copy in both formats."""
    arrays = {
        "matrix": np.arange(LARGE, dtype=np.int16).reshape(4, -1),
        "cube": np.arange(24, dtype=np.float64).reshape(2, 3, 4),
        "vector": np.arange(5, dtype=np.uint8),
    }
    old, new = (store.open(make(version, **arrays), keep=keep) for version in ("2.0", "3"))

    assert old.tensors == new.tensors
    assert store.counts.tensors == (3 if keep else 0)
    for index, expected in enumerate(arrays.values()):
        np.testing.assert_array_equal(old.read(index), expected)
        np.testing.assert_array_equal(new.read(index), expected)


@pytest.mark.parametrize("keep", [True, False])
def test_every_element_type_and_every_shape(private: HostStore, make: MakeBundle, keep: bool) -> None:
    """Tensors of all types and shapes, also scalars and empty ones, are read-only, contiguous and aligned."""
    arrays = [
        np.ones(shape).astype(dtypes.numpy_dtype(token))
        for token in dtypes.TOKENS
        for shape in ((), (0,), (2, 0, 3), (5,), (3, 7))
    ]
    bundle = make(**{f"w{i}": array for i, array in enumerate(arrays)})
    weights = private.open(bundle, keep=keep)

    for index, (expected, loaded) in enumerate(zip(arrays, load_weights(bundle), strict=True)):
        for array in (weights.read(index), loaded):
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.tobytes() == expected.tobytes()
            assert array.flags.c_contiguous
            assert array.flags.aligned
            assert not array.flags.writeable
        if expected.size:
            assert weights.read(index).ctypes.data % 64 == 0
    check_counts(private)
    private.close()


def test_a_model_without_weights_takes_no_memory(store: HostStore, make: MakeBundle, tmp_path: Path) -> None:
    """A model without weights takes no memory, whether it has a weights file or not."""
    for bundle in (make(), read_bundle(make_bundle(tmp_path, name="none"))):
        weights = store.open(bundle, keep=True)
        assert weights.kept
        assert weights.tensors == ()
        weights.drop()
        weights.keep()


def test_keeping_and_dropping_are_idempotent(store: HostStore, make: MakeBundle) -> None:
    """Keeping or dropping weights twice changes nothing, because an operator may set a residency that the model already has."""
    weights = store.open(make(a=large(1), b=small(1)), keep=False)
    assert store.counts == HostCounts(0, 0, 0)
    weights.drop()

    weights.keep()
    counts = store.counts
    weights.keep()

    assert weights.kept
    assert store.counts == counts == HostCounts(weights.nbytes, weights.nbytes, 2)
    check_counts(store)
    weights.drop()
    weights.drop()
    assert store.counts == HostCounts(0, 0, 0)
    weights.close()
    weights.close()


def test_a_tensor_that_another_model_keeps_is_not_read_again(store: HostStore, make: MakeBundle) -> None:
    """A tensor that another model keeps is not read again, even if the file changes after the bundle was opened."""
    keeper = store.open(make(a=large(1)), keep=True)
    bundle = make(a=large(1))
    other = store.open(bundle, keep=False)
    rewrite(bundle)

    assert np.shares_memory(other.read(0), keeper.read(0))
    other.keep()

    keeper.close()
    assert (other.read(0) == 1).all()


def test_dropping_gives_the_memory_back_to_the_system_at_once(store: HostStore, make: MakeBundle) -> None:
    """Dropping weights returns their memory to the system at once. No allocator keeps it."""
    size = 32 << 20
    bundle = make(**{f"w{i}": np.full(size // 16, i, np.uint8) for i in range(16)})
    gc.collect()
    without = resident_bytes()
    weights = store.open(bundle, keep=True)
    arrays = [weights.read(index) for index in range(16)]
    assert sum(int(array[::4096].sum()) for array in arrays)  # Shared pages count after a touch.
    del arrays
    with_copy = resident_bytes()
    weights.drop()

    assert with_copy - without > 0.9 * size
    assert resident_bytes() - without < 0.1 * size


def test_a_bundle_that_is_replaced_atomically_can_still_be_read(store: HostStore, make: MakeBundle) -> None:
    """Weights stay readable if their file is replaced by a rename, or removed, because it is open."""
    bundle = make(a=large(1))
    weights = store.open(bundle, keep=False)
    os.replace(weights_file(make(a=large(2))), weights_file(bundle))
    assert (weights.read(0) == 1).all()
    weights_file(bundle).unlink()

    weights.keep()

    assert (weights.read(0) == 1).all()


@pytest.mark.parametrize("change", ["rewritten", "truncated"])
def test_a_file_that_is_written_in_place_is_an_error_with_a_remedy(
    store: HostStore, make: MakeBundle, change: str
) -> None:
    """If a weights file was written in place, reading or keeping its weights fails with a remedy. Host copies stay valid."""
    bundle = make(a=large(1), b=large(2))
    with_copy, without_copy = store.open(bundle, keep=True), store.open(make(c=small(1)), keep=False)
    absent = store.open(bundle, keep=False)
    values_before = with_copy.read(1).copy()
    if change == "rewritten":
        rewrite(bundle)
    else:
        os.truncate(weights_file(bundle), weights_file(bundle).stat().st_size - 1)

    np.testing.assert_array_equal(with_copy.read(1), values_before)
    with_copy.drop()
    for attempt in (absent.keep, with_copy.keep, lambda: absent.read(1)):
        with pytest.raises(BundleError, match="was written to since the model was loaded; reload the model"):
            attempt()
        assert store.counts == HostCounts(0, 0, 0)
        check_counts(store)
    assert (without_copy.read(0) == 1).all()


def test_a_file_that_has_its_content_again_is_read_again(store: HostStore, make: MakeBundle) -> None:
    """After a changed tensor has its old bytes again, it can be read. The file's time and other tensors do not matter."""
    bundle = make(a=large(1), b=large(2))
    weights = store.open(bundle, keep=False)
    rewrite(bundle)

    assert (weights.read(0) == 1).all()
    with pytest.raises(BundleError, match="was written to since the model was loaded"):
        weights.read(1)
    rewrite(bundle)

    assert (weights.read(1) == 2).all()
    weights.keep()
    assert weights.kept


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("offset", [8, -1])
def test_weights_that_do_not_match_the_manifest_are_not_opened(
    store: HostStore, make: MakeBundle, offset: int, keep: bool
) -> None:
    """Weights that do not match the manifest's checksum cannot be opened, until the file is repaired.

    No tensor of the file is kept.
    """
    bundle = make("3", a=large(1), b=large(2))
    before = open_files()
    rewrite(bundle, bundle.weights[0].offset + offset if offset > 0 else offset)
    torn = read_bundle(bundle.path, verify=False)

    with pytest.raises(BundleError, match=r"weights\.safetensors does not match the manifest: it is being"):
        store.open(torn, keep=keep)

    assert store.counts == HostCounts(0, 0, 0)
    wait_until(lambda: open_files() <= before)
    rewrite(bundle, bundle.weights[0].offset + offset if offset > 0 else offset)
    weights = store.open(read_bundle(bundle.path, verify=False), keep=keep)
    assert (weights.read(1) == 2).all()


def test_a_change_that_hides_its_time_is_found_by_content(store: HostStore, make: MakeBundle) -> None:
    """If a file was changed but has its old time, the change is found by the content.

    Otherwise models would share wrong weights under the same key.
    """
    bundle = make(a=large(1), b=large(2))
    weights = store.open(bundle, keep=False)
    rewrite(bundle, dated=False)

    with pytest.raises(BundleError, match="reload the model"):
        weights.keep()

    assert not weights.kept
    assert store.counts == HostCounts(0, 0, 0)


def test_a_missing_or_short_file_leaks_nothing(store: HostStore, make: MakeBundle) -> None:
    """If the file is missing or short, no reference and no descriptor is left."""
    short, gone = make(a=large(1), b=large(2)), make(a=large(1))
    before = open_files()
    os.truncate(weights_file(short), weights_file(short).stat().st_size - 1)
    weights_file(gone).unlink()

    with pytest.raises(BundleError, match="changed since the bundle was read"):
        store.open(short, keep=True)
    with pytest.raises(BundleError, match="cannot be read"):
        store.open(gone, keep=True)

    assert store.counts == HostCounts(0, 0, 0)
    wait_until(lambda: open_files() <= before)


class Interrupted(HostMemory):
    """Memory that calls `before` before each allocation."""

    def __init__(self, before: Callable[[], object]) -> None:
        self.before = before
        self.released: list[str] = []

    def place(self, digest: str, filled: Bytes) -> TensorBytes:
        self.before()
        block = super().place(digest, filled)
        return TensorBytes(block.bytes, lambda: self.released.append(digest))


def test_a_file_that_changes_while_it_is_opened(make: MakeBundle) -> None:
    """If the file changes while its weights are read, the tensors that were read are released, and the file is closed."""
    before = open_files()
    bundle = make(a=large(1), b=large(2))
    memory = Interrupted(lambda: rewrite(bundle))
    store = HostStore(memory)

    with pytest.raises(BundleError, match="reload the model"):
        store.open(bundle, keep=True)

    assert len(memory.released) == 1
    assert store.counts == HostCounts(0, 0, 0)
    wait_until(lambda: open_files() <= before)
    check_counts(store)


def test_a_load_that_runs_out_of_memory_changes_nothing(make: MakeBundle) -> None:
    """If the memory is full in the middle of a load, no tensor of the model is kept."""
    successes = [1, 1]

    def run_out() -> None:
        if not successes.pop():
            raise HostMemoryError("full")

    successes.insert(0, 0)
    store = HostStore(Interrupted(run_out))
    bundle = make(a=large(1), b=large(2), c=large(3))

    with pytest.raises(HostMemoryError, match="full"):
        store.open(bundle, keep=True)

    assert store.counts == HostCounts(0, 0, 0)
    check_counts(store)
    successes[:] = [0, 1]
    weights = store.open(bundle, keep=False)
    with pytest.raises(HostMemoryError, match="full"):
        weights.keep()
    assert not weights.kept
    check_counts(store)


def test_two_threads_that_keep_a_tensor_at_once_keep_one_copy(make: MakeBundle) -> None:
    """Two threads read the same tensor at once. The host keeps one copy and releases the other."""
    meeting = threading.Barrier(2)
    memory = Interrupted(lambda: None)
    store = HostStore(memory)
    bundle = make(a=large(1))
    first, other = store.open(bundle, keep=False), store.open(bundle, keep=False)
    for both in ((first, first), (first, other)):
        memory.before = lambda: meeting.wait(PATIENCE_S)
        threads = [threading.Thread(target=weights.keep) for weights in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert store.counts.physical == large(1).nbytes
        assert len(memory.released) == 1
        check_counts(store)
        first.drop()
        other.drop()
        assert len(memory.released) == 2
        memory.released.clear()


class Driver:
    """Page locks like those of a GPU's driver."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        assert address not in self.locked
        self.locked[address] = nbytes

        def unlock() -> None:
            # The memory must still be mapped here. For a driver, it is an error to unmap locked memory.
            maps = Path("/proc/self/maps").read_text().splitlines()
            bounds = [[int(word, 16) for word in line.split()[0].split("-")] for line in maps]
            assert any(start <= address < end for start, end in bounds)
            del self.locked[address]

        return unlock


@pytest.mark.parametrize("shared", [True, False])
def test_each_mapping_is_page_locked_once_and_until_its_last_view_is_gone(
    make: MakeBundle, shared: bool, tmp_path: Path
) -> None:
    """A large tensor is page-locked once for all models, until its last view is freed.

    Small tensors are not page-locked, because they share pages with other data.
    """
    driver = Driver()
    store = HostStore(SharedMemory(tmp_path) if shared else HostMemory(), driver.lock)
    first = store.open(make(a=large(1), b=small(1)), keep=True)
    second = store.open(make(a=large(1), b=large(2).view(np.int32)), keep=True)
    array = second.read(1)
    assert driver.locked == {first.read(0).ctypes.data: LARGE, array.ctypes.data: LARGE}

    first.drop()
    assert len(driver.locked) == 2
    second.drop()

    assert driver.locked == {array.ctypes.data: LARGE}
    view = array.T[1:].view(np.float32)
    del array
    assert len(driver.locked) == 1
    del view
    assert driver.locked == {}
    store.close()


def test_memory_that_cannot_be_page_locked_is_used_without_the_lock(
    make: MakeBundle, caplog: pytest.LogCaptureFixture
) -> None:
    """If memory cannot be page-locked, it is used without the lock. The log has one line for all tensors."""

    def refuse(address: int, nbytes: int) -> Callable[[], None]:
        raise OSError("no more")

    store = HostStore(HostMemory(), refuse)
    with caplog.at_level(logging.WARNING, host_memory.log.name):
        weights = store.open(make(a=large(1), b=large(2)), keep=True)

    assert [record.getMessage() for record in logged_here(caplog)] == [
        "host memory is not page-locked, so transfers take longer: no more"
    ]
    assert (weights.read(1) == 2).all()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("opened", [False, True], ids=["open", "keep"])
def test_a_store_that_is_closed_during_a_load_leaves_nothing(
    make: MakeBundle, monkeypatch: pytest.MonkeyPatch, at: int, opened: bool
) -> None:
    """If the store closes during a load, as at the server's end, no tensor of the model stays in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rsrv-test-") as shm:
        store = HostStore(SharedMemory(Path(shm)))
        bundle = make(a=large(1), b=large(2), c=large(3))
        weights = store.open(bundle, keep=False) if opened else None
        read = WeightsFile.read_into

        def closing(file: WeightsFile, index: int, out: Bytes, *, digest: str | None = None) -> None:
            read(file, index, out, digest=digest)
            if index == at:
                store.close()

        monkeypatch.setattr(WeightsFile, "read_into", closing)
        come = partial(store.open, bundle, keep=True) if weights is None else weights.keep
        with pytest.raises(HostMemoryError):
            come()

        assert list(Path(shm).glob("*/*")) == []
        assert store.counts == HostCounts(0, 0, 0)


def test_a_file_that_was_exchanged_before_it_was_opened_is_refused(
    private: HostStore, make: MakeBundle
) -> None:
    """A file that was replaced after its header was read is refused, because its tensors may be at other places."""
    bundle, other = make(a=small(1), b=small(2)), make(b=small(2), a=small(1))
    os.replace(weights_file(other), weights_file(bundle))

    with pytest.raises(BundleError, match="changed since the bundle was read; load the model again"):
        private.open(bundle, keep=True)
    assert private.counts == HostCounts(0, 0, 0)
