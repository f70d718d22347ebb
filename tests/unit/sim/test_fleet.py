"""Several devices behind the gateway's own router and planner."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.placement.contract import Act
from rsrv.scheduler.events import Outcome
from rsrv.settings_fleet import GatewayMode
from rsrv.sim.cli import main
from rsrv.sim.decisions import decision_lines, fleet_decision_lines
from rsrv.sim.fleet import MODES, summarize_fleet, with_mode
from rsrv.sim.record import FleetRecord
from rsrv.sim.scenario import ScenarioError, load_scenario, parse_scenario
from rsrv.sim.simulate import simulate, simulate_fleet
from tests.builders import FEW_EXAMPLES

SCENARIOS = Path(__file__).parents[3] / "docs" / "scenarios"

#: At the start, two models with many requests are on one device, and two with few requests are on the other device. The
#: budget of each device is enough for all models.
CROWDED = """
    discipline: fifo
    duration: 20
    devices: 2
    device: {weight_budget_bytes: 400, h2d_bytes_per_s: 1000, warm: true}
    gateway: {mode: lpt_packing, first_rebalance_device_s: 4, rebalance_device_s: 8}
    models:
      busy: {cost: {1: 0.01}, weight_bytes: 100}
      idle: {cost: {1: 0.01}, weight_bytes: 100}
      brisk: {cost: {1: 0.01}, weight_bytes: 100}
      lazy: {cost: {1: 0.01}, weight_bytes: 100}
    arrivals:
      poisson: {rate: 80, models: {busy: 10, brisk: 10, idle: 1, lazy: 1}}
"""


def fleet(text: str, mode: GatewayMode | None = None) -> FleetRecord:
    scenario = parse_scenario(dedent(text))
    return simulate_fleet(scenario if mode is None else with_mode(scenario, mode))


def test_a_busy_model_moves_with_its_weights_first() -> None:
    """Before a busy model moves to another device, its weights are loaded there.

    Then its requests are sent to the new device, and the old device evicts the weights.
    """
    record = fleet(CROWDED)
    names = list(record.devices)
    acts = [(step.act, step.model) for _, step in record.steps]
    moved = next(model for act, model in acts if act is Act.PREFETCH and model in ("busy", "brisk"))
    fetch, free = (
        next((t, step) for t, step in record.steps if (step.act, step.model) == (act, moved))
        for act in (Act.PREFETCH, Act.EVICT)
    )
    sent = [request for request in record.requests if request.request.model == moved]
    before = {names[request.device] for request in sent if request.arrived < fetch[0]}
    after = {names[request.device] for request in sent if request.arrived > free[0]}

    assert (before, after) == ({free[1].worker}, {fetch[1].worker})
    assert before != after
    assert all(request.hit for request in sent)
    assert record.moves >= 1
    assert set(record.repacks) == {"start", "work"}


def test_packing_balances_devices() -> None:
    """At first, one device has almost all requests. The mode `lpt_packing` divides them between both devices."""
    record = fleet(CROWDED)
    late = [request for request in record.requests if request.arrived > 12]
    shares = [sum(request.device == index for request in late) / len(late) for index in range(2)]

    assert max(shares) < 0.6
    assert summarize_fleet(record)["total"]["moves"] == record.moves


def test_round_robin_takes_turns() -> None:
    """Requests of one model go to all devices in turn."""
    record = fleet(
        """
        devices: 3
        gateway: {mode: round_robin}
        models: {a: {cost: {1: 0.001}}}
        arrivals: {poisson: {rate: 100, stop: 1}}
        """
    )

    devices = [request.device for request in record.requests]
    assert len(devices) > 50
    assert all(device == (devices[0] + place) % 3 for place, device in enumerate(devices))


def test_one_device_behind_a_gateway_does_what_it_does_alone() -> None:
    """The scheduler of a single device makes the same decisions with and without a gateway."""
    text = (SCENARIOS / "bursts.yaml").read_text(encoding="utf-8")
    alone = simulate(parse_scenario(text))
    behind = simulate_fleet(parse_scenario(text + "gateway: {mode: round_robin}\n"))

    (record,) = behind.devices.values()
    assert list(decision_lines(record)) == list(decision_lines(alone))
    assert [request.ended for request in behind.requests] == [request.ended for request in alone.requests]


#: Two devices of one server. Each has memory for both models, but cannot execute all requests alone.
SERVER = """
    discipline: fifo
    duration: 10
    devices: 2
    servers: 1
    device: {weight_budget_bytes: 200, h2d_bytes_per_s: 1000, warm: true}
    gateway: {mode: lpt_packing, first_rebalance_device_s: 1, rebalance_device_s: 5}
    models: {m: {count: 2, cost: {1: 0.01}, weight_bytes: 100}}
    arrivals: {poisson: {rate: 120, models: {m-0: 11, m-1: 1}}}
