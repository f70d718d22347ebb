"""The devices of a server: what `runtime.devices` means on a machine, and that no two servers use the same card."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pynvml
import pytest

from rsrv.runtime import cuda
from rsrv.runtime.server_devices import (
    DevicesError,
    GpusUnknown,
    InstalledGpu,
    hold_card,
    keep_devices,
    read_gpus,
    resolve,
)
from rsrv.wire.paths import read_devices

TWO = (InstalledGpu("GPU-aa11"), InstalledGpu("GPU-bb22"))
#: The first GPU is partitioned.
PARTED = (InstalledGpu("GPU-aa11", ("MIG-1", "MIG-2")), InstalledGpu("GPU-bb22"))
EMPTY = (InstalledGpu("GPU-aa11", ()),)

Wanted = Literal["all"] | Sequence[int | str]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Create and return the device node of a card."""
    node = tmp_path / "nvidiactl"
    node.touch()
    monkeypatch.setattr(cuda, "CARD_SIGNS", (str(node),))
    return node


def resolved(
    setting: Wanted,
    visible: str | None = None,
    gpus: tuple[InstalledGpu, ...] = TWO,
    platform: str = "auto",
) -> list[str]:
    environment: Mapping[str, str] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return resolve(setting, platform, environment, lambda: gpus)


def nvml_fails() -> Sequence[InstalledGpu]:
    raise GpusUnknown("NVML says Driver/library version mismatch")


@pytest.mark.parametrize(
    ("setting", "visible", "gpus", "expected"),
    [
        ("all", None, TWO, ["GPU-aa11", "GPU-bb22"]),
        ("all", None, PARTED, ["MIG-1", "MIG-2", "GPU-bb22"]),
        ("all", "1", TWO, ["GPU-bb22"]),
        ("all", " 1 , 0 ", TWO, ["GPU-bb22", "GPU-aa11"]),
        ("all", "GPU-b", TWO, ["GPU-bb22"]),
        ("all", "MIG-2", PARTED, ["MIG-2"]),
        ("all", "1,-1,0", TWO, ["GPU-bb22"]),
        ("all", "", TWO, ["cpu"]),
        ("all", None, (), ["cpu"]),
        ([1], None, TWO, ["GPU-bb22"]),
        ([1, 0], "1,0", TWO, ["GPU-aa11", "GPU-bb22"]),
        ([0], None, PARTED, ["MIG-1", "MIG-2"]),
        (["GPU-bb22", "cpu"], None, TWO, ["GPU-bb22", "cpu"]),
        (["GPU-aa11"], "0", TWO, ["GPU-aa11"]),
        (["MIG-GPU-aa11/1/0"], None, PARTED, ["MIG-GPU-aa11/1/0"]),
        (["cpu", "cpu"], None, TWO, ["cpu", "cpu"]),
    ],
)
def test_devices_of_a_setting(
    setting: Wanted, visible: str | None, gpus: tuple[InstalledGpu, ...], expected: list[str]
) -> None:
    """A number is the index of a visible GPU. A partitioned GPU stands for all its instances. Names become UUIDs."""
    assert resolved(setting, visible, gpus) == expected


@pytest.mark.parametrize(
    ("setting", "visible", "gpus", "message"),
    [
        ([2], None, TWO, r"runtime\.devices: 2: this machine has GPUs 0 to 1"),
        ([1], None, TWO[:1], r"runtime\.devices: 1: this machine has one GPU, number 0"),
        ([1], "1", TWO, r"runtime\.devices: 1: CUDA_VISIBLE_DEVICES \(1\) has one GPU, number 0"),
        ([0], "-1", TWO, r"runtime\.devices: 0: CUDA_VISIBLE_DEVICES \(-1\) has no GPU"),
        (["GPU-cc"], None, TWO, r"runtime\.devices: GPU-cc: this machine has GPU-aa11, GPU-bb22"),
        (["GPU-"], None, TWO, r"runtime\.devices: GPU-: the UUIDs of several GPUs begin with this"),
        (["GPU-aa11"], "1", TWO, r"runtime\.devices: GPU-aa11 is not in CUDA_VISIBLE_DEVICES"),
        ([0, "GPU-aa"], None, TWO, r"runtime\.devices: GPU-aa11 is listed twice"),
        (["MIG-1", 0], None, PARTED, r"runtime\.devices: MIG-1 is listed twice"),
        ("all", "7", TWO, r"CUDA_VISIBLE_DEVICES: 7: this machine has GPUs 0 to 1"),
        (
            "all",
            "0,0",
            TWO,
            r"runtime\.devices: GPU-aa11 is listed twice, here or in CUDA_VISIBLE_DEVICES \(0,0\)",
        ),
        ("all", None, EMPTY, r"runtime\.devices: all: the GPUs are in MIG mode, without instances"),
        ([0], None, EMPTY, r"runtime\.devices: 0: the GPU is in MIG mode, without instances"),
        ([0], "0", EMPTY, r"runtime\.devices: 0: the GPU is in MIG mode, without instances"),
        ([1, 0], None, (*EMPTY, TWO[1]), r"runtime\.devices: 0: the GPU is in MIG mode, without instances"),
    ],
)
def test_devices_that_are_not_there(
    setting: Wanted, visible: str | None, gpus: tuple[InstalledGpu, ...], message: str
) -> None:
    """If a device does not exist, the error names the setting and what the machine has."""
    with pytest.raises(DevicesError, match=message):
        resolved(setting, visible, gpus)


