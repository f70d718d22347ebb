"""The cores of each worker: fair, close to its device, and within a container's limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.serve.cores import Cores, CoreShare, look, share

EIGHT = Cores(tuple(range(8)))
LEFT, RIGHT = frozenset(range(4)), frozenset(range(4, 8))
ANY: frozenset[int] = frozenset()


def cores(shares: list[CoreShare]) -> list[tuple[int, ...]]:
    return [one.cores for one in shares]


def test_cores_are_shared_out_in_equal_parts() -> None:
    """Each worker gets adjacent cores, and as many threads."""
    assert share(EIGHT, [ANY, ANY]) == [CoreShare((0, 1, 2, 3), 4), CoreShare((4, 5, 6, 7), 4)]


def test_a_share_has_both_halves_of_a_physical_core() -> None:
    """Cores are shared out in the given order, in which siblings are adjacent."""
    assert cores(share(Cores((0, 4, 1, 5, 2, 6, 3, 7)), [ANY, ANY])) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_workers_get_cores_close_to_their_devices() -> None:
    """Each worker gets cores close to its device; the first device is on the right."""
    assert cores(share(EIGHT, [RIGHT, LEFT, LEFT])) == [(4, 5, 6, 7), (0, 1), (2, 3)]


@pytest.mark.parametrize("near", [[LEFT, frozenset(range(2, 6))], [LEFT, ANY]])
def test_overlapping_sides_are_ignored(near: list[frozenset[int]]) -> None:
    """If the sides of devices overlap, cores are shared without them."""
    assert cores(share(EIGHT, near)) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_side_outside_the_allowed_cores_is_ignored() -> None:
    """A device whose close cores this process may not use has no side."""
    assert cores(share(Cores((0, 1)), [RIGHT, RIGHT])) == [(0,), (1,)]


def test_more_workers_than_cores_take_turns() -> None:
    """With more workers than cores, each has one core and cores have several workers."""
    assert cores(share(Cores((3, 4)), [ANY] * 3)) == [(3,), (4,), (3,)]


def test_a_container_with_a_limit_on_time_is_not_pinned() -> None:
    """A container with a limit on CPU time gets threads and no pinned cores."""
    limited = Cores(tuple(range(64)), quota=6.5)

    assert share(limited, [ANY] * 2) == [CoreShare((), 3)] * 2
    assert share(limited, [ANY] * 10) == [CoreShare((), 1)] * 10
    assert cores(share(Cores((0, 1), quota=2.0), [ANY] * 2)) == [(0,), (1,)]


@given(
    numbers=st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True),
    near=st.lists(st.sampled_from([ANY, LEFT, RIGHT, frozenset(range(100))]), min_size=1, max_size=10),
)
def test_shares_are_fair(numbers: list[int], near: list[frozenset[int]]) -> None:
    """Every worker has a core; with enough for all, none is shared and each has its part of its side."""
    shares = share(Cores(tuple(numbers)), near)

    assert all(
        one.cores and set(one.cores) <= set(numbers) and one.threads == len(one.cores) for one in shares
    )
    if len(set(near)) == 1 and len(numbers) >= len(near) and near[0] == ANY:
        used = [core for one in shares for core in one.cores]
        assert sorted(used) == sorted(numbers)
        sizes = {one.threads for one in shares}
        assert max(sizes) - min(sizes) <= 1


def test_this_machine_has_cores() -> None:
    """The real kernel reports the allowed cores, each once."""
    found = look()

    assert found.numbers
    assert len(set(found.numbers)) == len(found.numbers)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_container_is_read(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """The CPU limit is read from control groups of either version."""
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert look(tmp_path).quota == quota
