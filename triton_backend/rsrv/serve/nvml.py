"""GPUs of this machine, from NVIDIA's management library."""

from __future__ import annotations

import os

import pynvml

from rsrv.serve.devices import Gpu, GpuInventory

#: bits of a word in NVML's masks of cores
_WORD = 64


def look() -> GpuInventory:
    """Return all GPUs visible to this process, without using their memory."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuInventory(trouble=f"NVML says {error}")
    try:
        count = pynvml.nvmlDeviceGetCount()
        return GpuInventory(tuple(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)))
    except pynvml.NVMLError as error:
        return GpuInventory(trouble=f"NVML says {error}")
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    return Gpu(
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        _text(pynvml.nvmlDeviceGetName(handle)),
        _near(handle),
        _instances(handle),
    )


def _near(handle: object) -> frozenset[int]:
    words = -(-os.sysconf("SC_NPROCESSORS_CONF") // _WORD)
    try:
        mask = pynvml.nvmlDeviceGetCpuAffinity(handle, words)
    except pynvml.NVMLError:
        return frozenset()
    return frozenset(
        number * _WORD + bit for number, word in enumerate(mask) for bit in range(_WORD) if word >> bit & 1
    )


def _instances(handle: object) -> tuple[str, ...] | None:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return None
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        found.append(_text(pynvml.nvmlDeviceGetUUID(instance)))
    return tuple(found)


def _text(value: str | bytes) -> str:
    """Decode a text: releases before 11.515 return bytes."""
    return value.decode() if isinstance(value, bytes) else value
