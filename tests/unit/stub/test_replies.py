"""Tags of failures: the status in a message can be read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.replies import Reply, Responses, tag_failure, untag
from rsrv.wire.frames import Status
from tests.fakes import FakePbUtils

FINAL = FakePbUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
FAILURES = [status for status in Status if status is not Status.OK]


@pytest.mark.parametrize("status", FAILURES)
@given(text=st.text() | st.just("[rsrv:INTERNAL] of another"))
def test_a_tagged_failure_is_found_again(status: Status, text: str) -> None:
    """A failure's status and text can be read from its tagged message. The text may be any text, even one that has a tag."""
    failure = untag(tag_failure(status, text))

    assert failure is not None
    assert (failure.status, failure.text) == (status, text)


@pytest.mark.parametrize(
    "message", ["", "late", "[rsrv:] x", "[rsrv:OK] x", "[rsrv:NEW_ONE] x", "rsrv:DEADLINE x"]
)
def test_a_message_without_a_tag_has_no_status(message: str) -> None:
    """A message without a tag, with an unknown status or with the status OK has no status."""
    assert untag(message) is None


@pytest.mark.parametrize("status", FAILURES)
def test_an_answer_to_another_model_is_always_tagged(status: Status) -> None:
    """A failure of a sub-call always has a tag with its status, because Triton does not pass the code to the calling model.

    A failure for a client has a tag only if Triton has no code for the status.
    """
    responses = Responses(FakePbUtils)

    client = responses.failure(status, "why").error.message
    model = responses.failure(status, "why", sub_call=True).error.message

    assert model == f"[rsrv:{status.name}] why"
    untagged = status in (Status.INVALID, Status.NOT_FOUND, Status.CANCELLED, Status.INTERNAL)
    assert client == ("why" if untagged else model)


@pytest.mark.parametrize(("free", "flags"), [(4, [FINAL]), (3.9, [0, FINAL])])
def test_a_large_answer_needs_four_times_its_room(
    monkeypatch: pytest.MonkeyPatch, free: float, flags: list[int]
) -> None:
    """Usually, a large answer is sent together with the flag that it is the final response.

    If less than four times its size is free in shared memory, the answer is sent without the flag, and the flag after it.
    """
    nbytes = 1 << 20
    monkeypatch.setattr("rsrv.stub.replies.free_shared_memory", lambda: int(free * nbytes))
    sent: list[int] = []

    class Sender:
        def send(self, response: object = None, flags: int = 0) -> None:
            sent.append(flags)

    Reply(Sender(), Responses(FakePbUtils)).send("a large answer", nbytes)

    assert sent == flags
