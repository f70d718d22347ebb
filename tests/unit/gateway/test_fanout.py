"""The merge of several workers' answers into one."""

from __future__ import annotations

from typing import Any

from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from rsrv_gateway import fanout
from rsrv_gateway.outcomes import Refusal

GONE = Refusal(StatusCode.UNAVAILABLE, "connection refused")
MISSING = Refusal(StatusCode.NOT_FOUND, "unknown")
BAD = Refusal(StatusCode.INTERNAL, "disk full")


def index(**models: str) -> Any:
    """Return an index answer with entries of the form `name="version STATE"`."""
    response = pb.RepositoryIndexResponse()
    for name, entry in models.items():
        version, _, state = entry.rpartition(" ")
        response.models.add(name=name, version=version, state=state)
    return response


def statistics(number: int, batch_sizes: tuple[int, ...] = (1,), model: str = "m") -> Any:
    response = pb.ModelStatisticsResponse()
    each = response.model_stats.add(
        name=model, version="1", last_inference=number, inference_count=number, execution_count=1
    )
    each.inference_stats.queue.count = each.inference_stats.queue.ns = number
    for size in batch_sizes:
        each.batch_stats.add(batch_size=size).compute_infer.count = number
    each.memory_usage.add(type="GPU", id=0, byte_size=number)
    each.response_stats["0"].success.count = number
    return response


@given(st.lists(st.tuples(st.integers(0, 2**40), st.sets(st.integers(1, 4))), min_size=1, max_size=5))
def test_statistics_are_sums(workers: list[tuple[int, set[int]]]) -> None:
    """All counts and times of a model are summed, also by batch size. The time of the last inference is the latest one."""
    answers = {f"w{at}": statistics(number, tuple(sizes)) for at, (number, sizes) in enumerate(workers)}
    total = sum(number for number, _ in workers)

    answer: Any = fanout.merge_statistics(answers)
    (merged,) = answer.model_stats

    assert merged.inference_count == merged.inference_stats.queue.ns == total
    assert merged.memory_usage[0].byte_size == merged.response_stats["0"].success.count == total
    assert merged.execution_count == len(workers)
    assert merged.last_inference == max(number for number, _ in workers)
    assert {each.batch_size: each.compute_infer.count for each in merged.batch_stats} == {
        size: sum(number for number, sizes in workers if size in sizes)
        for size in set().union(*(sizes for _, sizes in workers))
    }


def test_statistics_of_those_that_know() -> None:
    """Unavailable workers, and workers that do not know the model, are left out unless there are no others.

    Any other refusal of a worker is the answer.
    """
    merged: Any = fanout.merge_statistics(
        {"a": MISSING, "b": statistics(3), "c": GONE, "d": statistics(4, model="n")}
    )
    assert [(each.name, each.inference_count) for each in merged.model_stats] == [("m", 3), ("n", 4)]

    assert fanout.merge_statistics({"a": MISSING}) == MISSING
    assert fanout.merge_statistics({"a": MISSING, "b": GONE}).code is StatusCode.UNAVAILABLE
    assert fanout.merge_statistics({"a": BAD, "b": statistics(1)}).message == "worker a: disk full"
    assert fanout.merge_statistics({}).code is StatusCode.UNAVAILABLE


def test_ready_anywhere_is_ready() -> None:
    """A model is ready if one worker has it ready. Otherwise its state is the furthest one of all workers."""
    merged: Any = fanout.merge_index(
        {
            "a": index(m="1 UNAVAILABLE", n="1 LOADING", o=" UNAVAILABLE", p=" "),
            "b": index(m="1 READY", n="1 UNAVAILABLE", o="3 READY"),
            "c": GONE,
        }
    )

    assert [(each.name, each.version, each.state) for each in merged.models] == [
        ("m", "1", "READY"),
        ("n", "1", "LOADING"),
        ("o", "3", "READY"),
        ("p", "", ""),
    ]


def test_with_one_voice() -> None:
    """If there is only one answer, or all workers give the same answer, this answer is returned unchanged."""
    assert fanout.all_succeeded({"a": BAD}) is BAD
    assert fanout.all_succeeded({"a": BAD, "b": BAD}) is BAD
    assert fanout.merge_index({"a": GONE}) is GONE
