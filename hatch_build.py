"""Build hook: adds the native front to the wheel, if its library has been built for this machine.

Such a wheel is for this machine's platform only. A wheel without the library is for any platform.
"""

import platform
import struct
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LIBRARY = "triton_backend/rsrv/native/libtriton_rsrv.so"
#: Machines that tools/native_front.py builds for, by their number in an ELF header.
_MACHINES = {62: "x86_64", 183: "aarch64"}
_AT_MACHINE = 18


class NativeFront(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the native front's library to the wheel, unless it was built for another kind of machine.

    The library needs glibc 2.31 and works with any version of Python.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = Path(self.root, _LIBRARY)
        if version == "editable" or not library.is_file():
            return
        # Do not compare times in an unpacked sdist: they may be the times of unpacking, and the build of the sdist compared them.
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
