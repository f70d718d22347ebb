"""The device, the link and the clients around the scheduler, in scenarios computed by hand."""

from __future__ import annotations

import pytest

from rsrv.scheduler.events import Outcome
from rsrv.scheduler.scheduler import Scheduler
from rsrv.sim.record import SimulationError
from rsrv.sim.scenario import ScenarioError
from tests.unit.sim.helpers import decisions, metrics, run

#: The device is warm, so that no request waits for weights.
ONE = """
discipline: fifo
device: {warm: true}
models: {a: {cost: {1: 0.001, 32: 0.004}}}
"""


def test_31_singles_at_once_share_the_large_size() -> None:
    """31 requests of one row arrive at once. They share an execution of 4 ms, because 31 executions of 1 ms cost more."""
    text = ONE + "arrivals: [" + ", ".join(["{t: 0, model: a}"] * 31) + "]"

    assert decisions(text) == ["t=0.000000 EXECUTE a size=32 rows=31 variant=0 requests=31"]
    total = metrics(text)["total"]
    assert (total["served"], total["makespan_s"], total["latency_p99_s"]) == (31, 0.004, 0.004)
    assert (total["utilisation"], total["goodput"]) == (1.0, 7750.0)
    assert (total["useful_rows"], total["padded_rows"], total["padding_ratio"]) == (31, 1, 0.03125)


def test_two_models_take_turns_by_arrival() -> None:
    """Under `fifo`, the model with the oldest request executes next. The times of all executions follow from the costs."""
    record = run(
        """
        discipline: fifo
        device: {warm: true}
        models: {a: {cost: {1: 0.010}}, b: {cost: {1: 0.002}}}
        arrivals: [{t: 0, model: a}, {t: 0.001, model: b}, {t: 0.002, model: a}, {t: 0.003, model: b}]
        """
    )

    times = [(execution.execute.model, execution.started, execution.ended) for execution in record.executions]
    assert times == [("a", 0.0, 0.01), ("b", 0.01, 0.012), ("a", 0.012, 0.022), ("b", 0.022, 0.024)]
    assert [sent.ended for sent in record.requests] == [0.01, 0.012, 0.022, 0.024]


def test_a_deadline_that_passes_in_the_queue() -> None:
    """A waiting request ends at its deadline, while the device is still busy with another request."""
    text = """
        discipline: fifo
        device: {warm: true}
        models: {a: {cost: {1: 0.010}}}
        arrivals: [{t: 0, model: a}, {t: 0.001, model: a, deadline_s: 0.004}]
        """

    assert decisions(text)[1:] == ["t=0.005000 EXPIRE a request=2"]
    total = metrics(text)["total"]
    assert (total["served"], total["expired"], total["goodput_ratio"]) == (1, 1, 0.5)
    assert total["makespan_s"] == 0.01


def test_a_late_answer_is_served_but_not_good() -> None:
    """A request whose deadline passes during its execution may be served, but it is not part of the goodput."""
    total = metrics(ONE + "arrivals: [{t: 0, model: a, deadline_s: 0.0005}]")["total"]

    assert total["goodput"] == 0.0
    assert total["served"] + total["shed"] == 1


def test_a_full_queue_refuses() -> None:
    """If one request executes and as many requests as allowed wait, the next request is refused."""
    text = """
        discipline: fifo
        device: {warm: true}
        models: {a: {cost: {1: 0.010}, max_queue_depth: 2}}
        arrivals: [{t: 0, model: a}, {t: 0.001, model: a}, {t: 0.001, model: a}, {t: 0.002, model: a}]
        """

    assert decisions(text)[1] == "t=0.002000 REFUSE a request=4 reason=queue_full"
    assert metrics(text)["models"]["a"]["refused"] == 1


def test_the_sections_queue_depth_is_the_models_default() -> None:
    """`max_queue_depth` in the section `settings` is the default for all models, as in rsrv.yaml."""
    text = ONE + "settings: {max_queue_depth: 1}\narrivals: [{t: 0, model: a}, {t: 0, model: a}]"

    assert metrics(text)["total"]["refused"] == 1


