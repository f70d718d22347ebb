"""Admission of runs of meta models: how many are under way at once, and which waiting one comes next.

A run between two of its calls holds memory and nothing else, so a few of them keep the device busy, and more
would only hold more. The others wait here, in the order that the discipline gives their requests: by priority,
then by deadline or arrival. They wait until their deadline at the longest.

Runs that call a model which is held (`Pause.HOLD`) would get no further: they are not admitted, and those that were
take no place from others.
"""

from collections.abc import KeysView, Mapping, Sequence
from math import inf

from rsrv.scheduler.discipline import Discipline
from rsrv.scheduler.events import (
    DEFAULT_PRIORITY,
    Admit,
    CallerError,
    Finish,
    Instruction,
    Outcome,
    Reason,
    Run,
)
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.ranking import Ranking
from rsrv.scheduler.statistics import MetaSnapshot


class _Meta:
    """What became of one meta model's runs."""

    __slots__ = ("admitted", "expired", "refused", "running", "waiting", "withdrawn")

    def __init__(self) -> None:
        self.waiting = self.running = 0
        self.admitted = self.expired = self.refused = self.withdrawn = 0

    def snapshot(self) -> MetaSnapshot:
        return MetaSnapshot(
            self.waiting, self.running, self.admitted, self.expired, self.refused, self.withdrawn
        )


class MetaAdmission:
    """Admits at most `limit` runs at a time. `models` are the scheduler's."""

    __slots__ = (
        "_deadlines",
        "_discipline",
        "_metas",
        "_models",
        "_order",
        "asked",
        "limit",
        "live",
        "stalled",
        "surplus",
        "waiting",
    )

    def __init__(self, models: Mapping[str, ModelState], discipline: Discipline, limit: int) -> None:
        self._models = models
        self._discipline = discipline
        self.limit = limit
        #: runs under way that call a model which is held.
        self.stalled: set[int] = set()
        #: places taken beyond the limit: by runs that were admitted before it shrank, or go on after others took theirs.
        self.surplus = 0
        #: all that wait or are under way, by id; and the numbers of those that wait, in order of arrival.
        self.live: dict[int, Run] = {}
        self.waiting: dict[int, int] = {}
        #: runs that were ever asked for; the latest one's number.
        self.asked = 0
        #: those that wait, by their place unless they call a model which is held, and by their deadline if they have one.
        self._order: Ranking[int] = Ranking()
        self._deadlines: Ranking[int] = Ranking()
        self._metas: dict[str, _Meta] = {}

    @property
    def running(self) -> int:
        """Runs that are under way."""
        return len(self.live) - len(self.waiting)

    @property
    def taken(self) -> int:
        """Places that they take."""
        return self.running - len(self.stalled)

    def under_way(self) -> frozenset[int]:
        """Those runs."""
        return frozenset(self.live.keys() - self.waiting.keys())

    def check(self, runs: Sequence[Run], requests: KeysView[int]) -> None:
        """Refuse runs that nobody could account for; `requests` are the ids in flight.

        Raises:
            CallerError: an id is 0, in use already or given twice, or a priority or a limit is negative.
        """
        seen: set[int] = set()
        for run in runs:
            if not run.id:
                raise CallerError("0 is no id of a run: it is that of none")
            if run.id in seen or run.id in self.live or run.id in requests:
                raise CallerError(f"id {run.id} is in use already, or twice in one event")
            seen.add(run.id)
            if run.priority < 0:
                raise CallerError(f"run {run.id} has priority {run.priority}; 1 is the highest")
            if run.max_waiting < 0:
                raise CallerError(f"run {run.id} has max_waiting {run.max_waiting}; 0 is the least")

    def ask(self, runs: Sequence[Run], now: float, out: list[Instruction]) -> None:
        """Let them wait, admit as many as may run, and refuse the latest that are too many to wait."""
        for run in runs:
            self.asked += 1
            meta = self._metas.setdefault(run.meta, _Meta())
            if run.deadline is not None and not run.deadline > now:  # or one that is no number
                meta.expired += 1
                out.append(Finish(run.id, Outcome.EXPIRED))
                continue
            self.live[run.id] = run
            self.waiting[run.id] = self.asked
            meta.waiting += 1
            self._place(run)
            if run.deadline is not None and run.deadline < inf:
                self._deadlines.set(run.id, run.deadline)
        self.proceed(now, out)
        for run in reversed(runs):
            meta = self._metas[run.meta]
            if run.id in self.waiting and meta.waiting > run.max_waiting:
                del self.live[run.id]
                self._leave(run).refused += 1
                # When to retry is not known: how long runs take is up to what they do between their calls.
                out.append(Finish(run.id, Outcome.REFUSED, Reason.QUEUE_FULL))

    def end(self, id: int) -> None:
        """A run is over, or does not want to begin any more. Unknown ids are ignored."""
        run = self.live.pop(id, None)
        if run is None:
            return
        if id in self.waiting:
            self._leave(run).withdrawn += 1
        else:
            self._metas[run.meta].running -= 1
            self.stalled.discard(id)
            self._recount()

    def reconfigure(self, discipline: Discipline, limit: int) -> None:
        """Admit by other settings from now on. What runs stays."""
        self.limit = limit
        self._recount()
        if discipline is not self._discipline:
            self._discipline = discipline
            for id in self.waiting:
                self._place(self.live[id])

    def reconsider(self) -> None:
        """Models came, were paused, or are not any more."""
        self.stalled = {
            id for id, run in self.live.items() if id not in self.waiting and self._calls_held(run)
        }
        self._recount()
        for id in self.waiting:
            self._place(self.live[id])

    def proceed(self, now: float, out: list[Instruction]) -> None:
        """End those that wait and whose deadline is `now` or earlier, and admit who comes next."""
        while (id := self._deadlines.first()) is not None and self._deadlines[id] <= now:
            self._leave(self.live.pop(id)).expired += 1
            out.append(Finish(id, Outcome.EXPIRED))
        while self.taken < self.limit and (id := self._order.first()) is not None:
            meta = self._leave(self.live[id])
            meta.running += 1
            meta.admitted += 1
            out.append(Admit(id))

    def next_deadline(self) -> float:
        """Return the soonest deadline of a waiting run; inf: there is none."""
        id = self._deadlines.first()
        return inf if id is None else self._deadlines[id]

    def snapshot(self) -> dict[str, MetaSnapshot]:
        """By meta; each of which a run was ever asked for."""
        return {name: meta.snapshot() for name, meta in self._metas.items()}

    def meta(self, name: str) -> MetaSnapshot | None:
        """One of them."""
        meta = self._metas.get(name)
        return None if meta is None else meta.snapshot()

    def _calls_held(self, run: Run) -> bool:
        return any(model in self._models and self._models[model].held for model in run.models)

    def _recount(self) -> None:
        self.surplus = max(0, self.taken - self.limit)

    def _place(self, run: Run) -> None:
        if self._calls_held(run):
            self._order.pop(run.id, None)
            return
        level, number = run.priority or DEFAULT_PRIORITY, self.waiting[run.id]
        self._order.set(run.id, self._discipline.place(level, run.deadline, number))

    def _leave(self, run: Run) -> _Meta:
        """It does not wait any more; returns where it is counted."""
        del self.waiting[run.id]
        self._order.pop(run.id, None)
        self._deadlines.pop(run.id, None)
        meta = self._metas[run.meta]
        meta.waiting -= 1
        return meta
