"""Devices of one server: the meaning of `runtime.devices` on this machine, and the right to use a card.

The first runtime resolves the setting once, and keeps the result in a file for the server's life. Otherwise, the numbers
of devices would shift if a card were lost.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rsrv.runtime.cuda import find_card
from rsrv.wire.paths import DEVICES, read_devices, write_whole

#: Maximum seconds to wait until the previous server has ended and released its card.
CARD_TIMEOUT_S = 10.0
#: Servers with at most this runtime.memory_fraction may share a card.
SHARING_FRACTION = 0.5

_KEY = "runtime.devices"
_CPU = "cpu"


class DevicesError(Exception):
    """The server cannot have these devices. The message names the setting and says what to do."""


class GpusUnknown(Exception):
    """NVML does not report the GPUs. The message has the reason."""


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    """A GPU of this machine, by the names that CUDA_VISIBLE_DEVICES takes."""

    uuid: str
    #: UUIDs of its MIG instances. None: the GPU is not partitioned.
    instances: tuple[str, ...] | None = None

    @property
    def selectors(self) -> tuple[str, ...]:
        """Names of the GPU's devices. CUDA never uses a partitioned GPU as a whole."""
        return (self.uuid,) if self.instances is None else self.instances


def read_gpus() -> tuple[InstalledGpu, ...]:
    """Return all GPUs in nvidia-smi's order, without using their memory. Raises GpusUnknown."""
    import pynvml

    def instances(handle: object) -> tuple[str, ...] | None:
        try:
            current, _ = pynvml.nvmlDeviceGetMigMode(handle)
        except pynvml.NVMLError:
            return None
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        selectors = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except pynvml.NVMLError_NotFound:
                continue
            selectors.append(uuid(instance))
        return tuple(selectors)

    def uuid(handle: object) -> str:
        value = pynvml.nvmlDeviceGetUUID(handle)
        return (
            value.decode() if isinstance(value, bytes) else str(value)
        )  # Releases before 11.515 return bytes here.

    try:
        pynvml.nvmlInit()
        try:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return tuple(InstalledGpu(uuid(handle), instances(handle)) for handle in handles)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise GpusUnknown(f"NVML says {error}") from None


