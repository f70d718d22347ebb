"""Black box and crash history: the next runtime blames the models that end runtimes."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.activity import Activity
from rsrv.runtime.crash_history import BlackBox, CrashHistory, Death, blame, verdict
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.wire import paths
from rsrv.wire.blackbox import SLOT_BYTES, SLOTS, Phase, UnfinishedTask, read_slots
from tests.fakes import FakeError, FakeRequest
from tests.unit.runtime.conftest import StartRuntime
from tests.unit.runtime.engines import make_engine, ramp, refused
from tests.unit.runtime.metas import answer_of, ask
from tests.waiting import wait_until

BUILDING = UnfinishedTask(Phase.BUILDING, hung=False, key="b@1")
WARMING = UnfinishedTask(Phase.WARMING, hung=False, key="w@1")
LOADING = UnfinishedTask(Phase.LOADING, hung=False, key="l@1")
EXECUTING = UnfinishedTask(Phase.EXECUTING, hung=False, key="e@1")
HUNG = UnfinishedTask(Phase.EXECUTING, hung=True, key="h@1")
ALONE = UnfinishedTask(Phase.EXECUTING, hung=False, key="e@1", alone=True)
BUSY = UnfinishedTask(Phase.EXECUTING, hung=False, key="y@1", ended=2)


@pytest.mark.parametrize(
    ("found", "crashed", "who"),
    [
        ([], True, []),
        ([EXECUTING], False, []),
        ([EXECUTING, LOADING], False, []),
        ([EXECUTING], True, [("e@1", "EXECUTING", "crashed", 1.0)]),
        (
            [EXECUTING, LOADING],
            True,
            [("e@1", "EXECUTING", "crashed", 0.5), ("l@1", "LOADING", "crashed", 0.5)],
        ),
        (
            [EXECUTING, BUSY, BUSY._replace(ended=0)],
            True,
            [("e@1", "EXECUTING", "crashed", 0.75), ("y@1", "EXECUTING", "crashed", 0.25)],
        ),
        ([EXECUTING, BUILDING], True, [("b@1", "BUILDING", "crashed", 1.0)]),
        ([EXECUTING, BUILDING], False, [("b@1", "BUILDING", "killed", 1.0)]),
        (
            [WARMING, BUILDING],
            False,
            [("w@1", "WARMING", "killed", 1.0), ("b@1", "BUILDING", "killed", 1.0)],
        ),
        ([WARMING, HUNG, EXECUTING], False, [("h@1", "EXECUTING", "hung", 1.0)]),
        ([ALONE], True, []),
        ([ALONE, BUILDING], True, []),
        ([ALONE, BUILDING], False, [("b@1", "BUILDING", "killed", 1.0)]),
        ([ALONE._replace(hung=True)], False, []),
    ],
)
def test_the_blame_of_a_death(
    found: list[UnfinishedTask], crashed: bool, who: list[tuple[str, str, str, float]]
) -> None:
    """A hang, then untried code, then, after a crash, the running models; least those that had run well before.

    A kill -9 is not blamed on running models, and the second death by one request on none.
    """
    blamed = blame(found, crashed=crashed, now=1.7e9)

    assert sorted((key, one.phase, one.how, one.share) for key, one in blamed.items()) == sorted(who)


def deaths(*how: str) -> list[Death]:
    return [Death("EXECUTING", one, 1.7e9) for one in how]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "tried"),
    [
        ([], True),
        (["crashed"], True),
        (["killed", "crashed"], True),
        (["killed", "crashed", "killed"], False),
        (["hung", "crashed"], True),
        (["hung", "crashed", "hung"], False),
    ],
)
def test_three_deaths_exclude_a_model(how: list[str], tried: bool) -> None:
    """Fewer deaths do not, for they may be due to two requests."""
    assert (verdict(deaths(*how), 1.7e9) is None) == tried


@pytest.mark.parametrize("phase", ["BUILDING", "WARMING", "LOADING"])
def test_one_hang_without_a_request_excludes_a_model(phase: str) -> None:
    """The model would hang again, also after a day."""
    hung = [Death(phase, "hung", 1.7e9)]

    assert verdict(hung, 1.7e9) is not None
    assert verdict(hung, 1.7e9 + 86400) is not None


def test_a_verdict_has_the_cause_and_the_remedies() -> None:
    """Count, time and phase, and three ways to have the model loaded again. No path: clients see it."""
    assert verdict(deaths("crashed", "crashed", "hung"), 1.7e9) == (
        "the model has ended the runtime 3 times: at 2023-11-14 22:13:20 UTC it hung while executing. It is not "
        "loaded again until its bundle changes, the server restarts, or deaths.json in the runtime's private "
        "directory is removed"
    )


def test_deaths_long_ago_do_not_count() -> None:
    """A model that is always busy gets a share of each death."""
    assert verdict(deaths("crashed", "crashed", "crashed"), 1.7e9 + 3500) is not None
    assert verdict(deaths("crashed", "crashed", "crashed"), 1.7e9 + 3700) is None


def run_well(activity: Activity, key: str, times: int) -> None:
    """Execute a model from launch to output, and load it, some times."""
    for _ in range(times):
        for place in (activity.launch, activity.read, activity.weights):
            place.begin(Phase.EXECUTING, key)
            place.end()


def crash(activity: Activity, memory: bytearray, accounts: dict[str, list[Death]], *keys: str) -> None:
    """Crash the runtime while these models execute, the first of them launched earlier."""
    for place, key in zip((activity.read, activity.launch, activity.weights), keys, strict=False):
        place.begin(Phase.EXECUTING, key)
    for key, death in blame(read_slots(bytes(memory)), crashed=True, now=1.7e9).items():
        accounts.setdefault(key, []).append(death)


def tried(accounts: dict[str, list[Death]], key: str) -> bool:
    return verdict(accounts.get(key, ()), 1.7e9) is None


@given(st.data())
def test_a_busy_model_is_not_blamed_for_the_crashes_of_others(data: st.DataObject) -> None:
    """Three other models, which sometimes run well, crash the runtime, each until it is excluded."""
    accounts: dict[str, list[Death]] = {}
    bad = ["a@1", "b@1", "c@1"]
    while left := [key for key in bad if tried(accounts, key)]:
        memory = bytearray(SLOT_BYTES * SLOTS)
        activity = Activity(memory)
        culprit = data.draw(st.sampled_from(left))
        busy = data.draw(st.integers(10, 200))
        for key in left:
            run_well(activity, key, data.draw(st.integers(0, busy // 10)))
        run_well(activity, "busy@1", busy)
        crash(activity, memory, accounts, *data.draw(st.permutations([culprit, "busy@1"])))

    assert tried(accounts, "busy@1")
    assert all(len(accounts[key]) <= 5 for key in bad)


@given(st.data())
def test_a_model_that_always_crashes_is_found_beside_any_others(data: st.DataObject) -> None:
    """After three deaths if it is alone or the others have run well; after eight beside two that have not yet."""
    accounts: dict[str, list[Death]] = {}
    deaths, soonest = 0, data.draw(st.sampled_from([0, 20]))
    while tried(accounts, "bad@1"):
        memory = bytearray(SLOT_BYTES * SLOTS)
        activity = Activity(memory)
        others = data.draw(st.lists(st.sampled_from(["o@1", "p@1", "q@1"]), max_size=2, unique=True))
        for key in others:
            run_well(activity, key, data.draw(st.integers(soonest, soonest + 50)))
        crash(activity, memory, accounts, *data.draw(st.permutations(["bad@1", *others])))
        deaths += 1

    assert deaths <= (3 if soonest else 8)


def test_a_hung_loop_blames_no_model(tmp_path: Path) -> None:
    """A model that was being built is not the reason for the end."""
    activity = Activity(BlackBox(tmp_path).memory)
    activity.build.begin(Phase.BUILDING, "b@1")
    activity.round.begin(Phase.LOOPING, "")
    activity.round.mark_hung()

    assert read_slots((tmp_path / paths.BLACKBOX).read_bytes()) == []


def test_a_cleared_box_blames_no_model(tmp_path: Path) -> None:
    """The runtime clears it when its loop fails, even if a model is being built."""
    box = BlackBox(tmp_path)
    Activity(box.memory).build.begin(Phase.BUILDING, "b@1")
    box.clear()

    assert read_slots((tmp_path / paths.BLACKBOX).read_bytes()) == []


def record(**damage: object) -> str:
    """Return a history of three deaths that would exclude m@1, but for the damage."""
    death = {"phase": "EXECUTING", "how": "crashed", "at": 1.7e9, "share": 1.0, **damage}
    return json.dumps({"m@1": [death] * 3})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"m@1": 7}',
        '{"m@1": [{"phase": "X"}]}',
        "\0" * 100,
        record(phase="DREAMING"),
        record(at="yesterday"),
        record(share=None),
        record(whose="m@1"),
    ],
)
def test_a_damaged_history_blames_no_model(tmp_path: Path, text: str) -> None:
    """The file may hold any text."""
    file = tmp_path / paths.DEATHS
    history = CrashHistory(file, lambda: 1.7e9)
    file.write_text(record())
    assert history.verdict("m@1") is not None

    file.write_text(text)

    assert history.verdict("m@1") is None


def test_the_box_outlives_its_process(tmp_path: Path) -> None:
    """The next process reads the unfinished tasks of a killed one, and no ended tasks."""
    activity = Activity(BlackBox(tmp_path).memory)
    activity.build.begin(Phase.BUILDING, "a-long-name@1")
    activity.build.end()
    activity.build.begin(Phase.BUILDING, "b@1")
    activity.launch.begin(Phase.EXECUTING, "m@1")
    activity.launch.end()
    activity.round.begin(Phase.LOOPING, "")

    assert read_slots((tmp_path / paths.BLACKBOX).read_bytes()) == [BUILDING]
    assert (tmp_path / paths.BLACKBOX).stat().st_mode & 0o777 == 0o600


def test_a_death_counts_once_if_the_next_runtime_is_killed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next runtime ends when it has just counted the death; the one after it finds one death."""
    box = BlackBox(tmp_path)
    Activity(box.memory).read.begin(Phase.EXECUTING, "m@1")
    box.crashed("Segmentation fault")
    count = CrashHistory.add

    def count_and_end(history: CrashHistory, key: str, death: Death) -> None:
        count(history, key, death)
        raise SystemExit("killed")

    monkeypatch.setattr(CrashHistory, "add", count_and_end)
    with pytest.raises(SystemExit):
        BlackBox(tmp_path)
    monkeypatch.undo()

    BlackBox(tmp_path)

    assert len(json.loads((tmp_path / paths.DEATHS).read_text())["m@1"]) == 1


