"""The devices of a node: from the setting, CUDA_VISIBLE_DEVICES or NVML, in order of precedence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.serve.devices import Gpu, GpuInventory, WorkerDevice, choose
from rsrv.serve.errors import NodeError

TWO = GpuInventory(
    (Gpu("GPU-aa11", "H100", frozenset({0, 1})), Gpu("GPU-bb22", "H100", frozenset({2, 3}))),
)
#: The first GPU is partitioned.
PARTED = GpuInventory((Gpu("GPU-aa11", "H100", instances=("MIG-1", "MIG-2")), Gpu("GPU-bb22", "H100")))
NONE = GpuInventory(trouble="NVML says no driver")

Wanted = Sequence[int | str] | int | None


def selectors(
    wanted: Wanted = None, visible: str | None = None, found: GpuInventory = TWO, cpu_workers: int = 0
) -> list[str]:
    """Return the workers' values of CUDA_VISIBLE_DEVICES."""
    return [device.selector for device in choose(wanted, visible, lambda: found, cpu_workers)]


def nobody_looks() -> GpuInventory:
    raise AssertionError("GPUs were looked for")


def test_workers_on_the_cpu_look_for_no_gpu() -> None:
    """Workers on the CPU do not ask NVML."""
    assert choose(None, "0", nobody_looks, 3) == [WorkerDevice("", "CPU")] * 3


def test_a_device_says_what_it_is_and_which_cores_are_close() -> None:
    """A device has its name, its UUID as selector, and its close cores."""
    assert choose(None, None, lambda: TWO, 0)[1] == WorkerDevice(
        "GPU-bb22", "H100 (GPU-bb22)", frozenset({2, 3})
    )


@pytest.mark.parametrize(
    ("wanted", "visible", "found", "expected"),
    [
        # nothing said: what there is
        (None, None, TWO, ["GPU-aa11", "GPU-bb22"]),
        (None, None, PARTED, ["MIG-1", "MIG-2", "GPU-bb22"]),
        # CUDA_VISIBLE_DEVICES
        (None, "1", TWO, ["GPU-bb22"]),
        (None, "1,0", TWO, ["GPU-bb22", "GPU-aa11"]),
        (None, " 1 , 0 ", TWO, ["GPU-bb22", "GPU-aa11"]),
        (None, "GPU-bb22", TWO, ["GPU-bb22"]),
        (None, "GPU-b", TWO, ["GPU-bb22"]),
        (None, "MIG-2", PARTED, ["MIG-2"]),
        (None, "0", PARTED, ["MIG-1", "MIG-2"]),
        (None, "GPU-aa11", PARTED, ["MIG-1", "MIG-2"]),
        (None, "MIG-GPU-aa11/1/0", PARTED, ["MIG-GPU-aa11/1/0"]),
        # The end of the list for CUDA.
        (None, "1,-1,0", TWO, ["GPU-bb22"]),
        # The number of an instance.
        (1, None, TWO, ["GPU-aa11"]),
        (2, None, PARTED, ["MIG-1", "MIG-2"]),
        (1, "1,0", TWO, ["GPU-bb22"]),
        # A list counts visible devices, as CUDA does.
        ([1], None, TWO, ["GPU-bb22"]),
        (["1"], None, TWO, ["GPU-bb22"]),
        ([0], "1", TWO, ["GPU-bb22"]),
        ([0], None, PARTED, ["MIG-1", "MIG-2"]),
        (["MIG-2", 1], None, PARTED, ["MIG-2", "GPU-bb22"]),
        (["GPU-bb"], None, TWO, ["GPU-bb22"]),
        # Without NVML the setting is taken as it is.
        ([0, "GPU-aa"], None, NONE, ["0", "GPU-aa"]),
        (2, None, NONE, ["0", "1"]),
        (None, "2,GPU-x", NONE, ["2", "GPU-x"]),
        ([1], "2,GPU-x", NONE, ["GPU-x"]),
    ],
)
def test_devices_are_chosen(
    wanted: Wanted, visible: str | None, found: GpuInventory, expected: Sequence[str]
) -> None:
    """The setting chooses among what CUDA_VISIBLE_DEVICES lists, or what NVML finds."""
    assert selectors(wanted, visible, found) == expected


