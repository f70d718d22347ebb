"""The watchdog: what is under way, what hangs, and who is to blame; time is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.activity import Activity, ActivitySlot, Phase, Task, Watchdog, describe
from rsrv.runtime.device import Array
from rsrv.runtime.host_weights import HostWeights
from rsrv.runtime.models import warm_up
from rsrv.settings import load_settings
from rsrv.wire.frames import Kind, pack_json
from rsrv.wire.socket import send
from tests.fakes import FakeDevice, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime, build_here
from tests.unit.runtime.test_stub_and_runtime import make_engine, rows
from tests.waiting import wait_until


class Watch:
    """A watchdog with 60 s of patience that looks every 5 s of a clock which is told the time."""

    def __init__(self, activity: Activity, patience: float = 60.0) -> None:
        self.now = 1000.0
        self.launcher: int | None = None
        self.found: list[tuple[Task, float]] = []
        self._dog = Watchdog(activity, patience, lambda: self.launcher, self._find, lambda: self.now)

    def _find(self, place: ActivitySlot, task: Task, seconds: float) -> None:
        self.found.append((task, seconds))

    def passes(self, seconds: float, looks: int | None = None) -> list[str]:
        """Who is found within so much time, in as many looks as it has, or as are said."""
        self.found.clear()
        count = round(seconds / self._dog.interval_s) if looks is None else looks
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
    """As if that thread executed."""
    place.thread = thread
    place.begin(Phase.EXECUTING, key, 8, expected)
    yield
    place.end()


def test_an_execution_that_does_not_end_is_found(activity: Activity, watch: Watch) -> None:
    """After the patience, and not before; named with its rows, its seconds, and what was expected."""
    activity.launch.begin(Phase.EXECUTING, "m@1", 8, 0.002)

    assert watch.passes(60) == []
    assert watch.passes(10) == ["m@1"]
    ((task, seconds),) = watch.found
    assert describe(task, seconds) == (
        "m@1 hangs: it has been executing for 65.0 s (8 rows, expected to take 0.002 s)"
    )


def test_what_is_expected_to_take_long_may_take_a_hundred_times_as_long(
    activity: Activity, watch: Watch
) -> None:
    """Two seconds expected are 200 that it may take."""
    activity.read.begin(Phase.EXECUTING, "m@1", 8, 2.0)

    assert watch.passes(200) == []
    assert watch.passes(15) == ["m@1"] * 2


def test_executions_that_end_are_never_found(activity: Activity, watch: Watch) -> None:
    """However many there are, one after the other."""
    for _ in range(100):
        with on(activity.launch, 1, "m@1"):
            assert watch.passes(50) == []


def test_a_process_that_was_stopped_does_not_hang(activity: Activity, watch: Watch) -> None:
    """Ten minutes in which the watchdog itself did not run count as two of its looks."""
    activity.launch.begin(Phase.EXECUTING, "m@1")
    assert watch.passes(10) == []

    for _ in range(4):
        assert watch.passes(600, looks=1) == []

    assert watch.passes(20) == ["m@1"]


def test_who_waits_for_the_device_is_not_to_blame(activity: Activity, watch: Watch) -> None:
    """A device that works for one thread at a time says for which; the one that came first may wait all the same."""
    activity.launch.thread, activity.warm_up.thread = 1, 2
    activity.launch.begin(Phase.EXECUTING, "waits@1")
    watch.launcher = 2
    for _ in range(10):
        with activity.warm_up.doing(Phase.WARMING, "long@1"):
            assert watch.passes(50) == []
    activity.warm_up.begin(Phase.WARMING, "hangs@1")

    assert set(watch.passes(100)) == {"hangs@1"}


def test_of_what_was_launched_ahead_the_first_is_to_blame(activity: Activity, watch: Watch) -> None:
    """A device that is given several executions does them in order."""
    number = activity.launch.begin(Phase.EXECUTING, "first@1")
    activity.launch.end()
    activity.launch.begin(Phase.EXECUTING, "second@1")
    activity.read.begin(Phase.EXECUTING, "first@1", number=number)

    assert set(watch.passes(100)) == {"first@1"}


def test_a_load_that_does_not_go_on_is_found(activity: Activity, watch: Watch) -> None:
    """Each tensor may take its time, a hundredth of a gigabyte per second at least; what waits for the device, too."""
    for _ in range(10):
        activity.weights.begin(Phase.LOADING, "m@1", 5 * 10**9, 5.0)
        assert watch.passes(400) == []
    activity.weights.begin(Phase.LOADING, "m@1", 100, 1e-7)
    with on(activity.read, 1, "busy@1", expected=10):
        assert watch.passes(500) == []

    assert set(watch.passes(100)) == {"m@1"}
    assert "(100 bytes in its largest tensor" in describe(*watch.found[0])


def test_a_loop_that_does_not_come_round_is_found(activity: Activity, watch: Watch) -> None:
    """While it waits for something to happen it may take for ever; an execution of its own is that model's fault."""
    assert watch.passes(1000) == []
    activity.round.begin(Phase.LOOPING, "")
    assert set(watch.passes(70)) == {"the loop"}
    assert describe(*watch.found[0]) == "the loop has not come round for 65.0 s"

    activity.round.begin(Phase.LOOPING, "")
    activity.short.begin(Phase.EXECUTING, "m@1")
    assert set(watch.passes(70)) == {"m@1"}


