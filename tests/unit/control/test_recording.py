"""The command `rsrv record`: the trace that it writes, and the scenario that it makes from the server's figures."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rsrv.cli.recording import Recording, ServedState, scenario_of
from rsrv.command import Terminated
from rsrv.control.v1 import control_pb2 as pb
from rsrv.sim.scenario import load_scenario
from tests.unit.control.test_cli import remember, shell
from tests.waiting import looped

#: Instance of the first runtime of `served`.
INSTANCE = "11" * 8
#: Answers to polls for requests, by the number of the first wanted request: the number of the first returned request, and the
#: requests. Requests 0 and 1 arrived before the record began. The runtime has forgotten requests 2 and 3.
CAME: dict[int, tuple[int, list[Any]]] = {
    0: (0, [(1.0, "a@1", 9, 0, None, 0, False)] * 2),
    2: (4, [(5.0, "a@1", 3, 0, 0.25, 2, False), (5.125, "b@1", 1, 0, None, 0, True)]),
}


def told(command: dict[str, Any]) -> dict[str, Any]:
    """Answer a command as a runtime does."""
    since: int = command.get("since", 0)
    reply = {"instance": INSTANCE, "unix_s": 1e9}
    match command["command"]:
        case "timeline":
            # Ten executions after the first request. Their times are relative to the answer's.
            spans = [["execute", "a@1", -1e9 - 6.0, 0.004, 3, 8, 1, False]] * 10
            return reply | {"first": since, "next": 10, "end": 10, "spans": spans[since:]}
    first, requests = CAME.get(since, (since, []))
    end = 2 if since == 0 else 6
    return reply | {"first": first, "next": first + len(requests), "end": end, "requests": requests}


@looped
async def test_a_record_is_a_scenario_of_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace has the requests since the start. The scenario has measured costs, bytes, and the tensors that models share."""
    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.answers = told
        remember(rsrv.server.runtime)
        for name, nbytes in (("a", 7_000_000), ("b", 5_000_000)):
            rsrv.server.runtime.models[name].device_bytes = nbytes
        out = tmp_path / "out.csv"

        result = await rsrv("record", str(out), "--seconds", "0.01")

        assert result.status == 0
        assert re.search(r"2 requests in \d+ s", result.out)
        assert result.err == "2 requests are missing: they arrived faster than `rsrv record` read them\n"
        assert out.read_text().splitlines() == [
            "t,model,rows,variant,deadline_s,priority,committed",
            "0.000000,a,3,0,0.250000,2,",
            "0.125000,b,1,0,,0,true",
        ]
        scenario = load_scenario(out.with_suffix(".yaml"))
        assert scenario.programs["a"].costs == {(0, 1): 0.001, (0, 8): 0.004, (0, 16): 0.003}
        a, b = (scenario.programs[name].tensors or {} for name in "ab")
        assert sorted(a.values()) == [0, 3_000_000, 4_000_000]
        assert a.keys() & b.keys()
        assert [(request.t, request.committed) for request in scenario.recorded[0]] == [
            (0.0, False),
            (0.125, True),
        ]
        assert scenario.settings.weight_budget_bytes == 15_000_000

        assert "already exists" in (await rsrv("record", str(out))).err
        assert "must end in .csv" in (await rsrv("record", "out.txt")).err


@looped
async def test_a_server_that_ends_leaves_its_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record ends with the server. Its scenario has the figures from the start of the record."""
    monkeypatch.setattr("rsrv.cli.recording._GONE_S", 0.0)

    async with shell(tmp_path, capsys) as rsrv:
        runtime = rsrv.server.runtime

        def dies(command: dict[str, Any]) -> dict[str, Any] | None:
            if command.get("since") != 2 or command["command"] != "arrivals":
                return told(command)
            runtime.die()
            return None

        runtime.answers = dies
        out = tmp_path / "out.csv"

        result = await rsrv("record", str(out))

        assert (result.status, "the server does not answer any more" in result.err) == (0, True), result
        assert load_scenario(out.with_suffix(".yaml")).programs["a"].costs[0, 8] == 0.004


@looped
@pytest.mark.parametrize("end", [KeyboardInterrupt, Terminated])
async def test_ctrl_c_and_sigterm_take_what_came_since_the_last_poll(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    end: type[KeyboardInterrupt],
) -> None:
    """After Ctrl-C or SIGTERM, the trace has the requests since the last poll, and the scenario is written."""
    interrupts: list[float] = []

    def interrupted(seconds: float) -> None:
        interrupts.append(seconds)
        raise end

    def later(command: dict[str, Any]) -> dict[str, Any]:
        if command["command"] == "arrivals" and command.get("since") == 2 and not interrupts:
            return {"instance": INSTANCE, "unix_s": 1e9, "first": 2, "next": 2, "end": 2, "requests": []}
        return told(command)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=interrupted)
    monkeypatch.setattr("rsrv.cli.recording.time", clock)

    async with shell(tmp_path, capsys) as rsrv:
        rsrv.server.runtime.answers = later
        result = await rsrv("record", str(tmp_path / "out.csv"))
        assert result.status == 0, result
        assert re.search(r"2 requests in \d+ s", result.out)
        assert load_scenario(tmp_path / "out.yaml").programs
    assert len(interrupts) == 1


def test_a_replaced_runtime_is_counted() -> None:
    """If a runtime is replaced, the record reports that requests of that moment are missing."""
    recording = Recording()
    for instance, first in (("old", 5), ("new", 0), ("new", 1)):
        at = pb.TimelinePosition(device=0, instance=instance, first=first, next=first + 1, end=first + 1)
        recording.take(pb.GetArrivalsResponse(positions=[at]))
    assert (recording.replaced, recording.lost) == (1, 0)


def executed(name: str, *costs: tuple[int, int, float | None], **differs: Any) -> pb.ModelStatus:
    """Return the status of a model with these executables. Each has a variant, a size and a cost."""
    executables = [pb.Executable(variant=variant, size=size, cost_s=cost) for variant, size, cost in costs]
    return pb.ModelStatus(name=name, record=pb.ModelRecord(executables=executables, **differs))


def test_models_that_cannot_be_simulated_are_left_out() -> None:
    """A model without any cost is in the scenario only if it got requests.

    A variant or size without a cost has the cost of its neighbour.
    """
    models = [
        executed("cold", (0, 1, None)),
        executed("wide", (0, 1, None), (1, 1, 0.5), (1, 4, 0.75), weights=pb.WEIGHTS_RESIDENT),
        executed("busy", (0, 1, 0.25), device_bytes=8, loads=1, load_seconds=2.0),
    ]
    recording = Recording()
    recording.counts.update(busy=3, failing=1)
    status = pb.GetStatusResponse(
        models=models,
        devices=[pb.DeviceStatus()] * 2,
        scheduler=pb.Scheduler(discipline=pb.DISCIPLINE_FAIR),
    )

    document = scenario_of("t.csv", recording, ServedState(status, pb.GetMemoryResponse(), "external", []))

    assert document["models"] == {
        "wide": {"variants": [{1: 0.5, 4: 0.75}] * 2, "weight_bytes": 0},
        "busy": {"cost": {1: 0.25}, "weight_bytes": 8},
        "failing": {"cost": {1: 1e-06}},
    }
    assert document["device"] == {"warm": True, "h2d_bytes_per_s": 4}
    assert (document["devices"], document["servers"], document["gateway"]) == (
        2,
        1,
        {"mode": "least_outstanding"},
    )