def test_closed_loop_clients_keep_the_device_busy() -> None:
    """64 clients that send again at once saturate one model: every execution is full."""
    total = metrics(ONE + "duration: 1\narrivals: {closed: {clients: 64}}")["total"]

    assert (total["utilisation"], total["padding_ratio"]) == (1.0, 0.0)
    # One batch executes for 4 ms, while the other clients' batch waits for 4 ms.
    assert (total["wait_p50_s"], total["latency_p50_s"], total["goodput"]) == (0.004, 0.008, 8000.0)


def test_a_closed_loop_client_thinks() -> None:
    """A client's request takes 1 ms, and then the client pauses for 9 ms, so it sends a request every 10 ms.

    It sends the last request exactly at the scenario's duration.
    """
    record = run(ONE + "duration: 0.1\narrivals: {closed: {models: [a], clients: 1, think_s: 0.009}}")

    assert [sent.arrived for sent in record.requests] == [round(0.01 * turn, 2) for turn in range(11)]


def test_a_closed_loop_client_that_is_refused_comes_back() -> None:
    """A client that is refused sends again after the time that the refusal names. Each attempt is a request of its own."""
    record = run(
        """
        discipline: fifo
        duration: 0.05
        device: {warm: true}
        models: {a: {cost: {1: 0.010}, max_queue_depth: 1}}
        arrivals: {closed: {clients: 3}}
        """
    )

    refused = [sent for sent in record.requests if sent.outcome is Outcome.REFUSED]
    assert len(refused) >= 2
    assert all(sent.ended == sent.arrived for sent in refused)
    assert len(record.requests) < 40


def test_a_closed_loop_client_whose_deadline_passes_sends_again() -> None:
    """While the device executes another request, each request of a client expires after 3 ms.

    After each of them, the client sends the next request at once.
    """
    text = """
        discipline: fifo
        duration: 0.008
        device: {warm: true}
        models: {a: {cost: {1: 0.010}}}
        arrivals: {requests: [{t: 0, model: a}], closed: {clients: 1, deadline_s: 0.003}}
        """

    ends = [(sent.arrived, sent.ended) for sent in run(text).requests if sent.outcome is Outcome.EXPIRED]
    assert ends == [(0.0, 0.003), (0.003, 0.006), (0.006, 0.009)]


def test_loads_take_bytes_over_rate_beside_executions() -> None:
    """The weights of b load while a executes. The link carries one load at a time."""
    record = run(
        """
        discipline: fifo
        device: {h2d_bytes_per_s: 1000}
        models:
          a: {cost: {1: 0.500}, weight_bytes: 100}
          b: {cost: {1: 0.010}, weight_bytes: 200}
        arrivals: [{t: 0, model: a}, {t: 0, model: b}]
        """
    )

    assert [(load.model, load.started, load.ended) for load in record.loads] == [
        ("a", 0.0, 0.1),
        ("b", 0.1, 0.3),
    ]
    times = [(execution.execute.model, execution.started, execution.ended) for execution in record.executions]
    assert times == [("a", 0.1, 0.6), ("b", 0.6, 0.61)]


def test_a_warm_device_loads_nothing_that_fits() -> None:
    """A device that starts warm has the weights of the first models of the scenario, as many as fit into the budget."""
    record = run(
        """
        device: {weight_budget_bytes: 250, warm: true}
        models:
          a: {cost: {1: 0.001}, weight_bytes: 100}
          b: {cost: {1: 0.001}, weight_bytes: 100}
        arrivals: [{t: 0, model: a}, {t: 0, model: b}]
        """
    )

    assert (record.loads, record.evictions) == ([], [])


