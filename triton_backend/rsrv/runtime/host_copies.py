"""Decisions about host copies of weights, within the limit of the host's memory.

This module decides which models get a host copy, which copies are dropped, and which models fall back to cold.

A model whose residency is `system` has a host copy if there is room. The least recently used copies make room for copies of
models that are loaded. Copies are also dropped after `idle.host`, or when the machine or the container is short of memory. A
model without a copy stays ready: before each load, its file is read. The scheduler decides on these reads, so this module
reports to it which copies exist.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from math import inf
from typing import NamedTuple

from rsrv.runtime.catalog import Catalog
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.weight_mover import CopiesDropped, CopyMade, HostMemoryMeasured, ModelClosed, WeightMover
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

#: Seconds between two checks of the memory.
REVIEW_S = 2.0
#: Minimum number of seconds between two checks while memory is short.
_SHORT_REVIEW_S = 0.1
#: Maximum number of idle models whose executables are examined when memory is short. This takes milliseconds.
_MOST_EXAMINED = 1000


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Host copy of one model."""

    model: str
    #: Bytes of the model's distinct tensors, by tensor.
    tensors: Mapping[str, int]
    #: Time of the last use, or inf while requests wait for the model or it is being loaded.
    used: float
    #: Time at which the copy is dropped because it was idle for `idle.host`.
    expires: float = inf


def choose_copies(copies: Iterable[HostCopy], excess: int, before: float = inf) -> tuple[list[str], int]:
    """Choose the least recently used copies that free `excess` bytes together. Return their models and the bytes still missing.

    Only copies that were last used before the time `before` are chosen. A tensor is freed with the last copy that has it.
    Copies that would free nothing stay.
    """
    if excess <= 0:
        return [], 0
    every = sorted(copies, key=lambda copy: (copy.used, copy.model))
    users = Counter(chain.from_iterable(copy.tensors for copy in every))
    chosen: list[HostCopy] = []
    for copy in every:
        if excess <= 0 or copy.used >= before:
            break
        chosen.append(copy)
        users.subtract(copy.tensors.keys())
        excess -= sum(nbytes for tensor, nbytes in copy.tensors.items() if not users[tensor])
    for copy in reversed(chosen.copy()):
        freed = sum(nbytes for tensor, nbytes in copy.tensors.items() if not users[tensor])
        if freed <= max(0, -excess):
            chosen.remove(copy)
            users.update(copy.tensors.keys())
            excess += freed
    return [copy.model for copy in chosen], max(0, excess)


class WarmModel(NamedTuple):
    """Model or meta model that may fall back to cold."""

    key: str
    name: str
    #: Time of the last use of the model, or for a meta model, of the models that it calls. inf: requests wait.
    since: float
    #: The model's setting `idle.executable`.
    limit: float
    #: Minimum seconds that the model stays warm after its last use, or 0 if it has no state. When a model falls back, its
    #: sequences end, so it stays until they have expired.
    least: float
    #: Ids of the model's executables.
    executables: frozenset[int]


def choose_cold(idle: Iterable[WarmModel], users: Mapping[int, int], most: int) -> list[WarmModel]:
    """Choose the least recently used models, at most `most`, that free memory.

    `users` has the number of models, idle or not, that use each executable. A meta model uses the executables of its callees.
    Models with equal modules share an executable, so it is freed with the last of these models. If no choice frees an
    executable, models are chosen nevertheless, because each has some memory of its own.
    """
    left, sharers = Counter(users), defaultdict[int, list[WarmModel]](list)
    chosen: dict[str, WarmModel] = {}
    every = nsmallest(_MOST_EXAMINED, idle, key=lambda model: (model.since, model.key))
    for model in every:
        if len(chosen) >= most:
            break
        left.subtract(model.executables)
        for executable in model.executables:
            sharers[executable].append(model)
            if left[executable] <= 0:
                chosen |= {sharer.key: sharer for sharer in sharers[executable]}
    return (list(chosen.values()) or every)[:most]


class Shortage(NamedTuple):
    """Reason why models fall back to cold."""

    #: Text for the log that says which resource is short.
    reason: str
    #: True if unloaded models have freed memory since the shortage was measured, or are about to free it.
    outdated: bool


