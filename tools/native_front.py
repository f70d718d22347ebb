"""Build the native front, libtriton_rsrv.so, into the package.

    python tools/native_front.py           # for x86-64, glibc 2.31 and later
    python tools/native_front.py aarch64   # into build/, only to show that it compiles

The compiler is Zig's, a wheel of 100 MB from PyPI, so that the build does not depend on the system's compiler and headers.
"""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rsrv.native import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
SOURCES = LIBRARY.parent
#: Compiler from PyPI, and the folder where it is installed if the environment lacks it.
ZIG, ZIG_VERSION, ZIG_FOLDER = "ziglang", "0.17.1", ROOT / ".zig"
GLIBC = "2.31"
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Wvla", "-Werror")
OPTIONS = (
    *("-std=c11", "-D_GNU_SOURCE", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-fstack-protector-strong", "-ffile-prefix-map=" + str(ROOT) + "=."),
    # Never unload the library, because one of its threads runs until the process ends.
    "-Wl,-z,nodelete,-z,relro,-z,now",
)


def ensure() -> Path:
    """Return the library. Build it again if a source or this file is newer."""
    sources = [*SOURCES.glob("*.[ch]"), Path(__file__)]
    with one_builds():
        if not LIBRARY.is_file() or LIBRARY.stat().st_mtime < max(path.stat().st_mtime for path in sources):
            build(LIBRARY)
    return LIBRARY


@contextmanager
def one_builds() -> Iterator[None]:
    """Hold the lock with which only one process at a time installs the compiler and builds."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    with (folder / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(
    library: Path, machine: str = "x86_64", options: Sequence[str] = ("-O2", "-D_FORTIFY_SOURCE=2", "-s")
) -> None:
    """Build the library. Raises CalledProcessError if the compiler reports a warning or an error."""
    library.parent.mkdir(parents=True, exist_ok=True)
    new = library.with_suffix(".new")
    target = ("-target", f"{machine}-linux-gnu.{GLIBC}")
    command: list[str | Path] = [*compiler(), *target, *OPTIONS, *WARNINGS, *options, "-o", new]
    command += [*sorted(SOURCES.glob("*.c")), "-lm"]
    subprocess.run(command, check=True)
    # Replace the file in one step, because a server may have the old one mapped.
    new.replace(library)


def compiler() -> list[str]:
    """Return the command of the C compiler. Install the compiler if it is missing."""
    if importlib.util.find_spec(ZIG) is not None:
        return [sys.executable, "-m", ZIG, "cc"]
    program = ZIG_FOLDER / ZIG / "__main__.py"
    if not program.is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(ZIG_FOLDER), f"{ZIG}=={ZIG_VERSION}"], check=True)
    return [sys.executable, str(program), "cc"]


def main(arguments: Sequence[str]) -> None:
    if arguments:
        (machine,) = arguments
        build(ROOT / "build" / machine / LIBRARY.name, machine)
    else:
        with one_builds():
            build(LIBRARY)


if __name__ == "__main__":
    main(sys.argv[1:])
