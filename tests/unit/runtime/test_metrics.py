"""The counts of a runtime and its stubs are complete, count nothing twice, and are removed with the model."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rsrv.hooks import BadInput
from rsrv.hooks.loader import Hooks
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.stub.meta_engine import MetaEngine
from rsrv.stub.metrics import Meters, Reporting
from rsrv.wire.frames import Kind, Status, pack_json
from rsrv.wire.socket import Closed
from tests.fakes import FakeError, FakeRequest
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.engines import make_engine, ramp, refused
from tests.unit.runtime.metas import ask
from tests.unit.runtime.watchers import Operator
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(load_settings("stub: {in_place_ms: 0}"))


@contextmanager
def reporting(engine: Engine | MetaEngine) -> Iterator[None]:
    """Send reports as a stub does between its `initialize` and `finalize`, but more often."""
    made = Reporting(engine.session, engine.meters, period=0.01)
    try:
        yield
    finally:
        made.close()


def metrics(runtime: Runtime) -> dict[str, Any]:
    return read_status(os.getpid())


def count(histogram: Any) -> int:
    return sum(histogram["counts"])


def test_a_model_counts_requests_executions_and_hooks(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """The runtime counts a model's answered, refused and failed requests, its executions, and the calls of its hooks."""

    def preprocess(arrays: dict[str, Any]) -> dict[str, Any]:
        if arrays["x"].min() < 0:
            raise ValueError("negative")
        if arrays["x"].max() > 900:
            raise BadInput("too much")
        return arrays

    engine = make_engine(runtime, doublings["a"], Hooks(preprocess), name="a")
    with reporting(engine):
        for _ in range(3):
            ask(engine, FakeRequest({"x": ramp(2)}))
        (wrong,) = ask(engine, FakeRequest({"y": ramp(1)}))
        (raised,) = ask(engine, FakeRequest({"x": -ramp(1)}))
        assert refused(wrong, FakeError.INVALID_ARG, "")
        assert refused(raised, FakeError.INTERNAL, "")
        wait_until(lambda: sum(metrics(runtime)["models"]["a"]["responses"].values()) == 5)

        a = metrics(runtime)["models"]["a"]

    assert a["responses"] == {"ok": 3, "invalid": 1, "internal": 1}
    assert count(a["request"]) == 5
    assert {hook: count(seconds) for hook, seconds in a["hooks"].items()} == {"pre": 4}
    assert a["outcomes"] == {
        "answered": 3,
        "refused": 0,
        "expired": 0,
        "shed": 0,
        "cancelled": 0,
        "failed": 0,
    }
    assert (a["dispatches"], a["useful_rows"], count(a["execute"])) == (3, 6, 3)
    assert (count(a["queue_wait"]), count(a["batch_rows"])) == (3, 3)
    assert (count(a["batch_padding"]), a["padded_rows"]) == (3, 6)  # 2 rows of size 4
    assert (a["weights"], a["queued"], a["loads"], count(a["load"])) == ("resident", 0, 1, 1)
    assert a["device_bytes"] == a["host_bytes"] == 12
    assert read_status(os.getpid())["memory"]["physical_bytes"] == 12
    engine.close()
    wait_until(lambda: metrics(runtime)["models"] == {})


