"""Cold starts, idle limits and host memory in the simulator, in scenarios computed by hand."""

from __future__ import annotations

import pytest

from rsrv.scheduler.events import Outcome
from rsrv.sim.record import Record
from rsrv.sim.scenario import ScenarioError, parse_scenario
from tests.unit.sim.helpers import metrics, run

#: Each model has 100 bytes of weights. They take 1 s from the disk and 0.1 s over the link. The executable takes 2 s to
#: load.
LAZY = """
device: {h2d_bytes_per_s: 1000, read_bytes_per_s: 100}
runtime: {start: lazy, start_timeout_s: 10, idle: {device: 10s, host: 1m, executable: 10m}}
models: {a: {cost: {1: 0.5}, weight_bytes: 100, start_s: 2}, b: {cost: {1: 0.5}, weight_bytes: 100, start_s: 2}}
"""


def ends(record: Record) -> list[tuple[Outcome | None, float]]:
    return [(request.outcome, request.ended) for request in record.requests]


def test_a_cold_model_starts_with_its_first_request_and_others_join() -> None:
    """The start of a cold model takes 3 s: 1 s for the read of its weights, and 2 s for its executable.

    Then the weights load. The request that caused the start and a later one both execute.
    """
    record = run(LAZY + "arrivals: [{t: 1, model: a}, {t: 2, model: a}, {t: 20, model: a}]")

    (start,) = record.starts
    assert (start.began, start.ended, start.read_bytes) == (1, 4, 100)
    assert ends(record)[:2] == [(Outcome.ANSWERED, 4.6), (Outcome.ANSWERED, 5.1)]
    assert [request.cold for request in record.requests] == [True, True, False]
    total = metrics(LAZY + "arrivals: [{t: 1, model: a}, {t: 2, model: a}]")["total"]
    assert (total["starts"], total["cold"], total["read_bytes"]) == (1, 2, 100)


def test_starts_take_turns_by_the_earliest_deadline() -> None:
    """One model starts at a time. The next one is the waiting model with the earliest deadline."""
    text = LAZY.replace("models: {", "models: {c: {cost: {1: 0.5}, start_s: 1}, ")
    record = run(
        text
        + "arrivals: [{t: 0, model: a}, {t: 1, model: b}, {t: 2, model: c, deadline_s: 8}, {t: 2, model: b}]"
    )

    assert [(start.model, start.began, start.ended) for start in record.starts] == [
        ("a", 0, 3),
        ("c", 3, 4),
        ("b", 4, 7),
    ]


def test_requests_give_up_while_their_model_starts() -> None:
    """A request waits for the start of its model until its deadline, or until the start's timeout.

    A model does not start if no request waits for it any more.
    """
    text = LAZY.replace("start_s: 2}}", "start_s: 20}}")
    record = run(
        text
        + "arrivals: [{t: 0, model: b, deadline_s: 4}, {t: 0, model: b}, {t: 1, model: a, deadline_s: 5}]"
    )

    assert ends(record) == [(Outcome.EXPIRED, 4), (Outcome.FAILED, 10), (Outcome.EXPIRED, 6)]
    assert [start.model for start in record.starts] == ["b"]


def test_edf_refuses_at_once_what_a_known_start_serves_too_late() -> None:
    """The duration of a model's start is known after its first start.

    At its second start, a request whose deadline is earlier than the end of the start is shed at once.
    """
    record = run(
        f"discipline: edf\n{LAZY}"
        "arrivals: [{t: 0, model: a, deadline_s: 9}, {t: 900, model: a, deadline_s: 2}, {t: 900, model: a, deadline_s: 9}]"
    )

    assert ends(record) == [(Outcome.ANSWERED, 3.6), (Outcome.SHED, 900), (Outcome.ANSWERED, 903.6)]


