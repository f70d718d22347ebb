"""Host copies that outlive a runtime: what it leaves, what the next runtime uses, and what a sweep removes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime import host_memory
from rsrv.runtime.host_memory import HostMemoryError, SharedMemory
from rsrv.runtime.host_weights import HostStore, HostWeights
from rsrv.wire.paths import start_time
from rsrv_bundle import Bundle, read_bundle
from rsrv_bundle.weights import WeightsFile
from tests.unit.runtime.weights import bundle_of, check_counts, large, small
from tests.waiting import wait_until

#: Names of a live server (this process) and of a server that has ended.
LIVE = f"{os.getpid()}-{start_time(os.getpid())}-gpu0"
ENDED = f"{os.getpid()}-1-gpu0"


@pytest.fixture(autouse=True)
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file seem to be written long ago."""
    monkeypatch.setattr("rsrv_bundle.weights._SETTLED_NS", -(1 << 62))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundle_of(tmp_path, {"a": large(1), "b": small(2), "c": large(3)}, "bundle", "3")


def start(shm: Path, owner: str = LIVE) -> HostStore:
    return HostStore(SharedMemory(shm, owner=owner))


def tensors(shm: Path) -> int:
    return sum(path.is_file() for path in shm.glob("rsrv-weights-*/*"))


def killed(store: HostStore) -> None:
    """End a store as SIGKILL does: the kernel releases its locks, and no file is removed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", _refuse)
        patch.setattr(shutil, "rmtree", _nothing)
        store.close()


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError


def _nothing(*_: object, **__: object) -> None:
    pass


def right(weights: HostWeights) -> bool:
    expected = (large(1), small(2), large(3))
    return all(np.array_equal(weights.read(index), array) for index, array in enumerate(expected))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of bytes of each read of a weights file."""
    counts: list[int] = []
    real = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        counts.append(count)
        return count

    monkeypatch.setattr(os, "preadv", read)
    return counts


@pytest.mark.parametrize("end", ["killed", "left"])
def test_the_next_runtime_reads_only_small_tensors(
    shm: Path, bundle: Bundle, reads: list[int], end: str
) -> None:
    """After a runtime's end, the next one reads only small tensors from the file.

    Large tensors are in shared memory, and a note has all digests.
    """
    store = start(shm)
    store.open(bundle, keep=True)
    if end == "killed":
        killed(store)
    else:
        store.leave()
        killed(store)
    reads.clear()

    after = start(shm)
    weights = after.open(bundle, keep=True)

    assert reads == [small(2).nbytes]
    assert right(weights)
    check_counts(after)
    after.close()
    assert tensors(shm) == 0


def test_a_model_without_a_host_copy_is_not_read_until_it_is_loaded(
    shm: Path, bundle: Bundle, reads: list[int]
) -> None:
    """The next runtime reads a model without a host copy only when the model is loaded.

    Until then, the note has the digests of the tensors.
    """
    store = start(shm)
    before = store.open(bundle, keep=False)
    killed(store)
    reads.clear()

    weights = start(shm).open(bundle, keep=False)

    assert reads == []
    assert weights.tensors == before.tensors
    assert right(weights)


def test_tensors_of_late_fronts_survive_a_sweep(shm: Path, bundle: Bundle, tmp_path: Path) -> None:
    """A sweep keeps tensors of models that have not registered yet. Some stubs register late, or at their next request."""
    store = start(shm)
    store.open(bundle, keep=True)
    killed(store)
    after = start(shm)
    early = after.open(bundle_of(tmp_path, {"z": large(9)}, "early"), keep=True)

    assert after.sweep() == 0
    assert start(shm, f"{LIVE[:-1]}1").sweep() == 0  # Another device's store keeps them as well.

    assert right(after.open(bundle, keep=True))
    early.close()
    after.close()
    assert tensors(shm) == 0


