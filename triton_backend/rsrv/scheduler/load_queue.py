"""The line for the link to the device: which absent weights load next, and which weights are evicted for them.

The decision is made when the link is free. Of the models with waiting requests and absent weights, the model that the
discipline ranks first loads, while other models execute. It gets free bytes, or the bytes of the victims that
`eviction.choose_victims` chooses. These weights are not evicted for it:

- pinned weights, weights on which an execution runs, and weights that a committed request waits for;
- weights in their protected time, if requests wait for them or are expected soon. The protected time is `residency_factor`
  times the duration of their load. Requests are expected soon if the model's usual pause is shorter than half a load, and the
  current pause is less than twice as long as the usual one. So a client that pauses between two requests finds the weights
  still there. Loads that take turns with executions take at most 1 / (1 + residency_factor) of the time, and a model waits at
  most one protected time longer for each model before it. Under `edf`, a model does not wait for the end of the protected time
  if its deadline would pass before that end;
- weights with waiting requests, as long as the idle weights together are large enough. Protected idle weights are included: the
  load waits for the end of their protection;
- weights of models with work that the discipline ranks before the model that loads. They would be the next to load again.

Weights without a host copy are in line for the disk first, in the same order, and for the link once they have been read.
So a load never waits for the disk while weights in host memory are in line.

While the first model finds no room, no other model loads. Otherwise, small models would starve a large one.

Required loads precede loads for waiting requests. They evict any weights except those in the first item of the list, idle
weights first. The load for a warm-up takes turns with models that have work. It also spares weights in their protected time if
requests wait for them.

Prefetched weights load when no model is required or demanded, and evict only idle weights that are not protected. Restored
weights come last, and load into free room only.

If weights do not load on demand, only required loads evict others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from rsrv.scheduler.discipline import Discipline
from rsrv.scheduler.eviction import Resident, choose_victims, freed_by_all
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.ranking import Rank, Ranking
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.weight_states import (
    ON_DEVICE,
    RUNNABLE,
    TAKING_BYTES,
    LoadReason,
    WeightEvent,
    WeightState,
)
from rsrv.scheduler.weights import WeightAccounts
from rsrv.text import amount, duration

#: Maximum number of models that `LoadQueue.obstacle` names.
_MAX_NAMES = 4

#: A load, and the models whose weights are evicted before it.
PlannedLoad = tuple[ModelState, list[ModelState]]


class LoadQueue:
    """The models in line for a load, the choice among them, and the models that wait after a failed load.

    Every change of a line or a back-off ends in `requeue`, which moves absent weights to the state that follows.
    """

    __slots__ = (
        "_factor",
        "_models",
        "_newly_evictable",
        "_policy",
        "_prefetch_at",
        "_prefetch_may_fit",
        "_read_for_warm_up",
        "_retry_at",
        "_warmed_up_last",
        "accounts",
        "backing_off",
        "blocked_head",
        "demand_for_disk",
        "demand_for_link",
        "discipline",
        "may_load",
        "may_read",
        "on_demand",
        "prefetched",
        "required",
        "restored",
    )

    def __init__(
        self,
        models: Mapping[str, ModelState],
        accounts: WeightAccounts,
        settings: SchedulerSettings,
        discipline: Discipline,
    ) -> None:
        self._models = models
        self.accounts = accounts
        self.discipline = discipline
        self._factor = settings.residency_factor
        #: True if requests cause loads and evictions.
        self.on_demand = settings.on_demand
        # There is one line for each reason, and a model may be in several lines. Dictionaries keep the order.
        self.required: dict[str, None] = {}
        #: Line for the link: models with waiting requests, by the discipline's rank.
        self.demand_for_link: Ranking[str] = Ranking()
        #: Line for the disk: models with waiting requests whose weights are only on disk, by the same rank.
        self.demand_for_disk: Ranking[str] = Ranking()
        self.prefetched: dict[str, None] = {}
        #: Models to restore, each with its place in the line. The smallest place is first.
        self.restored: dict[str, int] = {}
        #: True if a load runs, or a search for weights to load may succeed.
        self.may_load = False
        #: True if a read runs, or a search for weights to read may succeed.
        self.may_read = False
        #: True if the latest load was for a warm-up. Then a model with work loads next, if there is one.
        self._warmed_up_last = False
        #: True if the latest read was for a warm-up.
        self._read_for_warm_up = False
        #: True if a search for room for prefetched weights may succeed now.
        self._prefetch_may_fit = False
        #: Time when a search for room for prefetched weights may succeed although nothing else has changed.
        self._prefetch_at = inf
        #: The first model in line, if the latest search found no room for it. A search costs O(models), so the next search
        #: waits until `_retry_at`, or until a model of `_newly_evictable` can be evicted for this model.
        self.blocked_head: str | None = None
        self._retry_at = inf
        self._newly_evictable: dict[ModelState, None] = {}
        #: Models whose load failed and is not retried for a while. If memory is short, each retry would evict the weights of
        #: all other models. If a file cannot be read, each retry would occupy the link. A command may have loaded such a model
        #: since its failure.
        self.backing_off: dict[ModelState, None] = {}

    # --- queues and back-offs --------------------------------------------------------------------------------

    def reason(self, name: str) -> LoadReason | None:
        """Return the reason why a model is in line, or None if it is not in line.

        If there are several reasons, return the first one in order of precedence.
        """
        if name in self.required:
            return LoadReason.REQUIRED
        if name in self.demand_for_link or name in self.demand_for_disk:
            return LoadReason.DEMAND
        if name in self.prefetched:
            return LoadReason.PREFETCH
        return LoadReason.RESTORE if name in self.restored else None

    def requeue(self, model: ModelState) -> None:
        """Move absent weights to the state that follows from the lines and the back-offs."""
        weights, reason = model.weights, self.reason(model.name)
        self.may_load, self.may_read = True, self.may_read or weights.on_disk
        if weights.state is WeightState.QUEUED:
            if reason is None:
                self.accounts.move(weights, WeightEvent.WITHDRAW)
        elif weights.state in (WeightState.ABSENT, WeightState.BACKOFF) and reason is not None:
            self.accounts.move(weights, WeightEvent.QUEUE, reason.value)
        if weights.state is WeightState.ABSENT and model in self.backing_off:
            self.accounts.move(weights, WeightEvent.BACK_OFF, seconds=weights.backoff_seconds)
        elif weights.state is WeightState.BACKOFF and model not in self.backing_off:
            self.accounts.move(weights, WeightEvent.END_BACKOFF)

    def require(self, model: ModelState) -> None:
        """Append a model to the line of required loads, which precedes all other lines."""
        self.required[model.name] = None
        self.requeue(model)
        # The line may have a new head.
        self.unblock()

    def end_requirement(self, model: ModelState) -> None:
        """Remove a model from the line of required loads."""
        if model.name in self.required:
            del self.required[model.name]
            self.requeue(model)
            # The line may have another head now.
            self.unblock()

    def demand(self, model: ModelState, rank: Rank) -> None:
        """Put a model with waiting requests in line, or change its rank there."""
        (self.demand_for_disk if model.weights.on_disk else self.demand_for_link).set(model.name, rank)
        if model.weights.state is not WeightState.QUEUED:
            self.requeue(model)
        if model.name == self.blocked_head:
            # Its rank may have improved, so it may evict others now.
            self.unblock()

    def end_demand(self, model: ModelState) -> None:
        """Remove a model from the lines of demand, because it has no work any more."""
        self.demand_for_link.pop(model.name, None)
        self.demand_for_disk.pop(model.name, None)
        self.requeue(model)

    def copy_changed(self, model: ModelState, *, present: bool) -> None:
        """Record that the host got or lost its copy of a model's weights.

        If requests wait for the weights, move the model to the line for the link, or without a copy, to the line for the disk.
        """
        if model.weights.state is WeightState.READING:
            return  # `DeviceResidency.load_ended` calls this again when the read succeeds.
        model.weights.on_disk = not present
        rank = (self.demand_for_disk if present else self.demand_for_link).pop(model.name, None)
        if rank is not None:
            self.demand(model, rank)
        self.requeue(model)
        self.unblock()

    def prefetch(self, model: ModelState) -> None:
        """Put a model in the line of prefetches."""
        self.prefetched[model.name] = None
        self._prefetch_may_fit = True
        self.requeue(model)

    def prefetch_after_shed(self, model: ModelState) -> None:
        """Prefetch weights after a request was shed because their load takes too long, so that the next request finds them.

        Otherwise a model whose deadlines are all shorter than its load would never be served.
        """
        if model.weights.state not in TAKING_BYTES:
            self.prefetch(model)

    def restore(self, evicted: Iterable[ModelState]) -> None:
        """Put evicted models in the line of restores, the most urgent first, before the models that are already there."""
        models = list(evicted)
        first = min(self.restored.values(), default=0) - len(models)
        for place, model in enumerate(models, first):
            self.restore_at(place, model)

    def restore_at(self, place: int, model: ModelState) -> None:
        """Put a model in the line of restores. The smallest place is first."""
        self.restored[model.name] = place
        self.requeue(model)

    def end_prefetch_and_restore(self, model: ModelState) -> None:
        """Remove a model from the lines of prefetches and restores."""
        self.prefetched.pop(model.name, None)
        self.restored.pop(model.name, None)
        self.requeue(model)

    def leave_lines(self, model: ModelState) -> None:
        """Remove a model from every line except the lines of demand."""
        self.end_requirement(model)
        self.end_prefetch_and_restore(model)

    def back_off(self, model: ModelState, now: float, error: str) -> None:
        """Begin the back-off after a failed load. Its length doubles with each failure until a load succeeds."""
        model.weights.begin_backoff(now, error)
        self.backing_off[model] = None
        self.requeue(model)

    def forget_backoff(self, model: ModelState) -> None:
        """Drop the back-off of a model, if it has one: its time is over, or the model was removed."""
        if model in self.backing_off:
            del self.backing_off[model]
            self.requeue(model)

    def end_backoffs(self) -> None:
        """End every back-off. An operator freed memory, so loads may now succeed."""
        for model in self.backing_off:
            model.weights.end_backoff()

    def end_due_backoffs(self, now: float) -> None:
        """End the back-offs whose time is over. Require the loads of pinned models. Other models wait for requests."""
        for model in [model for model in self.backing_off if model.weights.backoff_until <= now]:
            self.forget_backoff(model)
            if model.weights.pinned:
                model.weights.desired = True
                if model.weights.state not in TAKING_BYTES:
                    self.require(model)

    def next_backoff_end(self) -> float:
        """Return the time when the next back-off of a pinned model ends. inf: there is none."""
        ends = (model.weights.backoff_until for model in self.backing_off if model.weights.pinned)
        return min(ends, default=inf)

    # --- other changes ---------------------------------------------------------------------------------------

    def note_evictable(self, model: ModelState) -> None:
        """Record that weights on the device may have become evictable.

        This matters only while there is a `blocked_head`, or a model in the line of prefetches.
        """
        if self.blocked_head is not None:
            self._newly_evictable[model] = None
        if not model.has_work:
            self._prefetch_may_fit = True

    def unblock(self) -> None:
        """Make the next call of `plan` search for room again. Call this when there may be room now."""
        self.blocked_head = None
        self._prefetch_may_fit = True
        self._newly_evictable.clear()

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """Use other settings. The lines of demand become empty, because the scheduler ranks all models again."""
        self._factor = settings.residency_factor
        self.on_demand = settings.on_demand
        self.demand_for_link.clear()
        self.demand_for_disk.clear()
        self.unblock()

    def started(self, model: ModelState) -> None:
        """Remove a model whose load has begun from the lines that the load serves.

        A prefetch stays in line while it loads, because it is still needed if the load is abandoned.
        """
        self.required.pop(model.name, None)
        self.demand_for_link.pop(model.name, None)
        self._warmed_up_last = model.needs_warm_up

    # --- decisions -------------------------------------------------------------------------------------------

    def next_read(self) -> ModelState | None:
        """Choose the model whose weights are read from disk now. None: no read. A read needs no room on the device."""
        name = self._head_for_disk()
        if name is None:
            name = next(self._queued_in(self.prefetched, on_disk=True), None) or self._first_restored(
                on_disk=True
            )
        self.may_read = name is not None
        if name is None:
            return None
        self._read_for_warm_up = self._models[name].needs_warm_up
        return self._models[name]

    def _queued_in(self, line: Iterable[str], *, on_disk: bool) -> Iterator[str]:
        """Return the names of a line's models that wait for the disk, or for the link."""
        queued = ((name, self._models[name].weights) for name in line)
        return (
            name
            for name, weights in queued
            if weights.on_disk is on_disk and weights.state is WeightState.QUEUED
        )

    def plan(self, now: float) -> PlannedLoad | None:
        """Choose the load that starts now, and the evictions before it. None: no load starts. Call this while no load runs."""
        self.may_load = bool(self.required or self.demand_for_link or self.prefetched or self.restored)
        name = self.head() if self.required or self.demand_for_link else None
        if name is None:
            self.blocked_head = None
            planned = self._plan_prefetch(now) if self.prefetched else None
            return self._plan_restore() if planned is None and self.restored else planned
        planned = self._plan_head(self._models[name], now)
        if planned is None and self._warmed_up_last and self.required:
            # The model whose turn it is does not fit now. Another model may load, so that the link is not idle.
            self._warmed_up_last = False
            required = self._first_required(on_disk=False)
            planned = None if required is None else self._plan_head(self._models[required], now)
        return planned

    def _plan_head(self, head: ModelState, now: float) -> PlannedLoad | None:
        """Plan the load of the head of the line."""
        if head.name == self.blocked_head:
            self._reconsider(head, now)
            if head.name == self.blocked_head:
                return None
        planned, self._retry_at = self.search(head, now)
        self.blocked_head = head.name if planned is None else None
        self._newly_evictable.clear()
        return planned

    def head(self) -> str | None:
        """Return the first model for the link that is required or demanded.

        Warm-ups take turns with models that have work.
        """
        return self._choose_head(self.demand_for_link, on_disk=False, yields=self._warmed_up_last)

    def _head_for_disk(self) -> str | None:
        """Return the first model for the disk, as `head` does for the link."""
        return self._choose_head(self.demand_for_disk, on_disk=True, yields=self._read_for_warm_up)

    def _choose_head(self, demand: Ranking[str], *, on_disk: bool, yields: bool) -> str | None:
        name = demand.first()
        required = self._first_required(on_disk=on_disk) if self.required else None
        if required is None or (yields and name is not None and self._models[required].needs_warm_up):
            return name
        return required

    def _first_required(self, *, on_disk: bool) -> str | None:
        return next(self._queued_in(self.required, on_disk=on_disk), None)

    def search(self, head: ModelState, now: float) -> tuple[PlannedLoad | None, float]:
        """Search for room for a model in line.

        Return the planned load, or None, and the time when there may be more room although nothing else has changed (inf:
        never).
        """
        missing, keep = self.accounts.missing(head.weights), head.weights.groups
        idle: list[ModelState] = []
        working: list[ModelState] = []
        for model in self._models.values():
            if evictable(model):
                (working if model.has_work else idle).append(model)
        # Weights with waiting requests are candidates only if all idle weights together are not enough.
        enough = missing <= freed_by_all(map(_resident, idle), keep, missing)
        candidates: list[Resident] = []
        retry_at = inf
        for model in idle if enough else (*idle, *working):
            at = self._yields_at(model, head)
            if at <= now:
                candidates.append(_resident(model, self.discipline))
            else:
                retry_at = min(retry_at, at)
        victims = choose_victims(missing, candidates, keep)
        planned = None if victims is None else (head, [self._models[victim] for victim in victims])
        return planned, retry_at

    def wants_room_of(self, model: ModelState, now: float) -> bool:
        """True if the head of the line waits for room that this model would make if it stopped executing."""
        if self.blocked_head is None or self.blocked_head != self.head() or self.accounts.loading is not None:
            return False
        return self._yields_at(model, self._models[self.blocked_head]) <= now

    def find_misfit(self) -> ModelState | None:
        """Return a model in line that does not fit and may evict no other. None: there is no such model."""
        # Loads on demand may evict other weights. Without them, only required loads may.
        if self.on_demand or self.required:
            return None
        first = self.demand_for_link.first()
        in_line = (self._models[name] for name in (self.prefetched if first is None else (first,)))
        return next((model for model in in_line if self.accounts.missing(model.weights) > 0), None)

    def is_useless(self, model: ModelState) -> bool:
        """True if the load that runs is not needed any more and delays another load.

        After a model's load was abandoned, the model's next load is never useless. Otherwise, impatient clients would never be
        served.
        """
        return not _is_needed(model) and self.head() is not None

    def is_useless_read(self, model: ModelState) -> bool:
        """True if the read that runs is not needed any more and delays another read. See `is_useless`."""
        if _is_needed(model):
            return False
        if self._head_for_disk() is not None:
            return True
        lines = (self.prefetched, self.restored)
        return self.reason(model.name) is None and any(
            next(self._queued_in(line, on_disk=True), None) is not None for line in lines
        )

    def next_search_at(self) -> float:
        """Return the time when there may be room for a model in line although nothing else has changed (inf: never)."""
        if self.accounts.loading is not None:
            return inf
        if self.blocked_head is not None:
            return self._retry_at
        return self._prefetch_at if self.prefetched and self.head() is None else inf

    def obstacle(self, model: ModelState, now: float, device: str = "") -> str:
        """Return a text that says what absent weights wait for, or "" if they wait for nothing.

        The call changes no later decision. `device`: text for the reason why no load starts on the device, or "".
        """
        state, reason = model.weights.state, self.reason(model.name)
        if state is WeightState.BACKOFF:
            left = duration(max(0.0, model.weights.backoff_until - now))
            # Only the load of a pinned model is retried without a request.
            return f"backoff: {'the load is retried in' if model.weights.pinned else 'no load for'} {left}"
        if state is WeightState.READING:
            return "read from disk" + (f" ({reason.value})" if reason else ", and not needed any more")
        if state is not WeightState.QUEUED or reason is None:
            return ""
        loading, head = self.accounts.loading, self.head()
        waits = f"queued ({reason.value}): waits for"
        reading = self.accounts.reading
        if model.weights.on_disk and reading is not None:
            return f"{waits} the read of {self._family(reading.model)} from disk"
        if loading is not None:
            return f"{waits} the load of {self._family(loading.model)}"
        if device:
            return f"{waits} {device}"
        if head is not None and head != model.name:
            return f"{waits} the load of {self._family(head)}, which is first in line"
        present = [
            state
            for state in self._models.values()
            if state.weights.state in ON_DEVICE and not state.weights.pinned
        ]
        in_use = [state for state in present if state.busy or state.committed]
        idle = [state for state in present if state not in in_use]
        if head is None:
            # Prefetched weights do not evict weights with work.
            protected = [
                state for state in idle if state.has_work or self._yields_to_prefetch_at(state) > now
            ]
        else:
            protected = [state for state in idle if self._yields_at(state, model) > now]
        parts = []
        if in_use:
            parts.append(f"in use by {_names(in_use)}")
        if protected:
            parts.append(f"kept for requests of {_names(protected)}")
        if self.accounts.pinned_bytes:
            parts.append(f"pinned {amount(self.accounts.pinned_bytes)}")
        missing = amount(self.accounts.missing(model.weights))
        return f"{waits} {missing}: {', '.join(parts) or 'in use by removed models'}"

    def _family(self, name: str) -> str:
        return self._models[name].family if name in self._models else name

    def victims_over_budget(self, now: float) -> list[ModelState]:
        """Choose evictions that bring the weights within the budget, as far as weights are evictable."""
        if self.accounts.excess() <= 0:
            return []
        free = [_resident(state, self.discipline) for state in self._models.values() if evictable(state)]
        missing = min(self.accounts.over_budget, freed_by_all(free))
        victims = choose_victims(missing, free)
        return [self._models[victim] for victim in victims or ()]

    # --- which weights may be evicted ------------------------------------------------------------------------

    def _reconsider(self, head: ModelState, now: float) -> None:
        """Unblock the head of the line if a new search may find room."""
        for model in self._newly_evictable:
            if self._models.get(model.name) is model:
                at = self._yields_at(model, head) if evictable(model) else inf
                self._retry_at = min(self._retry_at, at)
        self._newly_evictable.clear()
        if self._retry_at <= now:
            self.blocked_head = None

    def _yields_at(self, model: ModelState, head: ModelState) -> float:
        """Return the time from which a model's weights may be evicted for the head of the line (inf: never).

        From that time on, they may be evicted while nothing executes on them.
        """
        if model.weights.pinned or model.committed:
            return inf
        if head.name in self.required:
            # A warm-up can wait until weights that were loaded for requests have served some of these requests.
            return self._protected_until(model) if head.needs_warm_up and model.has_work else -inf
        if not self.on_demand:
            return inf
        if not model.has_work:
            until = min(self._protected_until(model), self._expected_until(model))
        elif self.discipline.rank(model) <= self.demand_for_link[head.name]:
            return inf
        else:
            until = self._protected_until(model)
        return -inf if self._is_urgent(head, until) else until

    def _plan_prefetch(self, now: float) -> PlannedLoad | None:
        """Plan the load of a prefetched model. Weights with work are not evicted for it."""
        if not (self._prefetch_may_fit or self._prefetch_at <= now):
            return None
        self._prefetch_may_fit = False
        self._prefetch_at = inf
        idle: list[Resident] = []
        for state in self._models.values():
            if self.on_demand and evictable(state) and not state.has_work:
                # The protected time also covers weights that `prefetch_after_shed` loaded: the next request should find them.
                until = self._yields_to_prefetch_at(state)
                if until <= now:
                    idle.append(_resident(state))
                else:
                    self._prefetch_at = min(self._prefetch_at, until)
        for name in self._queued_in(self.prefetched, on_disk=False):
            model = self._models[name]
            groups, missing = model.weights.groups, self.accounts.missing(model.weights)
            victims = choose_victims(missing, idle, groups)
            if victims is not None:
                return model, [self._models[victim] for victim in victims]
        return None

    def _plan_restore(self) -> PlannedLoad | None:
        """Plan the load of weights to restore."""
        name = self._first_restored(on_disk=False)
        return None if name is None else (self._models[name], [])

    def _first_restored(self, *, on_disk: bool) -> str | None:
        """Return the first model in the line of restores that fits into the free room.

        Remove the models before it from the line, because they do not fit.
        """
        while True:
            name = min(
                self._queued_in(self.restored, on_disk=on_disk), key=self.restored.__getitem__, default=None
            )
            if name is None or self.accounts.missing(self._models[name].weights) <= 0:
                return name
            del self.restored[name]
            self.requeue(self._models[name])

    def _yields_to_prefetch_at(self, model: ModelState) -> float:
        """Return the time from which weights without waiting requests may be evicted for a prefetch.

        It is later than the time for the head of the line, because no waiting request needs the prefetch.
        """
        return max(self._protected_until(model), self._expected_until(model))

    def _protected_until(self, model: ModelState) -> float:
        """Return the end of the weights' protected time: `residency_factor` times the duration of their load."""
        return model.weights.loaded_at + self._factor * model.weights.last_load_seconds

    def _expected_until(self, model: ModelState) -> float:
        """Return the time until which a model is expected to get a request: its last use plus twice its usual pause.

        -inf: no request is expected soon, because the usual pause is too long or unknown.
        """
        weights = model.weights
        pause = 2.0 * weights.usual_pause
        return weights.last_used + pause if pause <= weights.return_seconds and pause else -inf

    def _is_urgent(self, head: ModelState, until: float) -> bool:
        """True if the deadline of the head's front request would pass if its load began at `until`."""
        if not self.discipline.sheds or head.front is None:
            return False
        deadline = head.front.entries[0].request.deadline
        return deadline is not None and deadline - head.turn_seconds - head.weights.remaining_seconds < until


def evictable(model: ModelState) -> bool:
    """True if a model's weights could be evicted now if others need their room."""
    weights = model.weights
    return weights.state in RUNNABLE and not (weights.pinned or model.executions or model.committed)


def _is_needed(model: ModelState) -> bool:
    """Return True if a load or a read of the model's weights should not be abandoned."""
    weights = model.weights
    serves = weights.pinned or weights.desired or weights.retry_due or weights.abandoned
    return model.has_work or serves or model.needs_warm_up


def _resident(model: ModelState, discipline: Discipline | None = None) -> Resident:
    rank = discipline.rank(model) if discipline is not None and model.has_work else None
    weights = model.weights
    return Resident(model.name, weights.groups, weights.last_used, rank)


def _names(models: Sequence[ModelState]) -> str:
    names = [model.family for model in models]
    return ", ".join(names[:_MAX_NAMES]) + (" and others" if len(names) > _MAX_NAMES else "")
