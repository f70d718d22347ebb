"""A process that cannot continue answers its requests before it ends."""

import threading
from typing import Any

from rsrv.stub.hook_guard import DrainAndExit
from rsrv.stub.replies import Reply, Responses
from tests.fakes import FakeBackstop, FakeError, FakePbUtils, FakeRequest
from tests.waiting import PATIENCE_S


def test_waiting_requests_are_answered_before_the_process_ends() -> None:
    """Before the process ends, it stops accepting requests and answers each waiting request once."""
    responses = Responses(FakePbUtils)
    requests = [FakeRequest({}) for _ in range(4)]
    replies = [Reply(request.get_response_sender(), responses) for request in requests]
    replies[0].send("an answer")
    replies.pop(1)  # Dropped.
    order: list[object] = []

    DrainAndExit(lambda: order.append("stop"), responses, order.append, FakeBackstop())("it hangs")

    assert order == ["stop", 1]
    assert requests[0].answers.get(timeout=1) == "an answer"  # type: ignore[comparison-overlap]
    for request, text in zip(requests[1:], ("dropped", "it hangs", "it hangs"), strict=True):
        error = request.answers.get(timeout=1).error
        assert error is not None
        assert error.code == FakeError.INTERNAL
        assert text in error.message
    assert all(request.answers.empty() for request in requests)


def test_an_answer_that_cannot_be_sent_does_not_keep_the_others_from_theirs() -> None:
    """If one answer cannot be sent, the other requests are still answered, and the process still ends."""

    class Full:
        def send(self, response: Any = None, flags: int = 0) -> None:
            raise RuntimeError("no room")

    responses = Responses(FakePbUtils)
    request = FakeRequest({})
    replies = [Reply(Full(), responses), Reply(request.get_response_sender(), responses)]
    statuses: list[int] = []

    DrainAndExit(lambda: None, responses, statuses.append, FakeBackstop())("it hangs")

    assert statuses == [1]
    assert request.answers.get(timeout=1).error is not None
    assert all(reply.sent for reply in replies)


def test_of_several_threads_one_ends_the_process() -> None:
    """If several threads want to end the process, only the first one does it. The others do nothing."""
    inside, go = threading.Event(), threading.Event()
    statuses: list[int] = []

    def stop() -> None:
        inside.set()
        go.wait(PATIENCE_S)

    end = DrainAndExit(stop, Responses(FakePbUtils), statuses.append, FakeBackstop())
    first = threading.Thread(target=end, args=["one"])
    first.start()
    inside.wait(PATIENCE_S)

    end("another")

    assert statuses == []
    go.set()
    first.join()
    assert statuses == [1]
