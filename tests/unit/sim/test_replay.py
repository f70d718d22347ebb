"""The command `rsrv replay` sends the requests of a trace to a server, and compares the latencies with the simulator's."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from matplotlib.figure import Figure
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from rsrv.cli import main as cli
from rsrv.cli.replay import Unsendable, infer_request
from rsrv.extras import install_command
from rsrv.scheduler.events import Outcome
from rsrv.sim.record import RequestRecord
from rsrv.sim.scenario import load_scenario
from tests.waiting import PATIENCE_S

SCENARIO = """
duration: 1
models: {fast: {cost: {1: 0.002, 4: 0.004}}, late: {cost: {1: 0.002}}, gone: {cost: {1: 0.002}}}
arrivals: {trace: trace.csv}
"""
FP32, STRING = model_config_pb2.TYPE_FP32, model_config_pb2.TYPE_STRING


def described(*dims: int, kind: int = FP32, rows: int = 8) -> Any:
    """Return the configuration of a model with one input."""
    config = model_config_pb2.ModelConfig(name="m", max_batch_size=rows)
    config.input.add(name="x", data_type=kind, dims=dims)
    return config


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A server for the replay. The name of a model decides how it responds.

    For example, `fast` answers, `late` misses its deadlines, and `broken` fails.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        #: The model `stopped` waits for this event before it stops the client.
        self.may_stop = Event()

    def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name == "gone":
            context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'gone' is not found")
        config = described(3)
        config.name = request.name
        return service_pb2.ModelConfigResponse(config=config)

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if request.model_name == "stopped":
            end = Event()
            context.add_callback(end.set)
            self.may_stop.wait(PATIENCE_S)
            # The main thread of this process, which runs the command, waits for answers and gets the signal.
            os.kill(os.getpid(), signal.SIGINT)
            end.wait(PATIENCE_S)
        if request.model_name == "late":
            context.abort(grpc.StatusCode.UNAVAILABLE, "[rsrv:DEADLINE] missed")
        if request.model_name in ("full", "closed"):
            why = {"full": "[rsrv:QUEUE_FULL] 8 requests wait", "closed": "Socket closed"}
            context.abort(grpc.StatusCode.UNAVAILABLE, why[request.model_name])
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.INTERNAL, "the hook\nfailed")
        return service_pb2.ModelInferResponse(model_name=request.model_name)


@contextmanager
def serving(triton: Triton) -> Iterator[str]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def test_a_trace_is_sent_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests of the trace are sent with their rows, deadlines and priorities.

    The report has the outcomes of the requests, and what the simulator computes for the same trace.
    """
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "t,model,rows,deadline_s,priority\n0.2,fast,3,9,2\n0,fast,1,,\n0.1,late,1,0.001,\n0.3,gone,1,,\n"
    )
    (tmp_path / "trace.yaml").write_text(SCENARIO)
    triton = Triton()
    with serving(triton) as url:
        assert cli.main(["replay", str(trace), "--url", url, "--speed", "10"]) == 0
        output = capsys.readouterr()
        assert cli.main(["replay", str(trace), "--url", url, "--speed", "10", "--json"]) == 0

    # The order may differ, because the server handles requests concurrently.
    of_first_replay = [request for request in triton.asked if request.model_name == "fast"][:2]
    first, last = sorted(of_first_replay, key=lambda request: request.inputs[0].shape[0])
    assert (first.inputs[0].shape, last.inputs[0].shape, last.raw_input_contents[0]) == (
        [1, 3],
        [3, 3],
        bytes(36),
    )
    assert not first.parameters
    assert last.parameters["timeout"].int64_param == 9_000_000
    assert last.parameters["priority"].uint64_param == 2
    assert "gone: 1 requests were not sent: Request for unknown model: 'gone' is not found" in output.err
    lines = output.out.splitlines()
    assert lines[0].startswith("3 requests: 2 served, 1 expired; goodput ")
    assert [line.split()[:3] for line in lines[3:6]] == [
        ["fast", "2", "100%"],
        ["late", "1", "0%"],
        ["all", "3", "66.7%"],
    ]
    assert re.fullmatch("half of the answers came at least .*s (later|sooner) than simulated", lines[-1])
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"]["models"]["fast"]["latency_p99_s"] == pytest.approx(0.004)
    assert report["replayed"]["total"]["missed"] == 1
    assert report["simulated"]["total"]["requests"] == 3
    # Two requests are in time, and the last answer comes 4 ms after the last request.
    assert report["simulated"]["total"]["goodput"] == pytest.approx(2 / 0.024)


