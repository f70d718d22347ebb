"""The runtime's part of traced requests: spans made from events, and spans of a real loop and a stub."""

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.hooks import BadInput
from rsrv.hooks.loader import Hooks
from rsrv.runtime.timeline import Timeline, Traces
from rsrv.scheduler import events as ev
from rsrv.settings import load_settings
from rsrv.stub.calls import CallError
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.engine import Engine
from rsrv.stub.meta_engine import MetaEngine
from rsrv.stub.metrics import Reporting
from rsrv.wire.calls import Call
from rsrv.wire.traces import Attributes, Mark, Span
from tests.builders import write_meta
from tests.fakes import FakeRequest
from tests.runtime_commands import command
from tests.unit.runtime.conftest import Runtime, StartEngine, StartMeta, StartRuntime
from tests.unit.runtime.engines import make_engine, ramp
from tests.unit.runtime.metas import FakeCallees, ask, meta_engine, model_engine
from tests.waiting import PATIENCE_S, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
MODEL: Attributes = {"rsrv.model": "a", "rsrv.version": "1"}
BATCH: Attributes = {"rsrv.batch.id": 7, "rsrv.batch.size": 4, "rsrv.batch.rows": 3, "rsrv.batch.requests": 2}


class Played:
    """A timeline and traces that get the events which a loop would send."""

    def __init__(self, length: int = 100) -> None:
        self.timeline = Timeline()
        self.traces = Traces(self.timeline, length)

    def arrives(self, id: int, now: float, traced: bool = True) -> None:
        if traced:
            self.traces.begin(id, Mark(id, f"{id:032x}", f"{id:016x}"), "a@1")
        self.happens(ev.RequestsArrived((ev.Request(id, "a@1", 0, 1),)), now)

    def happens(self, event: ev.Event, now: float) -> None:
        self.traces.happened(event, self.timeline.happened(event, now), now)

    def begins(self, instruction: ev.Execute | ev.LoadWeights, now: float) -> None:
        self.timeline.begins(instruction, now)
        if isinstance(instruction, ev.Execute):
            self.traces.executes(instruction, now)

    def ends(self, finish: ev.Finish, now: float) -> None:
        self.traces.finished(finish, now)

    @property
    def spans(self) -> list[Span]:
        spans: list[Span] = self.traces.answer("i", 0)["spans"]
        return spans


def span(
    id: int, name: str, start: float, end: float, error: str = "", attributes: Attributes | None = None
) -> Span:
    """Return a span. `start` and `end` are in seconds."""
    ids = f"{id:032x}", f"{id:016x}", ""
    return Span(*ids, name, int(start * 1e9), int(end * 1e9), error, {**MODEL, **(attributes or {})})


def test_a_request_waits_for_a_load_and_executes_with_others() -> None:
    """The trace of a request has the part of the load that it waited for. A request that is not traced has no span."""
    played = Played()
    played.begins(ev.LoadWeights("a@1", 1), 9.0)
    played.arrives(1, 10.0)
    played.arrives(2, 10.5, traced=False)
    played.happens(ev.WeightsLoaded("a@1", 1, 2.0), 11.0)
    played.begins(ev.Execute(7, "a@1", 0, 4, 3, (1, 2)), 12.0)
    played.happens(ev.ExecutionFinished(7, 0.5), 13.0)
    for id in (1, 2):
        played.ends(ev.Finish(id, ev.Outcome.ANSWERED), 13.0)

    assert played.spans == [
        span(1, "queue", 10, 12),
        span(1, "load", 10, 11, attributes={"rsrv.load.seconds": 2.0}),
        span(1, "execute", 12.5, 13, attributes=BATCH),
    ]
    assert not played.traces.live


def test_requests_of_one_execution_share_its_number() -> None:
    """Each request of an execution has its own span, with the execution's number and failure."""
    played = Played()
    for id in (1, 2):
        played.arrives(id, 10.0)
    played.begins(ev.Execute(7, "a@1", 0, 4, 3, (1, 2)), 11.0)
    played.happens(ev.ExecutionFinished(7, 0.5, "secret"), 12.0)

    assert played.spans[2:] == [span(id, "execute", 11.5, 12, "the execution failed", BATCH) for id in (1, 2)]