"""


def test_the_stubs_of_a_server_follow_its_placement_table() -> None:
    """A model is executed only on its device in the placement table.

    When the table names a second device, a request is sent to the device that will answer first.
    """
    record = fleet(SERVER)
    assert list(record.devices) == ["server0/0", "server0/1"]

    joined = next(t for t, step in record.steps if (step.act, step.model) == (Act.PREFETCH, "m-0"))
    hot = [request for request in record.requests if request.request.model == "m-0"]
    late = [request.device for request in hot if request.arrived > joined + 1]
    assert len({request.device for request in hot if request.arrived < joined}) == 1
    assert 0.3 < sum(late) / len(late) < 0.7


def test_without_a_table_stubs_choose_among_all_devices_of_their_server() -> None:
    """Without a placement table, a request is sent to the other device if the model's home would answer much later.

    At most two loads are needed for this.
    """
    record = fleet(SERVER, "least_outstanding")
    hot = [request.device for request in record.requests if request.request.model == "m-0"]

    assert not record.steps
    assert 0.3 < sum(hot) / len(hot) < 0.7
    assert summarize_fleet(record)["total"]["loads"] <= 2


def test_devices_that_cannot_be_divided_are_refused() -> None:
    """All servers must have the same number of devices."""
    with pytest.raises(ScenarioError, match="servers: 6 devices cannot be divided among 4 servers equally"):
        parse_scenario("devices: 6\nservers: 4\nmodels: {a: {cost: {1: 0.1}}}\narrivals: []")


@pytest.mark.long
@FEW_EXAMPLES
@given(
    st.sampled_from(MODES),
    st.sampled_from(((1, 1), (2, 2), (4, 1), (4, 2), (5, 5), (6, 3))),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from(("fair", "fifo", "edf")),
)
def test_every_request_ends_once_and_runs_agree(
    mode: GatewayMode, devices: tuple[int, int], models: int, room: int, discipline: str
) -> None:
    """For any fleet, each request ends once, and executes on the device to which it was sent.

    The outcomes add up to the number of requests, and a second run makes the same decisions.
    """
    text = f"""
        discipline: {discipline}
        duration: 3
        devices: {devices[0]}
        servers: {devices[1]}
        device: {{weight_budget_bytes: {100 * room + 50}, h2d_bytes_per_s: 2000, warm: true}}
        gateway: {{first_rebalance_device_s: 0.5, rebalance_device_s: 1, replicas: 2}}
        settings: {{max_queue_depth: 8}}
        models: {{m: {{count: {models}, cost: {{1: 0.01, 8: 0.03}}, cost_jitter: 0.1, weight_bytes: 50}}}}
        arrivals:
          zipf: {{rate: 60, deadline_s: 0.3}}
          closed: {{models: [m-0], clients: 3}}
    """
    record, again = fleet(text, mode), fleet(text, mode)
    total = summarize_fleet(record)["total"]

    assert list(fleet_decision_lines(record)) == list(fleet_decision_lines(again))
    assert total["arrived"] == sum(total[end] for end in ("served", "shed", "expired", "refused"))
    executed = {
        number: index
        for index, device in enumerate(record.devices.values())
        for execution in device.executions
        for number in execution.execute.requests
    }
    for sent in record.requests:
        if sent.outcome is Outcome.ANSWERED:
            assert executed[sent.request.id] == sent.device


def test_settings_of_single_models_may_name_a_group() -> None:
    """In the gateway's settings of single models, the name of a group stands for all its models, as in `arrivals`."""
    scenario = parse_scenario(
        "devices: 2\ngateway: {models: {m: {replicas: all}}}\n"
        "models: {m: {count: 2, cost: {1: 0.1}}}\narrivals: []"
    )

    assert scenario.gateway is not None
    assert {name: model.replicas for name, model in scenario.gateway.models.items()} == {
        "m-0": "all",
        "m-1": "all",
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{mode: fastest}", "gateway.mode: "),
        ("{grpc: null}", "gateway.grpc: "),
        ("{models: {b: {}}}", "gateway.models.b: there is no model 'b' in `models`"),
        ("{hysteresis: -1}", "gateway.hysteresis: "),
    ],
)
def test_a_wrong_gateway_is_refused_by_key(section: str, message: str) -> None:
    """The section of the gateway is checked by the gateway's own rules, and the error has the key."""
    with pytest.raises(ScenarioError, match=r"^scenario: ") as caught:
        parse_scenario(f"gateway: {section}\nmodels: {{a: {{cost: {{1: 0.1}}}}}}\narrivals: []")

    assert message in str(caught.value)


def test_modes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modes are compared in a table, and in reproducible files with figures and a picture."""
    path = tmp_path / "scenario.yaml"
    path.write_text(dedent(CROWDED).replace("duration: 20", "duration: 2"), encoding="utf-8")
    for out in ("one", "two"):
        assert main([str(path), "--modes", "lpt_packing,round_robin", "--out", str(tmp_path / out)]) == 0

    rows = capsys.readouterr().out.splitlines()[:3]
    assert [row.split()[0] for row in rows] == ["mode", "round_robin", "lpt_packing"]
    first, second = (sorted((tmp_path / out).iterdir()) for out in ("one", "two"))
    assert [file.name for file in first] == ["metrics.json", "modes.png"]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    assert list(json.loads(first[0].read_text())["modes"]) == ["round_robin", "lpt_packing"]


def test_decisions_of_several_devices_name_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several devices, each decision names its device. The gateway's steps are printed among the decisions."""
    path = tmp_path / "scenario.yaml"
    path.write_text(dedent(CROWDED), encoding="utf-8")
    assert main([str(path), "--decisions"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert any(" gpu1 EXECUTE idle " in line for line in lines)
    assert any(" ASKED TO PREFETCH " in line for line in lines)


def test_modes_need_several_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Comparing modes needs several devices."""
    path = tmp_path / "scenario.yaml"
    path.write_text("models: {a: {cost: {1: 0.1}}}\narrivals: []", encoding="utf-8")

    assert main([str(path), "--modes", "round_robin"]) == 1
    assert "the scenario needs `devices`" in capsys.readouterr().err


@pytest.mark.long
def test_a_thousand_devices() -> None:
    """The simulation of a thousand devices with ten thousand models needs no more events and loads than the page says."""
    record = simulate_fleet(load_scenario(SCENARIOS / "thousand.yaml"))
    total = summarize_fleet(record)["total"]

    assert total["arrived"] == total["served"] == 150_212
    assert 285_000 < total["events"] < 315_000
    assert total["loads"] < 525
