"""Limits that the system sets for a process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from rsrv.limits import raise_limit, spare_mappings, spare_memory, total_memory


def test_a_limit_is_raised_as_far_as_it_may_be() -> None:
    """The soft limit of open files is raised to the hard limit, which does not change."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        raise_limit(resource.RLIMIT_NOFILE)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (None, {}),
        ("", {}),
        ("odd\n0::\n:\n", {}),
        ("0::/x\n", {"x/memory.max": b"max\n"}),
        ("0::/x\n", {"x/memory.max": b"\xff"}),
        ("9:memory:/x\n", {"memory/x/memory.limit_in_bytes": b"9223372036854771712\n"}),
    ],
)
def test_a_system_whose_control_groups_say_nothing_has_the_memory_of_the_machine(
    tmp_path: Path, groups: str | None, files: dict[str, bytes]
) -> None:
    """If there are no control groups, or their files cannot be read, the available memory is the machine's memory."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 400 kB\n")
    if groups is not None:
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(content)

    assert (total_memory(tmp_path), spare_memory(tmp_path)) == (1000 << 10, 400 << 10)


def test_the_mappings_that_are_left_are_those_that_the_kernel_allows_but_for_the_lines_of_maps(
    tmp_path: Path,
) -> None:
    """The number of further memory mappings is the kernel's limit minus the number of lines in /proc/self/maps.

    If the system does not report both numbers, a very large number is returned.
    """
    (tmp_path / "proc/self").mkdir(parents=True)
    assert spare_mappings(tmp_path) == (1 << 31, 1 << 31)
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/max_map_count").write_text("65530\n")
    assert spare_mappings(tmp_path) == (1 << 31, 1 << 31)
    (tmp_path / "proc/self/maps").write_bytes(b"a\nb\n\xff\n")
    assert spare_mappings(tmp_path) == (65527, 65530)
