"""Commands of operators to a running runtime: they are done, or refused with a reason."""

import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rsrv.limits import total_memory
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.wire.frames import Kind, pack_json
from rsrv.wire.socket import Closed
from tests.builders import FEW_EXAMPLES
from tests.fakes import FakeError, FakeRequest
from tests.runtime_commands import Refused, command
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.engines import answered, make_engine, ramp, refused, register, send_one
from tests.unit.runtime.metas import answer_of, chain, queued, send
from tests.unit.runtime.watchers import Operator, Watcher
from tests.waiting import wait_until

#: Bytes of a model of `doublings`.
_BYTES = 12


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(load_settings("stub: {in_place_ms: 0}"))


@pytest.fixture
def operator(runtime: Runtime) -> Iterator[Operator]:
    with Operator(runtime) as operator:
        yield operator


@pytest.fixture
def engines(runtime: Runtime, doublings: dict[str, Path]) -> dict[str, Engine]:
    """Return engines of models `a` and `b`."""
    return {name: make_engine(runtime, doublings[name], name=name) for name in "ab"}


# --- pausing -----------------------------------------------------------------------------------------------


def test_a_drained_model_answers_what_waits_and_refuses_what_comes(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator
) -> None:
    """A drained model answers its queue and refuses new requests; other models are served."""
    runtime.device.gate.clear()
    executing = send_one(engines["a"])
    runtime.device.gate.wait_until_held()
    waiting = send_one(engines["a"])
    wait_until(lambda: queued("a") == 1)

    assert operator.pause("a", "drain") == {}

    assert refused(
        answer_of(send_one(engines["a"])), FakeError.UNAVAILABLE, "[rsrv:PAUSED] the model is paused"
    )
    runtime.device.gate.set()
    assert [answered(request) for request in (executing, waiting, send_one(engines["b"]))] == [1, 1, 2]
    assert operator.pause("a", None) == {}
    assert answered(send_one(engines["a"])) == 1


def test_a_rejecting_model_refuses_what_waits_and_what_comes(
    engines: dict[str, Engine], operator: Operator
) -> None:
    """A model that is paused with `reject` refuses the waiting and the new requests with the same message."""
    operator.pause("a", "hold")
    waiting = send_one(engines["a"])
    wait_until(lambda: queued("a") == 1)

    operator.pause("a", "reject")

    assert all(
        refused(answer_of(request), FakeError.UNAVAILABLE, "[rsrv:PAUSED]")
        for request in (waiting, send_one(engines["a"]))
    )


def test_a_pause_of_all_holds_for_models_that_come_later(
    runtime: Runtime, doublings: dict[str, Path], operator: Operator
) -> None:
    """A pause of all models also applies to models that register later.

    It does not apply to a model that an operator has continued, until all models are paused again.
    """
    operator.pause(None, "reject")
    made = {name: make_engine(runtime, doublings[name], name=name) for name in "ab"}
    operator.pause("b", None)

    assert refused(answer_of(send_one(made["a"])), FakeError.UNAVAILABLE, "[rsrv:PAUSED]")
    assert answered(send_one(made["b"])) == 2
    made["b"].close()
    made["b"] = make_engine(runtime, doublings["b"], name="b")
    assert answered(send_one(made["b"])) == 2
    operator.pause(None, "reject")
    assert refused(answer_of(send_one(made["b"])), FakeError.UNAVAILABLE, "[rsrv:PAUSED]")


# --- weights -----------------------------------------------------------------------------------------------


def test_weights_are_evicted_and_prefetched_on_command(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator
) -> None:
    """Commands evict and prefetch a model's weights without a request. The weights of a pinned model stay."""
    operator.keep("b", "device")
    with Watcher(runtime) as watcher:
        assert operator.evict("a") == {"models": ["a"]}
        assert operator.do("evict") == {"models": []}
        watcher.until(lambda: watcher.is_("a", weights="absent"))
        wait_until(lambda: runtime.device.resident == 1)

        assert operator.prefetch("a") == {}

        watcher.until(lambda: watcher.is_("a", weights="resident"))
        assert watcher.history("b", "weights") == []


