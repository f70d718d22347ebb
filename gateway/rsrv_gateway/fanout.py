"""What several workers answered, as one answer. Pure.

An answer that was asked of all is a message of `service_pb2` or how it was refused, by worker. A worker that is unavailable
is left out where the others can speak for it, and in the way where all must have done something.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpc import StatusCode
from tritonclient.grpc import service_pb2

from rsrv_gateway.outcomes import Refusal, no_worker

Answer = Any | Refusal
Answers = Mapping[str, Answer]
#: of one RPC: the answers, by worker -> the answer
Merge = Callable[[Answers], Answer]

#: of a model in a repository index: the first one that a worker reports is the gateway's
_STATES = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE", "UNKNOWN")

#: by which tritonserver refuses statistics of a model that it has not
_UNKNOWN = (StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT)


def all_succeeded(answers: Answers) -> Answer:
    """The first answer, if no worker refused."""
    return _first_refusal(answers) or _only(answers)


def merge_statistics(answers: Answers) -> Answer:
    """ModelStatistics: sums by model and version. A model may be on some of the workers only."""
    return _heard(_without(answers, _UNKNOWN), _sum_statistics)


def merge_index(answers: Answers) -> Answer:
    """RepositoryIndex: a model is ready if it is ready anywhere."""
    return _heard(answers, _merge_index)


def _heard(answers: Answers, merge: Callable[[Mapping[str, Any]], Any]) -> Answer:
    """Merged without the workers that are unavailable, unless all are, or another one refused."""
    heard = {
        worker: answer
        for worker, answer in answers.items()
        if not (isinstance(answer, Refusal) and answer.broken())
    }
    refusal = _first_refusal(heard if heard else answers)
    if refusal is not None:
        return refusal
    return merge(heard) if heard else no_worker()


def _without(answers: Answers, codes: Iterable[StatusCode]) -> Answers:
    """Without refusals by these codes, unless there is nothing else."""
    rest = {
        worker: answer
        for worker, answer in answers.items()
        if not (isinstance(answer, Refusal) and answer.code in codes)
    }
    return rest or answers


def _first_refusal(answers: Answers) -> Refusal | None:
    for worker, answer in answers.items():
        if isinstance(answer, Refusal):
            if all(other == answer for other in answers.values()):
                return answer  # it is not about that worker
            return Refusal(answer.for_client(), f"worker {worker}: {answer.message}", answer.trailing)
    return None


def _only(answers: Mapping[str, Any]) -> Answer:
    return next(iter(answers.values()), None) or no_worker()


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


def _add_model(into: Any, other: Any) -> None:
    into.last_inference = max(into.last_inference, other.last_inference)
    into.inference_count += other.inference_count
    into.execution_count += other.execution_count
    _add(into.inference_stats, other.inference_stats)
    _add_rows(into.batch_stats, other.batch_stats, ("batch_size",))
    _add_rows(into.memory_usage, other.memory_usage, ("type", "id"))
    for key, each in other.response_stats.items():
        _add(into.response_stats[key], each)


def _add_rows(into: Any, other: Iterable[Any], key: tuple[str, ...]) -> None:
    """Adds up the rows with the same key, and appends the others."""
    rows = {tuple(getattr(row, name) for name in key): row for row in into}
    for row in other:
        known = rows.get(tuple(getattr(row, name) for name in key))
        if known is None:
            into.add().CopyFrom(row)
        else:
            _add(known, row, key)


def _add(into: Any, other: Any, key: tuple[str, ...] = ()) -> None:
    """Adds all numbers of a message to those of another, also in messages in it."""
    for field, value in other.ListFields():
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
    # What is not loaded has no version: that says nothing where the model is loaded elsewhere.
    versioned = {name for name, version in best if version}
    return service_pb2.RepositoryIndexResponse(
        models=[best[key] for key in sorted(best) if key[1] or key[0] not in versioned]
    )


def _rank(entry: Any) -> int:
    return _STATES.index(entry.state) if entry.state in _STATES else len(_STATES)