def test_slow_requests_have_the_time_in_their_stub(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """A slow request's time in the stub, before and after the runtime, arrives with the stub's next report."""
    entered = []

    def preprocess(arrays: dict[str, Any]) -> dict[str, Any]:
        entered.append(time.monotonic())
        return arrays

    engine = make_engine(runtime, doublings["a"], Hooks(preprocess), name="a")
    began = time.monotonic()
    with reporting(engine), Operator(runtime) as operator:
        ask(engine, FakeRequest({"x": ramp(2)}))
        # The report also has a request of another connection with the same number. Numbers are unique only on a connection.
        engine.meters.answered(Status.OK, time.perf_counter(), 0)
        end_s = time.monotonic()

        def known() -> bool:
            return operator.do("slowest", model="a")["requests"][0]["before_s"] is not None

        wait_until(known)
        (slow,) = operator.do("slowest", model="a")["requests"]
    assert entered[0] < slow["at"] < end_s
    assert 0 < slow["before_s"] < slow["at"] - began
    assert 0 < slow["after_s"] < end_s - slow["at"] - slow["seconds"]


def test_a_new_version_adds_to_what_the_old_one_counted(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """The counts of an old and a new version add up, also after the old one has left.

    A model that is loaded again counts from zero.
    """
    old = make_engine(runtime, doublings["a"], name="m")
    ask(old, FakeRequest({"x": ramp(1)}))
    new = make_engine(runtime, doublings["b"], name="m")
    ask(new, FakeRequest({"x": ramp(1)}), FakeRequest({"x": ramp(1)}))

    assert metrics(runtime)["models"]["m"]["outcomes"]["answered"] == 3
    old.close()
    with Operator(runtime) as operator:
        wait_until(lambda: len(operator.do("history", model="m")["histories"]) == 1)
    assert metrics(runtime)["models"]["m"]["outcomes"]["answered"] == 3
    new.close()
    wait_until(lambda: metrics(runtime)["models"] == {})
    make_engine(runtime, doublings["a"], name="m")
    assert metrics(runtime)["models"]["m"]["outcomes"]["answered"] == 0


def test_a_meta_model_counts_its_runs_and_hooks_of_what_it_calls(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """The runtime counts a meta model's runs, and the hooks that it calls for its callees."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        result: dict[str, Any] = call("a", inputs)
        if inputs["x"].min() < 0:
            raise ValueError("negative")
        return result

    engine = start_meta(runtime, run, "a", hooks={"a": Hooks(lambda arrays: arrays)})
    with reporting(engine):
        ask(engine, FakeRequest({"x": ramp(1)}), FakeRequest({"x": -ramp(1)}))
        wait_until(lambda: sum(metrics(runtime)["metas"]["meta"]["responses"].values()) == 2)
        wait_until(lambda: not metrics(runtime)["metas"]["meta"]["running"])
        record = metrics(runtime)

    meta = record["metas"]["meta"]
    assert meta["responses"] == {"ok": 1, "internal": 1}
    assert (meta["outcomes"]["answered"], meta["outcomes"]["failed"], meta["calls"]) == (1, 1, 2)
    assert count(meta["hooks"]["run"]) == 2
    assert count(record["models"]["a"]["hooks"]["pre"]) == 2
    assert record["models"]["a"]["outcomes"]["answered"] == 2
    assert record["models"]["a"]["responses"] == {}


def test_a_report_of_a_stub_changes_a_record(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """A stub's report changes the model's record. It counts requests that ended in the stub, which the runtime does not see."""
    a, _ = (make_engine(runtime, doublings[name], name=name) for name in "ab")
    since = read_status(os.getpid())["next"]
    with reporting(a):
        a.meters.answered(Status.INVALID, time.perf_counter(), 0)
        wait_until(lambda: "invalid" in metrics(runtime)["models"]["a"]["responses"])
    assert read_status(os.getpid(), since=since)["models"].keys() == {"a"}


def test_models_share_tensors(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """A tensor that two models share is reported once with both names, apart from the bytes of each model."""
    engines = [make_engine(runtime, doublings[bundle], name=name) for name, bundle in ("aa", "bb", "ca")]
    for engine in engines:
        ask(engine, FakeRequest({"x": ramp(1)}))
    record = metrics(runtime)

    assert record["shared"] == [{"bytes": 12, "models": ["a", "c"], "on_device": True}]
    b = record["models"]["b"]
    assert (b["device_bytes"], b["state_bytes"], b["host_bytes"], b["pinned"]) == (12, 0, 12, False)
    assert (record["memory"]["logical_bytes"], record["memory"]["physical_bytes"]) == (36, 24)
    assert record["largest_free_bytes"] is None


def test_answers_by_an_aliass_name_are_counted_apart(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """Answers to an alias count for the alias and for its model. The counts of several reports add up."""
    engine = make_engine(runtime, doublings["a"], name="a")
    engine.meters.alias = "champion"
    engine.meters.compared("different")
    with reporting(engine):
        ask(engine, FakeRequest({"x": ramp(1)}))
        wait_until(lambda: metrics(runtime)["models"]["a"]["aliases"] == {"champion": {"counts": {"ok": 1}}})
        ask(engine, FakeRequest({"x": ramp(1)}))
        wait_until(lambda: metrics(runtime)["models"]["a"]["aliases"] == {"champion": {"counts": {"ok": 2}}})

    assert metrics(runtime)["models"]["a"]["responses"] == {"ok": 2}
    assert metrics(runtime)["models"]["a"]["shadows"] == {"champion": {"counts": {"different": 1}}}


def test_reports_go_to_the_next_runtime(start_runtime: StartRuntime, doublings: dict[str, Path]) -> None:
    """After a runtime's death, a stub reports to the next one, and only what it has not yet reported."""
    settings = load_settings("stub: {in_place_ms: 0}")
    first = start_runtime(settings)
    engine = make_engine(first, doublings["a"], name="a")
    with reporting(engine):
        for _ in range(2):
            ask(engine, FakeRequest({"x": ramp(1)}))
        wait_until(lambda: metrics(first)["models"]["a"]["responses"] == {"ok": 2})
        first.stop()
        second = start_runtime(settings)
        ask(engine, FakeRequest({"x": ramp(1)}))
        wait_until(lambda: metrics(second)["models"]["a"]["responses"] == {"ok": 1})


def test_an_import_counts_until_its_connection_says_otherwise(
    runtime: Runtime, doublings: dict[str, Path]
) -> None:
    """The runtime reports an import of model.py with its seconds and its line.

    The import is reported until its connection sends a report without the import, or closes. Until then, the status says that
    the model waits for the import.
    """
    engine = make_engine(runtime, doublings["a"], name="a")
    attachment = engine.session.attachment
    assert attachment is not None
    lanes = [engine.session.open_connection(attachment.key) for _ in range(2)]
    assert metrics(runtime)["importing"] == {}

    for lane, importing in zip(lanes, ([7, 2], [45.0, 3]), strict=True):
        lane.report({**Meters().take(), "importing": importing}, 10)
    ((name, entry),) = metrics(runtime)["importing"].items()
    assert (name, entry["line"]) == ("a", 3)
    assert entry["seconds"] >= 45.0
    assert read_status(os.getpid())["starting"] == {"a": "importing model.py"}
    lanes[1].report(Meters().take(), 10)
    assert metrics(runtime)["importing"]["a"]["line"] == 2
    lanes[0].close()
    wait_until(lambda: metrics(runtime)["importing"] == {})
    assert read_status(os.getpid())["starting"] == {}
    lanes[1].close()


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"requests": [0, 0], "responses": {}, "hooks": []},
        {"requests": [0, 99, 1], "responses": {}, "hooks": {}},
        {"requests": [0, 0], "responses": {"great": 1}, "hooks": {}},
        {"requests": [0, 0], "responses": {"ok": -1}, "hooks": {}},
        {"requests": [0, 0], "responses": {}, "hooks": {"b": {"pre": [0, 0]}}},
        {"requests": [0, 0], "responses": {}, "hooks": {"a": {"other": [0, 0]}}},
        {"requests": [0, 0], "responses": {}, "hooks": {}, "importing": 3},
        {"requests": [0, 0], "responses": {}, "hooks": {}, "importing": [1.0, None]},
    ],
    ids=json.dumps,
)
def test_a_report_of_something_else_ends_its_connection_alone(
    runtime: Runtime, doublings: dict[str, Path], report: dict[str, Any]
) -> None:
    """An invalid report closes its connection, and counts nothing."""
    engine = make_engine(runtime, doublings["a"], name="a")
    attachment = engine.session.attachment
    assert attachment is not None
    lane = engine.session.open_connection(attachment.key)

    with pytest.raises(Closed):
        lane.report(report, 10)

    lane.close()
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}))
    assert answer.error is None
    assert metrics(runtime)["models"]["a"]["responses"] == {}


def test_a_report_without_a_registration_ends_the_connection(runtime: Runtime) -> None:
    """A report on a connection without a registration closes it."""
    greeted = runtime.open()
    greeted.sock.settimeout(PATIENCE_S)
    greeted.sock.send(pack_json(Kind.REPORT, {"requests": [0, 0], "responses": {}, "hooks": {}}))
    with pytest.raises(Closed):
        greeted.receiver.receive()
    greeted.sock.close()
