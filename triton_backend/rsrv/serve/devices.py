"""Choice of a node's devices. Pure: the caller supplies the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rsrv.serve.errors import NodeError

_CPU_HINT = "node.cpu_workers (--cpu-workers N) starts servers on the CPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine."""

    uuid: str
    #: product name
    name: str
    #: cores close to it; empty: unknown
    near: frozenset[int] = frozenset()
    #: UUIDs of its MIG instances; None: not partitioned
    instances: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """GPUs of this machine, in nvidia-smi's order."""

    gpus: tuple[Gpu, ...] = ()
    #: why they are unknown; empty: they are known
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """Device of one worker."""

    #: value of the worker's CUDA_VISIBLE_DEVICES; empty: it runs on the CPU
    selector: str
    #: name for operators
    name: str
    #: cores close to it; empty: all are alike
    near: frozenset[int] = frozenset()


def choose(
    wanted: Sequence[int | str] | int | None,
    visible: str | None,
    look: Callable[[], GpuInventory],
    cpu_workers: int,
) -> list[WorkerDevice]:
    """Return the devices, one for each worker: at least one, none twice. Raises NodeError.

    Args:
        wanted: `node.gpus`. Numbers are positions in `visible`, as for CUDA itself.
        visible: CUDA_VISIBLE_DEVICES; None: unset. Its numbers are nvidia-smi's.
        look: returns the GPUs; called only if needed.
        cpu_workers: `node.cpu_workers`.
    """
    if cpu_workers:
        if wanted:
            raise NodeError(
                "node.gpus and node.cpu_workers: a node runs on GPUs or on the CPU; set one of them"
            )
        return [WorkerDevice("", "CPU")] * cpu_workers
    if wanted == 0 or wanted == []:
        raise NodeError(f"node.gpus: none; {_CPU_HINT}")
    for one in wanted if isinstance(wanted, Sequence) else (wanted,):
        if isinstance(one, int) and one < 0:
            raise NodeError(
                f"node.gpus: {one} is negative; set how many GPUs to use, or a list of numbers from 0 on or UUIDs"
            )
    found = look()
    here = _here(visible, found)
    if isinstance(wanted, int) and not here and visible is None:
        chosen = [
            _named(number, found, "node.gpus") for number in range(wanted)
        ]  # only their number is known
    elif isinstance(wanted, int):
        if wanted > sum(map(len, here)):
            raise NodeError(f"node.gpus: {wanted} are wanted, and there are {sum(map(len, here))}")
        chosen = [[one for group in here for one in group][:wanted]]
    elif wanted is None:
        chosen = here
    else:
        chosen = [_wanted(one, here, visible, found) for one in wanted]
    devices = [device for group in chosen for device in group]
    if not devices:
        raise NodeError(_nothing(visible, found))
    for index, device in enumerate(devices):
        if device.selector in (other.selector for other in devices[:index]):
            raise NodeError(
                f"{device.name} is named twice, and two workers on one device take each other's memory"
            )
    return devices


def _here(visible: str | None, found: GpuInventory) -> list[list[WorkerDevice]]:
    """Return the visible devices, grouped by GPU: a partitioned GPU has several."""
    if visible is None:
        return [_of(gpu) for gpu in found.gpus]
    here = []
    for word in (word.strip() for word in visible.split(",")):
        # CUDA ends the list at any other word, such as -1 or NoDevFiles.
        if not (word.isdecimal() or word.startswith(("GPU-", "MIG-"))):
            break
        here.append(_named(int(word) if word.isdecimal() else word, found, "CUDA_VISIBLE_DEVICES"))
    return here


def _wanted(
    one: int | str, here: Sequence[list[WorkerDevice]], visible: str | None, found: GpuInventory
) -> list[WorkerDevice]:
    """Return the devices of an entry of `node.gpus`."""
    if isinstance(one, str) and one.isdecimal():
        one = int(one)
    if isinstance(one, str):
        if not one.startswith(("GPU-", "MIG-")):
            raise NodeError(f"node.gpus: {one!r} is neither a number nor a UUID (GPU-... or MIG-...)")
        devices = _named(one, found, "node.gpus")
        known = {device.selector for group in here for device in group}
        # Without NVML, different names may mean one device.
        if visible is not None and found.gpus and not {device.selector for device in devices} <= known:
            raise NodeError(f"node.gpus: {one} is not in CUDA_VISIBLE_DEVICES ({visible})")
        return devices
    if not here and visible is None and found.trouble:
        return _named(one, found, "node.gpus")
    if not 0 <= one < len(here):
        where = "this machine" if visible is None else f"CUDA_VISIBLE_DEVICES ({visible})"
        raise NodeError(f"node.gpus: {one}: {where} has {_range(len(here))}")
    return here[one]


def _named(name: int | str, found: GpuInventory, said: str) -> list[WorkerDevice]:
    """Return the devices of nvidia-smi's number, or of a UUID or its beginning. Raises NodeError."""
    if not found.gpus:
        return [WorkerDevice(str(name), f"GPU {name}" if isinstance(name, int) else name)]
    if isinstance(name, int):
        if not 0 <= name < len(found.gpus):
            raise NodeError(f"{said}: {name}: this machine has {_range(len(found.gpus))}")
        return _of(found.gpus[name])
    matching = [
        [device for device in _of(gpu) if device.selector.startswith(name)]
        or (gpu.uuid.startswith(name) and _of(gpu))
        for gpu in found.gpus
    ]
    groups = [group for group in matching if group]
    if len(groups) > 1:
        raise NodeError(f"{said}: {name}: several GPUs begin so; give more of the UUID")
    if groups:
        return groups[0]
    if name.startswith("MIG-GPU-"):
        return [WorkerDevice(name, name)]  # names of instances for drivers before 470; NVML has others
    known = ", ".join(device.selector for gpu in found.gpus for device in _of(gpu))
    raise NodeError(f"{said}: {name}: this machine has {known}")


def _of(gpu: Gpu) -> list[WorkerDevice]:
    """Return a GPU or its instances: CUDA never uses a partitioned GPU as a whole."""
    if gpu.instances is None:
        return [WorkerDevice(gpu.uuid, f"{gpu.name} ({gpu.uuid})", gpu.near)]
    return [WorkerDevice(uuid, f"{gpu.name} ({uuid})", gpu.near) for uuid in gpu.instances]


def _range(count: int) -> str:
    return {0: "no GPU", 1: "one GPU, number 0"}.get(count, f"GPUs 0 to {count - 1}")


def _nothing(visible: str | None, found: GpuInventory) -> str:
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES ({visible!r}) names no GPU; {_CPU_HINT}"
    if any(gpu.instances is not None for gpu in found.gpus):
        return "the GPUs are in MIG mode and have no instances: nvidia-smi mig -cgi ... -C makes some"
    return f"no GPU was found{f': {found.trouble}' if found.trouble else ''}; {_CPU_HINT}"