def test_what_answers_take_beside_the_runtime_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--fit` corrects `front_s` in the scenario by the difference between the server's median latency and the simulated one.

    The next simulation uses the corrected time.
    """
    trace, beside = tmp_path / "trace.csv", tmp_path / "trace.yaml"
    trace.write_text("t,model\n0,fast\n0.1,fast\n0.2,fast\n")
    beside.write_text(f"# by rsrv record\n{SCENARIO}front_s: 100.0\n")

    def replayed(*options: str) -> dict[str, Any]:
        assert cli.main(["replay", str(trace), "--url", url, "--speed", "4", "--json", *options]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    with serving(Triton()) as url:
        first = replayed("--fit")
        second = replayed()
    assert first["simulated"]["total"]["latency_p50_s"] == pytest.approx(100.002)
    assert first["late_p50_s"] < 0
    assert beside.read_text().startswith("# by rsrv record\n")
    assert load_scenario(beside).front_s == pytest.approx(max(0.0, 100.0 + first["late_p50_s"]), abs=1e-5)
    assert second["simulated"]["total"]["latency_p50_s"] < 100

    beside.unlink()
    assert cli.main(["replay", str(trace), "--fit"]) == 1
    assert "--fit: there is no" in capsys.readouterr().err


def test_latencies_are_drawn_beside_the_simulated_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture compares latencies of the server with simulated ones, for each model and for all models together.

    A model that the server did not answer has only the simulator's line.
    """
    trace, out = tmp_path / "trace.csv", tmp_path / "new" / "plots"
    trace.write_text("t,model,rows,deadline_s\n0,fast,1,\n0.1,fast,3,\n0.2,late,1,0.001\n")
    (tmp_path / "trace.yaml").write_text(SCENARIO)
    drawn: list[str] = []
    save = Figure.savefig

    def noted(figure: Figure, *args: Any, **options: Any) -> None:
        lines = figure.axes[0].get_lines()
        drawn.extend(f"{line.get_label()} {line.get_linestyle()}" for line in lines)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", noted)
    with serving(Triton()) as url:
        assert cli.main(["replay", str(trace), "--url", url, "--out", str(out)]) == 0

    assert [path.name for path in out.iterdir()] == ["latency.png"]
    assert (out / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert drawn[:2] == ["fast -", "all 2 models -"]
    assert drawn[2:] == ["fast, simulated --", "late, simulated --", "all 2 models, simulated --"]


def test_pictures_that_cannot_be_made_send_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails before the first request if matplotlib is missing, or if the folder for the pictures is a file."""
    trace, triton = tmp_path / "trace.csv", Triton()
    trace.write_text("t,model\n0,fast\n")
    with serving(triton) as url:
        assert cli.main(["replay", str(trace), "--url", url, "--out", str(trace)]) == 1
        assert "File exists" in capsys.readouterr().err
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "rsrv.sim.plots", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert cli.main(["replay", str(trace), "--url", url, "--out", str(tmp_path / "plots")]) == 1
    assert f"rsrv replay: --out needs matplotlib: {install_command('sim')}" in capsys.readouterr().err
    assert not triton.asked


def test_a_lost_server_is_no_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request that the server refuses is reported as refused.

    A request whose connection breaks is reported as failed, although both have the same gRPC code.
    """
    trace = tmp_path / "trace.csv"
    trace.write_text("t,model\n0,full\n0,closed\n")
    with serving(Triton()) as url:
        assert cli.main(["replay", str(trace), "--url", url]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("2 requests: 1 refused, 1 failed")
    assert "closed: the first error: Socket closed" in output.err


def test_ctrl_c_reports_the_requests_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C, the command reports the requests so far. A request without an answer is reported as cancelled."""
    trace = tmp_path / "trace.csv"
    trace.write_text("t,model\n0,fast\n0.1,stopped\n")
    triton = Triton()

    class Noted(RequestRecord):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "ended" and getattr(self, "outcome", None) is Outcome.ANSWERED:
                triton.may_stop.set()

    monkeypatch.setattr("rsrv.cli.replay.RequestRecord", Noted)
    with serving(triton) as url:
        assert cli.main(["replay", str(trace), "--url", url]) == 0
    assert capsys.readouterr().out.startswith("2 requests: 1 served, 1 cancelled")


def test_requests_that_no_server_takes_cost_only_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests with no rows or too many rows are not sent. All other requests are sent.

    Control characters in a model's name are replaced before the name is printed.
    """
    trace = tmp_path / "trace.csv"
    trace.write_text("t,model,rows\n0,fast,1000000000000\n0,fast,1\n0,fast,0\n")
    with serving(Triton()) as url:
        assert cli.main(["replay", str(trace), "--url", url]) == 0
        output = capsys.readouterr()
        trace.write_text('t,model,rows\n0,"a,""b""\n\x1b[31m",0\n')
        assert cli.main(["replay", str(trace), "--url", url]) == 1
    assert output.err == "fast: 2 requests were not sent: a request to this model has 1 to 8 rows, not 0\n"
    assert output.out.startswith("1 requests: 1 served")
    assert 'a,"b"??[31m: 1 requests were not sent' in capsys.readouterr().err


def test_a_mistake_in_the_files_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the trace has no requests, or the scenario or inputs cannot be read, the command fails before the first request."""
    trace, triton = tmp_path / "trace.csv", Triton()
    with serving(triton) as url:
        trace.write_text("t,model\n")
        assert cli.main(["replay", str(trace), "--url", url]) == 1
        trace.write_text("t,model\n0,fast\n")
        (tmp_path / "trace.yaml").write_text("models: {")
        assert cli.main(["replay", str(trace), "--url", url]) == 1
        output = capsys.readouterr().err
        (tmp_path / "trace.yaml").unlink()
        np.save(tmp_path / "x.npy", np.ones((1, 3), "f4"))
        (tmp_path / "cut.npz").write_bytes(b"PK\3\4cut")
        (tmp_path / "empty.npz").touch()
        for name in ("x.npy", "cut.npz", "empty.npz"):
            assert cli.main(["replay", str(trace), "--url", url, "--inputs", f"fast={tmp_path / name}"]) == 1
            assert f"{name} is not a file of np.savez" in capsys.readouterr().err
    assert "trace.csv has no requests" in output
    assert "trace.yaml: " in output
    assert not triton.asked


def test_errors_are_shown_and_a_missing_server_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first error of each model is printed. If the trace cannot be read or there is no server, the command fails."""
    trace = tmp_path / "trace.csv"
    trace.write_text("t,model\n0,broken\n0,broken\n")
    with serving(Triton()) as url:
        assert cli.main(["replay", str(trace), "--url", url]) == 0
    output = capsys.readouterr()
    assert output.err == "broken: the first error: the hook failed\n"
    assert "2 requests: 2 failed" in output.out

    assert cli.main(["replay", str(trace), "--url", url]) == 1
    assert f"rsrv replay: {url}: " in capsys.readouterr().err
    trace.write_text("t,model,row\n")
    assert cli.main(["replay", str(trace), "--url", url]) == 1
    assert "unknown column 'row'; did you mean 'rows'?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["replay", str(trace), "--inputs", "m"])
    assert "'m' is not MODEL=FILE.npz" in capsys.readouterr().err


def test_inputs_that_cannot_be_guessed() -> None:
    """Inputs with texts or with variable shapes cannot be made up, so requests repeat a row from the user's file.

    A row that does not fit the model is refused with the reason.
    """
    row = np.array([["a", "bc"]], object)
    message = infer_request(described(2, kind=STRING), 2, {"x": row})
    assert (message.inputs[0].datatype, message.inputs[0].shape) == ("BYTES", [2, 2])
    assert message.raw_input_contents[0] == b"\1\0\0\0a\2\0\0\0bc" * 2
    assert infer_request(described(-1, 2, rows=0), 5, {"x": np.ones((3, 2), "f4")}).inputs[0].shape == [3, 2]

    with pytest.raises(Unsendable, match=r"give one row of this input: --inputs m=FILE\.npz"):
        infer_request(described(2, kind=STRING), 1, None)
    with pytest.raises(Unsendable, match="cannot be guessed"):
        infer_request(described(-1), 1, None)
    with pytest.raises(Unsendable, match="no array 'x'"):
        infer_request(described(2), 1, {})
    with pytest.raises(Unsendable, match=r"x is float64 .* must be FP32"):
        infer_request(described(2), 1, {"x": np.ones((1, 2))})
    for empty in (np.float32(1), np.ones((0, 2), "f4")):
        with pytest.raises(Unsendable, match="x has no row"):
            infer_request(described(2), 1, {"x": np.asarray(empty)})
    stateful = described(2)
    stateful.model_transaction_policy.decoupled = True
    with pytest.raises(Unsendable, match="only models without state"):
        infer_request(stateful, 1, None)
