"""Memory of the native front: how much the machine or the container has, and which segments the front keeps."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from random import Random

import pytest

import native_front
from rsrv.wire.memory import Arena, Place
from tests.unit.native.front import SANITIZERS

MIB = 1 << 20


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cgroup")


@pytest.fixture(scope="module")
def library(group: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Build and load the front's memory.c for a control group whose files are in a folder."""
    folder = tmp_path_factory.mktemp("library")
    source, built = folder / "spare.c", folder / "spare.so"
    source.write_text(
        f'#define CGROUP "{group}"\n#include "{native_front.SOURCES}/memory.c"\n'
        "uint64_t spare(void) { return spare_memory(); }\n"
    )
    options = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", *SANITIZERS["undefined"]]
    include = f"-I{native_front.SOURCES}"
    subprocess.run([*native_front.compiler(), *options, include, "-o", built, source], check=True)
    native = ctypes.CDLL(str(built))
    native.spare.restype = ctypes.c_uint64
    native.arena_new.restype = ctypes.c_void_p
    return native


class NativePlace(ctypes.Structure):
    """The structure `struct place` of native.h."""

    _fields_ = (
        ("segment", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("memory", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
    )


@pytest.mark.parametrize(
    ("limit", "cache", "spare"),
    [
        (f"{64 * MIB}", {}, 4 * MIB),
        (f"{64 * MIB}", {"inactive_file": 30 * MIB, "active_file": 20 * MIB, "anon": 10 * MIB}, 44 * MIB),
        (f"{64 * MIB}", {"inactive_file": 61 * MIB}, 64 * MIB),
        (f"{32 * MIB}", {}, 0),
    ],
    ids=["without a file cache", "with one", "that is all", "above the limit"],
)
def test_a_containers_file_cache_is_no_memory_in_use(
    library: ctypes.CDLL, group: Path, limit: str, cache: dict[str, int], spare: int
) -> None:
    """The file cache of a container is free memory.

    Otherwise a container that has read its bundles would refuse large requests.
    """
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{60 * MIB}\n")
    (group / "memory.stat").write_text("".join(f"{name} {number}\n" for name, number in cache.items()))
    assert library.spare() == spare


def test_a_group_without_a_limit_has_the_machines_memory(library: ctypes.CDLL, group: Path) -> None:
    """A control group whose limit is `max` has the memory of the machine."""
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{60 * MIB}\n")
    assert library.spare() > 64 * MIB


def test_the_fronts_keep_the_same_segments(library: ctypes.CDLL, group: Path) -> None:
    """Requests of random sizes begin and end in any order. The arenas of both fronts give each request the same place."""
    (group / "memory.max").write_text("max\n")
    random, arena, native = Random(0), Arena(), ctypes.c_void_p(library.arena_new())
    taken: list[tuple[Place, NativePlace]] = []
    for _ in range(300):
        if taken and random.random() < 0.5:
            place, other = taken.pop(random.randrange(len(taken)))
            arena.give(place)
            library.arena_give(ctypes.byref(other))
            continue
        nbytes, other = random.choice([1, 30, 70, 200, 300]) * MIB, NativePlace()
        place = arena.take(nbytes)
        assert library.arena_take(native, ctypes.c_uint64(nbytes), ctypes.byref(other))
        assert (place.segment, place.offset) == (other.segment, other.offset)
        taken.append((place, other))
        while arena.fresh:
            arena.announced()
            library.arena_announced(native)
    for place, other in taken:
        arena.give(place)
        library.arena_give(ctypes.byref(other))
    arena.close()
    library.arena_close(native)
