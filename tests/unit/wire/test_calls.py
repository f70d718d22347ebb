"""Frames of meta models: round trips, and refusals of malformed frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.wire import calls, frames
from rsrv.wire.calls import Call, Entrance, Release, RunExit, Spot, Where
from rsrv.wire.frames import Kind, ProtocolError, Status

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
u16 = st.integers(0, 2**16 - 1)
entrances = st.builds(Entrance, u64, u64, st.integers(-(2**63), 2**63 - 1), u16, u16, u64)
leavings = st.builds(RunExit, u64, st.sampled_from(Status))
releases = st.builds(Release, u64, u64)
spots = st.lists(st.builds(Spot, st.sampled_from(Where), u32, u64), max_size=4)
some_calls = st.builds(Call, u64, u64, u16, u16, u32, spots, spots, u32)


@given(st.lists(entrances, max_size=5), st.lists(leavings, max_size=5), st.lists(releases, max_size=5))
def test_short_frames_survive(enter: list[Entrance], leave: list[RunExit], release: list[Release]) -> None:
    """The runtime unpacks the ENTER, LEAVE and RELEASE frames that a stub packs."""
    frame = calls.pack_entrances(enter)
    assert frames.read_header(frame) == (Kind.ENTER, len(enter))
    assert calls.unpack_entrances(frame, len(enter)) == enter

    frame = calls.pack_leavings(leave)
    assert frames.read_header(frame) == (Kind.LEAVE, len(leave))
    assert calls.unpack_leavings(frame, len(leave)) == leave

    frame = calls.pack_releases(release)
    assert frames.read_header(frame) == (Kind.RELEASE, len(release))
    assert calls.unpack_releases(frame, len(release)) == release


@given(st.lists(some_calls, max_size=6))
def test_calls_survive(sent: list[Call]) -> None:
    """The runtime unpacks calls of any number of tensors, in their order."""
    frame = calls.pack_calls(sent)

    assert frames.read_header(frame) == (Kind.CALL, len(sent))
    assert calls.unpack_calls(frame, len(sent)) == sent


def test_a_call_with_too_many_tensors_is_refused() -> None:
    """A call with more tensors than a frame has room for raises an error at its sender."""
    with pytest.raises(ProtocolError, match="exceeds a frame"):
        calls.pack_calls([Call(1, 1, 0, 0, 1, [Spot(Where.NOWHERE)] * 9000, [])])


@given(st.lists(some_calls, min_size=1, max_size=3), st.integers(1, 40), st.sampled_from([-1, 1]))
def test_frames_that_are_cut_or_count_wrong_are_refused(sent: list[Call], cut: int, more: int) -> None:
    """A frame is refused if it is cut off, or if it has another number of entries than announced."""
    frame = calls.pack_calls(sent)

    with pytest.raises(ProtocolError):
        calls.unpack_calls(frame[:-cut], len(sent))
    with pytest.raises(ProtocolError):
        calls.unpack_calls(frame, len(sent) + more)
    with pytest.raises(ProtocolError):
        calls.unpack_entrances(calls.pack_entrances([Entrance(1, 2, 3, 4)])[:-1], 1)


def test_an_unknown_status_is_refused() -> None:
    """The exit of a run with an unknown status is refused."""
    frame = bytearray(calls.pack_leavings([RunExit(1, Status.OK)]))
    frame[-8] = 99

    with pytest.raises(ProtocolError, match="99"):
        calls.unpack_leavings(bytes(frame), 1)
