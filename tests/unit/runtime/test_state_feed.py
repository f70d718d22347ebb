"""The updates of watchers: every change, once and in order."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rsrv.runtime.catalog import FeedEntry, StateFeed
from rsrv.runtime.crash_history import BlackBox, Death
from rsrv.settings import load_settings
from rsrv.stub.connection import Rejected, RuntimeConnection
from rsrv.wire.frames import Kind, pack_json, read_header, unpack_json
from rsrv.wire.memory import read_document
from rsrv.wire.socket import send
from rsrv_bundle import read_bundle
from tests.builders import FEW_EXAMPLES, broken_bundle, write_meta
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.engines import answered, make_engine, send_one
from tests.unit.runtime.watchers import Operator, Watcher

#: Bytes of a model of `doublings`.
_BYTES = 12


def register(runtime: Runtime, name: str, bundle: Path) -> RuntimeConnection:
    """Register a model, and return the connection. Raises Rejected."""
    lane = runtime.connect()
    lane.register({"model": name, "bundle": str(bundle)})
    return lane


def test_a_command_is_answered_after_its_changes(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """A command is answered after the changes that it causes, so that an operator sees them after the answer."""
    make_engine(runtime, doublings["a"], name="a")
    document = {**runtime.loop._catalog.policy.document, "paused": "hold"}
    with Operator(runtime) as operator:
        send(operator._greeted.sock, pack_json(Kind.WATCH, {}))
        operator.send(command="follow", instance="ours", revision=1, since=None, document=document)
        frames: list[tuple[Kind, dict[str, Any]]] = []
        while not frames or frames[-1][0] is not Kind.COMMANDED:
            frame, fds = operator._greeted.receiver.receive()
            frames.append((read_header(frame)[0], read_document(fds[0]) if fds else unpack_json(frame)))
            for fd in fds:
                os.close(fd)

    kind, change = frames[-2]
    assert (kind, change["entry"]["paused"]) == (Kind.STATE, "hold")


def test_a_model_comes_serves_and_goes(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """Each change of a model's state is sent once, and no entry is left when the model is gone."""
    with Watcher(runtime) as watcher:
        assert (watcher.revision, watcher.entries) == (0, {})

        engine = make_engine(runtime, doublings["a"], name="a")
        watcher.until(lambda: watcher.is_("a", state="ready"))

        digest = read_bundle(doublings["a"]).digest
        assert watcher.entries == {
            f"a@{digest[:12]}": {
                "name": "a",
                "kind": "model",
                "digest": digest,
                "state": "ready",
                "error": None,
                "residency": "system",
                "weights": "resident",
                "stubs": [os.getpid()],
                "models": [],
                "paused": None,
            }
        }
        engine.close()
        watcher.until(lambda: not watcher.entries)
        assert watcher.history("a", "state") == ["loading", "ready", "leaving", None]
        assert watcher.history("a", "stubs") == [[], [os.getpid()], [], None]
        assert watcher.history("a", "weights") == ["absent", "loading", "resident", "absent", None]


def test_weights_that_move_are_seen_to_move(start_runtime: StartRuntime, doublings: dict[str, Path]) -> None:
    """Each load and each eviction of weights is a change. The device has room for one of two models."""
    runtime = start_runtime(
        load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{weight_budget_bytes: {_BYTES}}}")
    )
    engines = [make_engine(runtime, doublings[name], name=name) for name in "ab"]
    with Watcher(runtime) as watcher:
        watcher.until(lambda: watcher.is_("b", weights="resident"))

        for w, engine in enumerate(engines, 1):
            assert answered(send_one(engine)) == w
        watcher.until(lambda: len(watcher.seen) == 6)

        assert watcher.history("a", "weights") == ["loading", "resident", "absent"]
        assert watcher.history("b", "weights") == ["absent", "loading", "resident"]


