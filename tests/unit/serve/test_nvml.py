"""The GPUs of a machine, as reported by NVML's Python functions."""

from __future__ import annotations

import os
from typing import Any

import pynvml
import pytest

from rsrv.serve.devices import Gpu, GpuInventory
from rsrv.serve.nvml import look


class Library:
    """Fake NVML on a machine with two GPUs, the second partitioned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = 0
        for name in dir(pynvml):
            if name.startswith("nvml") and hasattr(self, name):
                monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H100"  # As in older releases of nvidia-ml-py.

    def nvmlDeviceGetCpuAffinity(self, handle: str, words: int) -> list[int]:
        assert words * 64 >= (os.cpu_count() or 1)
        if handle == "GPU-0":
            return [0b1011, *[0] * (words - 1)]
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "GPU-0":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index in (1, 3):
            return f"MIG-{index}"
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def test_gpus_and_their_instances_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs and instances are found with their close cores; slots without an instance are left out."""
    library = Library(monkeypatch)

    assert look() == GpuInventory(
        (
            Gpu("GPU-0", "NVIDIA H100", near=frozenset({0, 1, 3})),
            Gpu("GPU-1", "NVIDIA H100", instances=("MIG-1", "MIG-3")),
        )
    )
    assert library.open == 0


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_library_that_fails_is_trouble(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A missing driver or lost GPU is reported as trouble."""
    Library(monkeypatch)

    def fail(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, name, fail)

    assert look() == GpuInventory(trouble="NVML says GPU is lost")
