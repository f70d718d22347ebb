"""Obstacles to the native front on this machine: a library that does not load, or an untested version of Triton."""

import ctypes
import subprocess
import sys
from functools import cache
from pathlib import Path

#: Versions of Triton's backend API that the native front was tested with. Releases 24.10 and 26.09 both have 1.19.
TESTED_API = frozenset({"1.19"})

#: Program that prints the version of Triton's backend API. It runs in a separate process, because Triton's library loads the
#: libraries of CUDA.
_ASK = """
import ctypes, sys
major, minor = ctypes.c_uint32(), ctypes.c_uint32()
ctypes.CDLL(sys.argv[1]).TRITONBACKEND_ApiVersion(ctypes.byref(major), ctypes.byref(minor))
print(f"{major.value}.{minor.value}")
"""


def load_obstacle(library: Path) -> str:
    """Return why the dynamic loader of this machine refuses the native front's library, or an empty text if it accepts it."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        # Accept missing functions of Triton, because only a tritonserver has them. The loader reports them only if nothing else
        # is wrong.
        if "undefined symbol: TRITON" not in str(error):
            return f"the library cannot be loaded: {error}"
    return ""


def triton_obstacle(tritonserver: str | None) -> str:
    """Return why the native front should not be used with this tritonserver. Empty if its version is tested or unknown.

    The version is unknown on a machine without Triton, and if the command tritonserver is the script of `rsrv triton install`.
    That script starts a tested release.
    """
    version = backend_api(tritonserver)
    if version in {"", *TESTED_API}:
        return ""
    return f"Triton's backend API {version} is not tested with the native front ({', '.join(sorted(TESTED_API))} is)"


@cache
def backend_api(tritonserver: str | None) -> str:
    """Return the version of the backend API of this tritonserver, such as `1.19`, or an empty text if it is unknown."""
    if tritonserver is None:
        return ""
    library = Path(tritonserver).resolve().parent.parent / "lib" / "libtritonserver.so"
    command = [sys.executable, "-c", _ASK, str(library)]
    try:
        result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
