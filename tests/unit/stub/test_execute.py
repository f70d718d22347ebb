"""Triton's entry to a stub: it always returns, and each request is answered exactly once."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rsrv.stub.metrics import Meters
from rsrv.stub.replies import Reply, Responses
from rsrv.stub.request import ClientRequest, EntryPoint, Outcomes
from tests.fakes import FakeError, FakePbUtils, FakeRequest, FakeResponse

RESPONSES = Responses(FakePbUtils)
WELL = FakeResponse([])


def reply(request: ClientRequest) -> None:
    request.reply = Reply(request.triton.get_response_sender(), RESPONSES)


def raising(error: BaseException) -> Callable[..., Any]:
    def raise_it(*_: object) -> Any:
        raise error

    return raise_it


def entry(answer: Callable[[list[ClientRequest]], Sequence[Any] | None], **other: Any) -> EntryPoint:
    parts = {"reply": reply, "end": raising(AssertionError("the process ends")), **other}
    return EntryPoint(answer, Outcomes(Meters(), RESPONSES), **parts)


def answers(requests: list[FakeRequest], returned: list[Any] | None) -> list[str]:
    """Return what each request got, in the returned list or by its sender: "well", or the code of an error, for each answer."""
    texts = []
    for index, request in enumerate(requests):
        every = [] if returned is None else [returned[index]]
        while not request.answers.empty():
            every.append(request.answers.get())
        texts.append(
            " ".join("well" if response.error is None else response.error.code for response in every)
        )
    return texts


def replies_to(*indices: int, then: Callable[[], Any]) -> Callable[[list[ClientRequest]], Any]:
    def answer(requests: list[ClientRequest]) -> Any:
        for index in indices:
            reply(requests[index])
        return then()

    return answer


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("replied", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_batch_that_fails_is_answered_through_replies(
    replied: tuple[int, ...], error: BaseException
) -> None:
    """If the engine fails after it has made senders for some requests, all requests of the batch are answered by senders.

    execute() then returns no list.
    """
    requests = [FakeRequest({}) for _ in range(3)]
    returned = entry(replies_to(*replied, then=raising(error))).execute(requests)
    assert returned is None
    assert answers(requests, returned) == [FakeError.INTERNAL] * 3


def test_a_request_that_was_answered_before_the_batch_failed_is_not_answered_again() -> None:
    """If the engine fails after it has answered one request of a batch, only the other requests fail."""
    requests = [FakeRequest({}) for _ in range(2)]

    def answer(arrived: list[ClientRequest]) -> None:
        reply(arrived[0])
        assert arrived[0].reply is not None
        arrived[0].reply.send(WELL)
        raise ValueError("no")

    assert answers(requests, entry(answer).execute(requests)) == ["well", FakeError.INTERNAL]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda _: None, FakeError.INTERNAL),
        (lambda _: [WELL], FakeError.INTERNAL),
        (lambda _: [WELL] * 3, FakeError.INTERNAL),
        (replies_to(0, then=lambda: None), FakeError.INTERNAL),
        (replies_to(0, 1, then=lambda: [WELL] * 2), FakeError.INTERNAL),
        (lambda _: [WELL] * 2, "well"),
        (replies_to(0, 1, then=lambda: None), ""),  # This engine answers later, by the senders.
    ],
)
def test_requests_that_the_engine_leaves_out_are_answered(
    answer: Callable[[list[ClientRequest]], Any], expected: str
) -> None:
    """If the engine returns too few or too many answers, each request still gets one answer, or fails."""
    requests = [FakeRequest({}) for _ in range(2)]
    held_requests: list[ClientRequest] = []

    def keep(arrived: list[ClientRequest]) -> Any:
        held_requests.extend(arrived)
        return answer(arrived)

    assert answers(requests, entry(keep).execute(requests)) == [expected] * 2


def test_a_process_that_cannot_even_fail_requests_ends() -> None:
    """If the process cannot even send failures to its requests, it ends. Then the model is loaded again."""
    reasons: list[str] = []
    broken = entry(
        replies_to(0, then=raising(ValueError("no"))), reply=raising(OSError("no room")), end=reasons.append
    )
    requests = [FakeRequest({}) for _ in range(2)]

    assert broken.execute(requests) is None

    assert reasons == ["the model's process cannot answer any more; it is being restarted"]