def test_an_idle_model_falls_back_step_by_step() -> None:
    """The weights of an idle model are evicted from the device after 10 s, and its host copy is dropped after a minute.

    After ten minutes, the model is cold.
    """
    record = run(
        LAZY + "arrivals: [{t: 0, model: a}, {t: 20, model: a}, {t: 120, model: a}, {t: 900, model: a}]"
    )

    assert [request.ended for request in record.requests] == [3.6, 20.6, 121.6, 903.6]
    assert [(load.started, load.read_bytes) for load in record.loads] == [
        (3, 0),
        (20, 0),
        (121, 100),
        (903, 0),
    ]
    assert record.evictions == [("a", 13.6), ("a", 30.6), ("a", 131.6), ("a", 913.6)]
    assert [start.began for start in record.starts] == [0, 900]
    assert record.host[:4] == [(0, 100), (80.6, 0), (120, 100), (181.6, 0)]


def test_a_model_in_use_does_not_fall_back() -> None:
    """A model with waiting or executing requests does not fall back, however long these take."""
    text = LAZY.replace("cost: {1: 0.5}", "cost: {1: 30}")
    record = run(text + "arrivals: [{t: 0, model: a}, {t: 1, model: a}]")

    assert [request.ended for request in record.requests] == [33.1, 63.1]
    assert [at for _, at in record.evictions] == [73.1]


def test_host_memory_holds_the_models_that_were_used_last() -> None:
    """If host memory is full, the least recently used model loses its host copy, and its next load reads from the disk."""
    record = run(
        """
        device: {weight_budget_bytes: 100, h2d_bytes_per_s: 1000, read_bytes_per_s: 100}
        runtime: {host_memory_bytes: 200}
        models: {a: {cost: {1: 0.5}, weight_bytes: 100, count: 3}}
        arrivals: [{t: 0, model: a-0}, {t: 5, model: a-1}, {t: 10, model: a-2}, {t: 15, model: a-0}]
        """
    )

    assert [load.read_bytes for load in record.loads] == [0, 0, 100, 100]
    assert max(nbytes for _, nbytes in record.host) == 200


def test_a_read_from_the_disk_delays_no_load_from_host_memory() -> None:
    """While the weights of one model are read from the disk, another model loads from host memory and executes."""
    record = run(
        """
        device: {weight_budget_bytes: 300, h2d_bytes_per_s: 1000, read_bytes_per_s: 10}
        runtime: {host_memory_bytes: 200}
        models: {a: {cost: {1: 0.5}, weight_bytes: 100, count: 3}}
        arrivals: [{t: 0, model: a-2}, {t: 1, model: a-1}]
        """
    )

    assert [(load.model, load.started, load.read_bytes) for load in record.loads] == [
        ("a-1", 1, 0),
        ("a-2", 10, 100),
    ]
    assert [request.ended for request in record.requests] == [10.6, 1.6]


def test_shared_tensors_are_read_and_counted_once() -> None:
    """The second model of a family reads only its own tensors from the disk."""
    record = run(
        """
        device: {read_bytes_per_s: 100}
        runtime: {start: lazy}
        models: {a: {cost: {1: 0.5}, weight_bytes: 100, shared_bytes: 80, count: 2}}
        arrivals: [{t: 0, model: a-0}, {t: 5, model: a-1}]
        """
    )

    assert [(start.read_bytes, start.ended) for start in record.starts] == [(100, 1), (20, 5.2)]
    assert record.host[-1][1] == 120


def test_an_eager_model_becomes_cold_and_starts_again() -> None:
    """A model that starts eagerly may have its own idle limit. After the limit it is cold, and the next request starts it again.

    A model without the limit never becomes cold.
    """
    record = run(
        """
        models:
          a: {cost: {1: 0.5}, start_s: 2, idle: {executable: 1m}}
          b: {cost: {1: 0.5}, start_s: 2}
        arrivals: [{t: 100, model: a}, {t: 200, model: b}]
        """
    )

    assert [(start.model, start.began) for start in record.starts] == [("a", 100)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("devices: 2\nruntime: {start: lazy}", "leave out `devices` and `gateway`"),
        ("runtime: {idle: {server: 1h}}", "a simulated runtime does not sleep"),
        ("runtime: {idle: {host: soon}}", "10m"),
    ],
)
def test_what_the_simulator_cannot_do_is_refused(text: str, problem: str) -> None:
    """A setting that the simulator does not support is refused. The error has its key, and says what to do."""
    with pytest.raises(ScenarioError, match=problem):
        parse_scenario(f"{text}\nmodels: {{a: {{cost: {{1: 1}}}}}}\narrivals: []")
