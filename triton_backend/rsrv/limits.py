"""Limits and memory of this process, and memory of the machine or of the container's control group, whichever has less."""

import ctypes
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None)
#: Bytes of a thread's stack if the system sets no limit.
_DEFAULT_STACK_BYTES = 2 << 20
#: Number of mappings if the system sets no limit.
_NO_LIMIT = 1 << 31


def raise_limit(which: int) -> None:
    """Raise a soft limit, which the kernel enforces, to the hard limit. `which` is one of `resource.RLIMIT_...`."""
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (hard, hard))


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that all processes of the machine or the container may take together."""
    return min([_meminfo(root, "MemTotal"), *(limit for _, limit in _limits(root))])


def spare_memory(root: Path = Path("/")) -> int:
    """Return approximately how many bytes of memory are free now.

    File cache of the kernel counts as free if it was read only once. Of file cache that was read again, half counts as free,
    because it includes running programs.
    """
    amounts = [_meminfo(root, "MemAvailable")]
    for group, limit in _limits(root):
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        statistics = _fields(group / "memory.stat")
        once, again = (
            statistics.get(f"total_{name}", statistics.get(name, 0))
            for name in ("inactive_file", "active_file")
        )
        amounts.append(limit - used + once + again // 2)
    return max(0, min(amounts))


def spare_mappings(root: Path = Path("/")) -> tuple[int, int]:
    """Return how many more mappings this process may make, and how many it may have in all. Counting 60,000 takes 60 ms.

    If the system does not report the limit, both are _NO_LIMIT.
    """
    most = _number(root / "proc" / "sys" / "vm" / "max_map_count")
    try:
        count = (root / "proc" / "self" / "maps").read_bytes().count(b"\n")
    except OSError:
        most = None
    return (_NO_LIMIT, _NO_LIMIT) if most is None else (most - count, most)


def private_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that count against RLIMIT_DATA: private writable memory, including stacks and untouched memory."""
    return _fields(root / "proc" / "self" / "status")["VmData:"] * 1024


def limit_private_bytes(more: int) -> None:
    """Limit the private memory of this process to this many bytes more than it has. Shared memory and files do not count."""
    limit = private_bytes() + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def stack_bytes() -> int:
    """Return the bytes of private memory that each further thread takes for its stack. A thread never touches most of it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _DEFAULT_STACK_BYTES if soft == resource.RLIM_INFINITY else soft


def lift_limit() -> None:
    """Revoke `limit_private_bytes`."""
    raise_limit(resource.RLIMIT_DATA)


def can_have(nbytes: int) -> bool:
    """Return True if this process can allocate this many bytes in one piece, from the system or from its own freed memory."""
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
    """Yield the control groups that limit this process's memory, each with its limit in bytes.

    Inside a container, the kernel may report the path that the group has outside the container. The group is then at the root of
    the mount. If the kernel has no control groups, nothing is yielded.
    """
    mounts = {"": root / "sys" / "fs" / "cgroup", "memory": root / "sys" / "fs" / "cgroup" / "memory"}
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        mount = mounts.get(controllers)
        if mount is None or not path:
            continue
        group = mount / path.strip("/")
        for folder in {mount, group, *group.parents}:
            if folder.is_relative_to(mount):
                limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
                if limit is not None:
                    yield folder, limit


def _number(file: Path) -> int | None:
    """Return the number in a file. Return None for "max", and if the file does not exist."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _fields(file: Path) -> dict[str, int]:
    """Return the numbers in a file of the kernel by the first words of the lines. Empty if the file does not exist."""
    lines = (line.split() for line in _text(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _text(file: Path) -> str:
    """Return the text of a file of the kernel. Empty if the file does not exist."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
