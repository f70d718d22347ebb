"""Shared memory: ranges never overlap, all memory is returned, and hostile segments are refused."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.wire.layout import ALIGNMENT
from rsrv.wire.memory import (
    Arena,
    Board,
    Place,
    SharedMemoryError,
    create_document,
    create_sealed,
    map_segment,
    read_board,
    read_document,
)
from tests.held import open_files


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(first=4096, keep=1 << 20)
    yield made
    made.close()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), max_size=60))
def test_ranges_never_overlap_and_all_come_back(steps: list[tuple[int, bool]]) -> None:
    """For random calls of `take` and `give`, the ranges in use are disjoint and aligned.

    When all ranges are given back, the arena is idle.
    """
    arena = Arena(first=4096, keep=1 << 16)
    out: list[Place] = []
    for nbytes, give in steps:
        if give and out:
            arena.give(out.pop(nbytes % len(out)))
        else:
            place = arena.take(nbytes)
            assert place.nbytes >= nbytes
            assert place.offset % ALIGNMENT == 0
            assert place.offset + place.nbytes <= len(arena.segment(place))
            for other in out:
                apart = (
                    place.segment != other.segment
                    or place.offset >= other.offset + other.nbytes
                    or other.offset >= place.offset + place.nbytes
                )
                assert apart
            out.append(place)
    for place in out:
        arena.give(place)

    assert arena.idle
    arena.close()


def test_a_large_tensor_gets_a_segment_of_its_own_and_gives_it_back(arena: Arena) -> None:
    """A segment that is larger than `keep` is dropped as soon as it is idle, and the drop is reported to the runtime."""
    small = arena.take(100)
    before = arena.nbytes
    large = arena.take(8 << 20)
    for _ in range(2):
        arena.announced()

    arena.give(large)

    assert arena.nbytes == before
    assert arena.dropped == [large.segment]
    arena.give(small)


def test_idle_segments_together_take_no_more_than_may_stay(arena: Arena) -> None:
    """Idle segments may take `keep` bytes together, which is enough for one of three segments. So two of them are dropped."""
    places = [arena.take(1 << 20) for _ in range(3)]
    for _ in places:
        arena.announced()

    for place in places:
        arena.give(place)

    assert arena.nbytes == 1 << 20
    assert arena.dropped == [place.segment for place in places[:2]]


def test_a_segment_that_was_never_announced_is_not_announced_after_its_end(arena: Arena) -> None:
    """If a segment is dropped before it was announced to the runtime, its descriptor is closed and never sent."""
    arena.take(100)
    before = open_files()
    large = arena.take(8 << 20)

    arena.give(large)

    assert all(id != large.segment for id, _ in arena.fresh)
    assert open_files() <= before


def test_closing_frees_every_descriptor_and_later_gives_are_ignored() -> None:
    """Closing an arena closes every descriptor. A place that is given back later is ignored."""
    before = open_files()
    arena = Arena()
    place = arena.take(10)

    arena.close()
    arena.give(place)

    assert open_files() <= before
    with pytest.raises(OSError, match="closed"):
        arena.take(10)


def test_a_document_of_any_size_survives() -> None:
    """A document that is too large for a frame is sent in a memfd."""
    value = {"list": list(range(100_000))}
    fd = create_document(value)

    assert read_document(fd) == value
    os.close(fd)


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_a_document_without_sense_is_the_peers_fault(text: bytes) -> None:
    """A document that is not a JSON object is refused as the peer's fault."""
    fd = create_sealed(len(text), "test")
    os.pwrite(fd, text, 0)
    with pytest.raises(SharedMemoryError):
        read_document(fd)
    os.close(fd)


def test_both_sides_see_the_same_bytes(arena: Arena) -> None:
    """What the stub writes through its mapping, the runtime reads through its own."""
    place = arena.take(256)
    arena.segment(place)[place.offset : place.offset + 256] = np.arange(256, dtype=np.uint8)
    (_, fd) = arena.fresh[0]

    mapped = map_segment(fd, 1 << 30)

    assert mapped[place.offset : place.offset + 256].tolist() == list(range(256))


def test_a_segment_that_its_owner_could_shrink_is_refused() -> None:
    """A segment without seals is refused. Its owner could shrink it, and then reading it would kill the runtime with SIGBUS."""
    fd = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    try:
        with pytest.raises(SharedMemoryError, match="sealed"):
            map_segment(fd, 1 << 30)
    finally:
        os.close(fd)


def test_a_segment_beyond_the_limit_is_refused() -> None:
    """A segment that is larger than the limit is refused.

    Its empty pages would cost the sender nothing, but would take address space of the runtime.
    """
    fd = create_sealed(1 << 30, "large")
    try:
        with pytest.raises(SharedMemoryError, match="is more than 4096"):
            map_segment(fd, 4096)
    finally:
        os.close(fd)


def test_a_board_has_one_size() -> None:
    """A board of any other size than the documented one is refused when it is mapped."""
    for size in (1, 4096, 1 << 20):
        fd = create_sealed(size, "board")
        try:
            with pytest.raises(SharedMemoryError):
                read_board(fd)
        finally:
            os.close(fd)


def test_a_document_beyond_the_limit_is_refused_unread() -> None:
    """A document that is larger than the limit is refused, and is not read."""
    fd = create_sealed(1 << 40, "document")
    try:
        with pytest.raises(SharedMemoryError, match="exceeds 67108864"):
            read_document(fd)
    finally:
        os.close(fd)


def test_something_that_is_no_memory_is_refused() -> None:
    """If the peer sends the descriptor of a pipe in place of a memfd, an error is raised, and the process does not crash."""
    read, write = os.pipe()
    try:
        with pytest.raises(SharedMemoryError):
            map_segment(read, 1 << 30)
    finally:
        os.close(read)
        os.close(write)


def test_a_sealed_segment_cannot_be_resized() -> None:
    """No process, its owner included, can resize a sealed segment."""
    fd = create_sealed(4096, "test")
    try:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_a_tensor_that_no_machine_can_hold_is_an_error_that_can_be_handled(arena: Arena) -> None:
    """A request for more memory than any machine has raises an error, and leaks no descriptor."""
    before = open_files()
    with pytest.raises(OSError, match="memory"):
        arena.take(1 << 60)

    assert open_files() <= before
    arena.give(arena.take(10))


def test_the_board_shows_what_was_published_last() -> None:
    """A reader that has mapped the board sees every later value. It cannot write to the board."""
    board = Board()
    view = read_board(board.fd)
    assert view[0] == 0

    board.publish(123_456_788, busy=True)

    assert view[0] == 123_456_789
    assert view.readonly
    board.publish_load(7, 5)
    assert (view[7], view[0]) == (5, 123_456_789)
    board.publish_load(0, 9)
    assert view[0] == 123_456_789, "a model without a slot has no cell"
    board.publish(123_456_791, busy=False)
    assert view[0] == 123_456_790
