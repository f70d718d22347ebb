"""For any scenario, each request ends once, and the device, the link and the build thread do one thing at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import Outcome
from rsrv.sim.decisions import decision_lines
from rsrv.sim.metrics import summarize
from rsrv.sim.naive import NAIVE
from rsrv.sim.scenario import parse_scenario
from rsrv.sim.simulate import simulate
from rsrv_bundle import yaml12

_seconds = st.integers(1, 40).map(lambda ms: ms / 1000)
_model = st.fixed_dictionaries(
    {"cost": st.dictionaries(st.sampled_from([1, 2, 8]), _seconds, min_size=1)},
    optional={
        "cost_jitter": st.just(0.3),
        "weight_bytes": st.integers(0, 60),
        "max_queue_depth": st.integers(1, 4),
        "weight": st.sampled_from([0.5, 1.0, 4.0]),
        "count": st.integers(1, 3),
        "coalesce": st.booleans(),
        "max_delay_us": st.sampled_from([0, 5000]),
        "start": st.sampled_from(["eager", "lazy"]),
        "start_s": _seconds,
    },
)
_common: dict[str, st.SearchStrategy[Any]] = {
    "rows": st.integers(0, 3),
    "deadline_s": _seconds,
    "priority": st.integers(0, 9),
}
_scenario = st.fixed_dictionaries(
    {
        "discipline": st.sampled_from(sorted({**DISCIPLINES, **NAIVE})),
        "seed": st.integers(0, 3),
        "duration": st.just(0.2),
        "device": st.fixed_dictionaries(
            {},
            optional={
                "warm": st.booleans(),
                "h2d_bytes_per_s": st.sampled_from([1e3, 1e5]),
                "read_bytes_per_s": st.sampled_from([1e3, 1e5]),
                "weight_budget_bytes": st.integers(50, 200),
            },
        ),
        "settings": st.fixed_dictionaries({"depth": st.integers(1, 2)}),
        "runtime": st.fixed_dictionaries(
            {},
            optional={
                "idle": st.fixed_dictionaries(
                    {}, optional=dict.fromkeys(("device", "host", "executable"), _seconds)
                ),
                "start_timeout_s": st.sampled_from([0.02, 60]),
                "host_memory_bytes": st.integers(0, 200),
            },
        ),
        "models": st.dictionaries(st.sampled_from(["a", "b", "c"]), _model, min_size=1),
        "arrivals": st.fixed_dictionaries(
            {},
            optional={
                "poisson": st.fixed_dictionaries({"rate": st.sampled_from([50, 400])}, optional=_common),
                "zipf": st.fixed_dictionaries(
                    {"rate": st.just(100), "shuffle": st.booleans()}, optional=_common
                ),
                "bursts": st.fixed_dictionaries(
                    {"every_s": _seconds, "size": st.integers(1, 6)}, optional=_common
                ),
                "closed": st.fixed_dictionaries(
                    {"clients": st.integers(1, 3), "think_s": st.sampled_from([0.0, 0.01])}, optional=_common
                ),
            },
        ),
    }
)


@given(_scenario)
def test_random_scenarios(scenario: dict[str, Any]) -> None:
    """A random scenario is parsed and simulated, and its record, metrics and decisions are consistent."""
    record = simulate(parse_scenario(yaml12.dump(scenario)))

    for sent in record.requests:
        assert sent.outcome is not None
        assert sent.arrived <= 0.2
        assert (sent.started is not None) == (sent.outcome is Outcome.ANSWERED)
        assert sent.arrived <= (sent.started or sent.arrived) <= sent.ended
    executions = [(execution.started, execution.ended) for execution in record.executions]
    loads = [(load.started, load.ended) for load in record.loads]
    starts = [(start.began, start.ended) for start in record.starts]
    for taken in (executions, loads, starts):
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(taken))
    served = sum(len(execution.execute.requests) for execution in record.executions)
    limit = scenario["runtime"].get("host_memory_bytes", 1e9)
    assert all(0 <= nbytes <= limit for _, nbytes in record.host)
    total = summarize(record)["total"]
    assert total["arrived"] == len(record.requests)
    assert total["served"] == served
    assert total["utilisation"] is None or 0.0 <= total["utilisation"] <= 1.0
    assert len(list(decision_lines(record))) == len(record.decisions)
