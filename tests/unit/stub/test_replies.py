"""How failures are told: what a tag says is found again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.replies import Responses, tag_failure, untag
from rsrv.wire.frames import Status
from tests.fakes import FakePbUtils

FAILURES = [status for status in Status if status is not Status.OK]


@pytest.mark.parametrize("status", FAILURES)
@given(text=st.text() | st.just("[rsrv:INTERNAL] of another"))
def test_a_tagged_failure_is_found_again(status: Status, text: str) -> None:
    """Every status, with any text, even one that looks like a tag."""
    found = untag(tag_failure(status, text))

    assert found is not None
    assert (found.status, found.text) == (status, text)


@pytest.mark.parametrize(
    "message", ["", "late", "[rsrv:] x", "[rsrv:OK] x", "[rsrv:NEW_ONE] x", "rsrv:DEADLINE x"]
)
def test_what_is_not_tagged_stays_unknown(message: str) -> None:
    """Also a status that is none of ours, or no failure."""
    assert untag(message) is None


@pytest.mark.parametrize("status", FAILURES)
def test_an_answer_to_another_model_is_always_tagged(status: Status) -> None:
    """For its code is lost on the way; a client, who gets the code, sees tags only where Triton has no code."""
    responses = Responses(FakePbUtils)

    client = responses.failure(status, "why").error.message
    model = responses.failure(status, "why", sub_call=True).error.message

    assert model == f"[rsrv:{status.name}] why"
    untagged = status in (Status.INVALID, Status.NOT_FOUND, Status.CANCELLED, Status.INTERNAL)
    assert client == ("why" if untagged else model)