def test_a_failed_model_stays_to_be_seen_until_a_newer_one_comes(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A failed model's entry stays with its reason until a newer version of the model is loaded."""
    with Watcher(runtime) as watcher:
        for name in "ab":
            with pytest.raises(Rejected) as caught:
                register(runtime, name, broken_bundle(tmp_path / name, doublings[name]))
            watcher.until(lambda name=name: watcher.is_(name, state="failed"))  # type: ignore[misc]
            assert watcher.is_(name, error=str(caught.value), stubs=[], weights="absent")
            assert watcher.history(name, "state") == ["loading", "failed"]

        lane = register(runtime, "a", doublings["a"])
        watcher.until(lambda: len([e for e in watcher.entries.values() if e["name"] == "a"]) == 1)
        watcher.until(lambda: watcher.is_("a", state="ready"))
        lane.close()
        watcher.until(lambda: len(watcher.entries) == 1)
        assert watcher.is_("b", state="failed")


def test_a_bundle_that_cannot_be_read_is_a_failed_model(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """If a bundle cannot be read, its model gets a failed entry, unless another version serves.

    The failed entry is removed when a good version registers.
    """
    torn = shutil.copytree(doublings["a"], tmp_path / "torn")
    (torn / "weights.safetensors").write_bytes(b"")
    with Watcher(runtime) as watcher:
        with pytest.raises(Rejected) as caught:
            register(runtime, "a", torn)
        watcher.until(lambda: watcher.is_("a", state="failed", error=str(caught.value)))

        lane = register(runtime, "a", doublings["a"])
        watcher.until(lambda: watcher.is_("a", state="ready"))
        with pytest.raises(Rejected):
            register(runtime, "a", torn)
        lane.close()
        watcher.until(lambda: not watcher.entries)


def test_a_bundle_with_many_faults_is_a_failed_model(
    runtime: Runtime, doubling: Path, tmp_path: Path
) -> None:
    """If the reason of a failure is long, watchers get the same shortened text as the stub."""
    faulty = shutil.copytree(doubling, tmp_path / "faulty")
    with (faulty / "manifest.yaml").open("a") as manifest:
        manifest.writelines(f"no_such_section_{n}: 1\n" for n in range(100))
    with Watcher(runtime) as watcher:
        with pytest.raises(Rejected) as caught:
            register(runtime, "faulty", faulty)
        watcher.until(lambda: watcher.is_("faulty", state="failed", error=str(caught.value)))


def test_what_failed_can_come_again_as_it_is(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """If a failed version is loaded again, it keeps its entry, which becomes "loading" and then "ready"."""
    runtime.device.fail = "told to"
    with Watcher(runtime) as watcher:
        with pytest.raises(Rejected, match="told to"):
            register(runtime, "a", doublings["a"])
        runtime.device.fail = None
        register(runtime, "a", doublings["a"])

        watcher.until(lambda: watcher.is_("a", state="ready"))

        assert watcher.history("a", "state") == ["loading", "failed", "loading", "ready"]
        assert watcher.is_("a", error=None)


def test_two_versions_of_a_model_are_two_entries(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """Two versions of a model have two entries. When the old version leaves, only its entry is removed."""
    old = register(runtime, "m", doublings["a"])
    with Watcher(runtime) as watcher:
        register(runtime, "m", doublings["b"])
        digests = [read_bundle(doublings[name]).digest for name in "ab"]
        keys = [f"m@{digest[:12]}" for digest in digests]
        watcher.until(lambda: watcher.entries.get(keys[1], {}).get("state") == "ready")
        assert watcher.entries[keys[0]]["state"] == "ready"

        old.close()
        watcher.until(lambda: set(watcher.entries) == {keys[1]})


def test_a_meta_model_is_ready_when_all_that_it_calls_are(
    runtime: Runtime, doublings: dict[str, Path], start_meta: StartMeta
) -> None:
    """A meta model's entry names its callees, and is ready when they are. Callees have no stubs."""
    with Watcher(runtime) as watcher:
        engine = start_meta(runtime, lambda inputs, call: {"y": call("a", inputs)["y"]}, "ab")
        watcher.until(lambda: watcher.is_("meta", state="ready"))

        keys = [f"{name}@{read_bundle(doublings[name]).digest[:12]}" for name in "ab"]
        assert watcher.is_(
            "meta", kind="meta", models=keys, residency=None, weights=None, stubs=[os.getpid()]
        )
        assert all(watcher.is_(name, stubs=[], state="ready") for name in "ab")
        assert watcher.history("meta", "state") == ["loading", "ready"]
        engine.close()
        watcher.until(lambda: not watcher.entries)
        assert watcher.history("meta", "state")[-1] is None


def test_a_meta_model_fails_with_what_it_calls(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """If a callee fails, its meta model fails with the same reason. The other callees leave unless they are used."""
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", ["a", "b"])
    calls = {"a": str(doublings["a"]), "b": str(broken_bundle(tmp_path / "b", doublings["b"]))}
    with Watcher(runtime) as watcher:
        with pytest.raises(Rejected) as caught:
            runtime.connect().register({"model": "meta", "bundle": str(meta), "calls": calls})

        watcher.until(lambda: watcher.is_("meta", state="failed"))
        assert watcher.is_("meta", error=str(caught.value), stubs=[])
        assert watcher.is_("b", state="failed")
        watcher.until(lambda: watcher.of("a") is None)
        assert watcher.history("meta", "state") == ["loading", "failed"]


def test_what_is_not_tried_any_more_is_seen_to_have_failed(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A model that is refused because of earlier deaths has one failed entry, however often it is loaded.

    A meta model that calls this model has a failed entry as well.
    """
    box = BlackBox(tmp_path)
    key = f"a@{read_bundle(doublings['a']).digest[:12]}"
    box.history.add(key, Death("LOADING", "hung", 0.0))
    runtime = start_runtime(blackbox=box)
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", ["a"])
    with Watcher(runtime) as watcher:
        for _ in range(2):
            with pytest.raises(Rejected) as caught:
                register(runtime, "a", doublings["a"])
        calls = {"a": str(doublings["a"])}
        with pytest.raises(Rejected, match="it hung"):
            runtime.connect().register({"model": "meta", "bundle": str(meta), "calls": calls})

        watcher.until(lambda: watcher.is_("meta", state="failed"))

        error = watcher.entries[key]["error"]
        assert str(caught.value) == f"{key}: {error}"
        assert watcher.history("a", "state") == ["failed"]
        assert watcher.is_("meta", error=f"{key}: {error}", models=[key])


def test_what_operators_change_is_told(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """Each pause and each change of residency is one change. A command that repeats another one causes no change."""
    make_engine(runtime, doublings["a"], name="a")
    with Watcher(runtime) as watcher, Operator(runtime) as operator:
        for _ in range(2):
            operator.pause("a", "hold")
            operator.keep("a", "device")
        operator.pause(None, None)
        watcher.until(lambda: watcher.is_("a", paused=None, residency="device"))

        assert [change for _, change in watcher.seen] == [
            {"paused": "hold"},
            {"residency": "device"},
            {"paused": None},
        ]


def test_watching_again_sends_another_snapshot(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """A second WATCH on a connection sends another snapshot. Each change is still sent once."""
    with Watcher(runtime) as watcher:
        send(watcher._greeted.sock, pack_json(Kind.WATCH, {}))
        assert watcher._receive() == {"instance": watcher.instance, "revision": 0, "entries": {}}

        register(runtime, "a", doublings["a"])

        watcher.until(lambda: watcher.is_("a", state="ready"))


_NAMES = "abm"
steps = st.one_of(
    st.tuples(st.just("come"), st.sampled_from("abm"), st.sampled_from("abcx")),
    st.tuples(st.just("go"), st.integers(0, 5)),
    st.tuples(st.just("meta"), st.sampled_from(["ab", "bc"])),
    st.tuples(
        st.just("pause"), st.sampled_from([*_NAMES, None]), st.sampled_from(["drain", "hold", "reject"])
    ),
    st.tuples(st.just("continue"), st.sampled_from([*_NAMES, None])),
    st.tuples(
        st.just("residency"), st.sampled_from(_NAMES), st.sampled_from(["unpinned", "system", "device"])
    ),
    st.tuples(st.just("prefetch"), st.sampled_from(_NAMES)),
    st.tuples(st.just("evict"), st.sampled_from([*_NAMES, None])),
    st.tuples(st.just("compact")),
)


@given(st.lists(steps, max_size=20))
@settings(FEW_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changes_lead_to_what_a_new_watcher_is_given(
    start_runtime: StartRuntime,
    doublings: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    done: list[tuple[Any, ...]],
) -> None:
    """After any steps, a watcher's changes add up to the snapshot of a new watcher."""
    folder = tmp_path_factory.mktemp("models")
    bundles = {**doublings, "x": broken_bundle(folder / "x", doublings["a"])}
    runtime = start_runtime(load_settings(f"runtime: {{weight_budget_bytes: {_BYTES}}}"))
    lanes: list[RuntimeConnection] = []
    with ExitStack() as stack:
        watcher = stack.enter_context(Watcher(runtime))
        operator = stack.enter_context(Operator(runtime))
        for number, step in enumerate(done):
            match step:
                case ("come", name, bundle):
                    lanes.append(ask_for(runtime, {"model": name, "bundle": str(bundles[bundle])}))
                case ("meta", called):
                    meta = write_meta(folder / f"meta{number}", "def run(inputs, call): ...", list(called))
                    calls = {name: str(doublings[name]) for name in called}
                    lanes.append(ask_for(runtime, {"model": "meta", "bundle": str(meta), "calls": calls}))
                case ("go", index):
                    if index < len(lanes):
                        lanes.pop(index).close()
                case ("pause", name, mode):
                    operator.pause(name, mode)
                case ("residency", name, residency):
                    operator.keep(name, residency)
                case ("continue", name):
                    operator.pause(name, None)
                case ("prefetch", name):
                    operator.prefetch(name)
                case ("compact",):
                    operator.do("compact")
                case (command, name):
                    operator.do(command, model=name)
            with Watcher(runtime) as fresh:
                watcher.catch_up(fresh.revision)
                assert (watcher.instance, watcher.entries) == (fresh.instance, fresh.entries)
        for lane in lanes:
            lane.close()
        watcher.until(lambda: all(entry["state"] == "failed" for entry in watcher.entries.values()))
    runtime.stop()


def ask_for(runtime: Runtime, registration: dict[str, Any]) -> RuntimeConnection:
    """Return a connection that has sent a registration, without waiting for the answer."""
    lane = RuntimeConnection(runtime.open())
    assert lane._send(pack_json(Kind.REGISTER, registration), 1.0)
    return lane


def test_only_the_latest_failures_are_remembered() -> None:
    """Only the latest failures keep their entries. When an older entry is removed, this is sent as a change."""
    watching = StateFeed(transport=None)  # type: ignore[arg-type]

    for number in range(300):
        loading = FeedEntry(f"m{number}", "model", "d", "loading")
        watching.put(f"m{number}@0", loading)
        watching.put(f"m{number}@0", loading._replace(state="failed", error="why"))
        watching.gone(f"m{number}@0")

    assert list(watching.snapshot()["entries"]) == [f"m{number}@0" for number in range(44, 300)]
    assert watching.revision == 2 * 300 + 44
