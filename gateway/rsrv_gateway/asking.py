"""Asking several workers: in turn, or at the same time. What is asked, and how, is the front's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import TypeVar

from rsrv.placement.routing import Choice
from rsrv_gateway.outcomes import MOST_LOSSES, Refusal, no_worker
from rsrv_gateway.traffic import Traffic

T = TypeVar("T")

#: asks one worker, by name
Ask = Callable[[str], Awaitable[T | Refusal]]


async def ask_others(
    traffic: Traffic,
    choice: Choice,
    refusal: Refusal,
    ask: Callable[[str, float], Awaitable[T | Refusal]],
    deadline: float,
) -> T | Refusal:
    """After the chosen worker's refusal: the answer of the first that may answer instead, and does.

    `ask` is told the seconds that are left; `deadline` is by `monotonic`.
    """
    losses = int(refusal.lost)
    for worker in choice.others:
        left = deadline - monotonic()
        if left <= 0 or losses == MOST_LOSSES:
            break
        traffic.moved(choice.worker)
        traffic.router.move(choice, worker)
        answer = await ask(worker, left)
        if not isinstance(answer, Refusal):
            return answer
        refusal = answer.or_rather(refusal)
        losses += answer.lost
        if not answer.elsewhere():
            break
    return refusal


async def first(
    workers: Iterable[str], ask: Ask[T], wanted: Callable[[T], bool] | None = None
) -> T | Refusal:
    """The first answer, or the first that is wanted; else the last."""
    answer: T | Refusal | None = None
    for worker in list(workers):
        last = await ask(worker)
        if not isinstance(last, Refusal):
            answer = last
            if wanted is None or wanted(last):
                break
            continue
        if answer is None or isinstance(answer, Refusal):
            answer = last.or_rather(answer)
        if not last.elsewhere():
            break
    return no_worker() if answer is None else answer


async def everywhere(workers: Iterable[str], ask: Ask[T]) -> dict[str, T | Refusal]:
    """At the same time; by worker, in the order of their names."""
    asked = sorted(workers)
    answers = await asyncio.gather(*[ask(worker) for worker in asked])
    return dict(zip(asked, answers, strict=True))
