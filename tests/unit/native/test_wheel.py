"""The platform of a wheel with the native front, and without one."""

from __future__ import annotations

import platform
import struct
from pathlib import Path
from typing import Any

import pytest

import hatch_build

X86_64, AARCH64 = 62, 183


def built(folder: Path, version: str = "standard") -> dict[str, Any]:
    """Return what a build of the wheel does beside the settings."""
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    hook = hatch_build.NativeFront(str(folder), {}, None, None, str(folder), "wheel")  # type: ignore[arg-type]
    hook.initialize(version, data)
    return data


@pytest.mark.parametrize("version", ["standard", "editable"])
@pytest.mark.parametrize("machine", [None, X86_64, AARCH64])
def test_a_wheel_is_for_one_platform_if_it_carries_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: int | None, version: str
) -> None:
    """A library of another machine stays out, and the wheel is for any; so it is for an editable installation."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    if machine is not None:
        library = tmp_path / "triton_backend/rsrv/native/libtriton_rsrv.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", machine))

    data = built(tmp_path, version)

    if machine == X86_64 and version == "standard":
        assert data["tag"] == "py3-none-manylinux_2_31_x86_64"
        assert data["artifacts"] == ["/triton_backend/rsrv/native/libtriton_rsrv.so"]
        assert not data["pure_python"]
    else:
        assert data == {"artifacts": [], "pure_python": True}
