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
    ("tasks", "crashed", "who"),
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
    tasks: list[UnfinishedTask], crashed: bool, who: list[tuple[str, str, str, float]]
) -> None:
    """A death is blamed on a task that hung, else on code that was not proven yet, else, after a crash, on the running models.

    A model that has run well gets a smaller share of the blame. A kill -9 is not blamed on running models, and a second
    death by the same request is blamed on no model.
    """
    blamed = blame(tasks, crashed=crashed, now=1.7e9)

    assert sorted((key, entry.phase, entry.how, entry.share) for key, entry in blamed.items()) == sorted(who)


def deaths(*how: str) -> list[Death]:
    return [Death("EXECUTING", way, 1.7e9) for way in how]  # type: ignore[arg-type]


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
    """A model is excluded after three deaths. Two may be due to two requests."""
    assert (verdict(deaths(*how), 1.7e9) is None) == tried


@pytest.mark.parametrize("phase", ["BUILDING", "WARMING", "LOADING"])
def test_one_hang_without_a_request_excludes_a_model(phase: str) -> None:
    """A model that hung once without a request is excluded, also a day later, because it would hang again."""
    hung = [Death(phase, "hung", 1.7e9)]

    assert verdict(hung, 1.7e9) is not None
    assert verdict(hung, 1.7e9 + 86400) is not None


def test_a_verdict_has_the_cause_and_the_remedies() -> None:
    """A verdict has the number of deaths, the time, the phase, and three ways to load the model again.

    It has no path, because clients see it.
    """
    assert verdict(deaths("crashed", "crashed", "hung"), 1.7e9) == (
        "the model has ended the runtime 3 times: at 2023-11-14 22:13:20 UTC it hung while executing. It is not "
        "loaded again until its bundle changes, the server restarts, or deaths.json in the runtime's private "
        "directory is removed"
    )


def test_deaths_long_ago_do_not_count() -> None:
    """Deaths of more than an hour ago do not exclude a model, because a model that is always busy gets a share of each death."""
    assert verdict(deaths("crashed", "crashed", "crashed"), 1.7e9 + 3500) is not None
    assert verdict(deaths("crashed", "crashed", "crashed"), 1.7e9 + 3700) is None


def run_well(activity: Activity, key: str, times: int) -> None:
    """Load a model and execute it from launch to output, `times` times."""
    for _ in range(times):
        for place in (activity.launch, activity.read, activity.weights):
            place.begin(Phase.EXECUTING, key)
            place.end()


def crash(activity: Activity, memory: bytearray, accounts: dict[str, list[Death]], *keys: str) -> None:
    """Crash the runtime while these models execute. The first one was launched earlier than the second."""
    for place, key in zip((activity.read, activity.launch, activity.weights), keys, strict=False):
        place.begin(Phase.EXECUTING, key)
    for key, death in blame(read_slots(bytes(memory)), crashed=True, now=1.7e9).items():
        accounts.setdefault(key, []).append(death)


def tried(accounts: dict[str, list[Death]], key: str) -> bool:
    return verdict(accounts.get(key, ()), 1.7e9) is None