def test_a_model_that_is_not_built_yet_is_wanted_until_it_is(
    runtime: Runtime, doublings: dict[str, Path], operator: Operator
) -> None:
    """A model that is being built can be paused, and its weights are loaded as soon as it is built."""
    runtime.device.compiles.clear()
    registering = register(runtime, "a", doublings["a"])
    runtime.device.compiles.wait_until_held()

    assert operator.do("prefetch", model="a")["code"] == "FAILED_PRECONDITION"
    assert (operator.prefetch("a"), operator.pause("a", "drain")) == ({}, {})

    runtime.device.compiles.set()
    registering.join()
    with Watcher(runtime) as watcher:
        watcher.until(lambda: watcher.is_("a", weights="resident", paused="drain"))


def test_in_explicit_mode_only_what_was_fetched_is_served(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """In explicit mode, requests are refused unless a prefetch or a pin has made the model resident."""
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}\nlifecycle: {mode: explicit}"))
    engine = make_engine(runtime, doublings["a"], name="a")
    with Watcher(runtime) as watcher, Operator(runtime) as operator:
        watcher.until(lambda: watcher.is_("a", weights="absent", state="ready"))
        assert refused(answer_of(send_one(engine)), FakeError.UNAVAILABLE, "[rsrv:NOT_RESIDENT]")

        operator.prefetch("a")
        watcher.until(lambda: watcher.is_("a", weights="resident"))
        assert answered(send_one(engine)) == 1

        operator.evict("a")
        assert refused(answer_of(send_one(engine)), FakeError.UNAVAILABLE, "[rsrv:NOT_RESIDENT]")
        watcher.until(lambda: watcher.is_("a", weights="absent"))
        operator.keep("a", "device")
        watcher.until(lambda: watcher.is_("a", weights="resident"))
        assert answered(send_one(engine)) == 1


@pytest.mark.parametrize("newer", ["a", "c"])
def test_in_explicit_mode_a_version_that_takes_over_is_where_the_older_one_was(
    start_runtime: StartRuntime, doublings: dict[str, Path], newer: str
) -> None:
    """In explicit mode, a newer version or another stub of a resident model is resident as well, until the model is evicted."""
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}\nlifecycle: {mode: explicit}"))
    old = make_engine(runtime, doublings["a"], name="a")
    with Watcher(runtime) as watcher, Operator(runtime) as operator:
        operator.prefetch("a")
        watcher.until(lambda: watcher.is_("a", weights="resident"))
        if newer == "a":
            old.close()
            wait_until(lambda: not runtime.device.resident)
        new = make_engine(runtime, doublings[newer], name="a")
        old.close()
        assert answered(send_one(new)) == {"a": 1, "c": 3}[newer]

        operator.evict("a")
        new.close()
        wait_until(lambda: not runtime.device.resident)
        newest = make_engine(runtime, doublings["b"], name="a")
        assert refused(answer_of(send_one(newest)), FakeError.UNAVAILABLE, "[rsrv:NOT_RESIDENT]")


def test_in_explicit_mode_what_was_unpinned_does_not_come_back(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """In explicit mode, the weights of an unpinned model leave the device, even after a prefetch.

    Its next version is not resident either.
    """
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}\nlifecycle: {mode: explicit}"))
    make_engine(runtime, doublings["a"], name="a")
    with Watcher(runtime) as watcher, Operator(runtime) as operator:
        operator.prefetch("a")
        operator.keep("a", "device")
        watcher.until(lambda: watcher.is_("a", weights="resident", residency="device"))
        operator.keep("a", "system")
        watcher.until(lambda: watcher.is_("a", weights="absent"))
        new = make_engine(runtime, doublings["c"], name="a")

        assert refused(answer_of(send_one(new)), FakeError.UNAVAILABLE, "[rsrv:NOT_RESIDENT]")