def resolve(
    devices: Literal["all"] | Sequence[int | str],
    platform: str,
    environment: Mapping[str, str],
    list_gpus: Callable[[], Sequence[InstalledGpu]] = read_gpus,
) -> list[str]:
    """Return the devices of a server: values of CUDA_VISIBLE_DEVICES, or cpu. There is at least one. Raises DevicesError.

    Args:
        devices: `runtime.devices`. Numbers are indices of the visible GPUs.
        platform: `runtime.platform`.
        environment: variables of the server. The numbers in CUDA_VISIBLE_DEVICES are indices in nvidia-smi's order.
        list_gpus: returns the GPUs as `read_gpus` does. It is called only if needed.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    chosen = (
        _all(platform, environment, list_gpus)
        if devices == "all"
        else _listed(devices, platform, environment, list_gpus)
    )
    for index, device in enumerate(chosen):
        if device != _CPU and device in chosen[:index]:
            beside = "" if visible is None else f", here or in CUDA_VISIBLE_DEVICES ({visible})"
            raise DevicesError(
                f"{_KEY}: {device} is listed twice{beside}; two runtimes on one GPU take each other's memory"
            )
    return chosen


def _listed(
    listed: Sequence[int | str],
    platform: str,
    environment: Mapping[str, str],
    list_gpus: Callable[[], Sequence[InstalledGpu]],
) -> list[str]:
    if platform == "cpu":
        for device in listed:
            if device != _CPU:
                raise DevicesError(
                    f"{_KEY}: {device} is a GPU, and runtime.platform is cpu; remove one of them"
                )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus: Sequence[InstalledGpu] = ()
    if named := [device for device in listed if device != _CPU]:
        platforms = environment.get("JAX_PLATFORMS")
        if platform == "auto" and platforms == _CPU:
            raise DevicesError(f"{_KEY}: {named[0]} is a GPU, and JAX_PLATFORMS is cpu; remove one of them")
        try:
            gpus = list_gpus()
        except GpusUnknown:
            gpus = ()  # Use the names as they are listed, because only CUDA can resolve them.
        if platform == "auto" and not gpus and not platforms and find_card({}) is None:
            # Without this check, the CPU would silently serve in place of the GPU. `find_card` gets no environment, because
            # errors of CUDA_VISIBLE_DEVICES are reported below.
            raise DevicesError(
                f"{_KEY}: {named[0]}: this machine or container has no device node of an NVIDIA card. Start a container with "
                "--gpus all. If there is a card, set runtime.platform: cuda. If the models should run on the CPU, write cpu"
            )
    chosen: list[str] = []
    for device in listed:
        devices = _wanted(device, visible, gpus)
        if not devices:
            raise _without_instances(f"{device}: the GPU is")
        chosen += devices
    return chosen


def _all(
    platform: str, environment: Mapping[str, str], list_gpus: Callable[[], Sequence[InstalledGpu]]
) -> list[str]:
    card = find_card(environment)
    if platform == "cpu" or (platform == "auto" and card is None):
        return [_CPU]
    try:
        gpus = list_gpus()
    except GpusUnknown as error:
        if card is None:
            return [_CPU]  # The runtime explains why there is no GPU.
        raise DevicesError(
            f"{_KEY}: all: {error}, so the GPUs are not known. Try nvidia-smi, or list them: {_KEY}: [0]"
        ) from None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    groups = [gpu.selectors for gpu in gpus] if visible is None else _visible(visible, gpus)
    chosen = [device for group in groups for device in group]
    if not chosen and any(gpu.instances is not None for gpu in gpus):
        raise _without_instances("all: the GPUs are")
    return chosen or [_CPU]


def _without_instances(which: str) -> DevicesError:
    return DevicesError(
        f"{_KEY}: {which} in MIG mode, without instances: create instances with nvidia-smi mig -cgi ... -C"
    )


def _visible(visible: str, gpus: Sequence[InstalledGpu]) -> list[tuple[str, ...]]:
    """Return the devices that CUDA_VISIBLE_DEVICES names, one group for each of its entries."""
    groups = []
    for word in (word.strip() for word in visible.split(",")):
        # CUDA ends the list at any other word, such as -1 or NoDevFiles.
        if not (word.isdecimal() or word.startswith(("GPU-", "MIG-"))):
            break
        groups.append(_named(int(word) if word.isdecimal() else word, gpus, "CUDA_VISIBLE_DEVICES"))
    return groups


def _wanted(device_name: int | str, visible: str | None, gpus: Sequence[InstalledGpu]) -> tuple[str, ...]:
    """Return the devices of one entry of the setting."""
    if device_name == _CPU:
        return (_CPU,)
    if visible is None:
        return _named(device_name, gpus, _KEY)
    here = _visible(visible, gpus)
    if isinstance(device_name, int):
        if device_name >= len(here):
            raise DevicesError(
                f"{_KEY}: {device_name}: CUDA_VISIBLE_DEVICES ({visible}) has {_numbers(len(here))}"
            )
        return here[device_name]
    devices = _named(device_name, gpus, _KEY)
    # If NVML does not list the GPUs, names cannot be compared, because one device may have several names.
    if gpus and not {device for group in here for device in group}.issuperset(devices):
        raise DevicesError(f"{_KEY}: {device_name} is not in CUDA_VISIBLE_DEVICES ({visible})")
    return devices


def _named(name: int | str, gpus: Sequence[InstalledGpu], setting: str) -> tuple[str, ...]:
    """Return the devices with this number in nvidia-smi, or with this UUID or this beginning of a UUID.

    `setting`: the setting in which the name is, for error messages.
    """
    if not gpus:
        return (str(name),)
    if isinstance(name, int):
        if name >= len(gpus):
            raise DevicesError(f"{setting}: {name}: this machine has {_numbers(len(gpus))}")
        return gpus[name].selectors
    groups = [
        tuple(selector for selector in gpu.selectors if selector.startswith(name))
        or (gpu.selectors if gpu.uuid.startswith(name) else ())
        for gpu in gpus
    ]
    groups = [group for group in groups if group]
    if len(groups) > 1:
        raise DevicesError(
            f"{setting}: {name}: the UUIDs of several GPUs begin with this; give more of the UUID"
        )
    if groups:
        return groups[0]
    if name.startswith("MIG-GPU-"):
        return (name,)  # Drivers before 470 use other names for instances than NVML.
    known = ", ".join(selector for gpu in gpus for selector in gpu.selectors)
    raise DevicesError(f"{setting}: {name}: this machine has {known}")


def _numbers(count: int) -> str:
    return {0: "no GPU", 1: "one GPU, number 0"}.get(count, f"GPUs 0 to {count - 1}")


def keep_devices(directory: Path, find: Callable[[], list[str]]) -> list[str]:
    """Return the devices with which the server began. If none are recorded, record the devices that `find` returns now.

    `directory` is the directory of device 0. Raises OSError, and the errors of `find`.
    """
    try:
        return read_devices(directory)
    except FileNotFoundError:
        devices = find()
    write_whole(directory / DEVICES, json.dumps(devices))
    return devices


def hold_card(
    base: Path, device: str, server: str, *, share: bool, timeout_s: float = CARD_TIMEOUT_S
) -> int | None:
    """Lock a card for the life of this process. Return the lock's descriptor, or None for a CPU.

    Two servers on one card would take each other's memory, so the second one is refused, unless both `share`. `base` is
    the folder of all servers, and `server` names this one. Raises DevicesError.
    """
    if device == _CPU:
        return None
    fd = os.open(base / f"card-{device.replace('/', '_')}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            pass
        if time.monotonic() >= deadline:
            holder = os.pread(fd, 4096, 0).decode(errors="replace")
            os.close(fd)
            raise DevicesError(
                f"{_KEY}: {device} is in use by {holder}, and {server} also needs it. Give each server its own GPUs "
                f"({_KEY}), or let them share: runtime.memory_fraction of at most {SHARING_FRACTION} in both"
            )
        time.sleep(0.05)
    os.ftruncate(fd, 0)
    os.pwrite(fd, server.encode(), 0)
    return fd
