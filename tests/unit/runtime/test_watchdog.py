"""The watchdog, and the slots in which threads publish their tasks. The tests set the clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, isfinite
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.activity import Activity, ActivitySlot, Task, Watchdog, describe
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.device import Array
from rsrv.runtime.host_weights import HostWeights
from rsrv.runtime.models import warm_up
from rsrv.settings import load_settings
from rsrv.wire.blackbox import Phase
from tests.fakes import FakeDevice, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime, build_here
from tests.unit.runtime.engines import make_engine, ramp
from tests.unit.runtime.metas import answer_of
from tests.waiting import wait_until


class Watch:
    """A watchdog with a limit of 60 s and a check every 5 s. The test sets its clock."""

    def __init__(self, activity: Activity, limit_s: float = 60.0) -> None:
        self.now = 1000.0
        self.launcher: int | None = None
        self.found: list[tuple[Task, float]] = []
        self._dog = Watchdog(activity, limit_s, lambda: self.launcher, self._find, lambda: self.now)

    def _find(self, place: ActivitySlot, task: Task, seconds: float) -> None:
        self.found.append((task, seconds))
        place.mark_hung()

    def passes(self, seconds: float, checks: int | None = None) -> list[str]:
        """Advance the clock by `seconds`, with `checks` checks or at the usual interval. Return the models that hang."""
        self.found.clear()
        count = round(seconds / self._dog.interval_s) if checks is None else checks
        for _ in range(count):
            self.now += seconds / count
            self._dog.check()
        return [task.key or "the loop" for task, _ in self.found]


@pytest.fixture
def activity() -> Activity:
    return Activity()


@pytest.fixture
def watch(activity: Activity) -> Watch:
    return Watch(activity)


@contextmanager
def on(place: ActivitySlot, thread: int, key: str, expected: float = 0.0) -> Iterator[None]:
    """Occupy the slot with an execution on thread `thread` until the block ends."""
    place.thread = thread
    place.begin(Phase.EXECUTING, key, 8, expected)
    yield
    place.end()


def test_an_execution_that_does_not_end_is_found(activity: Activity, watch: Watch) -> None:
    """An execution that does not end is found after the limit.

    The text has its rows, its seconds and its expected duration.
    """
    activity.launch.begin(Phase.EXECUTING, "m@1", 8, 0.002)

    assert watch.passes(60) == []
    assert watch.passes(10) == ["m@1"]
    ((task, seconds),) = watch.found
    assert describe(task, seconds) == (
        "m@1 hangs: it has been executing for 65.0 s (8 rows, expected to take 0.002 s)"
    )


def test_a_long_execution_may_take_a_hundred_times_its_expected_time(
    activity: Activity, watch: Watch
) -> None:
    """An execution may take a hundred times its expected time, if this is longer than the limit."""
    activity.read.begin(Phase.EXECUTING, "m@1", 8, 2.0)

    assert watch.passes(200) == []
    assert watch.passes(15) == ["m@1"] * 2


def test_executions_that_end_are_never_found(activity: Activity, watch: Watch) -> None:
    """Executions that end in time are never found, however many follow one another."""
    for _ in range(100):
        with on(activity.launch, 1, "m@1"):
            assert watch.passes(50) == []


def test_a_process_that_was_stopped_does_not_hang(activity: Activity, watch: Watch) -> None:
    """If a process was stopped for ten minutes, this time counts only as two intervals."""
    activity.launch.begin(Phase.EXECUTING, "m@1")
    assert watch.passes(10) == []

    for _ in range(4):
        assert watch.passes(600, checks=1) == []

    assert watch.passes(20) == ["m@1"]


def test_a_task_that_waits_for_the_device_does_not_hang(activity: Activity, watch: Watch) -> None:
    """A synchronous device executes for one thread at a time, and names this thread.

    If a task of another thread waits for the device, the waiting task does not hang.
    """
    activity.launch.thread, activity.warm_up.thread = 1, 2
    activity.launch.begin(Phase.EXECUTING, "waits@1")
    watch.launcher = 2
    for _ in range(10):
        with activity.warm_up.doing(Phase.WARMING, "long@1"):
            assert watch.passes(50) == []
    activity.warm_up.begin(Phase.WARMING, "hangs@1")

    assert set(watch.passes(100)) == {"hangs@1"}


def test_the_first_of_executions_launched_ahead_hangs(activity: Activity, watch: Watch) -> None:
    """If two launched executions do not end, the first one hangs, because a device executes in the order of launches."""
    number = activity.launch.begin(Phase.EXECUTING, "first@1")
    activity.launch.end()
    activity.launch.begin(Phase.EXECUTING, "second@1")
    activity.read.begin(Phase.EXECUTING, "first@1", number=number)

    assert set(watch.passes(100)) == {"first@1"}


def test_a_load_that_hangs_is_found(activity: Activity, watch: Watch) -> None:
    """Each tensor of a load may take a hundred times its expected time.

    The time in which the load waits for the device is left out.
    """
    for _ in range(10):
        activity.weights.begin(Phase.LOADING, "m@1", 5 * 10**9, 5.0)
        assert watch.passes(400) == []
    activity.weights.begin(Phase.LOADING, "m@1", 100, 1e-7)
    with on(activity.read, 1, "busy@1", expected=10):
        assert watch.passes(500) == []

    assert set(watch.passes(100)) == {"m@1"}
    assert "(100 bytes in its largest tensor" in describe(*watch.found[0])


def test_a_compilation_that_hangs_is_found(activity: Activity, watch: Watch) -> None:
    """Each module may take minutes to compile. Reading the bundle and the weights has no limit."""
    with activity.build.doing(Phase.BUILDING, "m@1", expected=inf):
        assert watch.passes(10_000) == []
        for _ in range(3):
            activity.build.begin(Phase.BUILDING, "m@1", 8, 18.0)
            assert watch.passes(1700) == []
        assert set(watch.passes(200)) == {"m@1"}
    assert describe(*watch.found[0]).startswith("m@1 hangs: it has been being built for")


def test_a_loop_that_hangs_is_found(activity: Activity, watch: Watch) -> None:
    """The loop may wait for events without a limit. If it hangs in an execution, the model is blamed."""
    assert watch.passes(1000) == []
    activity.round.begin(Phase.LOOPING, "")
    assert set(watch.passes(70)) == {"the loop"}
    assert describe(*watch.found[0]) == "the main loop has not finished a round for 65.0 s"

    activity.round.begin(Phase.LOOPING, "")
    activity.short.begin(Phase.EXECUTING, "m@1")
    assert set(watch.passes(70)) == {"m@1"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["launch", "read", "warm_up", "short", "weights", "build", "round"]),
            st.booleans(),
        ),
        max_size=60,
    ),
    st.lists(st.floats(0, 100), min_size=60, max_size=60),
)
def test_a_task_younger_than_the_limit_is_never_found(
    steps: list[tuple[str, bool]], times: list[float]
) -> None:
    """A task that is younger than the limit is never found, for any order of tasks and any delay of the checks."""
    activity = Activity()
    watch = Watch(activity)
    began: dict[int, float] = {}
    for (name, begins), passing in zip(steps, times, strict=False):
        place: ActivitySlot = getattr(activity, name)
        if begins:
            began[place.begin(Phase.EXECUTING, name)] = watch.now
        else:
            place.end()
        watch.passes(passing, checks=1)
        for task, seconds in watch.found:
            assert watch.now - began[task.number] >= seconds > 60


# --- slots of a running runtime -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_runtime_notes_its_execution(
    start_runtime: StartRuntime, doubling: Path, asynchronous: bool
) -> None:
    """While the device executes, the slot names the model and the compiled size of the execution.

    Afterwards all slots are idle.
    """
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}"), asynchronous=asynchronous)
    engine = make_engine(runtime, doubling)
    runtime.device.gate.clear()
    request = FakeRequest({"x": ramp(3)})
    engine.execute([request])
    runtime.device.gate.wait_until_held()

    place = runtime.loop.activity.front(runtime.loop.launcher)

    assert place is not None
    task = place.task
    assert task is not None
    assert (task.phase, task.key.partition("@")[0], task.size) == (Phase.EXECUTING, "doubling", 4)
    assert 0 < task.expected < 1
    runtime.device.gate.set()
    assert answer_of(request).error is None
    wait_until(lambda: idle(runtime))


def idle(runtime: Runtime) -> bool:
    activity = runtime.loop.activity
    places = (
        activity.build,
        activity.warm_up,
        activity.weights,
        activity.short,
        activity.launch,
        activity.read,
    )
    return all(place.task is None for place in places)


def test_a_runtime_notes_builds_loads_and_warm_ups(start_runtime: StartRuntime, doubling: Path) -> None:
    """During a compilation, an upload and a warm-up, a slot names the model and the phase."""
    runtime = start_runtime()
    device, activity = runtime.device, runtime.loop.activity
    device.compiles.clear()
    device.uploads.clear()
    device.gate.clear()
    runtime.request_model(model="m", bundle=str(doubling))
    for gate, place, phase in (
        (device.compiles, activity.build, Phase.BUILDING),
        (device.uploads, activity.weights, Phase.LOADING),
        (device.gate, activity.warm_up, Phase.WARMING),
    ):
        gate.wait_until_held()
        task = place.task
        assert task is not None
        assert (task.phase, task.key.partition("@")[0]) == (phase, "m")
        assert isfinite(task.expected)
        gate.set()
    wait_until(lambda: idle(runtime))


def test_a_start_that_hangs_is_blamed_on_its_model(
    start_runtime: StartRuntime, doubling: Path, tmp_path: Path
) -> None:
    """If a compilation hangs, its model is blamed, and the next runtime does not load it again."""
    runtime = start_runtime(blackbox=BlackBox(tmp_path))
    runtime.device.compiles.clear()
    runtime.request_model(model="m", bundle=str(doubling), asked=True)
    runtime.device.compiles.wait_until_held()
    (key,) = runtime.loop._catalog.entries

    assert set(Watch(runtime.loop.activity).passes(2000)) == {key}

    verdict = BlackBox(tmp_path).history.verdict(key)
    assert verdict is not None
    assert "it hung while being built" in verdict
    runtime.device.compiles.set()
    wait_until(lambda: idle(runtime))


def test_reading_a_file_is_not_watched(
    start_runtime: StartRuntime, doubling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a weights file is not watched, because stalled storage is no fault of the model.

    The upload after it is watched.
    """
    noted: list[bool] = []
    read = HostWeights.read

    def stalls(weights: HostWeights, index: int) -> Array:
        noted.append(runtime.loop.activity.weights.task is not None)
        return read(weights, index)

    monkeypatch.setattr(HostWeights, "read", stalls)
    runtime = start_runtime(load_settings("models: {m: {residency: unpinned}}"))
    runtime.device.uploads.clear()
    runtime.request_model(model="m", bundle=str(doubling))

    runtime.device.uploads.wait_until_held()
    assert noted == [False]
    task = runtime.loop.activity.weights.task
    assert task is not None
    assert task.phase is Phase.LOADING
    runtime.device.uploads.set()
    wait_until(lambda: idle(runtime))


def test_the_loop_is_watched_while_it_handles_events(runtime: Runtime) -> None:
    """The loop is watched while it handles events, and not while it waits for them."""
    tasks: list[Task | None] = []

    runtime.loop._inbox.post(lambda: tasks.append(runtime.loop.activity.round.task))

    wait_until(lambda: bool(tasks))
    assert tasks[0] is not None
    assert tasks[0].phase is Phase.LOOPING
    wait_until(lambda: runtime.loop.activity.round.task is None)


def test_each_execution_of_a_warm_up_has_its_own_limit(doubling: Path) -> None:
    """Each of the twelve executions of a warm-up, four for each of three sizes, is a task with its own limit.

    A warm-up of many sizes may take long.
    """
    place = ActivitySlot()
    numbers: list[int] = []
    device = FakeDevice(lambda inputs, weights: [2 * inputs[0]])
    model = build_here(doubling, device)

    def compute(inputs: object, weights: object) -> list[object]:
        assert place.task is not None
        numbers.append(place.task.number)
        return []

    device.compute = compute  # type: ignore[assignment]
    warm_up(model, device, place)

    assert len(set(numbers)) == 12
    assert place.task is None