@pytest.mark.parametrize("loading", [False, True])
def test_a_request_that_is_not_executed_says_why(loading: bool) -> None:
    """The `queue` span of a refused or expired request has the reason.

    If its model's weights were loading, the `load` span says that the load is still under way.
    """
    played = Played()
    if loading:
        played.begins(ev.LoadWeights("a@1", 1), 9.0)
        played.begins(ev.LoadWeights("b@1", 2), 9.5)
    played.arrives(1, 10.0)
    played.ends(ev.Finish(1, ev.Outcome.EXPIRED), 11.0)
    played.arrives(2, 12.0)
    played.ends(ev.Finish(2, ev.Outcome.REFUSED, ev.Reason.QUEUE_FULL), 12.0)

    waits = [span(1, "queue", 10, 11, "expired"), span(2, "queue", 12, 12, "queue_full")]
    loads = [span(1, "load", 10, 11, "still under way"), span(2, "load", 12, 12, "still under way")]
    assert [played_span for played_span in played.spans if played_span.name == "queue"] == waits
    assert [played_span for played_span in played.spans if played_span.name == "load"] == (
        loads if loading else []
    )


def test_a_second_try_is_a_second_execution() -> None:
    """A request whose execution is retried has two `execute` spans and one `queue` span."""
    played = Played()
    played.arrives(1, 10.0)
    played.begins(ev.Execute(7, "a@1", 0, 1, 1, (1,)), 11.0)
    played.happens(ev.ExecutionFinished(7, 0.5, "no memory", out_of_memory=True), 12.0)
    played.begins(ev.Execute(8, "a@1", 0, 1, 1, (1,), again=True), 13.0)
    played.happens(ev.ExecutionFinished(8, 0.5), 14.0)
    played.ends(ev.Finish(1, ev.Outcome.ANSWERED), 14.0)

    assert [
        (played_span.name, played_span.start_ns // 10**8, bool(played_span.error))
        for played_span in played.spans
    ] == [
        ("queue", 100, False),
        ("execute", 115, True),
        ("execute", 135, False),
    ]


def test_spans_that_nobody_asks_for_are_forgotten() -> None:
    """Spans that nobody reads are dropped, the oldest first.

    Their number is added to that of the spans that stubs dropped.
    """
    played = Played(length=3)
    spans = [span(1, name, 1, 2) for name in "abcde"]
    played.traces.report(spans, 4)
    played.traces.report([], 2)

    assert played.traces.answer("i", 1) == {
        "instance": "i",
        "first": 2,
        "next": 5,
        "end": 5,
        "dropped": 6,
        "spans": spans[2:],
    }


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    """Start a runtime that exports traces."""
    return start_runtime(load_settings("{stub: {retry_s: 0}, traces: {endpoint: 'http://nowhere'}}"))


def reported_spans(engine: Engine | MetaEngine, last: str) -> dict[str, Span]:
    """Return the spans of stub and runtime by name, as soon as the span `last` is there."""
    spans: dict[str, Span] = {}

    def there() -> bool:
        answer = command(os.getpid(), {"command": "traces"})
        spans.update({fields[3]: Span(*fields) for fields in answer["spans"]})
        return last in spans

    reporting = Reporting(engine.session, engine.meters, period=0.01)
    wait_until(there)
    reporting.close()
    return spans


def test_a_traced_request_shows_what_stub_and_runtime_did(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """The stub's and the runtime's spans of a request are inside its `infer` span, whose parent is the client's span."""
    # An execution's span begins `seconds` before its end. The fake device does not sleep, so the span of an execution could
    # begin before its request.
    runtime.device.seconds = 0.0
    engine = start_engine(Hooks(lambda arrays: arrays, lambda arrays: arrays))

    ask(engine, FakeRequest({"x": ramp(2)}, traceparent=SAMPLED), FakeRequest({"x": ramp(1)}))

    spans = reported_spans(engine, "infer doubling")
    infer, queue = spans["infer doubling"], spans["queue"]
    assert (infer.trace, infer.parent) == (TRACE, PARENT)
    assert infer.attributes["rsrv.rows"] == 2
    parts = [spans[name] for name in ("preprocess", "queue", "execute", "postprocess")]
    assert {(part.trace, part.parent) for part in parts} == {(TRACE, infer.id)}
    starts = [infer.start_ns, *(part.start_ns for part in parts)]
    ends = [*(part.end_ns for part in parts), infer.end_ns]
    assert (starts, ends) == (sorted(starts), sorted(ends))
    assert queue.attributes["rsrv.model"] == infer.attributes["rsrv.model"] == "doubling"
    assert queue.attributes["rsrv.version"] == infer.attributes["rsrv.version"]


@pytest.mark.parametrize(
    ("error", "text"),
    [(RuntimeError("secret"), "preprocess hook failed"), (BadInput("no picture"), "no picture")],
)
def test_a_request_that_does_not_reach_the_runtime_is_traced_as_well(
    start_engine: StartEngine, error: Exception, text: str
) -> None:
    """A request whose hook raises has its spans, with the same error that the client gets."""

    def broken(arrays: Any) -> Any:
        raise error

    engine = start_engine(Hooks(broken))
    (answer,) = ask(engine, FakeRequest({"x": ramp(2)}, traceparent=SAMPLED))

    spans = reported_spans(engine, "infer doubling")
    assert spans.keys() == {"preprocess", "infer doubling"}
    assert text in spans["preprocess"].error
    assert spans["infer doubling"].error == spans["preprocess"].error
    assert answer.error is not None
    assert spans["infer doubling"].error in answer.error.message


def test_a_context_that_cannot_be_read_costs_no_request(
    runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta
) -> None:
    """A malformed trace context fails no request, of a model or of a meta model."""

    def ask_all(engine: Engine | MetaEngine) -> None:
        odd, plain = FakeRequest({"x": ramp(1)}), FakeRequest({"x": ramp(1)}, traceparent=SAMPLED)
        odd.context = "null"
        assert [answer.error for answer in ask(engine, odd, plain)] == [None, None]

    engine = start_engine()
    ask_all(engine)
    assert "execute" in reported_spans(engine, "infer doubling")
    ask_all(start_meta(runtime, lambda inputs, call: call("a", inputs)))


def test_a_request_with_a_wrong_parameter_is_traced(start_engine: StartEngine) -> None:
    """A request with a wrong parameter has its span, with the same error that the client gets."""
    engine = start_engine()
    wrong = json.dumps({"rsrv_priority": "high", "TraceParent": SAMPLED})
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}, parameters=wrong))

    infer = reported_spans(engine, "infer doubling")["infer doubling"]
    assert answer.error is not None
    assert infer.error in answer.error.message
    assert "rsrv_priority" in infer.error
    assert infer.attributes["rsrv.status"] == "INVALID"


