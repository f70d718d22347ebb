"""Reports about requests and recent work, as the JSON answers of commands."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from rsrv.runtime.catalog import Catalog
from rsrv.runtime.records import Records
from rsrv.runtime.request_ids import own_number, request_number
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import Registration
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.slowest import SlowRequest
from rsrv.wire.frames import ProtocolError


class Reports:
    """Histories, slow requests and the timeline. Belongs to the loop."""

    def __init__(
        self,
        catalog: Catalog,
        records: Records,
        scheduler: Scheduler,
        traces: Traces,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self.records = records
        self._scheduler = scheduler
        self._traces = traces
        self._clock = clock

    def take(self, group: Registration, report: Mapping[str, Any]) -> None:
        """Handle a stub's report. Raises ProtocolError."""
        self.records.take(group.name, group.calls, report)
        fronts: dict[int, list[tuple[float, float]]] = {}
        try:
            for number, since, until in report.get("slow", ()):
                fronts.setdefault(int(number), []).append((float(since), float(until)))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a REPORT with slow requests that cannot be read: {error}") from None
        for slow in self._scheduler.slowest(group.key, self._clock()) if fronts else ():
            # Requests on different connections of a stub may have equal numbers, so also compare the times.
            for since, until in fronts.get(own_number(slow.request.id), ()) if slow.front is None else ():
                before, after = slow.arrived - since, until - slow.ending.at
                if before >= 0 and after >= 0:
                    self._scheduler.add_front(slow, before, after)
                    break

    # --- answers to single commands -----------------------------------------------------------------------

    def ping(self) -> dict[str, Any]:
        return {"instance": self._catalog.feed.instance, "revision": self._catalog.feed.revision}

    def histories(self, names: Collection[str]) -> dict[str, Any]:
        """Return the recent history of the models with these names, by key: states, and decisions of the scheduler."""
        now, scheduler = self._clock(), self._scheduler
        return {
            "unix_s": time.time() - now,
            "histories": {
                key: {
                    "records": [
                        {"at": at, "what": event, **details}
                        for at, event, details in scheduler.history(key, entry.history)
                    ],
                    "waits_for": scheduler.obstacle(key, now),
                }
                for key, entry in self._catalog.entries.items()
                if entry.name in names
            },
        }

    def slowest(self, names: Collection[str]) -> dict[str, Any]:
        """Return the slowest requests of the models with these names, the slowest first."""
        now = self._clock()
        keys = [key for key, entry in self._catalog.entries.items() if entry.name in names]
        answer = self._slow_requests(
            [slow for key in keys for slow in self._scheduler.slowest(key, now)], now
        )
        answer["requests"].sort(key=itemgetter("seconds"), reverse=True)
        return answer

    def find(self, tag: int, id: int | None) -> dict[str, Any]:
        """Return the slowest requests and the requests in progress that have this global `id`, or this `tag`.

        A tag is the hash of a client's id for a request.
        """
        now = self._clock()
        return self._slow_requests(self._scheduler.find_requests(tag, id, now), now)

    def _slow_requests(self, slow_requests: Iterable[SlowRequest], now: float) -> dict[str, Any]:
        wholes: dict[tuple[str, int], list[SlowRequest]] = {}
        for slow in slow_requests:
            # A request without parts gets a negative number, which no request with parts has.
            number = slow.request.whole or -1 - slow.request.id
            wholes.setdefault((slow.request.model, number), []).append(slow)
        return {"unix_s": time.time() - now, "requests": [_whole_request(parts) for parts in wholes.values()]}

    def timeline(self, since: int) -> dict[str, Any]:
        return self._traces.timeline.answer(self._catalog.feed.instance, since, self._clock())

    def arrivals(self, since: int) -> dict[str, Any]:
        return self._traces.timeline.arrivals.answer(self._catalog.feed.instance, since, self._clock())

    def traces(self, since: int) -> dict[str, Any]:
        return self._traces.answer(self._catalog.feed.instance, since)


#: Components of a request's time that are summed over its parts, because parts mostly execute one after another.
_TIMES = ("paused_s", "weights_s", "peers_s", "executing_s")


def _whole_request(parts: Sequence[SlowRequest]) -> dict[str, Any]:
    """Return one request, combined from its parts.

    A fast part may be missing, because only the slowest requests of a model are recorded, and each part counts as a request.
    """
    described = sorted(map(_slow_request, parts), key=itemgetter("at"))
    first, last = described[0], max(described, key=lambda part: part["at"] + part["seconds"])
    if len(described) == 1:
        return first
    seconds = last["at"] + last["seconds"] - first["at"]
    after = first["after_s"]
    whole = first | {
        "parts": len(described),
        "rows": sum(part["rows"] for part in described),
        "seconds": seconds,
        # `after_s` of the first part begins at the end of that part, not at the end of the last part.
        "after_s": None if after is None else max(0.0, after - (seconds - first["seconds"])),
        "outcome": next((part["outcome"] for part in described if part["outcome"] != "answered"), "answered"),
        "batch": None,
    }
    whole |= {name: min(sum(part[name] for part in described), seconds) for name in _TIMES}
    whole["others_s"] = max(0.0, seconds - sum(whole[name] for name in _TIMES))
    return whole


def _slow_request(slow: SlowRequest) -> dict[str, Any]:
    request, wait, execute = slow.request, slow.wait, slow.ending.execute
    (before, after), evicted = slow.front or (None, None), wait.evicted
    state = "waiting" if execute is None else "executing"
    return {
        "number": request_number(request.id),
        "key": request.model,
        "rows": request.rows,
        "call": request.run != 0,
        "deadline_s": None if request.deadline is None else request.deadline - wait.arrived,
        "at": wait.arrived,
        "seconds": wait.seconds,
        "paused_s": wait.paused,
        "weights_s": wait.weights,
        "peers_s": wait.peers,
        "others_s": wait.others,
        "executing_s": wait.executing,
        "before_s": before,
        "after_s": after,
        "outcome": state if slow.ending.outcome is None else slow.ending.outcome.value,
        "behind": slow.ending.behind,
        "evicted": None if evicted is None else {"at": evicted.at, "what": evicted.what, **evicted.details},
        "batch": None if execute is None else (len(execute.requests), execute.rows, execute.size),
    }
