"""The platform of a wheel with the native front, and of a wheel without it."""

from __future__ import annotations

import os
import platform
import struct
from pathlib import Path
from typing import Any

import pytest

import hatch_build

X86_64, AARCH64 = 62, 183


def built(folder: Path, version: str = "standard", target: str = "wheel") -> dict[str, Any]:
    """Return the data that a build adds to the settings."""
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    hook = hatch_build.NativeFront(str(folder), {}, None, None, str(folder), target)  # type: ignore[arg-type]
    hook.initialize(version, data)
    return data


def make_library(folder: Path, machine: int) -> Path:
    """Write a library for this type of machine at its path in the source tree, and return its path."""
    library = folder / "triton_backend/rsrv/native/libtriton_rsrv.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", machine))
    return library


@pytest.mark.parametrize("version", ["standard", "editable"])
@pytest.mark.parametrize("machine", [None, X86_64, AARCH64])
def test_a_wheel_is_for_one_platform_if_it_carries_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: int | None, version: str
) -> None:
    """A wheel that contains a library for this machine is for one platform.

    A wheel without such a library, and an editable installation, are for any platform.
    """
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    if machine is not None:
        make_library(tmp_path, machine)

    data = built(tmp_path, version)

    if machine == X86_64 and version == "standard":
        assert data["tag"] == "py3-none-manylinux_2_31_x86_64"
        assert data["artifacts"] == ["/triton_backend/rsrv/native/libtriton_rsrv.so"]
        assert not data["pure_python"]
    else:
        assert data == {"artifacts": [], "pure_python": True}


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_a_library_that_is_older_than_its_sources_is_refused(tmp_path: Path, target: str) -> None:
    """A library that is older than its sources is refused, because it may lack their changes.

    An unpacked sdist is accepted: its times have no meaning.
    """
    library = make_library(tmp_path, X86_64)
    library.with_name("link.c").touch()
    os.utime(library, (1, 1))

    with pytest.raises(RuntimeError, match=r"older than its sources\. Run `python tools/native_front.py`"):
        built(tmp_path, target=target)
    (tmp_path / "PKG-INFO").touch()
    built(tmp_path, target=target)
