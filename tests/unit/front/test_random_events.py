"""A front keeps its invariants, whatever events it gets in whatever order."""

from __future__ import annotations

from random import Random

import pytest

from rsrv.front.events import (
    Dismissed,
    Hold,
    InputsExecuted,
    LoadAsked,
    ModelRejected,
    PlacementChanged,
    Proceed,
    Registered,
    RequestAnswered,
    RequestArrived,
    RequestCancelled,
    RunAsks,
    RuntimeLost,
    StartAsked,
    StartTimeoutKnown,
    StepAnnounced,
    Unloaded,
    Unreached,
    WentCold,
)
from rsrv.front.rules import MAX_DEATHS
from rsrv.front.states import ServingState
from rsrv.placement.device_choice import PINNED
from rsrv.wire.frames import StartProgress
from tests.unit.front.driver import Driver, Request

#: Longest time in seconds that a request waits for a runtime, and for one step of a start.
RETRY_S, LIMIT_S = 10.0, 60.0


class Life:
    """The life of a model, from its load to its unload, with random events that are possible in the current state."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.driver = Driver(
            devices=random.choice([1, 1, 2, 3]), mask=random.choice([0, 0, 1, 2, 3, PINNED | 1])
        )
        self.requests: list[Request] = []
        self.driver.send(LoadAsked(0))

    def step(self) -> None:
        """Send one event. It depends on chance and on the instructions of the front."""
        random, driver = self.random, self.driver
        acts = [
            self._ask,
            self._tick,
            self._tick,
            self._arrive,
            self._arrive,
            self._placement,
            self._cancel,
            self._run,
        ]
        acts += [self._attempt] * 4 * bool(driver.attempts)
        acts += [self._answer] * 2 * bool(driver.submitted)
        ready = [
            device
            for device, view in driver.front.snapshot().devices.items()
            if view.state is ServingState.READY
        ]
        acts += [self._lose, self._dismiss] * bool(ready)
        self.ready = ready
        driver.now += random.choice([0.0, 0.0, 0.001, 0.02, 0.3, 2.0, 20.0])
        random.choice(acts)()

    def _tick(self) -> None:
        self.driver.takes_none = self.random.random() < 0.2
        self.driver.tick(self.random.choice([0.0, 0.02, 1.0, 30.0]))
        self.driver.check_bounds(max(RETRY_S, LIMIT_S))

    def _arrive(self) -> None:
        random, now = self.random, self.driver.now
        request = Request(
            deadline_s=random.choice([0.0, 0.0, now + 0.5, now + 30.0, now - 0.1]),
            is_sub_call=random.random() < 0.1,
            nbytes=random.choice([8, 8, 8, 100 << 20]),
        )
        self.requests.append(request)
        self.driver.send(RequestArrived(request))

    def _attempt(self) -> None:
        random = self.random
        device = random.choice([*self.driver.attempts])
        if random.random() < 0.4:
            step = StartProgress(random.choice(["", "it compiles"]), LIMIT_S, random.choice([0.0, 5.0]))
            self.driver.send(StepAnnounced(device, step))
            return
        ends: list[Registered | WentCold | ModelRejected | Unreached] = [
            Registered(device, max(self.driver.devices, random.choice([1, 2, 3])), RETRY_S),
            Registered(device, self.driver.devices, RETRY_S),
            WentCold(device),
            ModelRejected(device, "no room"),
            ModelRejected(device, "it crashed", "it has crashed", barred=True),
            Unreached(device, "no runtime"),
            Unreached(device, "it ended", ended=True),
            Unreached(device, "version 9", misunderstood=True),
        ]
        self.driver.end_attempt(random.choice(ends))

    def _answer(self) -> None:
        self.driver.answer(self.random.randrange(len(self.driver.submitted)))

    def _lose(self) -> None:
        """Let a runtime die with some of the submitted requests."""
        random, driver = self.random, self.driver
        count = random.randint(0, len(driver.submitted))
        device, lost = random.choice(self.ready), random.sample(driver.submitted, count)
        driver.submitted = [
            client_request for client_request in driver.submitted if client_request not in lost
        ]
        sleeps = random.random() < 0.3
        driver.send(RuntimeLost(device, sleeps=sleeps))
        for request in lost:
            if not sleeps and random.random() < 0.8:
                request.deaths += 1
                driver.send(InputsExecuted(random.randbytes(1), request.deaths))
            driver.send(RequestArrived(request))

    def _dismiss(self) -> None:
        device = self.random.choice(self.ready)
        self.driver.send(StartTimeoutKnown(LIMIT_S))
        self.driver.send(Dismissed(device))
        for cold_device in self.driver.leaves:
            self.driver.leaves = []
            self.driver.send(WentCold(cold_device))

    def _placement(self) -> None:
        self.driver.send(PlacementChanged(self.random.choice([0, 1, 2, 4, 7, PINNED | 2])))

    def _ask(self) -> None:
        """Ask for a start on the device of a sub-call's run."""
        self.driver.send(StartAsked(self.random.randrange(len(self.driver.front.snapshot().devices))))

    def _cancel(self) -> None:
        """Let a client cancel a waiting request, or let the request be answered because its deadline has passed."""
        waiting = self.driver.front.waiting
        if waiting:
            request = self.random.choice(waiting)
            is_cancelled = self.random.random() < 0.5
            self.driver.send(RequestCancelled(request) if is_cancelled else RequestAnswered(request))

    def _run(self) -> None:
        """Let a run of a meta model ask whether it may proceed. The front must answer at once."""
        request = Request(deaths=self.random.choice([0, 0, 1, MAX_DEATHS]))
        self.driver.runs.clear()
        self.driver.send(RunAsks(request))
        answered = [decision for decision in self.driver.runs if isinstance(decision, Proceed | Hold)]
        assert len(answered) + (request.status is not None) == 1
        if request is self.driver.front.suspect:
            self.driver.send(RequestAnswered(request))

    def end(self) -> None:
        """Unload the model, and check that each request has ended or is submitted to a runtime."""
        self.driver.send(Unloaded())
        for request in self.requests:
            assert (request.status is not None) != (request in self.driver.submitted)


def live(seed: int, events: int) -> None:
    """Load a model, send this number of random events, and unload the model."""
    life = Life(Random(seed))
    for _ in range(events):
        life.step()
    life.end()


@pytest.mark.parametrize("seed", range(40))
def test_random_events_break_no_invariant(seed: int) -> None:
    """Each request ends once, no request waits beyond its limits, and at most one suspect is under way."""
    live(seed, 250)


@pytest.mark.long
def test_a_million_random_events_break_no_invariant() -> None:
    """The invariants also hold for a thousand models with a thousand events each."""
    for seed in range(1000, 2000):
        live(seed, 1000)
