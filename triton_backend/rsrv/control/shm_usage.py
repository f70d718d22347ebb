"""The users of /dev/shm: copies of weights, Triton's regions for models, and other files. Calls block for milliseconds."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

_SHM = Path("/dev/shm")
#: The beginning of the name of a user's directory of host copies (`rsrv.runtime.host_memory`).
_WEIGHTS = "rsrv-weights-"


class ShmUsage(NamedTuple):
    """Bytes of /dev/shm."""

    free: int
    total: int
    #: Host copies of weights of all servers.
    weights: int = 0
    #: Triton's regions with the inputs and outputs of requests, by model.
    requests: Mapping[str, int] = {}

    @property
    def is_short(self) -> bool:
        return self.free < 0.05 * self.total

    @property
    def others(self) -> int:
        """Bytes of other programs' files, and of regions whose model is not known."""
        return max(0, self.total - self.free - self.weights - sum(self.requests.values()))


def measure_shm(stubs: Mapping[str, Sequence[int]], directory: Path = _SHM) -> ShmUsage | None:
    """Return the usage of /dev/shm, or None if there is no /dev/shm. Users are measured only if little memory is free.

    Args:
        stubs: Process ids of stubs by model. The id of tritonserver is ignored: it has mapped the regions of all models.
        directory: The path /dev/shm.
    """
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    usage = ShmUsage(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)
    if not usage.is_short:
        return usage
    weights = sum(_bytes(path) for folder in directory.glob(f"{_WEIGHTS}*") for path in folder.rglob("*"))
    requests: dict[str, int] = {}
    for name, pids in stubs.items():
        requests[name] = sum(_bytes(path) for pid in pids for path in _mapped(pid, directory))
    return usage._replace(weights=weights, requests={name: size for name, size in requests.items() if size})


def _bytes(path: Path) -> int:
    """Return the bytes of a file, or 0 for a directory or a missing file."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_blocks * 512 if S_ISREG(status.st_mode) else 0
    return 0


def _mapped(pid: int, directory: Path) -> set[Path]:
    """Return the files in the directory, but not in folders below it, that a process has mapped."""

    def paths() -> Iterator[Path]:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, sign, name = line.partition(f" {directory}/")
            if sign and "/" not in name:
                yield directory / name

    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text() != "tritonserver\n":
            return set(paths())
    return set()