def test_a_depth_of_two_executes_one_after_the_other() -> None:
    """With a depth of two, the device gets the second execution at once, and begins it when the first one ends."""
    record = run(
        """
        discipline: fifo
        device: {warm: true}
        settings: {depth: 2}
        models: {a: {cost: {1: 0.010}}}
        arrivals: [{t: 0, model: a}, {t: 0, model: a}]
        """
    )

    assert [(execution.started, execution.ended) for execution in record.executions] == [
        (0.0, 0.01),
        (0.01, 0.02),
    ]
    assert [sent.started for sent in record.requests] == [0.0, 0.01]


def test_arrivals_of_an_instant_come_before_the_end_of_an_execution() -> None:
    """A request that arrives exactly at the end of an execution, at 4 ms, shares the next execution."""
    record = run(
        """
        discipline: fifo
        device: {warm: true}
        models: {a: {cost: {1: 0.004, 2: 0.005}}}
        arrivals: [{t: 0, model: a}, {t: 0.001, model: a}, {t: 0.004, model: a}]
        """
    )

    assert [execution.execute.rows for execution in record.executions] == [1, 2]


def test_instants_are_equal_whatever_they_were_computed_from() -> None:
    """Instants are compared in nanoseconds, so 0.1 + 0.2 equals 0.3."""
    record = run(
        """
        discipline: fifo
        device: {warm: true}
        models: {a: {cost: {1: 0.1}}, b: {cost: {1: 0.2, 2: 0.3}}}
        arrivals: [{t: 0, model: a}, {t: 0.05, model: b}, {t: 0.06, model: a}, {t: 0.3, model: b}]
        """
    )

    assert [(execution.execute.model, execution.started) for execution in record.executions][1:3] == [
        ("b", 0.1),
        ("a", 0.3),
    ]
    assert record.executions[1].ended == record.requests[3].arrived


def test_the_real_cost_may_differ_from_the_given_one() -> None:
    """With `cost_jitter`, the execution times scatter around the given cost."""
    record = run(
        """
        discipline: fifo
        duration: 2
        device: {warm: true}
        models: {a: {cost: {1: 0.010}, cost_jitter: 0.2}}
        arrivals: {closed: {clients: 1}}
        """
    )

    seconds = [execution.ended - execution.started for execution in record.executions]
    assert min(seconds) < 0.008 < sum(seconds) / len(seconds) < 0.012 < max(seconds)


def test_variants_share_no_execution() -> None:
    """Requests of different variants never share an execution."""
    text = """
        discipline: fifo
        device: {warm: true}
        models: {a: {variants: [{1: 0.001, 8: 0.002}, {1: 0.003, 8: 0.005}]}}
        arrivals: [{t: 0, model: a}, {t: 0, model: a, variant: 1}, {t: 0, model: a, variant: 1}]
        """

    assert decisions(text) == [
        "t=0.000000 EXECUTE a size=1 rows=1 variant=0 requests=1",
        "t=0.001000 EXECUTE a size=8 rows=2 variant=1 requests=2",
    ]


@pytest.mark.parametrize("committed", [True, False])
def test_committed_requests_go_first(committed: bool) -> None:
    """Requests that the scenario marks as committed are executed first."""
    record = run(
        f"""
        discipline: fifo
        device: {{warm: true}}
        models: {{a: {{cost: {{1: 0.001}}}}}}
        arrivals: [{{t: 0, model: a}}, {{t: 0, model: a}}, {{t: 0, model: a, committed: {committed}}}]
        """
    )

    assert (record.executions[0].execute.requests == (3,)) is committed


