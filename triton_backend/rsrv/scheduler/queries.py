"""Questions about the scheduler that others ask: none changes a later decision.

*Known* models are those that were added and not removed; *draining* ones were removed, and something of them is still on
the device.
"""

from collections.abc import Callable, Iterable
from math import inf

from rsrv.scheduler.discipline import Discipline
from rsrv.scheduler.events import Request
from rsrv.scheduler.history import History, HistoryRecord
from rsrv.scheduler.inflight import InFlight
from rsrv.scheduler.load_queue import LoadQueue
from rsrv.scheduler.meta_admission import MetaAdmission
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.request_queue import RequestQueues
from rsrv.scheduler.request_times import RequestTimes
from rsrv.scheduler.residency import CompactionState, DeviceResidency
from rsrv.scheduler.slowest import SlowRequest
from rsrv.scheduler.statistics import (
    MetaSnapshot,
    ModelSnapshot,
    OutcomeCounts,
    PastTotals,
    SchedulerSnapshot,
    SharedTensors,
    Totals,
    WeightBytes,
)
from rsrv.scheduler.weight_states import ON_DEVICE, RUNNABLE, TAKING_BYTES, WeightState

#: states in which weights are neither loading, nor about to, nor in use by a warm-up
_AT_REST = RUNNABLE | {WeightState.ABSENT, WeightState.BACKOFF}


