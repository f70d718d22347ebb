"""The fake device keeps the contract that the real one is held to (tests/unit/runtime/test_jax_device.py)."""

import threading

import numpy as np
import pytest

from rsrv.runtime.device import Abandoned, Executable, OutOfMemory
from tests.fakes import FakeDevice

TENSORS = [np.full(4, i, np.float32) for i in range(3)]


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(lambda inputs, weights: [inputs[0] + sum(weights)])


def test_what_is_uploaded_is_a_copy_and_is_counted(device: FakeDevice) -> None:
    """Host memory may change afterwards, as that of a mapped file does."""
    array = np.ones(4, np.float32)
    buffers = device.upload([array])
    array[:] = 9

    (y,), _ = device.read(device.launch(Executable(None), buffers, [np.zeros((1, 4), np.float32)]))

    assert y.tolist() == [[1, 1, 1, 1]]
    assert (device.resident, device.device_bytes, device.uploaded) == (1, 16, 1)
    device.free(buffers)
    assert (device.resident, device.device_bytes, device.uploaded) == (0, 0, 1)


def test_an_abandoned_upload_leaves_nothing(device: FakeDevice) -> None:
    """It is given up after two of three tensors."""
    answers = iter([False, False, True])

    with pytest.raises(Abandoned):
        device.upload(TENSORS, lambda: next(answers))

    assert (device.resident, device.device_bytes, device.uploaded) == (0, 0, 2)


def test_an_upload_can_be_held_between_two_tensors(device: FakeDevice) -> None:
    """And given up there."""
    device.uploads.clear(after=2)
    unwanted = threading.Event()
    ended: list[type[BaseException]] = []

    def upload() -> None:
        try:
            device.upload(TENSORS, unwanted.is_set)
        except Abandoned as error:
            ended.append(type(error))

    thread = threading.Thread(target=upload)
    thread.start()
    assert device.uploads.waiting.wait(10)
    assert device.resident == 2

    unwanted.set()
    device.uploads.set()
    thread.join(10)

    assert ended == [Abandoned]
    assert device.resident == 0


def test_an_upload_that_finds_no_room_leaves_nothing(device: FakeDevice) -> None:
    """Told to at the second tensor, and by its limit at the third; the next upload is well."""
    device.fail_next("upload", after=1)
    with pytest.raises(OutOfMemory):
        device.upload(TENSORS)
    assert device.resident == 0

    device.memory_limit = 32
    with pytest.raises(OutOfMemory):
        device.upload(TENSORS)
    assert (device.resident, device.memory_in_use()) == (0, 0)
    assert len(device.upload(TENSORS[:2])) == 2


def test_launches_and_reads_fail_when_they_are_told_to(device: FakeDevice) -> None:
    """The second launch, and both of the next two reads."""
    x = np.zeros((1, 4), np.float32)
    device.fail_next("launch", after=1)
    launched = device.launch(Executable(None), [], [x])
    with pytest.raises(OutOfMemory):
        device.launch(Executable(None), [], [x])

    device.fail_next("read", times=2)
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            device.read(launched)
    assert len(device.read(launched)[0]) == 1


def test_executing_on_freed_weights_is_noticed(device: FakeDevice) -> None:
    """A real device would read whatever is there by then."""
    buffers = device.upload(TENSORS)
    device.free(buffers)

    with pytest.raises(AssertionError, match="freed weights"):
        device.launch(Executable(None), buffers, [np.zeros((1, 4), np.float32)])
    with pytest.raises(AssertionError, match="freed twice"):
        device.free(buffers)


def test_page_locks_are_counted(device: FakeDevice) -> None:
    """Until they are undone."""
    unlock = device.page_lock(4096, 100)
    assert device.locked == {4096: 100}
    unlock()
    assert device.locked == {}