def test_a_gpu_and_the_cpu_as_platform_contradict() -> None:
    """If `devices` has a GPU and `platform` is `cpu`, the error names both settings."""
    assert resolved("all", platform="cpu") == ["cpu"]
    with pytest.raises(DevicesError, match=r"runtime\.devices: 0 is a GPU, and runtime\.platform is cpu"):
        resolved([0], platform="cpu")


def test_nvml_that_fails(card: Path) -> None:
    """If NVML fails, `all` is an error, and listed devices are used without a check. Without a card, NVML is not needed."""
    with pytest.raises(DevicesError, match=r"runtime\.devices: all: NVML says .*runtime\.devices: \[0\]"):
        resolve("all", "auto", {}, nvml_fails)
    assert resolve([1, "GPU-cc"], "auto", {}, nvml_fails) == ["1", "GPU-cc"]
    assert resolve([1], "auto", {"CUDA_VISIBLE_DEVICES": "5,3"}, nvml_fails) == ["3"]

    card.unlink()
    assert resolve([1, "GPU-cc"], "cuda", {}, nvml_fails) == ["1", "GPU-cc"]
    assert resolve("all", "cuda", {}, nvml_fails) == ["cpu"]
    assert resolve("all", "auto", {}, nvml_fails) == ["cpu"]


def test_a_gpu_is_listed_on_a_machine_without_cards(card: Path) -> None:
    """If a GPU is listed on a machine without cards, the error says what to do. The CPU does not replace the GPU."""
    card.unlink()
    with pytest.raises(
        DevicesError, match=r"runtime\.devices: 0: this machine .* has no device node .* write cpu"
    ):
        resolve(["cpu", 0, 1], "auto", {}, nvml_fails)


def test_numbers_stay_while_the_server_lives(tmp_path: Path) -> None:
    """A later runtime gets the devices of the first one, even if a card was lost meanwhile."""
    assert keep_devices(tmp_path, lambda: ["GPU-aa11", "GPU-bb22"]) == ["GPU-aa11", "GPU-bb22"]
    assert keep_devices(tmp_path, lambda: ["GPU-bb22"]) == ["GPU-aa11", "GPU-bb22"]
    assert read_devices(tmp_path) == ["GPU-aa11", "GPU-bb22"]


def test_a_second_server_on_a_card_is_refused(tmp_path: Path) -> None:
    """A second server on a card is refused, and the error names both servers.

    It gets the card when the first one has ended.
    """
    first = hold_card(tmp_path, "GPU-aa11", "tritonserver 1 (/models/a)", share=False)
    assert first is not None

    with pytest.raises(
        DevicesError, match=r"in use by tritonserver 1 \(/models/a\), and tritonserver 2 \(/b\)"
    ):
        hold_card(tmp_path, "GPU-aa11", "tritonserver 2 (/b)", share=True, timeout_s=0)
    other = hold_card(tmp_path, "GPU-bb22", "tritonserver 2 (/b)", share=False, timeout_s=0)
    os.close(first)
    again = hold_card(tmp_path, "GPU-aa11", "tritonserver 2 (/b)", share=False, timeout_s=0)

    for held in (other, again):
        assert held is not None
        os.close(held)
    assert hold_card(tmp_path, "cpu", "tritonserver 2 (/b)", share=False) is None


def test_servers_that_take_half_a_card_share_it(tmp_path: Path) -> None:
    """Two servers that take half of a card each share it. A third one that wants more is refused."""
    held = [hold_card(tmp_path, "MIG-a/1", f"tritonserver {n}", share=True, timeout_s=0) for n in (1, 2)]

    with pytest.raises(DevicesError, match=r"runtime\.memory_fraction of at most 0\.5 in both"):
        hold_card(tmp_path, "MIG-a/1", "tritonserver 3", share=False, timeout_s=0)
    for fd in held:
        assert fd is not None
        os.close(fd)


class NvmlLibrary:
    """A fake NVML library on a machine with two GPUs. The second one is partitioned."""

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

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:
        # Older releases of nvidia-ml-py return bytes.
        return handle.encode() if handle == "GPU-0" else handle

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
    """Both GPUs are found, and the instances of the second one. Slots without an instance are left out."""
    library = NvmlLibrary(monkeypatch)

    assert read_gpus() == (InstalledGpu("GPU-0"), InstalledGpu("GPU-1", ("MIG-1", "MIG-3")))
    assert library.open == 0


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_a_library_that_fails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If a function of NVML fails, the error has NVML's message."""
    NvmlLibrary(monkeypatch)

    def fail(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, name, fail)

    with pytest.raises(GpusUnknown, match="NVML says GPU is lost"):
        read_gpus()