def test_a_successful_build_clears_earlier_deaths(tmp_path: Path) -> None:
    """Two kills while it was built count until it is built; a third one later counts as the first."""
    for _ in range(2):
        Activity(BlackBox(tmp_path).memory).build.begin(Phase.BUILDING, "m@1")
    box = BlackBox(tmp_path)
    assert len(json.loads((tmp_path / paths.DEATHS).read_text())["m@1"]) == 2
    assert box.history.verdict("m@1") is None

    box.history.survived("m@1")
    Activity(box.memory).build.begin(Phase.BUILDING, "m@1")

    assert BlackBox(tmp_path).history.verdict("m@1") is None


def test_a_successful_build_keeps_deaths_of_executions(tmp_path: Path) -> None:
    """A build proves nothing about executions."""
    book = CrashHistory(tmp_path / paths.DEATHS, lambda: 0.0)
    for _ in range(3):
        book.add("m@1", Death("EXECUTING", "hung", 0.0))
    book.add("m@1", Death("BUILDING", "killed", 0.0))
    book.add("n@1", Death("BUILDING", "killed", 0.0))

    book.survived("m@1")
    book.survived("n@1")
    book.survived("never heard of")

    assert list(json.loads((tmp_path / paths.DEATHS).read_text())) == ["m@1"]
    assert book.verdict("m@1") is not None
    (tmp_path / paths.DEATHS).unlink()
    assert book.verdict("m@1") is None