class HostCopies:
    """Decides about the host copies of all models. Belongs to the loop. The weight mover carries out the decisions."""

    def __init__(self, catalog: Catalog, scheduler: Scheduler, outbox: deque[ev.Event]) -> None:
        self._catalog = catalog
        self._scheduler = scheduler
        self._outbox = outbox
        self._mover: WeightMover | None = None
        #: Models that were loaded without a copy and should get one, in this order.
        self._wanting: dict[str, None] = {}
        # A new copy is made only while both of the following are false.
        #: True while copies are being dropped.
        self._drops = False
        #: True while a copy is being made.
        self._makes = False
        #: True if the next measurement is for a review of all copies.
        self._reviews = False
        #: Time of the last review of all copies.
        self._reviewed = -inf
        #: True if memory is short although all copies that may be dropped are dropped.
        self.is_short = False
        #: Time of the latest measurement.
        self._measured_at = -inf

    def begin(self, mover: WeightMover) -> None:
        self._mover = mover

    def loaded(self, model: CompiledModel) -> None:
        """Request a host copy for a model whose weights were loaded, if its residency is `system`.

        The copy is made if there is room for it.
        """
        self.tell(model)
        if model.residency == "system" and not model.host.kept:
            self._wanting[model.key] = None
            if self._mover is not None and not (self._drops or self._makes):
                self._mover.measure()

    def measured(self, message: HostMemoryMeasured, now: float) -> int:
        """Handle a measurement of the free memory, for example after copies were dropped or made.

        Return how many bytes of sequences' state must be freed, because dropping host copies does not free enough memory. If
        `is_short` is true, models must fall back to cold for the same reason.
        """
        assert self._mover is not None
        if isinstance(message, ModelClosed):
            self._mover.closed(message)
        self._measured_at = message.at
        host, lacking = self._mover.host, 0
        spare = message.spare - host.promised
        short = host.limit is not None and host.limit.lacking(spare, ends=self.is_short) > 0
        self.is_short = self.is_short and short
        self._drops = self._drops and not isinstance(message, CopiesDropped)
        if isinstance(message, CopyMade):
            self._makes = False
            made = self._catalog.entries.get(message.model)
            if made is not None and made.model is not None and made.model.host.kept:
                self.tell(made.model)
        if self._reviews or (short and now >= self._reviewed + _SHORT_REVIEW_S):
            self._reviews, self._reviewed = False, now
            lacking = self._review(spare, now)
            self._tell_all()
        self._make(spare)
        return lacking

    def _tell_all(self) -> None:
        """Report new and dropped copies to the scheduler.

        Free weights that were read ahead for loads that are not needed any more.
        """
        for key, entry in self._catalog.entries.items():
            model = entry.model
            if model is None or entry.ending:
                continue
            at_rest = self._scheduler.idle_since(key) < inf
            if at_rest and model.host.is_read_ahead and self._mover is not None:
                self._mover.end_read_ahead(model.host)
            # While a load is due, report nothing: weights that were read ahead of the load count as a host copy until it ends.
            if at_rest or model.host.kept or entry.weights == "resident":
                self.tell(model)

    def tell(self, model: CompiledModel) -> None:
        """Report to the scheduler whether the host has a copy of a model's weights, unless it knows that already."""
        if self._scheduler.on_disk(model.key) is model.host.kept:
            self._outbox.append(ev.CopyChanged(model.key, model.host.kept))
            self._catalog.moves.add(model.key)
            self._catalog.touched.add(model.key)

    @property
    def shortage(self) -> Shortage | None:
        """Reason why models fall back to cold. None: there is enough memory."""
        mover = self._mover
        if mover is not None and self.is_short:
            return Shortage("memory is short", mover.is_outdated(self._measured_at))
        if mover is not None and mover.lacks_mappings:
            return Shortage("the runtime has few memory mappings left", mover.is_outdated(mover.counted_at))
        return None

    def built(self) -> None:
        """Start a measurement of memory and mappings, because the executables of a new model have taken some of both."""
        if self._mover is not None:
            self._mover.measure(mappings=True)

    def measure(self, now: float, states: int) -> float:
        """Start a measurement of the memory if there are models or host copies. Return the time of the next measurement.

        `states`: bytes of sequences' state in host memory.
        """
        mover = self._mover
        if mover is None:
            return inf
        mover.host.states = states
        if mover.host.taken or mover.host.left or self._catalog.entries:
            self._reviews = True
            mover.measure(mappings=mover.lacks_mappings)
        else:
            self._tell_all()
        return now + REVIEW_S

    def _review(self, spare: int, now: float) -> int:
        """Drop copies that have not been used for too long, or whose memory is needed for something else.

        Return how many bytes of sequences' state must be freed in addition.
        """
        mover = self._mover
        if mover is None or self._drops:
            return 0
        limit, taken, left = mover.host.limit, mover.host.taken, mover.host.left
        short = 0 if limit is None else limit.lacking(spare, ends=self.is_short)
        over = 0 if limit is None else limit.excess(taken + left, spare)
        excess = max(short, over)
        if excess > 0 and left:
            # An earlier runtime left these tensors, and no stub has registered their models with this runtime.
            mover.forget_left(excess)
            excess -= left
        if excess > 0 and mover.host.ahead:
            self._end_reads_ahead(mover)
            excess = 0  # The next review shows whether that was enough.
        copies = self._copies()
        idle = [copy.model for copy in copies if copy.expires <= now]
        chosen, lacking = choose_copies([copy for copy in copies if copy.expires > now], excess)
        if idle:
            log.info("host copies dropped because they were unused for idle.host: %s", ", ".join(idle))
        if chosen:
            log.info("host copies dropped because memory is short: %s", ", ".join(chosen))
        self._drop([*idle, *chosen])
        self.is_short = short > 0 and lacking > 0 and not (idle or chosen)
        # Copies can be read again, but state cannot. If memory was short before, `short` may exceed `over`, because a shortage
        # ends only when twice the least share is free. No sequence ends for this difference.
        return max(0, lacking - max(0, short - over))

    def _end_reads_ahead(self, mover: WeightMover) -> None:
        """Free weights that were read ahead for loads that have not begun. They will be read again."""
        for key, entry in self._catalog.entries.items():
            model = None if entry.ending or entry.weights != "absent" else entry.model
            # While a read runs, the scheduler still treats the weights as on disk.
            if model is not None and model.host.is_read_ahead and not self._scheduler.on_disk(key):
                mover.end_read_ahead(model.host)
                log.info(
                    "%s: weights that were read ahead for a load were dropped because memory is short", key
                )
                self.tell(model)

    def _make(self, spare: int) -> None:
        """Make a copy for the first model in `_wanting`. If there is no room, drop less recently used copies first."""
        while self._wanting and self._mover is not None and not (self._drops or self._makes):
            key = next(iter(self._wanting))
            entry = self._catalog.entries.get(key)
            model = None if entry is None or entry.ending else entry.model
            victims, lacking = list[str](), 0
            host = self._mover.host
            if model is not None and host.limit is not None:
                excess = host.limit.excess(host.taken, spare, model.host.missing_bytes)
                if excess > 0:
                    victims, lacking = choose_copies(self._copies(), excess, self._scheduler.idle_since(key))
            if victims and not lacking:
                # The level is debug because this may happen at each load without a copy, which is too often for operators.
                log.debug(
                    "host copies dropped to make room for the host copy of %s: %s", key, ", ".join(victims)
                )
                self._drop(victims)
                return
            del self._wanting[key]
            if model is not None and not lacking:
                self._makes = True
                self._mover.make_copy(model)

    def _drop(self, models: Sequence[str]) -> None:
        assert self._mover is not None
        if models:
            self._drops = True
            dropped = [self._catalog.get(key) for key in models]
            self._mover.drop_copies([model.host for model in dropped])
            for model in dropped:
                self.tell(model)

    def _copies(self) -> list[HostCopy]:
        """Return the host copies of all models that are not ending."""
        settings = self._catalog.policy.settings
        copies = []
        for key, entry in self._catalog.entries.items():
            model = entry.model
            if model is not None and not entry.ending and model.host.kept:
                used = self._scheduler.idle_since(key)
                copies.append(
                    HostCopy(key, model.host.copied, used, used + settings.idle_limits(entry.name).host)
                )
        return copies
