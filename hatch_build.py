"""The native front in the wheel: if it was built before for this machine, the wheel is for its platform, else for any."""

import platform
import struct
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LIBRARY = "triton_backend/rsrv/native/libtriton_rsrv.so"
#: machines that tools/native_front.py builds for, by their number in an ELF header
_MACHINES = {62: "x86_64", 183: "aarch64"}
_AT_MACHINE = 18


class NativeFront(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the library, which needs glibc 2.31 and no Python of its own. An sdist may carry that of another machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = Path(self.root, _LIBRARY)
        if version == "editable" or not library.is_file():
            return
        # The files of an unpacked sdist may have the times of their unpacking; they were compared before.
        sources = [] if Path(self.root, "PKG-INFO").exists() else library.parent.glob("*.[ch]")
        if any(source.stat().st_mtime > library.stat().st_mtime for source in sources):
            raise RuntimeError(
                f"{_LIBRARY} is older than its sources. Run `python tools/native_front.py`, or remove it."
            )
        (machine,) = struct.unpack_from("<H", library.read_bytes(), _AT_MACHINE)
        if self.target_name == "wheel" and _MACHINES.get(machine) == platform.machine():
            build_data["artifacts"].append(f"/{_LIBRARY}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_2_31_{platform.machine()}"