@given(
    st.lists(
        st.tuples(st.sampled_from(["launch", "read", "warm_up", "short", "weights", "round"]), st.booleans()),
        max_size=60,
    ),
    st.lists(st.floats(0, 100), min_size=60, max_size=60),
)
def test_nothing_is_found_that_began_within_the_patience(
    steps: list[tuple[str, bool]], times: list[float]
) -> None:
    """Whatever begins and ends in whatever order, and however the looks are delayed."""
    activity = Activity()
    watch = Watch(activity)
    began: dict[int, float] = {}
    for (name, begins), passing in zip(steps, times, strict=False):
        place: ActivitySlot = getattr(activity, name)
        if begins:
            began[place.begin(Phase.EXECUTING, name)] = watch.now
        else:
            place.end()
        watch.passes(passing, looks=1)
        for task, seconds in watch.found:
            assert watch.now - began[task.number] >= seconds > 60


# --- what the runtime notes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_runtime_says_what_it_executes(
    start_runtime: StartRuntime, doubling: Path, asynchronous: bool
) -> None:
    """While the device holds an execution, its model and size are known; afterwards nothing is under way."""
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}"), asynchronous=asynchronous)
    engine = make_engine(runtime, doubling)
    runtime.device.gate.clear()
    request = FakeRequest({"x": rows(3)})
    engine.execute([request])
    assert runtime.device.gate.waiting.wait(10)

    place = runtime.loop.activity.front(runtime.loop.launcher)

    assert place is not None
    task = place.task
    assert task is not None
    assert (task.phase, task.key.partition("@")[0], task.size) == (Phase.EXECUTING, "doubling", 4)
    assert 0 < task.expected < 1
    runtime.device.gate.set()
    assert request.answers.get(timeout=10).error is None
    wait_until(lambda: idle(runtime))
    engine.close()


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


def test_a_runtime_says_what_it_builds_loads_and_warms_up(
    start_runtime: StartRuntime, doubling: Path
) -> None:
    """Held in a compilation, in a transfer and in a warm-up, each is noted with the model."""
    runtime = start_runtime()
    device, activity = runtime.device, runtime.loop.activity
    device.compiles.clear()
    device.uploads.clear()
    device.gate.clear()
    greeted = runtime.open()
    send(greeted.sock, pack_json(Kind.REGISTER, {"model": "m", "bundle": str(doubling)}))
    for gate, place, phase in (
        (device.compiles, activity.build, Phase.BUILDING),
        (device.uploads, activity.weights, Phase.LOADING),
        (device.gate, activity.warm_up, Phase.WARMING),
    ):
        assert gate.waiting.wait(10)
        task = place.task
        assert task is not None
        assert (task.phase, task.key.partition("@")[0]) == (phase, "m")
        gate.set()
    wait_until(lambda: idle(runtime))
    greeted.sock.close()


def test_reading_a_file_is_not_the_devices_work(
    start_runtime: StartRuntime, doubling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that stalls while a load reads it is nobody's hang; the transfer that follows is watched."""
    noted: list[bool] = []
    read = HostWeights.read

    def stalls(weights: HostWeights, index: int) -> Array:
        noted.append(runtime.loop.activity.weights.task is not None)
        return read(weights, index)

    monkeypatch.setattr(HostWeights, "read", stalls)
    runtime = start_runtime(load_settings("models: {m: {residency: unpinned}}"))
    runtime.device.uploads.clear()
    greeted = runtime.open()
    send(greeted.sock, pack_json(Kind.REGISTER, {"model": "m", "bundle": str(doubling)}))

    assert runtime.device.uploads.waiting.wait(10)
    assert noted == [False]
    task = runtime.loop.activity.weights.task
    assert task is not None
    assert task.phase is Phase.LOADING
    runtime.device.uploads.set()
    wait_until(lambda: idle(runtime))
    greeted.sock.close()


def test_all_that_the_loop_does_is_part_of_its_round(runtime: Runtime) -> None:
    """What arrives is handled within the round; waiting for it is not."""
    found: list[Task | None] = []

    runtime.loop._inbox.post(lambda: found.append(runtime.loop.activity.round.task))

    wait_until(lambda: bool(found))
    assert found[0] is not None
    assert found[0].phase is Phase.LOOPING
    wait_until(lambda: runtime.loop.activity.round.task is None)


def test_each_run_of_a_warm_up_has_its_own_time(doubling: Path) -> None:
    """Four for each of three sizes: a model of many sizes may take long, and none of its executions may."""
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