@pytest.mark.parametrize(
    ("wanted", "visible", "found", "cpu_workers", "message"),
    [
        ([0], None, TWO, 2, "node.gpus and node.cpu_workers: a node runs on GPUs or on the CPU"),
        (0, None, TWO, 0, "node.gpus: none; node.cpu_workers (--cpu-workers N)"),
        ([], None, TWO, 0, "node.gpus: none; "),
        (None, None, NONE, 0, "no GPU was found: NVML says no driver; node.cpu_workers (--cpu-workers N)"),
        (None, None, GpuInventory(), 0, "no GPU was found; "),
        (None, "", TWO, 0, "CUDA_VISIBLE_DEVICES ('') names no GPU; node.cpu_workers"),
        (None, "-1", TWO, 0, "CUDA_VISIBLE_DEVICES ('-1') names no GPU; "),
        (None, "NoDevFiles", TWO, 0, "names no GPU"),
        (
            None,
            None,
            GpuInventory((Gpu("GPU-a", "A100", instances=()),)),
            0,
            "MIG mode and have no instances",
        ),
        (None, "0,2", TWO, 0, "CUDA_VISIBLE_DEVICES: 2: this machine has GPUs 0 to 1"),
        (3, None, TWO, 0, "node.gpus: 3 are wanted, and there are 2"),
        (2, "1", TWO, 0, "node.gpus: 2 are wanted, and there are 1"),
        ([2], None, TWO, 0, "node.gpus: 2: this machine has GPUs 0 to 1"),
        (-1, None, TWO, 0, "node.gpus: -1 is negative; set how many GPUs to use, or a list"),
        (-2, "0,1", TWO, 0, "node.gpus: -2 is negative"),
        (-1, None, NONE, 0, "node.gpus: -1 is negative"),
        ([-1], None, TWO, 0, "node.gpus: -1 is negative"),
        ([0, -1], None, NONE, 0, "node.gpus: -1 is negative"),
        ([1], "1", TWO, 0, "node.gpus: 1: CUDA_VISIBLE_DEVICES (1) has one GPU, number 0"),
        (["GPU-aa11"], "1", TWO, 0, "node.gpus: GPU-aa11 is not in CUDA_VISIBLE_DEVICES (1)"),
        (["GPU-cc"], None, TWO, 0, "node.gpus: GPU-cc: this machine has GPU-aa11, GPU-bb22"),
        (["GPU-"], None, TWO, 0, "node.gpus: GPU-: several GPUs begin so"),
        (["all"], None, TWO, 0, "node.gpus: 'all' is neither a number nor a UUID"),
        ([0, 0], None, TWO, 0, "H100 (GPU-aa11) is named twice"),
        (None, "0,GPU-aa", TWO, 0, "H100 (GPU-aa11) is named twice"),
    ],
)
def test_a_wrong_choice_is_refused(
    wanted: Wanted, visible: str | None, found: GpuInventory, cpu_workers: int, message: str
) -> None:
    """A wrong choice is refused with the setting and what to do."""
    with pytest.raises(NodeError) as caught:
        selectors(wanted, visible, found, cpu_workers)

    assert message in str(caught.value)


@given(
    wanted=st.one_of(
        st.none(),
        st.integers(-1, 4),
        st.lists(st.one_of(st.integers(-1, 4), st.sampled_from(["GPU-aa11", "MIG-2"]))),
    ),
    visible=st.one_of(
        st.none(), st.lists(st.sampled_from(["0", "1", "2", "-1", "GPU-bb22", "MIG-1", ""])).map(",".join)
    ),
    found=st.sampled_from([TWO, PARTED, NONE]),
    cpu_workers=st.integers(0, 3),
)
def test_devices_are_some_and_none_twice(
    wanted: Wanted, visible: str | None, found: GpuInventory, cpu_workers: int
) -> None:
    """For any settings, each worker has a device of its own, or there is a reason why not."""
    try:
        devices = choose(wanted, visible, lambda: found, cpu_workers)
    except NodeError:
        return
    assert devices
    on_gpu = [device.selector for device in devices if device.selector]
    assert len(on_gpu) == len(set(on_gpu)) == (0 if cpu_workers else len(devices))
