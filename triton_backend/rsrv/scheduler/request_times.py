"""The parts of slow requests' time: for their weights, for others to join, behind other work, and executing."""

from collections.abc import Collection, Sequence
from math import inf

from rsrv.scheduler.events import Execute, ExecutionFinished, Outcome
from rsrv.scheduler.inflight import InFlight, StartedExecution
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.request_queue import RequestQueues
from rsrv.scheduler.slowest import SlowRequest, Wait
from rsrv.scheduler.variant_queue import InFlightRequest

#: from when to when
Periods = Collection[tuple[float, float]]


class RequestTimes:
    """Explains requests from the histories of their models and the device's latest executions."""

    def __init__(self, queues: RequestQueues, running: InFlight) -> None:
        self._queues = queues
        self._running = running

    def keep(
        self,
        running: StartedExecution,
        entries: Sequence[InFlightRequest],
        event: ExecutionFinished,
        now: float,
    ) -> None:
        """Offer the requests of an execution that ended to the slowest of their model."""
        model, started, arrivals = running.model, running.started, [entry.arrived for entry in entries]
        first, held_until = min(arrivals), -inf
        if model.program.max_delay:
            # A batch that is full starts before the delay is over: when its last request came.
            ends = first + model.program.max_delay
            held_until = ends if ends <= started else max(arrivals)
        absences, evicted = model.history.absences(first)
        # With a depth of 2, an execution waits for the one before it on the device.
        behind = self._running.behind(first, max(started, now - event.seconds), started)
        outcome = Outcome.ANSWERED if event.error is None else Outcome.FAILED
        latest = model.slowest.latest_arrival(now)
        for entry in entries:
            arrived = entry.arrived
            if not arrived < latest:
                continue
            paused, weights = _blocked(model, absences, arrived, started)
            peers = max(0.0, min(held_until, started) - arrived - paused - weights)
            executing = min(event.seconds, now - started)
            wait = Wait(arrived, now - arrived, paused, weights, peers, executing)
            model.slowest.add(
                entry.request, wait, outcome, running.execute, behind, evicted if weights else None
            )

    def keep_ended(self, now: float) -> None:
        """Offer requests that ended without an execution to the slowest of their models."""
        ended, self._queues.ended = self._queues.ended, []
        for model, entry, outcome in ended:
            if entry.arrived < model.slowest.latest_arrival(now):
                slow = self._unfinished(model, entry, now, None, now)
                model.slowest.add(entry.request, slow.wait, outcome, None, slow.behind, slow.evicted)

    def in_progress(self, tag: int, id: int | None, now: float) -> list[SlowRequest]:
        """Return requests that wait or execute, with their time up to now: with a client's tag, or this id."""
        executing = {id: one for one in self._running.values() for id in one.execute.requests}
        found = []
        for entry in self._queues.live.values():
            request = entry.request
            if (not tag or request.tag != tag) and request.id != id:
                continue
            running = executing.get(request.id)
            if running is not None:
                found.append(self._unfinished(running.model, entry, running.started, running.execute, now))
            elif entry.queue is not None:
                found.append(self._unfinished(self._queues.model(entry), entry, now, None, now))
        return found

    def _unfinished(
        self, model: ModelState, entry: InFlightRequest, until: float, execute: Execute | None, now: float
    ) -> SlowRequest:
        """Return a request that is not answered. `until`: until when it has waited."""
        arrived, delay = entry.arrived, model.program.max_delay
        absences, evicted = model.history.absences(arrived)
        paused, weights = _blocked(model, absences, arrived, until)
        peers = max(0.0, min(arrived + delay, until) - arrived - paused - weights) if delay else 0.0
        wait = Wait(arrived, now - arrived, paused, weights, peers, now - until)
        behind = self._running.behind(arrived, until, until)
        return SlowRequest(
            wait.seconds, 0, entry.request, wait, None, execute, behind, evicted if weights else None
        )


def _blocked(model: ModelState, absences: Periods, since: float, until: float) -> tuple[float, float]:
    """Return the seconds in which a model was held, and those of the rest in which its weights were absent."""
    if not (absences or model.holds):
        return 0.0, 0.0
    both = [(max(a, c), min(b, d)) for a, b in absences for c, d in model.holds]
    return (
        _overlap(model.holds, since, until),
        _overlap(absences, since, until) - _overlap(both, since, until),
    )


def _overlap(periods: Periods, since: float, until: float) -> float:
    """Return the seconds of a time that fall into periods."""
    return sum([max(0.0, min(end, until) - max(begin, since)) for begin, end in periods])