# --- policy ------------------------------------------------------------------------------------------------


def test_a_shorter_queue_holds_at_once_and_for_versions_that_come_later(
    runtime: Runtime, doublings: dict[str, Path], engines: dict[str, Engine], operator: Operator
) -> None:
    """A shorter queue limit applies at once, and to later versions of the model. The value null restores the general limit."""
    assert operator.want("a", max_queue_depth=1) == {}
    newer = make_engine(runtime, doublings["c"], name="a")
    runtime.device.gate.clear()
    occupying = send_one(engines["b"])
    runtime.device.gate.wait_until_held()
    for engine in (engines["a"], newer):
        send_one(engine)
        assert refused(answer_of(send_one(engine)), FakeError.UNAVAILABLE, "[rsrv:QUEUE_FULL]")

    operator.want("a", max_queue_depth=None)

    more = send_one(newer)
    runtime.device.gate.set()
    assert (answered(occupying), answered(more)) == (2, 3)


def test_a_delay_and_a_share_are_taken(engines: dict[str, Engine], operator: Operator) -> None:
    """A request for a model with a long delay waits until the delay is removed. Other models are not delayed."""
    assert operator.want("a", weight=2, max_delay_us=60_000_000) == {}
    waiting = send_one(engines["a"])
    wait_until(lambda: queued("a") == 1)
    assert answered(send_one(engines["b"])) == 2

    assert operator.want("a", max_delay_us=0) == {}

    assert answered(waiting) == 1


# --- asking ------------------------------------------------------------------------------------------------


def test_a_ping_says_which_runtime_and_how_much_has_changed(runtime: Runtime, operator: Operator) -> None:
    """The answer to a ping has the runtime's instance and the revision, which are the same as a watcher's."""
    with Watcher(runtime) as watcher:
        assert operator.do("ping") == {"instance": watcher.instance, "revision": watcher.revision}


def test_the_timeline_has_what_the_device_did(engines: dict[str, Engine], operator: Operator) -> None:
    """The timeline has the load and the warm-up of each model, an execution, and an eviction."""
    assert answered(send_one(engines["a"])) == 1
    assert operator.do("evict", model="b") == {"models": ["b"]}

    spans = [(kind, model.partition("@")[0]) for kind, model, *_ in operator.do("timeline")["spans"]]

    first = [span for model in "ab" for span in [("load", model), ("warm_up", model)]]
    assert spans == [*first, ("execute", "a"), ("evict", "b")]


def test_the_history_of_all_versions(
    runtime: Runtime, doublings: dict[str, Path], engines: dict[str, Engine], operator: Operator
) -> None:
    """A model's history has the records of all its versions by key, with their states and weights.

    It has no records of other models.
    """
    make_engine(runtime, doublings["c"], name="a")

    answer = operator.do("history", model="a")

    assert len(answer["histories"]) == 2
    for key, history in answer["histories"].items():
        assert key.startswith("a@")
        assert history["waits_for"] == ""
        records = history["records"]
        assert all(abs(answer["unix_s"] + record["at"] - time.time()) < 3600 for record in records)
        changes = [(record["what"], record.get("why")) for record in records]
        assert [change for change in changes if change[0].startswith("model ")] == [
            ("model reading", "registered"),
            ("model compiling", "modules read"),
            ("model warming up", "compiled"),
            ("model ready", "warmed up"),
        ]
        assert ("weights queued", "required") in changes
    assert {model["weights_state"] for model in read_status(os.getpid())["models"].values()} == {"resident"}