def test_a_budget_evicts_the_least_recently_used() -> None:
    """If the budget is enough for two of three models, the least recently used model is evicted.

    For a model that is larger than the budget, all other models are evicted.
    """
    text = """
        discipline: fifo
        device: {weight_budget_bytes: 200, h2d_bytes_per_s: 1000}
        models:
          m: {cost: {1: 0.001}, weight_bytes: 100, count: 3}
          huge: {cost: {1: 0.001}, weight_bytes: 201}
        arrivals:
          - {t: 0, model: m-0}
          - {t: 1, model: m-1}
          - {t: 2, model: m-0}
          - {t: 3, model: m-2}
          - {t: 4, model: huge}
        """

    assert [line for line in decisions(text) if "EXECUTE" not in line] == [
        "t=0.000000 LOAD m-0 epoch=1",
        "t=1.000000 LOAD m-1 epoch=2",
        "t=3.000000 EVICT m-1",
        "t=3.000000 LOAD m-2 epoch=3",
        "t=4.000000 EVICT m-0",
        "t=4.000000 EVICT m-2",
        "t=4.000000 LOAD huge epoch=4",
    ]
    models = metrics(text)["models"]
    assert (models["m-1"]["evictions"], models["m-2"]["loads"], models["huge"]["loads"]) == (
        1,
        1,
        1,
    )


def test_a_family_shares_its_backbone() -> None:
    """Three fine-tunes of 100 bytes, of which 90 are shared, fit into 120 bytes.

    Only the first load moves the shared bytes.
    """
    text = """
        device: {weight_budget_bytes: 120, h2d_bytes_per_s: 100}
        models: {tune: {cost: {1: 0.01}, weight_bytes: 100, shared_bytes: 90, count: 3}}
        arrivals: [{t: 0, model: tune-0}, {t: 2, model: tune-1}, {t: 3, model: tune-2}]
        """
    record = run(text)

    assert [(load.nbytes, load.ended - load.started) for load in record.loads] == [
        (100, 1.0),
        (10, pytest.approx(0.1)),
        (10, pytest.approx(0.1)),
    ]
    assert record.evictions == []


def test_relatives_in_a_swap_move_only_what_differs() -> None:
    """If two models of a family do not fit together, they are loaded in turn. The shared bytes stay on the device.

    Each load moves only the model's own bytes.
    """
    text = """
        device: {weight_budget_bytes: 100, h2d_bytes_per_s: 100}
        models: {tune: {cost: {1: 0.01}, weight_bytes: 100, shared_bytes: 90, count: 2}}
        arrivals: [{t: 0, model: tune-0}, {t: 2, model: tune-1}, {t: 4, model: tune-0}]
        """
    record = run(text)

    assert [load.nbytes for load in record.loads] == [100, 10, 10]
    assert record.evictions == [("tune-0", 2.0), ("tune-1", 4.0)]


def test_a_pinned_model_is_loaded_by_itself_and_stays() -> None:
    """A pinned model is loaded without a request and is never evicted. The other models evict each other."""
    text = """
        device: {weight_budget_bytes: 200, h2d_bytes_per_s: 100}
        models:
          kept: {cost: {1: 0.01}, weight_bytes: 100, residency: device}
          m: {cost: {1: 0.01}, weight_bytes: 100, count: 2}
        arrivals: [{t: 3, model: m-0}, {t: 6, model: m-1}, {t: 9, model: kept}]
        """
    record = run(text)

    assert [load.model for load in record.loads] == ["kept", "m-0", "m-1"]
    assert record.evictions == [("m-0", 6.0)]
    assert record.requests[2].hit


def test_more_shared_bytes_than_bytes_are_refused() -> None:
    """A model with more shared bytes than weight bytes is refused. The error names the keys."""
    with pytest.raises(ScenarioError, match="shared_bytes and shares: 2 is more than weight_bytes"):
        run("models: {a: {cost: {1: 1}, weight_bytes: 1, shared_bytes: 2}}\narrivals: []")


def test_requests_that_never_end_are_the_simulators_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the scheduler never ends a request, or always asks for a wake-up at the same time, the simulator reports a bug."""
    monkeypatch.setattr(Scheduler, "handle", lambda self, event, now: [])
    with pytest.raises(SimulationError, match="1 requests never end"):
        run(ONE + "arrivals: [{t: 0, model: a}]")

    monkeypatch.setattr(Scheduler, "next_wakeup", lambda self: 0.5)
    with pytest.raises(SimulationError, match=r"time stands still at t=0\.5"):
        run(ONE + "arrivals: [{t: 0, model: a}]")
