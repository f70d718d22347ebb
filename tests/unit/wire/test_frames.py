"""Frames are unpacked as they were packed, and malformed frames are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.wire import frames
from rsrv.wire.frames import Completion, Kind, ProtocolError, Status, Submission

submissions = st.builds(
    Submission,
    request=st.integers(0, 2**64 - 1),
    deadline_ns=st.integers(0, 2**63 - 1),
    rows=st.integers(0, 2**32 - 1),
    variant=st.integers(0, 2**16 - 1),
    priority=st.integers(0, 2**16 - 1),
    segment=st.integers(0, 2**32 - 1),
    inputs_at=st.integers(0, 2**63),
    outputs_at=st.integers(0, 2**63),
    flags=st.integers(0, 2**32 - 1),
    run=st.integers(0, 2**64 - 1),
    tag=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**64 - 1),
)
completions = st.builds(
    Completion,
    request=st.integers(0, 2**64 - 1),
    status=st.sampled_from(Status),
    size=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 2**32 - 1),
    execute_ns=st.integers(0, 2**63 - 1),
    text=st.text(max_size=30),
)


@given(st.lists(submissions, max_size=20))
def test_submissions_survive(sent: list[Submission]) -> None:
    """The runtime unpacks the submissions that a stub packs."""
    frame = frames.pack_submissions(sent)

    assert frames.read_header(frame) == (Kind.SUBMIT, len(sent))
    assert list(frames.unpack_submissions(frame, len(sent))) == sent


@given(st.lists(completions, max_size=20))
def test_completions_survive(sent: list[Completion]) -> None:
    """A stub unpacks the completions that the runtime packs, texts included."""
    received: list[Completion] = []
    for frame in frames.pack_completions(sent):
        kind, count = frames.read_header(frame)
        assert kind is Kind.DONE
        received += frames.unpack_completions(frame, count)

    assert received == sent


def test_many_long_texts_are_split_over_frames() -> None:
    """Completions that do not fit one frame are packed into several frames. Each of these is below the limit."""
    sent = [Completion(i, Status.INTERNAL, text="x" * 4000) for i in range(200)]

    packed = frames.pack_completions(sent)

    assert len(packed) > 1
    assert all(len(frame) <= frames.MAX_FRAME for frame in packed)
    received = [c for f in packed for c in frames.unpack_completions(f, frames.read_header(f)[1])]
    assert received == sent


def test_the_largest_batch_of_submissions_fits_one_frame() -> None:
    """MAX_ENTRIES is chosen so that a full SUBMIT stays below MAX_FRAME."""
    full = [Submission(i, 0, 1, 0, 0, 0, 0, 0, 0) for i in range(frames.MAX_ENTRIES)]

    assert len(frames.pack_submissions(full)) <= frames.MAX_FRAME


@given(st.text(st.characters()))
def test_a_tag_stands_for_an_id(id: str) -> None:
    """The tag of a request id fits into its 64-bit field, and is always the same for the same id.

    The tag is 0 only for an empty id.
    """
    tag = frames.request_tag(id)

    assert 0 <= tag < 2**64
    assert bool(tag) == bool(id)
    assert tag == frames.request_tag(id)


@pytest.mark.parametrize(("id", "tag"), [("", 0), ("request-17", 14926567910488006288)])
def test_tags_are_the_documents(id: str, tag: int) -> None:
    """Tags equal the examples in the specification, so that programs in other languages compute the same tags."""
    assert frames.request_tag(id) == tag


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_ids_survive(ids: list[int]) -> None:
    """CANCEL and DROP_SEGMENT carry plain lists of ids."""
    frame = frames.pack_ids(Kind.CANCEL, ids)

    assert frames.unpack_ids(frame, frames.read_header(frame)[1]) == tuple(ids)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"magic": 1, "version": 1}, "does not use"),
        (
            {"magic": frames.MAGIC, "version": 99},
            f"version 99 of the protocol, and this side uses {frames.PROTOCOL_VERSION}",
        ),
        ({}, "does not use"),
    ],
)
def test_a_wrong_greeting_is_refused_with_its_reason(body: dict[str, int], expected: str) -> None:
    """A wrong first frame is refused. The error says whether it is of another version, or not of this protocol at all."""
    with pytest.raises(ProtocolError, match=expected):
        frames.check_hello(frames.pack_json(Kind.HELLO, body))


def test_a_matching_greeting_passes() -> None:
    """A matching greeting is accepted."""
    frames.check_hello(frames.hello())


def test_cold_has_the_start_timeout_in_both_forms() -> None:
    """A COLD frame has the start timeout in seconds as JSON. Its flat form has it in nanoseconds, as a little-endian i64."""
    frame, flat = frames.pack_cold(2.5), frames.pack_cold(2.5, flat=True)

    assert frames.unpack_json(frame) == {"start_timeout_s": 2.5, "retry_after_s": 0}
    assert frames.read_header(flat)[0] is Kind.COLD
    assert flat[frames.HEADER.size :] == (2_500_000_000).to_bytes(8, "little")


def test_an_overlong_json_is_refused_before_it_is_sent() -> None:
    """A JSON text that exceeds a frame is an error for its sender."""
    with pytest.raises(ProtocolError, match="exceeds a frame"):
        frames.pack_json(Kind.REGISTER, {"bundle": "x" * frames.MAX_FRAME})