def test_a_request_without_a_runtime_is_traced(
    runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta
) -> None:
    """A traced request that fails for lack of a runtime has a span, which is sent with the next report.

    A request that is not traced has no span.
    """
    engine, meta = start_engine(), start_meta(runtime, lambda inputs, call: call("a", inputs))
    runtime.stop()
    wait_until(lambda: engine.session.reading is None and meta.session.reading is None)
    for each in (engine, meta):
        traced, other = FakeRequest({"x": ramp(1)}, traceparent=SAMPLED), FakeRequest({"x": ramp(1)})
        first, second = ask(each, traced, other)

        ((infer,), _) = each.meters.spans.take()
        assert (infer.trace, infer.parent, infer.name) == (TRACE, PARENT, f"infer {each.session.model}")
        assert infer.attributes["rsrv.status"] == "RUNTIME_DOWN"
        assert first.error is not None
        assert second.error is not None
        assert infer.error[:50] in first.error.message


def test_spans_that_a_runtime_does_not_take_are_counted(
    runtime: Runtime, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans that a runtime did not read are reported as dropped with the next report."""
    engine, tried = start_engine(), threading.Event()
    real = RuntimeConnection.report_spans

    def stuck(lane: RuntimeConnection, *_: object) -> None:
        monkeypatch.setattr(RuntimeConnection, "report_spans", real)
        tried.set()
        raise TimeoutError

    monkeypatch.setattr(RuntimeConnection, "report_spans", stuck)
    ask(engine, FakeRequest({"x": ramp(1)}, traceparent=SAMPLED))
    reporting = Reporting(engine.session, engine.meters, period=0.01)
    assert tried.wait(PATIENCE_S)
    ask(engine, FakeRequest({"x": ramp(1)}, traceparent=SAMPLED))
    wait_until(lambda: command(os.getpid(), {"command": "traces"})["dropped"] == 1)
    reporting.close()


def test_calls_of_a_meta_model_are_parts_of_its_run(runtime: Runtime, start_meta: StartMeta) -> None:
    """Each call of a meta model has a span inside the run's, also a refused call."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        with suppress(CallError):
            call("b", {"x": np.zeros((1, 5), np.float32)})
        return {"y": call("a", inputs)["y"]}

    engine = start_meta(runtime, run)
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}, traceparent=SAMPLED))
    assert answer.error is None

    spans = reported_spans(engine, "infer meta")
    infer, whole, good, bad = (spans[name] for name in ("infer meta", "run", "call a", "call b"))
    assert (infer.parent, whole.parent, good.parent, bad.parent) == (PARENT, infer.id, whole.id, whole.id)
    assert "expected shape" in bad.error
    waits = [entry for entry in command(os.getpid(), {"command": "traces"})["spans"] if entry[3] == "queue"]
    # One `queue` span is the wait for admission, the other one the wait for the device.
    assert {wait[1] for wait in waits} == {whole.id, good.id}
    assert (good.error, whole.error, infer.error) == ("", "", "")
    assert spans["execute"].parent == good.id
    assert spans["execute"].attributes["rsrv.model"] == "a"
    assert infer.start_ns <= whole.start_ns <= good.start_ns
    assert spans["execute"].end_ns <= good.end_ns <= whole.end_ns <= infer.end_ns


