"""Admission of runs of meta models: the number of concurrent runs, and the next waiting run.

A few runs keep the device busy. More runs would only hold more memory, because a run keeps its memory between two of
its calls. So further runs wait in the order of the discipline: by priority, then by deadline or arrival. They wait at most
until their deadline.

Runs that call a held model (`Pause.HOLD`) cannot continue. If they wait, they are not admitted. If they are admitted, they
free their slots.
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

#: Weight of the latest run in the learned length of a meta model's runs.
_WEIGHT = 0.2


class _Meta:
    """Counters of one meta model's runs."""

    __slots__ = ("admitted", "expired", "refused", "running", "seconds", "waiting", "withdrawn")

    def __init__(self) -> None:
        self.waiting = self.running = 0
        #: Learned length of an admitted run, or 0 if none has ended.
        self.seconds = 0.0
        self.admitted = self.expired = self.refused = self.withdrawn = 0

    def snapshot(self) -> MetaSnapshot:
        return MetaSnapshot(
            self.waiting, self.running, self.admitted, self.expired, self.refused, self.withdrawn
        )


class MetaAdmission:
    """Admission of at most `limit` runs at a time. `models` has all known models."""

    __slots__ = (
        "_admitted",
        "_deadlines",
        "_discipline",
        "_metas",
        "_models",
        "_order",
        "ahead",
        "closed",
        "limit",
        "live",
        "run_count",
        "stalled",
        "waiting",
    )

    def __init__(self, models: Mapping[str, ModelState], discipline: Discipline, limit: int) -> None:
        self._models = models
        self._discipline = discipline
        self.limit = limit
        #: True if no run is admitted, because the runtime is about to end.
        self.closed = False
        #: Admitted runs that call a held model.
        self.stalled: set[int] = set()
        #: All waiting and admitted runs by id.
        self.live: dict[int, Run] = {}
        #: Number of each waiting run by id. Numbers rise in the order of arrival.
        self.waiting: dict[int, int] = {}
        #: Time at which each run was admitted, by id.
        self._admitted: dict[int, float] = {}
        #: Number of runs requested so far, which is also the number of the latest run.
        self.run_count = 0
        #: Waiting runs in the order of admission. Runs that call a held model are left out.
        self._order: Ranking[int] = Ranking()
        #: Deadlines of the waiting runs that have one.
        self._deadlines: Ranking[int] = Ranking()
        self._metas: dict[str, _Meta] = {}
        #: Sum of the learned lengths of all waiting runs and of half the lengths of the admitted ones.
        self.ahead = 0.0

    @property
    def running(self) -> int:
        """Number of admitted runs."""
        return len(self.live) - len(self.waiting)

    @property
    def slots_taken(self) -> int:
        """Number of slots that admitted runs take."""
        return self.running - len(self.stalled)

    def admitted_ids(self) -> frozenset[int]:
        """Return the ids of the admitted runs."""
        return frozenset(self.live.keys() - self.waiting.keys())

    def check(self, runs: Sequence[Run], requests: KeysView[int]) -> None:
        """Check that runs may be added. `requests` are the ids of live requests.

        Raises:
            CallerError: an id is 0, in use already or given twice, or a priority or a limit is negative.
        """
        seen: set[int] = set()
        for run in runs:
            if not run.id:
                raise CallerError("0 is not an id of a run: it stands for none")
            if run.id in seen or run.id in self.live or run.id in requests:
                raise CallerError(f"id {run.id} is in use already, or twice in one event")
            seen.add(run.id)
            if run.priority < 0:
                raise CallerError(f"run {run.id} has priority {run.priority}; 1 is the highest")
            if run.max_waiting < 0:
                raise CallerError(f"run {run.id} has max_waiting {run.max_waiting}; 0 is the least")

    def ask(self, runs: Sequence[Run], now: float, out: list[Instruction]) -> None:
        """Queue runs, and admit as many as possible.

        Refuse the latest runs if more than `max_waiting` runs of their meta model wait.
        """
        if not self.live:
            # Reset the sum, so that rounding errors do not accumulate.
            self.ahead = 0.0
        for run in runs:
            self.run_count += 1
            meta = self._metas.setdefault(run.meta, _Meta())
            if run.deadline is not None and not run.deadline > now:  # This also refuses NaN.
                meta.expired += 1
                out.append(Finish(run.id, Outcome.EXPIRED))
                continue
            self.live[run.id] = run
            self.waiting[run.id] = self.run_count
            meta.waiting += 1
            self.ahead += meta.seconds
            self._enlist(run)
            if run.deadline is not None and run.deadline < inf:
                self._deadlines.set(run.id, run.deadline)
        self.proceed(now, out)
        for run in reversed(runs):
            meta = self._metas[run.meta]
            if run.id in self.waiting and meta.waiting > run.max_waiting:
                del self.live[run.id]
                self._leave(run).refused += 1
                # No `retry_after` is given: the duration of runs depends on their work between calls, so it is unknown.
                out.append(Finish(run.id, Outcome.REFUSED, Reason.QUEUE_FULL))

    def end(self, id: int, now: float) -> None:
        """End an admitted run, or withdraw a waiting one. Unknown ids are ignored."""
        run = self.live.pop(id, None)
        if run is None:
            return
        if id in self.waiting:
            self._leave(run).withdrawn += 1
        else:
            meta = self._metas[run.meta]
            meta.running -= 1
            self.ahead -= meta.seconds / 2
            change = now - self._admitted.pop(id) - meta.seconds
            if meta.seconds:
                change *= _WEIGHT
            meta.seconds += change
            self.ahead += (meta.waiting + meta.running / 2) * change
            self.stalled.discard(id)

    def reconfigure(self, discipline: Discipline, limit: int) -> None:
        """Use other settings from now on. Admitted runs stay."""
        self.limit = limit
        if discipline is not self._discipline:
            self._discipline = discipline
            for id in self.waiting:
                self._enlist(self.live[id])

    def reconsider(self) -> None:
        """Check again whether runs can be admitted, after models were added, removed, paused or resumed."""
        self.stalled = {
            id for id, run in self.live.items() if id not in self.waiting and self._calls_held(run)
        }
        for id in self.waiting:
            self._enlist(self.live[id])

    def proceed(self, now: float, out: list[Instruction]) -> None:
        """End waiting runs whose deadline is `now` or earlier, and admit the next ones."""
        while (id := self._deadlines.first()) is not None and self._deadlines[id] <= now:
            self._leave(self.live.pop(id)).expired += 1
            out.append(Finish(id, Outcome.EXPIRED))
        while not self.closed and self.slots_taken < self.limit and (id := self._order.first()) is not None:
            meta = self._leave(self.live[id])
            meta.running += 1
            meta.admitted += 1
            self.ahead += meta.seconds / 2
            self._admitted[id] = now
            out.append(Admit(id))

    def wait_seconds(self) -> float:
        """Return the expected seconds until a run that arrived now would be admitted; 0 while a slot is free.

        (lengths of all waiting runs + half of the lengths of the admitted ones) / limit
        """
        return max(0.0, self.ahead) / self.limit if self.slots_taken >= self.limit else 0.0

    def next_deadline(self) -> float:
        """Return the soonest deadline of a waiting run. inf: there is none."""
        id = self._deadlines.first()
        return inf if id is None else self._deadlines[id]

    def snapshot(self) -> dict[str, MetaSnapshot]:
        """Return the statistics of each meta model that has ever had a run, by name."""
        return {name: meta.snapshot() for name, meta in self._metas.items()}

    def meta(self, name: str) -> MetaSnapshot | None:
        """Return the statistics of one meta model. None: it has never had a run."""
        meta = self._metas.get(name)
        return None if meta is None else meta.snapshot()

    def _calls_held(self, run: Run) -> bool:
        return any(model in self._models and self._models[model].held for model in run.models)

    def _enlist(self, run: Run) -> None:
        if self._calls_held(run):
            self._order.pop(run.id, None)
            return
        level, number = run.priority or DEFAULT_PRIORITY, self.waiting[run.id]
        self._order.set(run.id, self._discipline.place(level, run.deadline, number))

    def _leave(self, run: Run) -> _Meta:
        """Remove a run from the waiting runs. Return the counters of its meta model."""
        del self.waiting[run.id]
        self._order.pop(run.id, None)
        self._deadlines.pop(run.id, None)
        meta = self._metas[run.meta]
        meta.waiting -= 1
        self.ahead -= meta.seconds
        return meta