def test_requests_are_found_by_their_id_and_by_number(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator
) -> None:
    """A client's id finds all its requests, waiting or answered. The number of a request finds this one alone."""
    runtime.device.gate.clear()
    occupying = send_one(engines["b"])
    runtime.device.gate.wait_until_held()
    requests = [FakeRequest({"x": ramp(1, 1.0)}, id=id) for id in ("ours", "theirs", "ours")]
    engines["a"].execute(requests)
    wait_until(lambda: queued("a") == 3)

    waiting = operator.do("find", request="ours")["requests"]
    assert [(entry["outcome"], entry["batch"]) for entry in waiting] == [("waiting", None)] * 2
    assert all(entry["key"].startswith("a@") and entry["behind"] == ["b"] for entry in waiting)

    runtime.device.gate.set()
    assert (answered(occupying), answered(requests[0])) == (2, 1)
    entries = operator.do("find", request="ours")["requests"]
    assert {entry["number"] for entry in entries} == {entry["number"] for entry in waiting}
    assert {entry["outcome"] for entry in entries} == {"answered"}
    assert operator.do("find", request=entries[0]["number"])["requests"] == entries[:1]
    slowest = operator.do("slowest", model="a")["requests"]
    assert [entry["seconds"] for entry in slowest] == sorted(
        (entry["seconds"] for entry in slowest), reverse=True
    )
    assert len(slowest) == 3
    assert [operator.do("find", request=none)["requests"] for none in ("", "9" * 5000 + ".1", "1.²")] == [
        []
    ] * 3


def test_the_calls_of_a_run_are_found_by_the_id_of_its_request(
    runtime: Runtime, start_meta: StartMeta, operator: Operator
) -> None:
    """The id of a meta model's request finds the calls of its run."""
    request = FakeRequest({"x": ramp(1, 1.0)}, id="ours")
    thread = send(start_meta(runtime, chain), request)
    assert answer_of(request).error is None
    thread.join()

    entries = operator.do("find", request="ours")["requests"]
    assert sorted((entry["key"][:2], entry["call"]) for entry in entries) == [("a@", True), ("b@", True)]