def test_calls_through_triton_are_parts_as_well(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """If a call goes through Triton, the spans of the called model are inside the call's."""
    runtime = start_runtime(load_settings("traces: {endpoint: 'http://nowhere'}\nmeta: {transport: bls}"))
    triton = FakeCallees(engines={"a": model_engine(runtime, doublings["a"], internal=True)})
    meta = write_meta(tmp_path / "meta", "def run(inputs, call):\n    return call('a', inputs)", ["a"])
    with meta_engine(runtime, meta, {"a": doublings["a"]}, triton=triton) as engine:
        (answer,) = ask(engine, FakeRequest({"x": ramp(1)}, traceparent=SAMPLED))
        assert answer.error is None
        spans = reported_spans(engine, "infer meta") | reported_spans(triton.engines["a"], "infer a")
    triton.close()

    assert spans["call a"].parent == spans["run"].id
    assert spans["infer a"].parent == spans["call a"].id
    assert spans["execute"].parent == spans["infer a"].id
    assert {entry.trace for entry in spans.values()} == {TRACE}


def test_a_runtime_without_a_collector_keeps_nothing(start_runtime: StartRuntime, doubling: Path) -> None:
    """Without a collector in the settings, neither the stub nor the runtime keeps spans."""
    runtime = start_runtime()
    engine = make_engine(runtime, doubling)
    request = FakeRequest({"x": ramp(1)}, traceparent=SAMPLED)
    engine._attachment.direct.mark([Mark(number, TRACE, PARENT) for number in range(100)])
    ask(engine, request)

    assert not request.trace_read
    assert engine.meters.spans.take() == ([], 0)
    assert command(os.getpid(), {"command": "traces"})["end"] == 0


def test_marks_of_requests_that_are_refused_do_not_stay(
    runtime: Runtime, doubling: Path, start_meta: StartMeta
) -> None:
    """The trace marks of refused requests and calls are removed, even if the scheduler never gets the request."""
    engine = make_engine(runtime, doubling)
    parameters = json.dumps({"rsrv_run": "1"})
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}, parameters=parameters, traceparent=SAMPLED))
    assert answer.error is not None
    assert not runtime.loop._traces.live
    calls = start_meta(runtime, lambda inputs, call: inputs).session.attachment
    assert calls is not None
    calls.direct.mark([Mark(1, TRACE, PARENT)])
    calls.direct.call([Call(1, 77, 0, 0, 1, (), ())], [])
    calls.direct.receive(PATIENCE_S)

    wait_until(lambda: not any(connection.marks for connection in runtime.loop._transport.connections))


def test_marks_of_requests_that_never_come_are_forgotten(runtime: Runtime, doubling: Path) -> None:
    """Trace marks whose requests never arrive are dropped. Later requests are still traced."""
    engine = make_engine(runtime, doubling)
    for start in range(1000, 6000, 1000):
        engine._attachment.direct.mark([Mark(start + n, TRACE, PARENT) for n in range(1000)])
    ask(engine, FakeRequest({"x": ramp(1)}, traceparent=SAMPLED))

    assert "execute" in reported_spans(engine, "infer doubling")
