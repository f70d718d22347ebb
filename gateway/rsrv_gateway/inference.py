"""One inference request: choose a worker, send it the request, try other workers if it refuses, and count the request.

Both proxies use this module. They differ in how they read a request, send it to a worker, and deliver the answer.
"""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from rsrv_gateway.fanout import fail_over
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.suspects import EQUAL
from rsrv_gateway.traffic import CANCELLED, Traffic

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Inference(Generic[T]):
    """An inference request, with the facts that the choice of a worker needs."""

    model: str
    version: str
    items: int
    #: Id of the request's sequence. If it is None, empty or 0, the request belongs to no sequence.
    sequence: int | str | None
    #: Names of the outputs for which the client asks for classes.
    classified: Collection[str]
    #: Time of `monotonic` at which the request arrived.
    arrived: float
    #: Deadline of the request on the same clock.
    deadline: float
    #: Sends the request to a worker, which has the given number of seconds to answer.
    ask: Callable[[str, float], Awaitable[T | Refusal]]
    #: Returns the digest of the whole request.
    digest: Callable[[], bytes]
    #: Returns whether the whole request can be sent again.
    is_repeatable: Callable[[], bool]
    #: True to send the request to a model's only worker again after the connection broke.
    repeats_lost: bool = False


async def infer(
    traffic: Traffic, request: Inference[T], deliver: Callable[[T], Awaitable[tuple[R, str]]]
) -> R | Refusal:
    """Execute a request on a worker, and count it. Return the delivered answer, or the refusal for the client.

    `deliver` sends the worker's answer to the client. It returns the delivered answer, and the code under which to count the
    request.
    """
    router, model = traffic.router, request.model
    if traffic.suspects.has(model) and traffic.suspects.is_equal(model, request.digest()):
        traffic.count_refused(model, EQUAL.code.name)
        return EQUAL
    choice = router.select(model, request.items) or await traffic.find(model, request.items)
    if isinstance(choice, Refusal):
        traffic.count_refused(model, choice.code.name)
        return choice

    async def ask(worker: str, left: float) -> T | Refusal:
        wrong = await traffic.refusal_of_classes(worker, model, request.version, request.classified)
        return wrong or await request.ask(worker, left)

    deadline, code = request.deadline, CANCELLED
    try:
        if request.sequence:
            traffic.pin_sequence(choice, model, request.sequence)
        answer = await ask(choice.worker, deadline - monotonic())
        if isinstance(answer, Refusal) and not request.sequence and request.is_repeatable():
            if answer.lost and request.repeats_lost and not choice.others:
                answer = await ask(choice.worker, deadline - monotonic())
            elif answer.is_retryable():
                answer = await fail_over(traffic, choice, answer, ask, deadline, model, request.digest)
        if isinstance(answer, Refusal):
            code = answer.for_client().name
            return answer
        delivered, code = await deliver(answer)
        return delivered
    finally:
        router.release(choice)
        traffic.count_finished(model, choice.worker, code, request.items, monotonic() - request.arrived)
