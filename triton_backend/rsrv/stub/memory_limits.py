"""How much memory there is: of the machine, or of the container's control group if that has less."""

import ctypes
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rsrv.limits import raise_limit

_libc = ctypes.CDLL(None)
#: bytes of a thread's stack where the system sets no limit
_STACK = 2 << 20


def total_memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its neighbours may have together."""
    return min([_meminfo(root, "MemTotal"), *(limit for _, limit in _limits(root))])


def spare_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken now, about; what the kernel only caches is free for that."""
    found = [_meminfo(root, "MemAvailable")]
    for group, limit in _limits(root):
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        statistics = _fields(group / "memory.stat")
        cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        found.append(limit - used + cached)
    return max(0, min(found))


def private_bytes(root: Path = Path("/")) -> int:
    """What counts against RLIMIT_DATA: private memory that can be written to, touched or not; stacks, too."""
    return _fields(root / "proc" / "self" / "status")["VmData:"] * 1024


def limit_private_bytes(more: int) -> None:
    """Have this process take at most that many bytes more than it has. Shared memory and files do not count."""
    limit = private_bytes() + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def stack_bytes() -> int:
    """What each further thread takes of private memory, most of which it never touches."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _STACK if soft == resource.RLIM_INFINITY else soft


def lift_limit() -> None:
    """Take back what `limit_private_bytes` did."""
    raise_limit(resource.RLIMIT_DATA)


def can_have(nbytes: int) -> bool:
    """Whether this process gets that much memory in one piece: from the system, or of what it has freed."""
    gc.collect()
    _libc.malloc_trim(0)
    try:
        np.empty(nbytes, np.uint8)
    except MemoryError:
        return False
    return True


def _meminfo(root: Path, name: str) -> int:
    return _fields(root / "proc" / "meminfo")[f"{name}:"] * 1024


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that limit this process's memory, each with its limit in bytes.

    Inside a container the path that the kernel names may be the one outside: then the group is at the root.
    """
    mounts = {"": root / "sys" / "fs" / "cgroup", "memory": root / "sys" / "fs" / "cgroup" / "memory"}
    for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mount = mounts.get(controllers)
        if mount is None:
            continue
        group = mount / path.strip("/")
        for one in {mount, group, *group.parents}:
            if one.is_relative_to(mount):
                limit = _number(one / "memory.max") or _number(one / "memory.limit_in_bytes")
                if limit is not None:
                    yield one, limit


def _number(file: Path) -> int | None:
    """None also for "max", and for a file that is not there."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _fields(file: Path) -> dict[str, int]:
    try:
        lines = (line.split() for line in file.read_text().splitlines())
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