class SchedulerQueries:
    """Part of `Scheduler`, which sets and changes these attributes."""

    _models: dict[str, ModelState]
    _draining: dict[str, ModelState]
    _past: PastTotals
    _queues: RequestQueues
    _admission: MetaAdmission
    _residency: DeviceResidency
    _discipline: Discipline
    _loads: LoadQueue
    _running: InFlight
    _times: RequestTimes
    _backlog: float
    _kept_exclusive: bool

    def backlog_seconds(self, now: float) -> float:
        """Expected device time until all waiting and running requests are done; costs O(depth).

            `InFlight.seconds`
            + sum over queues of `VariantQueue.seconds`

        Loads of weights do not count: they run beside executions, and the first one was never measured.
        """
        running = self._running.seconds(now) if self._running else 0.0
        return running + max(0.0, self._backlog)

    def seconds_until_idle(self, now: float) -> float | None:
        """Expected time until the device has nothing to do; None: it is free.

            backlog + seconds for which the running execution is overdue

        An execution that takes longer than expected is expected to take as long again. Requests that wait for their
        weights, or in a pause, leave the device to other models.
        """
        if not self._running:
            return None
        return self.backlog_seconds(now) + self._running.overdue_seconds(now)

    @property
    def sheds(self) -> bool:
        """True if requests whose deadline cannot be met any more end at once."""
        return self._discipline.sheds

    def admission_seconds(self) -> float:
        """Expected time until a run of a meta model that came now would be admitted; 0 while a slot is free."""
        return self._admission.wait_seconds()

    def load_seconds(self, model: str) -> float:
        """Return the expected seconds of loading a model's weights now; 0 if they are resident, or it is unknown."""
        state = self._models.get(model)
        return 0.0 if state is None or state.weights.state in ON_DEVICE else state.weights.remaining_seconds

    def on_disk(self, model: str) -> bool:
        """Return whether a known model's weights are read from disk before a load; False for others."""
        state = self._models.get(model)
        return state is not None and state.weights.on_disk

    def knows(self, model: str) -> bool:
        """True if a model is known or draining: its key may be added again only when it is neither."""
        return model in self._models or model in self._draining

    def last_arrival(self, model: str) -> float:
        """Return when the latest requests for a known model came; -inf for others, and if none has come."""
        state = self._models.get(model)
        return -inf if state is None else state.weights.last_arrival

    def idle_since(self, model: str) -> float:
        """Return when a known model's weights were last used; inf: requests wait for them, or they load or execute."""
        state = self._models.get(model)
        if state is None or state.queued or state.executing or state.weights.state not in _AT_REST:
            return inf
        return state.weights.last_used

    def queued(self, model: str) -> int:
        """Requests that wait for a known model; 0 for others."""
        state = self._models.get(model)
        return 0 if state is None else state.queued

    def history(self, model: str, beside: Iterable[HistoryRecord] = ()) -> list[HistoryRecord]:
        """Return the latest events, instructions and states of a known or draining model, oldest first; none of others.

        `beside`: other records about the model to insert, oldest first.
        """
        state = self._find(model)
        return (History() if state is None else state.history).records(beside)

    def slowest(self, model: str, now: float) -> list[SlowRequest]:
        """Return the slowest requests of a known or draining model, the slowest first; none of others."""
        state = self._find(model)
        return [] if state is None else state.slowest.read(now)

    def add_front(self, slow: SlowRequest, before: float, after: float) -> None:
        """Note the seconds that a request of `slowest` had in its front, before and after."""
        state = self._find(slow.request.model)
        if state is not None:
            state.slowest.add_front(slow, before, after)

    def find_requests(self, tag: int, id: int | None, now: float) -> list[SlowRequest]:
        """Return the slowest requests, and those in progress, with a client's tag other than 0, or with this id.

        With a part of a request, all of its parts are returned.
        """
        found = self._matching(lambda one: one.id == id or bool(tag and one.tag == tag), now)
        if wholes := {one.request.whole for one in found} - {0}:
            found = [one for one in found if not one.request.whole]
            found += self._matching(lambda one: one.whole in wholes, now)
        return found

    def _matching(self, matches: Callable[[Request], bool], now: float) -> list[SlowRequest]:
        kept = [one for state in self._states() for one in state.slowest.find(matches, now)]
        return kept + self._times.in_progress(matches, now)

    def obstacle(self, model: str, now: float) -> str:
        """Return what the absent weights of a known model wait for, in words; "" if they wait for nothing."""
        state, retried = self._models.get(model), self._residency.compaction.retried
        device = ""
        if retried is not None:
            device = f"the second try of {retried.family}"
        elif self._residency.compaction.state is CompactionState.DUE:
            device = "a compaction of the device's memory"
        elif self._kept_exclusive:
            device = "a request that executes alone"
        return "" if state is None else self._loads.obstacle(state, now, device)

    def change_counts(self) -> dict[str, int]:
        """Return a number for each known and draining model. It rises whenever the model's counters or weights change."""
        return {state.name: state.history.count for state in self._states()}

    def weight_bytes(self) -> WeightBytes:
        """Return the device bytes of all weights. Costs O(models)."""
        accounts = self._residency.accounts
        present = (one for one in self._states() if one.weights.state in TAKING_BYTES)
        logical = sum(one.program.weight_bytes for one in present)
        return WeightBytes(accounts.bytes, accounts.pinned_bytes, logical, accounts.budget)

    def shared_tensors(self) -> list[SharedTensors]:
        """Return the weights of all models, divided by the models that have them. Costs O(models and their groups)."""
        groups = {id(group): group for state in self._states() for group in state.weights.groups}
        return [
            SharedTensors(group.bytes, [owner.model for owner in group.owners], group.users > 0)
            for group in groups.values()
        ]

    def totals(self) -> dict[str, Totals]:
        """Return the counters of known and draining models by name, over all versions. To be read at once."""
        return self._past.with_present((state.family, state.totals) for state in self._states())

    def model(self, key: str) -> ModelSnapshot | None:
        """Return statistics of one known or draining model."""
        state = self._find(key)
        return None if state is None else state.snapshot()

    def meta(self, name: str) -> MetaSnapshot | None:
        """Return statistics of the runs of one meta model; None if there never was one."""
        return self._admission.meta(name)

    def metas(self) -> dict[str, MetaSnapshot]:
        """Return statistics of the runs of each meta model."""
        return self._admission.snapshot()

    def _find(self, name: str) -> ModelState | None:
        """Return a model that the scheduler knows, draining or not."""
        return self._models.get(name) or self._draining.get(name)

    def _states(self) -> list[ModelState]:
        return [*self._models.values(), *self._draining.values()]

    def snapshot(self) -> SchedulerSnapshot:
        """Return statistics of all known and draining models."""
        states, totals = self._states(), OutcomeCounts()
        for counts in (self._queues.departed, *(state.totals.counts for state in states)):
            totals.add(counts)
        weights = self.weight_bytes()
        return SchedulerSnapshot(
            models={state.name: state.snapshot() for state in states},
            metas=self._admission.snapshot(),
            arrived=self._queues.arrived,
            outcomes=totals.outcomes(),
            refused=totals.refused,
            queued=self._queues.queued,
            executing=len(self._queues.live) - self._queues.queued,
            running=len(self._running),
            weight_bytes=weights.physical,
            pinned_bytes=weights.pinned,
            logical_bytes=weights.logical,
            weight_budget_bytes=weights.budget,
        )
