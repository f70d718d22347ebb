"""Invariants for any events in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rsrv.scheduler import invariants
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    Admit,
    Compact,
    CopyChanged,
    Event,
    Evict,
    LoadAbandoned,
    LoadFailed,
    ModelAdded,
    Pause,
    Paused,
    Pinned,
    PolicyChanged,
    Prefetch,
    Program,
    Request,
    RequestsArrived,
    RequestsCancelled,
    RunEnded,
    RunsAsked,
    SettingsChanged,
    WeightsLoaded,
    WeightsRead,
)
from rsrv.scheduler.eviction import POLICIES
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.settings import Eviction, SchedulerSettings
from tests.builders import FEW_EXAMPLES
from tests.unit.scheduler.driver import Driver

MODELS = ("a", "b", "c")
#: Bytes of the tensors that models may share.
TENSORS = {"t": 0, "u": 1, "v": 2, "w": 3, "x": 5}

programs = st.builds(
    Program,
    model=st.sampled_from(MODELS),
    costs=st.dictionaries(
        st.tuples(st.integers(0, 1), st.sampled_from([1, 2, 4, 8, 32])),
        st.sampled_from([0.001, 0.002, 0.004, 0.032]),
        min_size=1,
        max_size=5,
    ),
    coalesce=st.booleans(),
    max_queue_depth=st.sampled_from([1, 3, 40]),
    max_batch_rows=st.none() | st.sampled_from([1, 5, 64]),
    weight_bytes=st.integers(0, 5),
    tensors=st.none()
    | st.sets(st.sampled_from(sorted(TENSORS))).map(lambda keys: {k: TENSORS[k] for k in keys}),
    pinned=st.sampled_from([False, False, True]),
    load_seconds=st.sampled_from([0.0, 0.003]),
    weight=st.sampled_from([0.1, 1.0, 7.0]),
    max_delay=st.sampled_from([0.0, 0.0, 0.002]),
    idle_seconds=st.sampled_from([inf, inf, 0.0, 0.002, 0.4]),
    paused=st.sampled_from([None, None, None, *Pause]),
    feeds_back=st.sampled_from([False, False, True]),
)
arrivals = st.lists(
    st.tuples(
        st.sampled_from((*MODELS, "nobody")),
        st.integers(0, 2),  # variant
        st.sampled_from([0, 1, 1, 1, 2, 3, 33]),  # rows
        st.none() | st.sampled_from([-0.001, 0.0, 0.001, 0.01, 1.0]),  # deadline, from now
        st.sampled_from([0, 0, 0, 1, 2, 3]),  # run of a meta
        st.sampled_from([0, 0, 0, 1, 9]),  # priority
        st.sampled_from([False, False, False, False, True]),  # exclusive
    ),
    min_size=1,
    max_size=12,
)
asked = st.lists(
    st.tuples(
        st.sampled_from(["m", "n"]),
        st.none() | st.sampled_from([-0.001, 0.0, 0.001, 0.01, 1.0]),  # deadline, from now
        st.sampled_from([0, 0, 0, 1, 9]),  # priority
        st.sampled_from([0, 1, 3, 40]),  # how many may wait
        st.sets(st.sampled_from((*MODELS, "nobody"))),  # its callees
    ),
    min_size=1,
    max_size=4,
)
pauses = st.sampled_from([0.0, 0.0, 0.0005, 0.003, 0.5])
disciplines = st.sampled_from(sorted(DISCIPLINES))


class RandomEvents(RuleBasedStateMachine):
    """Drives a scheduler at random.

    `Driver` asserts at each step: conservation, nothing expired or cancelled executes, order within a
    variant, the oldest progresses, no execution on absent weights, no eviction below an execution, the
    depth, the number of runs under way, and that none waits beside a free place; and the machine validates itself after each event.
    """

    driver: Driver

    def __init__(self) -> None:
        super().__init__()
        #: figures of the models after the last event
        self.reported: Mapping[str, tuple[object, str]] = {}

    @initialize(
        depth=st.integers(1, 3),
        discipline=disciplines,
        budget=st.none() | st.integers(0, 8),
        ahead=st.sampled_from([0.0, 2.0]),
        metas=st.integers(1, 3),
        on_demand=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        depth: int,
        discipline: str,
        budget: int | None,
        ahead: float,
        metas: int,
        on_demand: bool,
    ) -> None:
        self.driver = Driver(
            SchedulerSettings(
                depth=depth,
                discipline=discipline,
                weight_budget_bytes=budget,
                launch_ahead_ms=ahead,
                meta_concurrency=metas,
                on_demand=on_demand,
            )
        )
        self.programs: dict[str, Program] = {}

    @rule(
        discipline=disciplines,
        depth=st.integers(1, 3),
        budget=st.none() | st.integers(0, 8),
        eviction=st.sampled_from(sorted(POLICIES)),
        metas=st.integers(1, 3),
        on_demand=st.booleans(),
    )
    def change_the_settings(
        self, discipline: str, depth: int, budget: int | None, eviction: Eviction, metas: int, on_demand: bool
    ) -> None:
        settings = replace(
            self.driver.settings,
            discipline=discipline,
            depth=depth,
            weight_budget_bytes=budget,
            eviction=eviction,
            meta_concurrency=metas,
            on_demand=on_demand,
        )
        self.driver.send(SettingsChanged(settings))

    # --- models --------------------------------------------------------------------------------------

    @rule(
        program=programs, pause=pauses, resident=st.booleans(), warm_up=st.booleans(), on_disk=st.booleans()
    )
    def add(self, program: Program, pause: float, resident: bool, warm_up: bool, on_disk: bool) -> None:
        if program.model not in self.driver.scheduler.snapshot().models:
            self.programs[program.model] = program
            self.driver.send(ModelAdded(program, resident, warm_up, on_disk=on_disk), after=pause)

    @rule(model=st.sampled_from((*MODELS, "nobody")), present=st.booleans())
    def copy_changes(self, model: str, present: bool) -> None:
        self.driver.send(CopyChanged(model, present))

    @precondition(lambda self: self.driver.reading)
    @rule(pause=pauses, how=st.sampled_from(["good", "good", "bad"]))
    def read_ends(self, pause: float, how: str) -> None:
        (model,) = self.driver.reading
        if how == "good":
            self.driver.read(model, pause)
        else:
            self.driver.fail_load(model)

    @rule(model=st.sampled_from(MODELS), pinned=st.booleans())
    def pin(self, model: str, pinned: bool) -> None:
        if model in self.loaded():
            self.driver.send(Pinned(model, pinned))

    @rule(models=st.sets(st.sampled_from(MODELS)), mode=st.sampled_from([None, None, *Pause]))
    def pause(self, models: set[str], mode: Pause | None) -> None:
        self.driver.pause(mode, *sorted(models & self.loaded()))

    @rule(model=st.sampled_from(MODELS))
    def prefetch(self, model: str) -> None:
        if model in self.loaded():
            self.driver.send(Prefetch(model))

    @rule(models=st.sets(st.sampled_from(MODELS)))
    def evict(self, models: set[str]) -> None:
        self.driver.evict(*sorted(models & self.loaded()))

    @rule(
        model=st.sampled_from(MODELS),
        weight=st.none() | st.sampled_from([0.1, 1.0, 7.0]),
        max_delay=st.none() | st.sampled_from([0.0, 0.002]),
        max_queue_depth=st.none() | st.sampled_from([1, 3, 40]),
        idle_seconds=st.none() | st.sampled_from([inf, 0.0, 0.002, 0.4]),
    )
    def change_the_policy(
        self,
        model: str,
        weight: float | None,
        max_delay: float | None,
        max_queue_depth: int | None,
        idle_seconds: float | None,
    ) -> None:
        if model in self.loaded():
            self.driver.send(PolicyChanged(model, weight, max_delay, max_queue_depth, idle_seconds))

    @rule()
    def compact(self) -> None:
        self.driver.send(Compact())

    @rule(within=st.sampled_from([None, None, 0.0, 0.002, 1.0]))
    def wind_down(self, within: float | None) -> None:
        self.driver.wind_down(within)

    @precondition(lambda self: self.driver.warming)
    @rule(
        data=st.data(),
        how=st.sampled_from(["good", "bad", "no memory"]),
        cost=st.sampled_from([0.0005, 0.003]),
    )
    def warm_up_ends(self, data: st.DataObject, how: str, cost: float) -> None:
        model = data.draw(st.sampled_from(sorted(self.driver.warming)))
        retried = how == "no memory" and self.driver.warming_again != model
        self.driver.warming_again = ""
        self.driver.warm_up_ends(model, cost if how == "good" else None, out_of_memory=how == "no memory")
        if how != "good" and not retried and model in self.loaded():
            self.driver.remove(model)

    @rule(model=st.sampled_from(MODELS))
    def remove(self, model: str) -> None:
        if model in self.loaded():
            self.driver.remove(model)

    @rule(model=st.sampled_from(MODELS), pause=pauses)
    def load(self, model: str, pause: float) -> None:
        if model in self.driver.loading:
            self.driver.load(model, pause)

    @rule(model=st.sampled_from(MODELS), out_of_memory=st.booleans())
    def fail_load(self, model: str, out_of_memory: bool) -> None:
        if model in self.driver.loading:
            self.driver.fail_load(model, out_of_memory=out_of_memory)

    @precondition(lambda self: self.driver.abandoning)
    @rule(data=st.data())
    def abandon_load(self, data: st.DataObject) -> None:
        self.driver.abandon_load(data.draw(st.sampled_from(sorted(self.driver.abandoning))))

    @precondition(lambda self: self.driver.loading)
    @rule(data=st.data(), how=st.sampled_from(["good", "bad", "abandoned", "read"]))
    def late_end_of_a_load(self, data: st.DataObject, how: str) -> None:
        latest = max(self.driver.loading.values())
        epoch = data.draw(st.integers(1, latest))
        model = data.draw(st.sampled_from(MODELS))
        if epoch not in (self.driver.loading.get(model), self.driver.reading.get(model)):
            late: WeightsRead | WeightsLoaded | LoadFailed | LoadAbandoned = LoadAbandoned(model, epoch)
            if how == "read":
                late = WeightsRead(model, epoch, 0.1)
            elif how != "abandoned":
                good = how == "good"
                late = WeightsLoaded(model, epoch, 0.1) if good else LoadFailed(model, epoch, "late")
            ended, running = len(self.driver.ended), len(self.driver.executing)
            held = self.driver.scheduler.snapshot().weight_bytes
            self.driver.send(late)

            assert (len(self.driver.ended), len(self.driver.executing)) == (ended, running)
            assert self.driver.scheduler.snapshot().weight_bytes == held

    # --- requests ------------------------------------------------------------------------------------

    @rule(arrivals=arrivals, pause=pauses)
    def arrive(
        self, arrivals: list[tuple[str, int, int, float | None, int, int, bool]], pause: float
    ) -> None:
        at = self.driver.now + pause
        requests = [
            self.driver.request(
                model,
                rows,
                variant=variant,
                deadline=None if deadline is None else at + deadline,
                run=run,
                priority=priority,
                exclusive=exclusive,
            )
            for model, variant, rows, deadline, run, priority, exclusive in arrivals
        ]
        self.driver.send(RequestsArrived(tuple(requests)), after=pause)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known: list[Request] = [*self.driver.requests.values()]
        some = data.draw(st.lists(st.sampled_from(known[-20:]), max_size=4))
        waiting = {request.id for request in some} & self.driver.waiting.keys()
        ended = len(self.driver.ended)
        self.driver.send(RequestsCancelled(tuple(request.id for request in some)))

        assert len(self.driver.ended) == ended + len(waiting)

    # --- runs of metas -------------------------------------------------------------------------------

    @rule(runs=asked, pause=pauses)
    def ask(self, runs: list[tuple[str, float | None, int, int, set[str]]], pause: float) -> None:
        at = self.driver.now + pause
        some = [
            self.driver.run_of(
                meta,
                deadline=None if deadline is None else at + deadline,
                priority=priority,
                max_waiting=waiting,
                models=tuple(sorted(models)),
            )
            for meta, deadline, priority, waiting, models in runs
        ]
        self.driver.send(RunsAsked(tuple(some)), after=pause)

    @precondition(lambda self: self.driver.asked)
    @rule(data=st.data(), pause=pauses)
    def end_a_run(self, data: st.DataObject, pause: float) -> None:
        run = data.draw(st.sampled_from([*self.driver.asked][-10:]))
        self.driver.send(RunEnded(run), after=pause)

        assert run not in self.driver.under_way
        assert run in self.driver.left_waiting

    @precondition(lambda self: self.driver.under_way)
    @rule(data=st.data(), models=st.lists(st.sampled_from(MODELS), min_size=1, max_size=4))
    def call(self, data: st.DataObject, models: list[str]) -> None:
        run = data.draw(st.sampled_from(sorted(self.driver.under_way)))
        self.driver.arrive(*(self.driver.request(model, run=run) for model in models))

    # --- executions ----------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.executing)
    @rule(
        data=st.data(),
        slower=st.sampled_from([0.5, 1.0, 1.0, 100.0]),
        how=st.sampled_from(["good", "good", "device fault", "no memory"]),
    )
    def finish(self, data: st.DataObject, slower: float, how: str) -> None:
        execute = data.draw(st.sampled_from([*self.driver.executing.values()]))
        ended = len(self.driver.ended)
        self.driver.finish(
            execute.number,
            seconds=0.001 * slower,
            error=None if how == "good" else how,
            out_of_memory=how == "no memory",
        )

        if how != "no memory" or execute.again:
            assert len(self.driver.ended) >= ended + len(execute.requests)

    @rule(pause=pauses)
    def wait(self, pause: float) -> None:
        wakeup = self.driver.scheduler.next_wakeup()
        self.driver.tick(self.driver.now + pause if wakeup is None else wakeup)

    # --- always --------------------------------------------------------------------------------------

    def loaded(self) -> set[str]:
        return {name for name, state in self.driver.scheduler.snapshot().models.items() if not state.draining}

    @invariant()
    def bytes_are_those_on_the_device(self) -> None:
        if hasattr(self, "driver"):
            held = [self.programs[one] for one in self.driver.resident | self.driver.loading.keys()]
            shared = {key for one in held for key in one.tensors or ()}
            own = sum(one.weight_bytes for one in held if one.tensors is None)
            snapshot = self.driver.scheduler.snapshot()
            assert snapshot.weight_bytes == own + sum(TENSORS[key] for key in shared)
            assert snapshot.logical_bytes == sum(one.weight_bytes for one in held)

    @invariant()
    def changes_are_noted(self) -> None:
        if hasattr(self, "driver"):
            scheduler, before = self.driver.scheduler, self.reported
            now = {
                name: (load, scheduler.model(name).residency)  # type: ignore[union-attr]
                for name, load in scheduler.load_report().models.items()
            }
            touched = scheduler.take_unreported()
            assert {name for name, one in now.items() if before.get(name) != one} <= {*touched}
            self.reported = now

    @invariant()
    def wakeup_is_not_after_the_soonest_deadline(self) -> None:
        if hasattr(self, "driver"):
            deadlines = [
                deadline
                for waiting in (self.driver.waiting, self.driver.waiting_runs)
                for deadline in (one.deadline for one in waiting.values())
                if deadline is not None
            ]
            wakeup = self.driver.scheduler.next_wakeup()
            assert not deadlines or (wakeup is not None and wakeup <= min(deadlines))

    @invariant()
    def backlog_is_there_when_work_is(self) -> None:
        if hasattr(self, "driver"):
            backlog = self.driver.scheduler.backlog_seconds(self.driver.now)
            busy = bool(self.driver.waiting or self.driver.executing or self.driver.again)
            waiting = [one for one in self.driver.waiting.values() if not self.driver.held(one.model)]
            assert backlog > 0.0 if waiting else backlog >= 0.0
            assert busy or backlog == 0.0

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        _drain_and_replay(self.driver)


def test_random_events() -> None:
    """No sequence of events breaks an invariant, and a replay gives the same instructions."""
    run_state_machine_as_test(RandomEvents, settings=settings(FEW_EXAMPLES, stateful_step_count=40))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_random_events() -> None:
    """The same with 1,000 longer runs."""
    run_state_machine_as_test(RandomEvents, settings=settings(max_examples=1000, stateful_step_count=80))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_random_events() -> None:
    """200 runs of 5,000 events on up to 12 models, with queues that build up and drain."""
    for seed in range(200):
        settings = SchedulerSettings(
            depth=1 + seed % 3,
            discipline=sorted(DISCIPLINES)[seed // 3 % len(DISCIPLINES)],
            weight_budget_bytes=(None, 30, 12)[seed // 9 % 3],
            eviction=sorted(POLICIES)[seed % len(POLICIES)],
            meta_concurrency=1 + seed % 4,
            on_demand=seed % 5 > 0,
        )
        driver = Driver(settings, validate_every=20)
        chance = Random(seed)
        while len(driver.events) < 5000:
            _one_random_event(driver, chance, load=1 + seed % 7)
        _drain_and_replay(driver)


def _one_random_event(driver: Driver, chance: Random, load: int) -> None:
    models = driver.scheduler.snapshot().models
    model = f"m{chance.randrange(12)}"
    pause = chance.choice((0.0, 0.0005, 0.002))
    events = ("arrive", "finish", "cancel", "tick", "model", "ask", "end")
    match chance.choices(events, (8, 16, 2, 2, 2, 1, 1))[0]:
        case "arrive":
            requests = [
                driver.request(
                    f"m{chance.randrange(12)}",
                    chance.choice((0, 1, 1, 1, 2, 5)),
                    variant=chance.randrange(2),
                    deadline=chance.choice((None, None, driver.now + chance.expovariate(20.0))),
                    run=chance.choice((0, 0, 0, *driver.under_way)),
                    priority=chance.choice((0, 0, 0, 1, 9)),
                    exclusive=chance.random() < 0.05,
                )
                for _ in range(chance.randint(1, 4 * load))
            ]
            driver.send(RequestsArrived(tuple(requests)), after=pause)
        case "finish" if driver.executing:
            error = "device fault" if chance.random() < 0.05 else None
            number = chance.choice([*driver.executing])
            memory = error is not None and chance.random() < 0.5
            driver.finish(number, seconds=0.001 * chance.expovariate(1.0), error=error, out_of_memory=memory)
        case "ask":
            runs = [
                driver.run_of(
                    chance.choice("mn"),
                    deadline=chance.choice((None, None, driver.now + chance.expovariate(20.0))),
                    priority=chance.choice((0, 0, 1)),
                    max_waiting=chance.choice((2, 20)),
                )
                for _ in range(chance.randint(1, load))
            ]
            driver.send(RunsAsked(tuple(runs)), after=pause)
        case "end" if driver.under_way or driver.waiting_runs:
            run = chance.choice([*driver.under_way, *driver.waiting_runs])
            driver.send(RunEnded(run), after=pause)
        case "cancel" if driver.waiting:
            driver.cancel(*chance.sample([*driver.waiting.values()], 1))
        case "model" if model in driver.loading:
            if chance.random() < 0.2:
                driver.fail_load(model, out_of_memory=chance.random() < 0.5)
            elif model in driver.abandoning and chance.random() < 0.5:
                driver.abandon_load(model)
            else:
                driver.load(model, pause)
        case "model" if model in driver.reading:
            if model in driver.abandoning:
                driver.abandon_load(model)
            elif chance.random() < 0.2:
                driver.fail_load(model)
            else:
                driver.read(model, pause)
        case "model" if model in driver.warming:
            driver.warm_up_ends(model)
        case "model" if chance.random() < 0.1:
            driver.send(CopyChanged(model, chance.random() < 0.5))
        case "model" if chance.random() < 0.05:
            driver.send(Compact())
        case "model" if chance.random() < 0.02:
            driver.change(on_demand=chance.random() < 0.7)
        case "model" if model in models and not models[model].draining and chance.random() < 0.3:
            operate: list[Event] = [
                Pinned(model, chance.random() < 0.3),
                Prefetch(model),
                Evict((model,)),
                Paused((model,), chance.choice([None, None, *Pause])),
                PolicyChanged(model, weight=chance.choice((0.1, 1.0)), max_queue_depth=chance.randint(1, 50)),
            ]
            driver.send(chance.choice(operate))
        case "model" if model not in models:
            sizes = chance.sample((1, 2, 4, 8, 16, 32), 3)
            driver.send(
                ModelAdded(
                    Program(
                        model,
                        {
                            (variant, size): 0.001 * chance.uniform(1, 1 + size / 4)
                            for variant in range(2)
                            for size in sizes
                        },
                        coalesce=chance.random() < 0.8,
                        max_queue_depth=chance.choice((5, 50)),
                        weight_bytes=chance.randint(0, 12),
                        tensors=chance.choice(
                            (None, {f"t{one}": one for one in chance.sample(range(8), chance.randint(0, 5))})
                        ),
                        weight=chance.choice((0.1, 1.0, 7.0)),
                        max_delay=chance.choice((0.0, 0.0, 0.002)),
                    ),
                    resident=chance.random() < 0.5,
                    warm_up=chance.random() < 0.5,
                )
            )
        case "model" if not models[model].draining and chance.random() < 0.1:
            driver.remove(model)
        case _:
            wakeup = driver.scheduler.next_wakeup()
            driver.tick(driver.now + pause if wakeup is None else min(wakeup, driver.now + pause))


def _drain_and_replay(driver: Driver) -> None:
    """Let all requests end; then a fresh scheduler gives the same instructions for the recorded events."""
    loaded = [name for name, one in driver.scheduler.snapshot().models.items() if not one.draining]
    driver.pause(None, *loaded)
    driver.wind_down(None)
    for _ in range(10_000):
        if driver.reading:
            driver.read(next(iter(driver.reading)))
        elif driver.loading:
            driver.load(next(iter(driver.loading)))
        elif driver.warming:
            driver.warm_up_ends(min(driver.warming))
        elif driver.executing:
            driver.finish()
        elif driver.under_way:
            driver.send(RunEnded(next(iter(driver.under_way))))
        elif (wakeup := driver.scheduler.next_wakeup()) is not None:
            driver.tick(wakeup)
        else:
            break
    invariants.check(driver.scheduler)

    assert driver.ended.keys() == driver.requests.keys()
    # Each requested run stopped waiting once: admitted, finished or withdrawn, and none is left.
    assert driver.left_waiting.keys() == driver.asked.keys()
    metas = driver.scheduler.snapshot().metas.values()
    ways = [(sum(one.admitted for one in metas), Admit), (sum(one.withdrawn for one in metas), RunEnded)]
    for count, way in ways:
        assert count == sum(isinstance(one, way) for one in driver.left_waiting.values())

    again = Scheduler(driver.first_settings)
    assert [again.handle(event, now) for event, now in driver.events] == driver.instructions
    assert again.snapshot() == driver.scheduler.snapshot()
