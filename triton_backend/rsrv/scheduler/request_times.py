"""The parts of the time of slow requests: pauses, and waits for weights, for requests that may join, and for other work."""

from collections.abc import Callable, Sequence
from math import inf

from rsrv.scheduler.events import Execute, ExecutionFinished, Outcome, Request
from rsrv.scheduler.inflight import InFlight, StartedExecution
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.request_queue import RequestQueues
from rsrv.scheduler.slowest import Ending, SlowRequest
from rsrv.scheduler.variant_queue import LiveRequest


class RequestTimes:
    """Explains requests from the histories of their models and the device's latest executions."""

    def __init__(self, queues: RequestQueues, running: InFlight) -> None:
        self._queues = queues
        self._running = running

    def keep(
        self,
        running: StartedExecution,
        entries: Sequence[LiveRequest],
        event: ExecutionFinished,
        now: float,
    ) -> None:
        """Pass the requests of an ended execution to their model, which keeps its slowest requests."""
        model, started, arrivals = running.model, running.started, [entry.arrived for entry in entries]
        first, held_until = min(arrivals), -inf
        if model.program.max_delay:
            # A full batch starts before the end of the delay, as soon as its last request has arrived.
            ends = first + model.program.max_delay
            held_until = ends if ends <= started else max(arrivals)
        absences, evicted = model.history.absences(first)
        # With a depth of 2, an execution waits for the previous execution on the device.
        behind = self._running.behind(first, max(started, now - event.seconds), started)
        outcome = Outcome.ANSWERED if event.error is None else Outcome.FAILED
        ending = Ending(
            now,
            started,
            event.seconds,
            held_until,
            absences,
            tuple(model.holds),
            outcome,
            running.execute,
            behind,
            evicted,
        )
        model.slowest.add(entries, ending)

    def keep_ended(self, now: float) -> None:
        """Pass requests that ended without an execution to their models, which keep their slowest requests."""
        ended, self._queues.ended = self._queues.ended, []
        for model, entry, outcome in ended:
            if entry.arrived < model.slowest.latest_arrival(now):
                model.slowest.add([entry], self._unfinished(model, entry, now, None, outcome, now))

    def in_progress(self, matches: Callable[[Request], bool], now: float) -> list[SlowRequest]:
        """Return the waiting and executing requests that match, with their time up to now."""
        executing = {
            id: execution for execution in self._running.values() for id in execution.execute.requests
        }
        slow = []
        for entry in self._queues.live.values():
            request = entry.request
            if not matches(request):
                continue
            running = executing.get(request.id)
            if running is not None:
                model, until, execute = running.model, running.started, running.execute
            elif entry.queue is not None:
                model, until, execute = self._queues.model(entry), now, None
            else:
                continue
            ending = self._unfinished(model, entry, until, execute, None, now)
            slow.append(SlowRequest(now - entry.arrived, 0, request, entry.arrived, ending))
        return slow

    def _unfinished(
        self,
        model: ModelState,
        entry: LiveRequest,
        until: float,
        execute: Execute | None,
        outcome: Outcome | None,
        now: float,
    ) -> Ending:
        """Return how a request without a finished execution has spent its time so far.

        `until`: time until which the request has waited.
        """
        arrived, delay = entry.arrived, model.program.max_delay
        absences, evicted = model.history.absences(arrived)
        behind = self._running.behind(arrived, until, until)
        held_until = arrived + delay if delay else -inf
        return Ending(
            now, until, inf, held_until, absences, tuple(model.holds), outcome, execute, behind, evicted
        )