@given(st.data())
def test_a_busy_model_is_not_blamed_for_the_crashes_of_others(data: st.DataObject) -> None:
    """Three models that sometimes run well crash the runtime until each is excluded.

    A busy model beside them is never excluded.
    """
    accounts: dict[str, list[Death]] = {}
    bad = ["a@1", "b@1", "c@1"]
    while remaining := [key for key in bad if tried(accounts, key)]:
        memory = bytearray(SLOT_BYTES * SLOTS)
        activity = Activity(memory)
        culprit = data.draw(st.sampled_from(remaining))
        busy = data.draw(st.integers(10, 200))
        for key in remaining:
            run_well(activity, key, data.draw(st.integers(0, busy // 10)))
        run_well(activity, "busy@1", busy)
        crash(activity, memory, accounts, *data.draw(st.permutations([culprit, "busy@1"])))

    assert tried(accounts, "busy@1")
    assert all(len(accounts[key]) <= 5 for key in bad)


@given(st.data())
def test_a_model_that_always_crashes_is_found_beside_any_others(data: st.DataObject) -> None:
    """A model that always crashes is excluded after three deaths if it is alone or the other models have run well.

    With two other models that have not run well yet, it is excluded after at most eight deaths.
    """
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
    """If the loop hung, a model that was being built is not blamed."""
    activity = Activity(BlackBox(tmp_path).memory)
    activity.build.begin(Phase.BUILDING, "b@1")
    activity.round.begin(Phase.LOOPING, "")
    activity.round.mark_hung()

    assert read_slots((tmp_path / paths.BLACKBOX).read_bytes()) == []


def test_a_cleared_box_blames_no_model(tmp_path: Path) -> None:
    """If the loop fails, the runtime clears the black box, so that a model that was being built is not blamed."""
    box = BlackBox(tmp_path)
    Activity(box.memory).build.begin(Phase.BUILDING, "b@1")
    box.clear()

    assert read_slots((tmp_path / paths.BLACKBOX).read_bytes()) == []


def record(**damage: object) -> str:
    """Return a history of three deaths. Without `damage`, it would exclude m@1."""
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
    """A history file with any damaged text excludes no model."""
    file = tmp_path / paths.DEATHS
    history = CrashHistory(file, lambda: 1.7e9)
    file.write_text(record())
    assert history.verdict("m@1") is not None

    file.write_text(text)

    assert history.verdict("m@1") is None


def test_the_box_outlives_its_process(tmp_path: Path) -> None:
    """The next process finds the unfinished tasks of a killed process in the black box, and no ended tasks."""
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
    """A runtime is killed just after it has counted a death. The runtime after it does not count the death again."""
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
    """Two kills during builds are forgotten after a successful build, so a third kill is like the first one."""
    for _ in range(2):
        Activity(BlackBox(tmp_path).memory).build.begin(Phase.BUILDING, "m@1")
    box = BlackBox(tmp_path)
    assert len(json.loads((tmp_path / paths.DEATHS).read_text())["m@1"]) == 2
    assert box.history.verdict("m@1") is None

    box.history.survived("m@1")
    Activity(box.memory).build.begin(Phase.BUILDING, "m@1")

    assert BlackBox(tmp_path).history.verdict("m@1") is None


def test_a_successful_build_keeps_deaths_of_executions(tmp_path: Path) -> None:
    """A successful build does not clear deaths of executions, because it proves nothing about executions."""
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
    """A runtime reads a black box of any content without failing."""
    assert len(read_slots(content)) <= SLOTS


def test_a_runtime_without_room_for_a_box_has_none(tmp_path: Path) -> None:
    """A runtime starts without a black box if there is no room for one."""
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
    """A crash while a model executes adds to its deaths, and a kill does not.

    The next runtime logs the stacks of a fatal signal.
    """
    for _ in range(3):
        process = subprocess.run([sys.executable, "-c", _DIE, str(tmp_path), str(number.value)], check=False)
        assert process.returncode == -number

    box = BlackBox(tmp_path)

    assert (box.history.verdict("m@1") is not None) == counts
    assert ("Fatal Python error" in caplog.text) == counts
    assert "while m@1 was executing" in caplog.text


def test_a_first_load_is_not_proven_before_it_ends(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A first load is unfinished until its last tensor is on the device: reading some of its weights does not prove the load."""
    box = BlackBox(tmp_path)
    runtime = start_runtime(blackbox=box)
    runtime.device.uploads.clear()
    runtime.request_model(model="m", bundle=str(doublings["a"]))
    runtime.device.uploads.wait_until_held()

    (slot,) = read_slots(bytes(box.memory))

    assert (slot.phase, slot.ended) == (Phase.LOADING, 0)
    runtime.device.uploads.set()
    wait_until(lambda: runtime.loop.activity.weights.task is None)


# --- models that are excluded -------------------------------------------------------------------------------------


def error_of(engine: Engine) -> str:
    """Send a request, and return the message of its error, or ""."""
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}))
    return "" if answer.error is None else answer.error.message


def test_a_model_that_hung_is_refused_and_the_others_come_back(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """Clients of a model that hung get the reason, and its stub retries.

    Others are served. The model loads when the history is deleted.
    """
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
    # Copy the black box now, so that the copy does not contain later writes of this runtime.
    after = tmp_path / "after"
    after.mkdir()
    shutil.copy(tmp_path / paths.BLACKBOX, after)
    for _ in range(2):  # Two other requests hung before.
        CrashHistory(after / paths.DEATHS).add(place.task.key, Death("EXECUTING", "hung", time.time()))
    runtime.stop()
    runtime.device.gate.set()

    start_runtime(settings, blackbox=BlackBox(after))

    assert refused(answer_of(request), FakeError.UNAVAILABLE, "[rsrv:RUNTIME_DOWN] bad@")

    wait_until(lambda: ask(good, FakeRequest({"x": ramp(1)}))[0].error is None)
    wait_until(lambda: "it hung while executing" in error_of(bad))
    assert error_of(bad).startswith("[rsrv:RUNTIME_DOWN] bad@")
    assert ask(good, FakeRequest({"x": ramp(1)}))[0].error is None
    (after / paths.DEATHS).unlink()
    wait_until(lambda: ask(bad, FakeRequest({"x": ramp(1)}))[0].error is None)
