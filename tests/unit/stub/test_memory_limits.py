"""The available memory, which is read from the kernel's files."""

from pathlib import Path

import pytest

from rsrv.limits import private_bytes, spare_memory, total_memory

GIB = 1 << 30
MEMINFO = f"MemTotal:   {16 * GIB // 1024} kB\nMemFree: 5 kB\nMemAvailable: {8 * GIB // 1024} kB\nHugePages_Total: 0\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for path, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "spare"),
    [
        ("0::/\n", {}, 16 * GIB, 8 * GIB),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, 16 * GIB, 8 * GIB),
        (
            "0::/\n",
            {
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
            },
            4 * GIB,
            2 * GIB + GIB // 2,
        ),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": f"{2 * GIB}",
                "sys/fs/cgroup/a/memory.current": f"{5 * GIB}",
            },
            2 * GIB,
            0,
        ),
        (
            "4:memory:/outside/of/the/container\n3:cpu:/x\n0::/\n",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}",
                "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\ninactive_file 0\n",
            },
            4 * GIB,
            3 * GIB + GIB // 2,
        ),
        ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 63}"}, 16 * GIB, 8 * GIB),
    ],
    ids=["no group", "no limit", "v2", "v2, of a parent", "v1, in a container", "v1, no limit"],
)
def test_a_control_group_may_have_less_than_the_machine(
    tmp_path: Path, cgroup: str, files: dict[str, str], total: int, spare: int
) -> None:
    """The total memory is the smallest of the machine's memory and the limits of control groups. Caches count as spare memory."""
    root = machine(tmp_path, cgroup, files)

    assert total_memory(root) == total
    assert spare_memory(root) == spare


def test_this_machine_has_memory() -> None:
    """The files of this machine can be read."""
    assert total_memory() >= spare_memory() > 0
    assert private_bytes() > 0