@given(st.binary(max_size=SLOT_BYTES * SLOTS + 100))
def test_a_box_of_random_bytes_is_read(content: bytes) -> None:
    """No content ends the runtime that reads it."""
    assert len(read_slots(content)) <= SLOTS


def test_a_runtime_without_room_for_a_box_has_none(tmp_path: Path) -> None:
    """It starts without one."""
    box = BlackBox(tmp_path / "not there")

    Activity(box.memory).build.begin(Phase.BUILDING, "m@1")
    box.catch_signals()


_DIE = """
import os, sys
from pathlib import Path
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.activity import Activity
from rsrv.wire.blackbox import Phase
box = BlackBox(Path(sys.argv[1]))
box.catch_signals()
Activity(box.memory).launch.begin(Phase.EXECUTING, "m@1")
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("number", "counts"), [(signal.SIGSEGV, True), (signal.SIGABRT, True), (signal.SIGKILL, False)]
)
def test_a_crash_while_executing_counts_and_a_kill_does_not(
    tmp_path: Path, number: signal.Signals, counts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A fatal signal leaves stacks, which the next runtime logs."""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", _DIE, str(tmp_path), str(number.value)], check=False)
        assert ended.returncode == -number

    box = BlackBox(tmp_path)

    assert (box.history.verdict("m@1") is not None) == counts
    assert ("Fatal Python error" in caplog.text) == counts
    assert "while m@1 was executing" in caplog.text


