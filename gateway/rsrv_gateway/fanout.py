"""Calls to several workers, one after another or at once, and functions that merge their answers into one answer.

The answer of a worker is a message of `service_pb2`, or a refusal. If an operation needs the answer of only one worker,
unavailable workers are ignored. If all workers must do something, an unavailable worker is an error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic
from typing import Any, TypeVar

from grpc import StatusCode
from tritonclient.grpc import service_pb2

from rsrv.placement.routing import Choice
from rsrv_gateway.outcomes import CONNECTION_LOSSES_MAX, Refusal, no_worker
from rsrv_gateway.suspects import SUSPECT
from rsrv_gateway.traffic import Traffic

T = TypeVar("T")

#: Calls one worker, by name.
Ask = Callable[[str], Awaitable[T | Refusal]]


async def fail_over(
    traffic: Traffic,
    choice: Choice,
    refusal: Refusal,
    ask: Callable[[str, float], Awaitable[T | Refusal]],
    deadline: float,
    model: str,
    digest: Callable[[], bytes],
) -> T | Refusal:
    """Send a request to other workers, one after another, after the chosen worker has refused it. Return the first answer.

    `ask` receives the worker and the remaining seconds. `deadline` is in seconds of `monotonic`. `digest` returns the digest of
    the request.
    """
    if not (refusal.lost and await traffic.brain.has_died(choice.worker, model)):
        return await _ask_others(traffic, choice, refusal, ask, deadline, set())
    async with traffic.suspects.turn() as execution:
        answer = await _ask_others(traffic, choice, refusal, ask, deadline, execution.workers)
        if not (isinstance(answer, Refusal) and answer.lost and execution.was_alone(choice.worker)):
            return answer
        if choice.worker in choice.others and await traffic.brain.has_died(choice.worker, model):
            traffic.suspects.add(model, digest())
            return SUSPECT
        return answer


async def _ask_others(
    traffic: Traffic,
    choice: Choice,
    refusal: Refusal,
    ask: Callable[[str, float], Awaitable[T | Refusal]],
    deadline: float,
    asked: set[str],
) -> T | Refusal:
    """Send a request to the other workers in turn. Add each worker to `asked` before the request is sent to it."""
    losses = int(refusal.lost)
    for worker in choice.others:
        left = deadline - monotonic()
        if left <= 0 or losses == CONNECTION_LOSSES_MAX:
            break
        traffic.count_failover(choice.worker)
        traffic.router.move(choice, worker)
        asked.add(worker)
        answer = await ask(worker, left)
        if not isinstance(answer, Refusal):
            return answer
        refusal = answer.preferred_to(refusal)
        losses += answer.lost
        if not answer.is_retryable():
            break
    return refusal


async def first(
    workers: Iterable[str], ask: Ask[T], accepts: Callable[[T], bool] | None = None
) -> T | Refusal:
    """Ask the workers in turn, and return the first answer that `accepts` accepts (by default, any answer).

    If there is none, return the last answer, or the best refusal if all workers refused.
    """
    answer: T | Refusal | None = None
    for worker in list(workers):
        last = await ask(worker)
        if not isinstance(last, Refusal):
            answer = last
            if accepts is None or accepts(last):
                break
            continue
        if answer is None or isinstance(answer, Refusal):
            answer = last.preferred_to(answer)
        if not last.is_retryable():
            break
    return no_worker() if answer is None else answer


async def ask_all(workers: Iterable[str], ask: Ask[T]) -> dict[str, T | Refusal]:
    """Call all workers at once. Return their answers by worker, sorted by name."""
    names = sorted(workers)
    answers = await asyncio.gather(*[ask(worker) for worker in names])
    return dict(zip(names, answers, strict=True))


Answer = Any | Refusal
Answers = Mapping[str, Answer]
#: Merges the workers' answers of one RPC.
Merge = Callable[[Answers], Answer]

#: States of a model in a repository index, in order of precedence.
_STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE", "UNKNOWN")

#: Codes with which tritonserver refuses statistics of an unknown model.
_UNKNOWN = (StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT)


def all_succeeded(answers: Answers) -> Answer:
    """Return the first answer if no worker refused."""
    return _first_refusal(answers) or next(iter(answers.values()), no_worker())


def merge_statistics(answers: Answers) -> Answer:
    """Merge ModelStatistics into sums by model and version. A model may be on only some of the workers."""
    return _merge_available(_without(answers, _UNKNOWN), _sum_statistics)


def merge_index(answers: Answers) -> Answer:
    """Merge RepositoryIndex: a model is ready if it is ready on any worker."""
    return _merge_available(answers, _merge_index)


def _merge_available(answers: Answers, merge: Callable[[Mapping[str, Any]], Any]) -> Answer:
    """Merge the answers of the available workers. Return a refusal if all workers are unavailable, or if another one refused."""
    heard = {
        worker: answer
        for worker, answer in answers.items()
        if not (isinstance(answer, Refusal) and answer.suspects_worker())
    }
    refusal = _first_refusal(heard if heard else answers)
    if refusal is not None:
        return refusal
    return merge(heard) if heard else no_worker()


def _without(answers: Answers, codes: Iterable[StatusCode]) -> Answers:
    """Return the answers without refusals with these codes. If all answers are such refusals, return all of them."""
    remaining = {
        worker: answer
        for worker, answer in answers.items()
        if not (isinstance(answer, Refusal) and answer.code in codes)
    }
    return remaining or answers


def _first_refusal(answers: Answers) -> Refusal | None:
    for worker, answer in answers.items():
        if isinstance(answer, Refusal):
            if all(last == answer for last in answers.values()):
                return answer  # This refusal does not depend on the worker.
            return Refusal(answer.for_client(), f"worker {worker}: {answer.message}", answer.trailing)
    return None


# --- statistics ------------------------------------------------------------------------------------------


def _sum_statistics(answers: Mapping[str, Any]) -> Any:
    merged: dict[tuple[str, str], Any] = {}
    for answer in answers.values():
        for each in answer.model_stats:
            into = merged.get((each.name, each.version))
            if into is None:
                merged[each.name, each.version] = each
            else:
                _add_model(into, each)
    return service_pb2.ModelStatisticsResponse(model_stats=merged.values())


def _add_model(into: Any, model: Any) -> None:
    into.last_inference = max(into.last_inference, model.last_inference)
    into.inference_count += model.inference_count
    into.execution_count += model.execution_count
    _add(into.inference_stats, model.inference_stats)
    _add_rows(into.batch_stats, model.batch_stats, ("batch_size",))
    _add_rows(into.memory_usage, model.memory_usage, ("type", "id"))
    for key, each in model.response_stats.items():
        _add(into.response_stats[key], each)


def _add_rows(into: Any, added: Iterable[Any], key: tuple[str, ...]) -> None:
    """Add up the rows with equal keys, and append the others."""
    rows = {tuple(getattr(row, name) for name in key): row for row in into}
    for row in added:
        known = rows.get(tuple(getattr(row, name) for name in key))
        if known is None:
            into.add().CopyFrom(row)
        else:
            _add(known, row, key)


def _add(into: Any, message: Any, key: tuple[str, ...] = ()) -> None:
    """Add all numbers of a message to another message, including nested messages."""
    for field, value in message.ListFields():
        if field.name in key:
            continue
        if field.message_type is None:
            setattr(into, field.name, getattr(into, field.name) + value)
        else:
            _add(getattr(into, field.name), value)


# --- the repository --------------------------------------------------------------------------------------


def _merge_index(answers: Mapping[str, Any]) -> Any:
    best: dict[tuple[str, str], Any] = {}
    for answer in answers.values():
        for each in answer.models:
            known = best.get((each.name, each.version))
            if known is None or _rank(each) < _rank(known):
                best[each.name, each.version] = each
    # A model that is not loaded has no version. Such an entry is useless if the model is loaded on another worker.
    versioned = {name for name, version in best if version}
    return service_pb2.RepositoryIndexResponse(
        models=[best[key] for key in sorted(best) if key[1] or key[0] not in versioned]
    )


def _rank(entry: Any) -> int:
    return _STATES.index(entry.state) if entry.state in _STATES else len(_STATES)