def test_tensors_of_a_server_that_has_ended_are_swept(shm: Path, bundle: Bundle) -> None:
    """The tensors and notes of a server that has ended are swept."""
    store = start(shm, ENDED)
    store.open(bundle, keep=True)
    killed(store)

    assert start(shm).sweep() == 2

    assert tensors(shm) == 0
    assert not list(shm.glob(f"*/{ENDED}"))


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
def test_tensors_of_a_file_that_changed_meanwhile_are_swept(
    shm: Path, bundle: Bundle, tmp_path: Path, change: str
) -> None:
    """If a weights file changed while no runtime had its model, its old tensors are swept, because no model needs them."""
    store = start(shm)
    store.open(bundle, keep=True)
    killed(store)
    assert bundle.weights_file is not None
    if change == "removed":
        bundle.weights_file.unlink()
    elif change == "replaced":
        fresh = bundle_of(tmp_path, {"a": large(1), "b": small(2), "c": large(4)}, "fresh")
        assert fresh.weights_file is not None
        os.replace(fresh.weights_file, bundle.weights_file)
    else:
        content = bundle.weights_file.read_bytes()
        bundle.weights_file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        # The file's times show the write, even within one tick of the clock.
        os.utime(bundle.weights_file, ns=(1, 1))

    assert start(shm).sweep() == 2

    assert tensors(shm) == 0