def test_a_first_load_is_not_proven_before_it_ends(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """Reading some of its weights does not prove that the load ends well."""
    box = BlackBox(tmp_path)
    runtime = start_runtime(blackbox=box)
    runtime.device.uploads.clear()
    runtime.request_model(model="m", bundle=str(doublings["a"]))
    runtime.device.uploads.wait_until_held()

    (found,) = read_slots(bytes(box.memory))

    assert (found.phase, found.ended) == (Phase.LOADING, 0)
    runtime.device.uploads.set()
    wait_until(lambda: runtime.loop.activity.weights.task is None)


# --- models that are excluded -------------------------------------------------------------------------------------


def told(engine: Engine) -> str:
    """Return the error of a request."""
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}))
    return "" if answer.error is None else answer.error.message


def test_a_model_that_hung_is_refused_and_the_others_come_back(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """Its clients get the reason, its stub retries, and it loads after the history is deleted."""
    settings = load_settings("stub: {in_place_ms: 0}")
    runtime = start_runtime(settings, asynchronous=True, blackbox=BlackBox(tmp_path))
    good, bad = (make_engine(runtime, doublings[a], name=name) for a, name in (("a", "good"), ("b", "bad")))
    runtime.device.gate.clear()
    request = FakeRequest({"x": ramp(1)})
    bad.execute([request])
    runtime.device.gate.wait_until_held()
    place = runtime.loop.activity.front(runtime.loop.launcher)
    assert place is not None
    place.mark_hung()
    assert place.task is not None
    # Copied as if the process ended now: later writes of this one are not in the copy.
    after = tmp_path / "after"
    after.mkdir()
    shutil.copy(tmp_path / paths.BLACKBOX, after)
    for _ in range(2):  # by other requests
        CrashHistory(after / paths.DEATHS).add(place.task.key, Death("EXECUTING", "hung", time.time()))
    runtime.stop()
    runtime.device.gate.set()

    start_runtime(settings, blackbox=BlackBox(after))

    assert refused(answer_of(request), FakeError.UNAVAILABLE, "[rsrv:RUNTIME_DOWN] bad@")

    wait_until(lambda: ask(good, FakeRequest({"x": ramp(1)}))[0].error is None)
    wait_until(lambda: "it hung while executing" in told(bad))
    assert told(bad).startswith("[rsrv:RUNTIME_DOWN] bad@")
    assert ask(good, FakeRequest({"x": ramp(1)}))[0].error is None
    (after / paths.DEATHS).unlink()
    wait_until(lambda: ask(bad, FakeRequest({"x": ramp(1)}))[0].error is None)
