"""Invariants for any events in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from random import Random
from typing import get_args

import pytest

from rsrv.scheduler import invariants
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    Admit,
    Compact,
    CopyChanged,
    Event,
    Execute,
    Finish,
    Instruction,
    LoadAbandoned,
    LoadFailed,
    ModelAdded,
    Outcome,
    Pause,
    Pinned,
    PolicyChanged,
    Prefetch,
    Program,
    Reason,
    Request,
    RequestsArrived,
    Run,
    RunEnded,
    RunsAsked,
    SettingsChanged,
    WarmUp,
    WeightsLoaded,
    WeightsRead,
)
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import ModelSnapshot
from tests.unit.scheduler.driver import Driver

#: Bytes of the tensors that models may share.
TENSORS = {f"t{size}": size for size in range(8)}
SIZES = (1, 2, 4, 8, 16, 32)


class RandomEvents:
    """Sends random events to a scheduler.

    `Driver` checks at each step that no expired or cancelled request executes, that requests of a variant execute in
    order, and that only padded models mix variants. It checks that the oldest request progresses, that no execution
    lacks its weights, and that no weights are evicted while an execution uses them. It checks the depth, the number of
    runs in progress, and that no run waits if another one may begin. The scheduler checks its own invariants after every
    `validate_every` events.
    """

    def __init__(self, seed: int, models: int, validate_every: int = 1) -> None:
        self.chance = Random(seed)
        self.models = [f"m{number}" for number in range(models)]
        #: How many requests or runs arrive in one event.
        self.load = 1 + seed % 4
        self.driver = Driver(
            SchedulerSettings(
                depth=1 + seed % 3,
                discipline=sorted(DISCIPLINES)[seed // 3 % len(DISCIPLINES)],
                weight_budget_bytes=(None, 30, 12)[(seed + seed // 3) % 3],
                launch_ahead_ms=(0.0, 2.0)[seed // 2 % 2],
                meta_concurrency=1 + seed % 4,
                on_demand=seed % 5 > 0,
            ),
            validate_every=validate_every,
        )
        self.programs: dict[str, Program] = {}
        #: Snapshots of the models after the last event.
        self.reported: Mapping[str, ModelSnapshot] = {}
        #: Change counters of the models after the last event.
        self.counted: Mapping[str, int] = {}
        #: Kinds of events with their relative frequency.
        self.steps: dict[Callable[[], None], int] = {
            self.arrive: 9,
            self.finish: 16,
            self.end_of_a_load: 5,
            self.end_of_a_read: 3,
            self.end_of_a_warm_up: 5,
            self.add: 6,
            self.operate: 3,
            self.cancel: 2,
            self.wait: 6,
            self.ask: 1,
            self.call: 2,
            self.end_a_run: 2,
            self.late_end_of_a_load: 1,
            self.copy_changes: 1,
            self.remove: 1,
            self.change_the_settings: 1,
        }

    def run(self, events: int) -> None:
        """Send at least this many events, let all requests end, and replay the events."""
        while len(self.driver.events) < events:
            self.chance.choices([*self.steps], [*self.steps.values()])[0]()
            self.check()
        self.drain()
        self.replay()

    def reached(self) -> Counter[object]:
        """Return how often each type of event and instruction, each outcome and reason, and each kind of execution occurred."""
        counts: Counter[object] = Counter(type(event) for event, _ in self.driver.events)
        for instruction in (entry for out in self.driver.instructions for entry in out):
            counts[type(instruction)] += 1
            match instruction:
                case Finish(_, outcome, reason):
                    counts[outcome] += 1
                    counts[reason] += 1
                case Execute(again=True) | WarmUp(again=True):
                    counts["retry"] += 1
                case Execute(exclusive=True):
                    counts["exclusive"] += 1
                case Execute():
                    variants = {self.driver.requests[number].variant for number in instruction.requests}
                    counts["several lengths"] += len(variants) > 1
        return counts

    # --- models --------------------------------------------------------------------------------------

    def known(self) -> list[str]:
        states = self.driver.scheduler.snapshot().models
        return sorted(name for name, state in states.items() if not state.draining)

    def some(self, models: list[str]) -> list[str]:
        return self.chance.sample(models, self.chance.randint(0, len(models)))

    def add(self) -> None:
        chance, model = self.chance, self.chance.choice(self.models)
        if model in self.driver.scheduler.snapshot().models:
            return
        sizes = chance.sample(SIZES, 3)
        tensors = {key: TENSORS[key] for key in chance.sample(sorted(TENSORS), chance.randint(0, 4))}
        coalesce = chance.random() < 0.8
        self.programs[model] = program = Program(
            model,
            {
                (variant, size): 0.001 * chance.uniform(1, 1 + size / 4)
                for variant in range(3)
                for size in sizes
            },
            coalesce=coalesce,
            max_queue_depth=chance.choice((3, 40)),
            max_batch_rows=chance.choice((None, None, 5)),
            weight_bytes=chance.randint(0, 12),
            tensors=chance.choice((None, tensors)),
            pinned=chance.random() < 0.1,
            load_seconds=chance.choice((0.0, 0.003)),
            weight=chance.choice((0.1, 1.0, 7.0)),
            max_delay=chance.choice((0.0, 0.0, 0.002)),
            idle_seconds=chance.choice((inf, inf, 0.0, 0.002, 0.4)),
            paused=chance.choice((None,) * 9 + tuple(Pause)),
            feeds_back=chance.random() < 0.1,
            padded=coalesce and chance.random() < 0.5,
        )
        resident, warm_up, on_disk = (chance.random() < 0.5 for _ in range(3))
        self.driver.send(ModelAdded(program, resident, warm_up, on_disk=on_disk), after=self.pause())

    def remove(self) -> None:
        if known := self.known():
            self.driver.remove(self.chance.choice(known))

    def operate(self) -> None:
        """Send an event that an operator may cause."""
        chance, driver, known = self.chance, self.driver, self.known()
        if not known:
            return
        model = chance.choice(known)
        policy = PolicyChanged(
            model,
            weight=chance.choice((None, 0.1, 1.0, 7.0)),
            max_delay=chance.choice((None, 0.0, 0.002)),
            max_queue_depth=chance.choice((None, 3, 40)),
            idle_seconds=chance.choice((None, inf, 0.0, 0.002, 0.4)),
        )
        match chance.randrange(6):
            case 0:
                driver.send(Pinned(model, chance.random() < 0.3))
            case 1:
                driver.send(Prefetch(model))
            case 2:
                driver.evict(*self.some(known))
            case 3:
                driver.pause(chance.choice((None, *Pause)), *self.some(known))
                driver.pause(None, *self.some(known))
            case 4:
                driver.send(policy)
            case 5:
                driver.send(Compact())

    def copy_changes(self) -> None:
        model = self.chance.choice((*self.models, "nobody"))
        self.driver.send(CopyChanged(model, self.chance.random() < 0.5))

    # --- weights -------------------------------------------------------------------------------------

    def end_of_a_load(self) -> None:
        for model in [*self.driver.loading]:
            if model in self.driver.abandoning and self.chance.random() < 0.5:
                self.driver.abandon_load(model)
            elif self.chance.random() < 0.4:
                self.driver.fail_load(model, out_of_memory=self.chance.random() < 0.5)
            else:
                self.driver.load(model, self.pause())

    def end_of_a_read(self) -> None:
        for model in [*self.driver.reading]:
            if model in self.driver.abandoning and self.chance.random() < 0.5:
                self.driver.abandon_load(model)
            elif self.chance.random() < 0.2:
                self.driver.fail_load(model)
            else:
                self.driver.read(model, self.pause())

    def end_of_a_warm_up(self) -> None:
        if not self.driver.warming:
            return
        model = self.chance.choice(sorted(self.driver.warming))
        memory = self.chance.random() < 0.1
        good = not memory and self.chance.random() < 0.9
        retried = memory and self.driver.warming_again != model
        self.driver.warming_again = ""
        self.driver.warm_up_ends(model, 0.001 if good else None, out_of_memory=memory)
        if not good and not retried and model in self.known():
            self.driver.remove(model)

    def late_end_of_a_load(self) -> None:
        """Send a late end of a load or read that has ended or was abandoned, and check that nothing changes."""
        driver = self.driver
        if not driver.loading:
            return
        model = self.chance.choice(self.models)
        epoch = self.chance.randint(1, max(driver.loading.values()))
        if epoch in (driver.loading.get(model), driver.reading.get(model)):
            return
        late = self.chance.choice(
            (
                WeightsRead(model, epoch, 0.1),
                WeightsLoaded(model, epoch, 0.1),
                LoadFailed(model, epoch, "late"),
                LoadAbandoned(model, epoch),
            )
        )
        ends, running = len(driver.ended), len(driver.executing)
        held = driver.scheduler.snapshot().weight_bytes
        driver.send(late)

        assert (len(driver.ended), len(driver.executing)) == (ends, running)
        assert driver.scheduler.snapshot().weight_bytes == held

    # --- requests ------------------------------------------------------------------------------------

    def pause(self) -> float:
        return self.chance.choice((0.0, 0.0, 0.0005, 0.002, 0.02))

    def deadline(self) -> float | None:
        chance = self.chance
        remaining_s = chance.choice((-0.001, chance.expovariate(20.0), chance.expovariate(300.0)))
        return chance.choice((None, None, self.driver.now + remaining_s))

    def arrive(self) -> None:
        chance, driver = self.chance, self.driver
        requests = [
            driver.request(
                "nobody" if chance.random() < 0.02 else chance.choice(self.known() or self.models),
                chance.choice((0, 1, 1, 1, 2, 3, 3, 33)),
                variant=chance.choice((0, 0, 0, 1, 1, 1, 2, 3)),
                deadline=self.deadline(),
                run=chance.choice((0, 0, 0, 0, 1, 2)),
                priority=chance.choice((0, 0, 0, 1, 9)),
                exclusive=chance.random() < 0.05,
                accepted=chance.random() < 0.05,
            )
            for _ in range(chance.randint(1, 4 * self.load))
        ]
        driver.send(RequestsArrived(tuple(requests)), after=self.pause())

    def cancel(self) -> None:
        latest = [*self.driver.requests.values()][-20:]
        some = self.chance.sample(latest, min(len(latest), self.chance.randint(1, 3)))
        waiting = {request.id for request in some} & self.driver.waiting.keys()
        out = self.driver.cancel(*some)

        finishes = [instruction for instruction in out if isinstance(instruction, Finish)]
        assert {finish.request for finish in finishes if finish.outcome is Outcome.CANCELLED} == waiting

    # --- runs of meta models -------------------------------------------------------------------------

    def ask(self) -> None:
        chance, driver = self.chance, self.driver
        runs = [
            driver.run_of(
                chance.choice("mn"),
                deadline=self.deadline(),
                priority=chance.choice((0, 0, 1)),
                max_waiting=chance.choice((0, 2, 20)),
                models=tuple(chance.sample(self.models, chance.randint(0, 2))),
            )
            for _ in range(chance.randint(1, self.load))
        ]
        driver.send(RunsAsked(tuple(runs)), after=self.pause())

    def call(self) -> None:
        driver = self.driver
        if driver.under_way and (known := self.known()):
            run = self.chance.choice(sorted(driver.under_way))
            models = self.chance.choices(known, k=self.chance.randint(1, 4))
            driver.arrive(*(driver.request(model, run=run) for model in models))

    def end_a_run(self) -> None:
        if self.driver.asked:
            run = self.chance.choice([*self.driver.asked][-10:])
            self.driver.send(RunEnded(run), after=self.pause())

            assert run not in self.driver.under_way
            assert run in self.driver.left_waiting

    # --- executions and time -------------------------------------------------------------------------

    def finish(self) -> None:
        driver, chance = self.driver, self.chance
        if not driver.executing:
            return
        number = chance.choice([*driver.executing])
        execute, ends = driver.executing[number], len(driver.ended)
        fails, memory = chance.random() < 0.1, chance.random() < 0.5
        driver.finish(
            number,
            seconds=0.001 * chance.expovariate(1.0),
            error="device fault" if fails else None,
            out_of_memory=fails and memory,
        )
        if not (fails and memory) or execute.again:
            assert len(driver.ended) >= ends + len(execute.requests)

    def wait(self) -> None:
        wakeup = self.driver.scheduler.next_wakeup()
        latest = self.driver.now + self.pause()
        self.driver.tick(latest if wakeup is None else min(wakeup, latest))

    def change_the_settings(self) -> None:
        driver, chance = self.driver, self.chance
        match chance.randrange(3):
            case 0:
                driver.wind_down(chance.choice((None, 0.0, 0.002)))
            case 1:
                driver.wind_down(None)
            case 2:
                driver.send(
                    SettingsChanged(
                        replace(
                            driver.settings,
                            discipline=chance.choice(sorted(DISCIPLINES)),
                            depth=chance.randint(1, 3),
                            weight_budget_bytes=chance.choice((None, 30, 12)),
                            meta_concurrency=chance.randint(1, 4),
                            on_demand=chance.random() < 0.8,
                        )
                    )
                )

    # --- checks --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what the scheduler reports after each step."""
        driver, scheduler = self.driver, self.driver.scheduler
        held = [self.programs[name] for name in driver.resident | driver.loading.keys()]
        shared = {key for program in held for key in program.tensors or ()}
        own = sum(program.weight_bytes for program in held if program.tensors is None)
        snapshot = scheduler.snapshot()
        assert snapshot.weight_bytes == own + sum(TENSORS[key] for key in shared)
        assert snapshot.logical_bytes == sum(program.weight_bytes for program in held)

        # If the snapshot of a model has changed, its change counter has changed as well.
        figures = {
            name: replace(model, load_seconds=0.0, backlog_seconds=0.0)
            for name, model in snapshot.models.items()
            if not model.draining
        }
        counts = scheduler.change_counts()
        assert all(
            self.reported.get(name) == figures[name]
            for name, count in counts.items()
            if self.counted.get(name) == count and name in figures
        )
        self.counted = counts
        self.reported = figures

        waiting: list[Request | Run] = [*driver.waiting.values(), *driver.waiting_runs.values()]
        soonest = min((waiter.deadline for waiter in waiting if waiter.deadline is not None), default=inf)
        wakeup = scheduler.next_wakeup()
        assert soonest == inf or (wakeup is not None and wakeup <= soonest)

        backlog = scheduler.backlog_seconds(driver.now)
        work = any(not driver.held(request.model) for request in driver.waiting.values())
        assert backlog > 0.0 if work else backlog >= 0.0
        assert driver.waiting or driver.executing or driver.again or backlog == 0.0

    def drain(self) -> None:
        """Let all requests and runs end."""
        driver = self.driver
        driver.pause(None, *self.known())
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
            elif driver.waiting and (wakeup := driver.scheduler.next_wakeup()) is not None:
                driver.tick(wakeup)
            else:
                break
        invariants.check(driver.scheduler)

        assert driver.ended.keys() == driver.requests.keys()
        # Each requested run has stopped waiting exactly once: it was admitted, has ended, or was withdrawn.
        assert driver.left_waiting.keys() == driver.asked.keys()
        metas = driver.scheduler.snapshot().metas.values()
        ways = [
            (sum(meta.admitted for meta in metas), Admit),
            (sum(meta.withdrawn for meta in metas), RunEnded),
        ]
        for count, way in ways:
            assert count == sum(isinstance(ending, way) for ending in driver.left_waiting.values())

    def replay(self) -> None:
        """Check that a new scheduler gives the same instructions for the recorded events."""
        again = Scheduler(self.driver.first_settings)
        assert [again.handle(event, now) for event, now in self.driver.events] == self.driver.instructions
        assert again.snapshot() == self.driver.scheduler.snapshot()


def test_random_events() -> None:
    """Random events break no invariant, and a replay gives the same instructions.

    Each kind of event and outcome occurs often.
    """
    reached: Counter[object] = Counter()
    for seed in range(15):
        events = RandomEvents(seed, models=4)
        events.run(260)
        reached += events.reached()

    expected = [
        *get_args(Event),
        *get_args(Instruction),
        *Outcome,
        *Reason,
        "retry",
        "exclusive",
        "several lengths",
    ]
    rare = {str(event): reached[event] for event in expected if reached[event] < 5}
    assert not rare
    assert reached[Execute] > 500


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_random_events() -> None:
    """A million random events with up to 12 models break no invariant. There are 200 sequences of 5,000 events."""
    for seed in range(200):
        RandomEvents(seed, models=12, validate_every=20).run(5000)