def test_a_file_that_was_written_a_moment_ago_is_not_noted(
    shm: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was written a moment ago gets no note. File systems round times, so another write might not be seen."""
    monkeypatch.setattr("rsrv_bundle.weights._SETTLED_NS", 1 << 62)
    store = start(shm)
    store.open(bundle, keep=True)

    assert list((shm / f"rsrv-weights-u{os.getuid()}" / LIVE).iterdir()) == []
    store.close()


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '["a", "b", ["../../etc/passwd"]]', '["a", "b", 3]', "[" * 200_000]
)
def test_a_damaged_note_costs_a_read(shm: Path, bundle: Bundle, damage: str) -> None:
    """If a note is damaged, as by a full disk or an operator, the weights are read, and the note is written again."""
    store = start(shm)
    store.open(bundle, keep=True)
    (note,) = (shm / f"rsrv-weights-u{os.getuid()}" / LIVE).iterdir()
    intact = note.read_text()
    killed(store)
    note.write_text(damage)

    after = start(shm)
    after.sweep()
    assert right(after.open(bundle, keep=True))

    assert note.read_text() == intact
    after.close()


def test_a_note_for_another_manifest_costs_a_read(shm: Path, bundle: Bundle, tmp_path: Path) -> None:
    """If the manifest has another checksum than the note, the weights are read and checked again."""
    store = start(shm)
    store.open(bundle, keep=True)
    killed(store)
    manifest = bundle.path / "manifest.yaml"
    text = manifest.read_text()
    digest = bundle.manifest.sha256["weights.safetensors"]
    manifest.write_text(text.replace(digest, "f" * 64))
    torn = read_bundle(bundle.path, verify=False)

    with pytest.raises(Exception, match="does not match the manifest"):
        start(shm).open(torn, keep=True)


def test_a_tensor_that_is_gone_is_read_and_shared_again(shm: Path, bundle: Bundle, reads: list[int]) -> None:
    """If an operator has removed a tensor's file, the tensor is read and shared again."""
    store = start(shm)
    weights = store.open(bundle, keep=True)
    (shm / f"rsrv-weights-u{os.getuid()}" / weights.tensors[0].key.digest).unlink()
    killed(store)
    reads.clear()

    after = start(shm)
    assert right(after.open(bundle, keep=True))

    assert sorted(reads) == [small(2).nbytes, large(1).nbytes]
    assert tensors(shm) == 2
    after.close()


def test_left_tensors_leave_when_memory_is_needed(shm: Path, bundle: Bundle, tmp_path: Path) -> None:
    """If memory is needed, tensors that the last runtime left are removed, unless a model has registered for them."""
    store = start(shm)
    store.open(bundle, keep=True)
    store.open(bundle_of(tmp_path, {"z": large(9)}, "other"), keep=True)
    killed(store)
    after = start(shm)
    back = after.open(bundle, keep=True)
    assert after.left == 0  # The notes are not read yet.
    after.sweep()
    assert after.left == large(9).nbytes

    after.forget_left(1)

    assert after.left == 0
    assert tensors(shm) == 2
    assert right(back)
    after.close()


def test_left_tensors_leave_one_model_after_the_other(shm: Path, tmp_path: Path) -> None:
    """Left tensors are removed model by model, the oldest note first, and no more than needed.

    The others need not be read again.
    """
    store = start(shm)
    bundles = [bundle_of(tmp_path, {"a": large(value)}, f"bundle{value}") for value in range(3)]
    for age, model_bundle in enumerate(bundles):
        store.open(model_bundle, keep=True)
        (note,) = (note for note in shm.glob("*/*/*") if str(model_bundle.weights_file) in note.read_text())
        os.utime(note, ns=(age, age))
    killed(store)
    after = start(shm)
    after.sweep()

    after.forget_left(large(0).nbytes + 1)

    assert after.left == large(0).nbytes
    assert tensors(shm) == 1
    assert [after.open(left_bundle, keep=True).kept for left_bundle in bundles] == [True] * 3
    after.close()


def test_what_another_device_left_does_not_count(shm: Path, bundle: Bundle) -> None:
    """Tensors that another device's runtime left are not counted as left tensors of this runtime.

    This runtime cannot remove them. If it counted them, it would never drop its own copies for lack of memory.
    """
    other = start(shm, f"{LIVE[:-1]}1")
    other.open(bundle, keep=True)
    killed(other)
    store = start(shm)

    assert store.sweep() == 0

    assert store.left == 0


def test_a_left_tensor_counts_once_when_its_model_comes_back(shm: Path, bundle: Bundle) -> None:
    """A left tensor whose model comes back becomes a copy, and is not a left tensor any more."""
    store = start(shm)
    store.open(bundle, keep=True)
    killed(store)
    after = start(shm)
    after.sweep()
    assert after.left == large(1).nbytes + large(3).nbytes

    after.open(bundle, keep=True)

    assert after.left == 0
    after.close()


def test_two_models_of_one_file_share_its_note(shm: Path, bundle: Bundle) -> None:
    """Two models with the same file share its note, which is removed with the last of them."""
    store = start(shm)
    first, second = (store.open(bundle, keep=True) for _ in range(2))
    notes = shm / f"rsrv-weights-u{os.getuid()}" / LIVE
    first.close()
    assert len(list(notes.iterdir())) == 1

    second.close()

    assert list(notes.iterdir()) == []
    store.close()


def test_the_end_of_the_server_removes_what_a_sleeping_runtime_left(
    shm: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`remove_left` removes the tensors that a sleeping runtime left.

    The spare calls it when the server ends. A runtime that shares no memory calls it at its start.
    """
    store = start(shm)
    store.open(bundle, keep=True)
    killed(store)
    monkeypatch.setattr(host_memory, "_SHM", shm)

    host_memory.remove_left(LIVE)

    assert tensors(shm) == 0
    assert not list(shm.glob(f"*/{LIVE}"))
    host_memory.remove_left(LIVE)
    host_memory.remove_left("")


def test_a_modest_process_takes_a_share_of_its_descriptors(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `modest`, only a share of the descriptors is used for tensors, because sockets need some as well.

    Further tensors are private.
    """
    monkeypatch.setattr(host_memory, "_MAX_MODEST", 1)
    memory = SharedMemory(shm, modest=True)
    blocks = [memory.place(digit * 64, np.zeros(large(0).nbytes, np.uint8)) for digit in "ab"]

    assert tensors(shm) == 1
    assert "ulimit -n" in caplog.text
    for block in blocks:
        block.release()
    memory.close()


def test_a_left_tensor_that_rsrv_did_not_make_is_not_used(shm: Path, bundle: Bundle) -> None:
    """A left file that rsrv did not make is not used: the model is refused, or, with `modest`, it gets a private copy."""
    store = start(shm)
    digest = store.open(bundle, keep=True).tensors[0].key.digest
    killed(store)
    path = shm / f"rsrv-weights-u{os.getuid()}" / digest
    path.unlink()
    path.write_bytes(b"short")

    with pytest.raises(HostMemoryError, match="was not made by rsrv"):
        start(shm).open(bundle, keep=True)
    modest = HostStore(SharedMemory(shm, owner=LIVE, modest=True))
    assert right(modest.open(bundle, keep=True))


def test_a_note_names_its_file_by_all_that_the_system_tells(bundle: Bundle) -> None:
    """A note identifies a file version by all that the system reports about the file, including its ctime.

    So even a change of the mode is noticed.
    """
    file = WeightsFile(bundle)
    assert bundle.weights_file is not None
    assert WeightsFile.version_of(str(bundle.weights_file)) == file.version

    def change_and_compare() -> bool:
        assert bundle.weights_file is not None
        bundle.weights_file.chmod(0o600)
        bundle.weights_file.chmod(0o644)
        return WeightsFile.version_of(str(bundle.weights_file)) != file.version

    wait_until(change_and_compare, what="the next tick of the file system's clock")
    file.close()