def test_a_long_history_comes_in_a_document(
    runtime: Runtime, doublings: dict[str, Path], operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long history arrives as a document, because frames are short."""
    name = "n" * 255
    registering = register(runtime, name, doublings["a"])
    registering.join()

    with Watcher(runtime) as watcher:
        assert watcher.is_(name, state="ready")
        operator.pause(name, "hold")
        watcher.until(lambda: watcher.is_(name, paused="hold"))
    monkeypatch.setattr("rsrv.wire.frames.MAX_FRAME", 500)
    (key,) = operator.do("history", model=name)["histories"]
    monkeypatch.undo()
    assert key.startswith(name)


def test_the_record_says_what_there_is_to_do(start_runtime: StartRuntime, doublings: dict[str, Path]) -> None:
    """The status has each model's queue and cost, and the device's backlog and budget."""
    runtime = start_runtime(
        load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{weight_budget_bytes: {10 * _BYTES}}}")
    )
    engine = make_engine(runtime, doublings["a"], name="a")
    idle = read_status(os.getpid())
    assert (idle["backlog_s"], idle["memory"]["budget_bytes"], idle["memory"]["physical_bytes"]) == (
        0,
        120,
        12,
    )
    model = idle["models"]["a"]
    assert model["cost_s"] == pytest.approx(0.001 / 8)
    assert (model["queued"], model["executing"], model["weights"]) == (0, 0, "resident")
    assert (model["pinned"], model["device_bytes"], model["max_rows"]) == (False, _BYTES, 8)
    assert (model["batch_input"], model["sequences"]) == ({"name": "x", "axis": 0}, {})
    runtime.device.gate.clear()
    request = send_one(engine)
    runtime.device.gate.wait_until_held()
    waiting = send_one(engine)
    wait_until(lambda: queued("a") == 1)
    busy = read_status(os.getpid())
    assert busy["backlog_s"] > 0
    assert (busy["models"]["a"]["executing"], busy["models"]["a"]["queued"]) == (1, 1)
    runtime.device.gate.set()
    assert (answered(request), answered(waiting)) == (1, 1)
    done = read_status(os.getpid())
    assert (done["models"]["a"]["useful_rows"], done["models"]["a"]["outcomes"]["answered"]) == (2, 2)
    with Operator(runtime) as operator:
        assert done["instance"] == operator.do("ping")["instance"]


def test_a_record_can_be_asked_for_its_changes(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """A status request that names an earlier status returns only the changed models.

    After a new model was added, it returns all models again.
    """
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}"))
    a, _ = (make_engine(runtime, doublings[name], name=name) for name in "ab")
    with Operator(runtime) as operator:
        first = read_status(os.getpid())
        assert (first["since"], first["models"].keys()) == (0, {"a", "b"})
        second = read_status(os.getpid(), since=first["next"])
        assert (second["since"], second["models"]) == (first["next"], {})

        assert answered(send_one(a)) == 1
        third = read_status(os.getpid(), since=second["next"])
        assert {name: model["outcomes"]["answered"] for name, model in third["models"].items()} == {"a": 1}
        operator.evict("b")
        wait_until(lambda: read_status(os.getpid())["models"]["b"]["weights"] == "absent")
        fourth = read_status(os.getpid(), since=third["next"])
        assert {name: model["weights"] for name, model in fourth["models"].items()} == {"b": "absent"}
        again = read_status(os.getpid(), since=first["next"])
        assert again["models"].keys() == {"a", "b"}
        assert again["since"] == first["next"]

        make_engine(runtime, doublings["a"], name="late")
        whole = read_status(os.getpid(), since=again["next"])
        assert (whole["since"], whole["models"].keys()) == (0, {"a", "b", "late"})
        assert read_status(os.getpid(), since=whole["next"] + 5)["since"] == 0


def test_weights_on_a_cpu_take_half_of_the_hosts_memory(operator: Operator) -> None:
    """By default, weights on a CPU may take half of the memory that the server's processes leave."""
    half = (total_memory() - (256 << 20)) // 2
    # The budget is None until the device is up.
    wait_until(lambda: read_status(os.getpid())["memory"]["budget_bytes"] is not None)

    load = read_status(os.getpid())

    assert (load["memory"]["physical_bytes"], load["memory"]["budget_bytes"]) == (0, half)
    assert (load["backlog_s"], load["models"], load["metas"]) == (0, {}, {})


def test_of_two_versions_the_ready_one_shows(
    runtime: Runtime, doublings: dict[str, Path], operator: Operator
) -> None:
    """If a model has two versions, the status shows the ready one while the other one warms up or leaves."""
    old = make_engine(runtime, doublings["a"], name="m")
    status = read_status(os.getpid())["models"]["m"]
    runtime.device.uploads.clear()
    registering = register(runtime, "m", doublings["b"])
    runtime.device.uploads.wait_until_held()

    assert read_status(os.getpid())["models"]["m"] == status
    assert read_status(os.getpid())["models"]["m"]["weights"] == "resident"

    runtime.device.uploads.set()
    registering.join()
    runtime.device.gate.clear()
    request = send_one(old)
    runtime.device.gate.wait_until_held()
    old.close()
    assert read_status(os.getpid())["models"]["m"]["executing"] == 1
    runtime.device.gate.set()
    del request


# --- profiles ----------------------------------------------------------------------------------------------


def test_a_profile_is_recorded_in_a_private_directory(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator, tmp_path: Path
) -> None:
    """A profile is recorded in a private directory. A second profile at the same time is refused."""
    for name in ("first", "second"):
        directory = tmp_path / "profiles" / name
        assert operator.do("profile", directory=str(directory)) == {}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert (directory / "trace").exists()
        again = operator.do("profile", directory=str(tmp_path / "third"))
        assert again == {
            "error": "a profile is already being recorded: stop it first",
            "code": "FAILED_PRECONDITION",
        }
        assert operator.do("profile") == {}
    assert operator.do("profile") == {"error": "no profile is being recorded", "code": "FAILED_PRECONDITION"}


def test_commands_that_follow_a_profile_are_answered_after_it(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator, tmp_path: Path
) -> None:
    """Commands after a profile are answered in order on their connection. Other connections do not wait for the profile."""
    runtime.device.profiles.clear()
    operator.send(command="profile", directory=str(tmp_path / "p"))
    operator.send(command="ping")
    operator.send(command="profile")
    operator.send(command="nonsense")
    runtime.device.profiles.wait_until_held()

    with Operator(runtime) as other:
        assert other.do("profile")["code"] == "FAILED_PRECONDITION"
        assert "instance" in other.do("ping")
    assert answered(send_one(engines["a"])) == 1

    runtime.device.profiles.set()
    first, ping, second, nonsense = (operator.hear() for _ in range(4))
    assert (first, second) == ({}, {})
    assert "instance" in ping
    assert nonsense["code"] == "INVALID_ARGUMENT"


def test_a_profile_outlives_its_client(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator, tmp_path: Path
) -> None:
    """A profile continues after its client has left, and another client can end it."""
    runtime.device.profiles.clear()
    with Operator(runtime) as other:
        other.send(command="profile", directory=str(tmp_path / "p"))
        runtime.device.profiles.wait_until_held()
    runtime.device.profiles.set()
    wait_until(lambda: operator.do("profile") == {})


@pytest.mark.parametrize(
    ("directory", "code"),
    [("relative", "INVALID_ARGUMENT"), ("", "INVALID_ARGUMENT"), ("/proc/nobody", "FAILED_PRECONDITION"),
     ("/\0", "INVALID_ARGUMENT"), ("/" + "x" * 5000, "FAILED_PRECONDITION"), ("/tmp", "INVALID_ARGUMENT")],
)  # fmt: skip
def test_a_profile_goes_into_a_new_directory_only(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator, directory: str, code: str
) -> None:
    """A profile can only be recorded into a new directory. For another one the command is refused, and no profile begins."""
    assert operator.do("profile", directory=directory)["code"] == code
    assert operator.do("profile")["code"] == "FAILED_PRECONDITION"


def test_a_profile_without_a_thread_for_it_bars_no_later_one(
    runtime: Runtime,
    engines: dict[str, Engine],
    operator: Operator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the system has no thread for a profile, the answer says so. The next profile can be recorded."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
        refusal = operator.do("profile", directory=str(tmp_path / "p"))
    assert (refusal["code"], "no thread" in refusal["error"]) == ("INTERNAL", True)
    assert operator.do("profile", directory=str(tmp_path / "p")) == {}


def test_a_device_that_cannot_be_profiled_serves_on(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator, tmp_path: Path
) -> None:
    """If the device fails to begin or end a profile, the answer has the reason.

    The next attempt may succeed, and models are served.
    """
    runtime.device.fail_next("profile", error=RuntimeError("busy"))
    refusal = operator.do("profile", directory=str(tmp_path / "p"))
    assert refusal == {"error": "RuntimeError: busy", "code": "INTERNAL"}

    assert operator.do("profile", directory=str(tmp_path / "q")) == {}
    runtime.device.fail_next("profile", error=RuntimeError("lost"))
    assert operator.do("profile")["code"] == "INTERNAL"
    assert operator.do("profile")["code"] == "FAILED_PRECONDITION"
    assert answered(send_one(engines["a"])) == 1


def test_more_commands_than_may_wait_end_the_connection(
    runtime: Runtime, engines: dict[str, Engine], tmp_path: Path
) -> None:
    """A connection with too many waiting commands is closed. Other connections are not."""
    runtime.device.profiles.clear()
    with Operator(runtime) as greedy, Operator(runtime) as other:
        greedy.send(command="profile", directory=str(tmp_path / "p"))
        with pytest.raises((Closed, OSError)):  # noqa: PT012 - while they are sent, or after that
            for _ in range(200):
                greedy.send(command="ping")
            greedy.hear()
        assert "instance" in other.do("ping")
        runtime.device.profiles.set()
        wait_until(lambda: other.do("profile") == {})


# --- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({}, "INVALID_ARGUMENT", "there is no command None; known are ping, compact"),
        ({"command": "evcit"}, "INVALID_ARGUMENT", "did you mean 'evict'?"),
        ({"command": ["ping"]}, "INVALID_ARGUMENT", "there is no command"),
        ({"command": "ping", "pong": 1}, "INVALID_ARGUMENT", "pong: unknown key"),
        ({"command": "evict", "model": "z"}, "NOT_FOUND", "there is no model 'z'"),
        ({"command": "prefetch", "model": None}, "INVALID_ARGUMENT", "model: "),
        ({"command": "abort", "request": 7}, "INVALID_ARGUMENT", "request: "),
        ({"command": "restart"}, "INVALID_ARGUMENT", "drain_s: missing"),
        ({"command": "restart", "drain_s": -1}, "INVALID_ARGUMENT", "a number of seconds, at least 0 (found -1)"),
        ({"command": "restart", "drain_s": True}, "INVALID_ARGUMENT", "drain_s: must be a number"),
        ({"command": "restart", "drain_s": 1, "force": "yes"}, "INVALID_ARGUMENT", "force: must be true or false (found 'yes')"),
        ({"command": "x" * 100_000}, "INVALID_ARGUMENT", "there is no command 'xxx"),
        ({"command": "history", "model": "x" * 100_000}, "NOT_FOUND", "there is no model 'xxx"),
        ({"command": "evict", "model": ["x"] * 10_000}, "INVALID_ARGUMENT", "model: "),
        ({"command": "ping"} | {f"k{i}": i for i in range(5_000)}, "INVALID_ARGUMENT", "k0: unknown key"),
    ],
)  # fmt: skip
def test_what_is_no_command_is_refused_with_its_reason(
    engines: dict[str, Engine], fields: dict[str, Any], code: str, text: str
) -> None:
    """A wrong command is refused with a short reason, and it changes nothing."""
    before = command(os.getpid(), {"command": "ping"})

    with pytest.raises(Refused) as caught:
        command(os.getpid(), fields)

    assert caught.value.code == code
    assert text in str(caught.value)
    assert len(str(caught.value)) <= 4000
    assert command(os.getpid(), {"command": "ping"}) == before
    assert answered(send_one(engines["a"])) == 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20)
    | st.sampled_from(["a", "meta", "drain", "hold", "device", "/x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
keys = st.sampled_from(["model", "instance", "revision", "since", "document", "request"])
names = st.sampled_from(
    [
        "ping",
        "follow",
        "compact",
        "prefetch",
        "evict",
        "abort",
        "history",
        "slowest",
        "find",
        "load",
    ]
)


@given(
    st.lists(
        st.builds(
            lambda command, fields: {"command": command, **fields},
            names | values,
            st.dictionaries(keys | st.text(max_size=8), values, max_size=4),
        ),
        max_size=10,
    )
)
@example([{"command": "follow", "instance": "x", "revision": 10**4000, "document": {}}])
@settings(FEW_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_object_gets_one_answer(
    runtime: Runtime, engines: dict[str, Engine], operator: Operator, commands: list[dict[str, Any]]
) -> None:
    """Each JSON object that is sent as a command gets one answer, and the runtime never fails."""
    for fields in commands:
        operator.send(**fields)
        answer = operator.hear()
        assert answer.get("code") in (None, "NOT_FOUND", "INVALID_ARGUMENT", "FAILED_PRECONDITION"), answer
        assert ("error" in answer) == ("code" in answer)
    operator.pause(None, None)
    assert runtime.alive


def test_a_frame_that_holds_no_object_ends_its_connection_only(runtime: Runtime, operator: Operator) -> None:
    """A frame without a JSON object ends its connection, because no operator sends that."""
    with Operator(runtime) as other:
        other._greeted.sock.send(pack_json(Kind.COMMAND, {})[:8] + json.dumps([1]).encode())
        with pytest.raises(Closed):
            other.hear()
    assert "instance" in operator.do("ping")
