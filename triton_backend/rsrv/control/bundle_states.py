"""The state of each bundle in the control process, and the time of its next comparison. Pure: time is an argument.

`TRANSITIONS` has all changes of a bundle's state. Any other change is a fault of this program, and raises an error with the
bundle's history. In addition to its state, a bundle has the time of its next comparison with the repository (`check_at`),
because a bundle may change at any moment. If Triton is loading or unloading the model at that time, the comparison waits until
Triton has finished.

Each bundle has its own times, so a model that compiles for minutes does not delay others. Only an unload waits for other models:
for the loads that began before it. Otherwise, the executables and weights of a renamed bundle would be lost before the model with
the new name can use them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

#: Seconds until the first retry of a failed load or unload. The pause doubles with each failure, up to the longest one.
RETRY_MIN_S, RETRY_MAX_S = 10.0, 600.0
#: Longest time that an unload waits for a load, in seconds.
LOAD_PATIENCE_S = 600.0
#: Number of transitions that a bundle's history keeps.
_HISTORY_LENGTH = 30


class BundleState(StrEnum):
    """State of a bundle, and of the model made from it."""

    #: Not compared with its bundle yet (initial state, during a comparison, and after removal).
    UNCHECKED = "unchecked"
    #: Triton loads the model from the repository: a new or changed version, or the same one because an operator asked.
    LOADING = "loading"
    #: The model in the repository equals the bundle, and Triton was told to serve it.
    SERVED = "served"
    #: The model differs from its bundle, because writing, loading or unloading failed. An older version may be
    #: serving.
    FAILED = "failed"
    #: The bundle cannot be served as it is on disk. An older version may be serving.
    BROKEN = "broken"
    #: The bundle is gone. The unload waits for loads that began before it.
    UNLOAD_PENDING = "unload_pending"
    #: Triton unloads the model, which is then removed from the repository.
    UNLOADING = "unloading"
    #: Triton loads the same version again, because the model's stub process is dead.
    RELOADING = "reloading"
    #: As RELOADING, but the bundle is broken, and Triton loads the version that it served before.
    RELOADING_BROKEN = "reloading_broken"
    #: As RELOADING, but the bundle is gone, and the model serves only until its unload begins.
    RELOADING_UNWANTED = "reloading_unwanted"
    #: As FAILED, but only the reload for a dead stub has failed.
    RELOAD_FAILED = "reload_failed"


class BundleEvent(StrEnum):
    """The causes of changes of state."""

    #: A comparison with the bundle begins. Its conclusion replaces that of an earlier comparison.
    CHECK = "check"
    #: The bundle, the repository and Triton agree: there is nothing to do.
    MATCHED = "matched"
    #: A load begins.
    LOAD = "load"
    #: A load or reload has succeeded.
    LOADED = "loaded"
    #: Writing, loading, reloading or unloading failed.
    FAIL = "fail"
    #: The bundle cannot be served as it is on disk.
    BREAK = "break"
    #: The model has no bundle any more, or is internal.
    ORPHAN = "orphan"
    #: An unload begins.
    UNLOAD = "unload"
    #: An unload has succeeded.
    UNLOADED = "unloaded"
    #: There is neither a bundle nor a model.
    FORGET = "forget"
    #: The model's stub is dead, and a reload begins.
    STUB_DIED = "stub died"


TRANSITIONS: Mapping[tuple[BundleState, BundleEvent], BundleState] = {
    (BundleState.UNCHECKED, BundleEvent.MATCHED): BundleState.SERVED,
    (BundleState.UNCHECKED, BundleEvent.LOAD): BundleState.LOADING,
    (BundleState.UNCHECKED, BundleEvent.FAIL): BundleState.FAILED,
    (BundleState.UNCHECKED, BundleEvent.BREAK): BundleState.BROKEN,
    (BundleState.UNCHECKED, BundleEvent.ORPHAN): BundleState.UNLOAD_PENDING,
    (BundleState.UNCHECKED, BundleEvent.FORGET): BundleState.UNCHECKED,
    (BundleState.UNCHECKED, BundleEvent.STUB_DIED): BundleState.RELOADING,
    (BundleState.LOADING, BundleEvent.LOADED): BundleState.SERVED,
    (BundleState.LOADING, BundleEvent.FAIL): BundleState.FAILED,
    (BundleState.SERVED, BundleEvent.CHECK): BundleState.UNCHECKED,
    (BundleState.SERVED, BundleEvent.STUB_DIED): BundleState.RELOADING,
    (BundleState.FAILED, BundleEvent.CHECK): BundleState.UNCHECKED,
    (BundleState.FAILED, BundleEvent.STUB_DIED): BundleState.RELOADING,
    (BundleState.BROKEN, BundleEvent.CHECK): BundleState.UNCHECKED,
    # A stub has died, and the server cannot load any model. The failure is logged, and the bundle remains broken.
    (BundleState.BROKEN, BundleEvent.FAIL): BundleState.BROKEN,
    (BundleState.UNLOAD_PENDING, BundleEvent.CHECK): BundleState.UNCHECKED,
    (BundleState.UNLOAD_PENDING, BundleEvent.UNLOAD): BundleState.UNLOADING,
    (BundleState.UNLOADING, BundleEvent.UNLOADED): BundleState.UNCHECKED,
    (BundleState.UNLOADING, BundleEvent.FAIL): BundleState.FAILED,
    # A dead stub is replaced even if the model is about to be unloaded, because the model serves until then.
    (BundleState.BROKEN, BundleEvent.STUB_DIED): BundleState.RELOADING_BROKEN,
    (BundleState.UNLOAD_PENDING, BundleEvent.STUB_DIED): BundleState.RELOADING_UNWANTED,
    (BundleState.RELOADING, BundleEvent.LOADED): BundleState.SERVED,
    (BundleState.RELOADING, BundleEvent.FAIL): BundleState.RELOAD_FAILED,
    (BundleState.RELOADING, BundleEvent.BREAK): BundleState.RELOADING_BROKEN,
    (BundleState.RELOADING, BundleEvent.ORPHAN): BundleState.RELOADING_UNWANTED,
    (BundleState.RELOADING_BROKEN, BundleEvent.CHECK): BundleState.RELOADING,
    (BundleState.RELOADING_BROKEN, BundleEvent.LOADED): BundleState.BROKEN,
    (BundleState.RELOADING_BROKEN, BundleEvent.FAIL): BundleState.BROKEN,
    (BundleState.RELOADING_UNWANTED, BundleEvent.CHECK): BundleState.RELOADING,
    (BundleState.RELOADING_UNWANTED, BundleEvent.LOADED): BundleState.UNLOAD_PENDING,
    (BundleState.RELOADING_UNWANTED, BundleEvent.FAIL): BundleState.UNLOAD_PENDING,
    (BundleState.RELOAD_FAILED, BundleEvent.CHECK): BundleState.UNCHECKED,
    (BundleState.RELOAD_FAILED, BundleEvent.STUB_DIED): BundleState.RELOADING,
}

#: The method that carries out each event.
EFFECTS: Mapping[BundleEvent, str] = {
    BundleEvent.LOAD: "ModelLoader.load",
    BundleEvent.STUB_DIED: "ModelLoader.reload",
    BundleEvent.UNLOAD: "ModelLoader.unload",
}

_BROKEN = frozenset({BundleState.BROKEN, BundleState.RELOADING_BROKEN})
_RELOADING = frozenset({BundleState.RELOADING, BundleState.RELOADING_BROKEN, BundleState.RELOADING_UNWANTED})
#: States in which Triton is loading or unloading the model.
_BUSY = frozenset({BundleState.LOADING, BundleState.UNLOADING, *_RELOADING})
#: Events that clear the recorded failure.
_SUCCESSES = frozenset(
    {
        BundleEvent.LOADED,
        BundleEvent.MATCHED,
        BundleEvent.UNLOADED,
        BundleEvent.FORGET,
    }
)


class IllegalTransition(RuntimeError):
    """An event that the bundle's state does not allow."""


@dataclass(frozen=True, slots=True)
class BundleFailure:
    """The reason why a model is not as its bundle says. An older version of it may be serving."""

    text: str
    #: Unix time of the first failure, if several failures have followed each other.
    since: float
    #: Number of attempts.
    tries: int = 1
    #: Time of the next attempt. None: there is no further attempt before the bundle changes.
    retry_at: float | None = None


@dataclass(slots=True)
class _BundleRecord:
    state: BundleState = BundleState.UNCHECKED
    #: Time at which Triton began to load or unload the model.
    busy_since: float = 0.0
    #: Time of the next comparison with the repository. None: there is no comparison before something changes.
    check_at: float | None = None
    failure: BundleFailure | None = None
    #: Meta models that must serve before this model is unloaded.
    carriers: tuple[str, ...] = ()
    #: Models whose loads the unload waits for.
    waits_for: frozenset[str] = frozenset()
    history: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY_LENGTH))

    @property
    def due_at(self) -> float | None:
        retry_at = self.failure.retry_at if self.failure else None
        return min((at for at in (self.check_at, retry_at) if at is not None), default=None)


class BundleStates:
    """The bundles of one repository. A bundle without a record is UNCHECKED, without a failure and a planned comparison."""

    def __init__(self) -> None:
        self._bundles: dict[str, _BundleRecord] = {}

    # --- queries ----------------------------------------------------------------------------------------------

    def state(self, name: str) -> BundleState:
        return self._bundles[name].state if name in self._bundles else BundleState.UNCHECKED

    def carriers(self, name: str) -> tuple[str, ...]:
        """Return the meta models that must serve before this model is unloaded."""
        return self._bundles[name].carriers if name in self._bundles else ()

    @property
    def failures(self) -> dict[str, BundleFailure]:
        """Failures by model."""
        return {name: bundle.failure for name, bundle in self._bundles.items() if bundle.failure is not None}

    @property
    def busy(self) -> frozenset[str]:
        """Models that Triton loads or unloads."""
        return self._in(_BUSY)

    @property
    def unloading(self) -> frozenset[str]:
        """Models that Triton unloads, and that are then removed from the repository."""
        return self._in({BundleState.UNLOADING})

    def _in(self, states: Collection[BundleState]) -> frozenset[str]:
        return frozenset(name for name, bundle in self._bundles.items() if bundle.state in states)

    # --- events -----------------------------------------------------------------------------------------------

    def apply(self, name: str, event: BundleEvent, now: float) -> BundleState:
        """Change the bundle's state, and return the new one. Raises IllegalTransition."""
        after = self._move(name, event, now)
        self._drop_idle(name)
        return after

    def conclude(self, name: str, event: BundleEvent, now: float) -> BundleState:
        """Apply the conclusion of a comparison with the bundle. It replaces an earlier conclusion.

        Raises IllegalTransition.
        """
        state = self.state(name)
        if (state, event) not in TRANSITIONS and (state, BundleEvent.CHECK) in TRANSITIONS:
            self._move(name, BundleEvent.CHECK, now)
        return self.apply(name, event, now)

    def _move(self, name: str, event: BundleEvent, now: float) -> BundleState:
        bundle = self._bundles.setdefault(name, _BundleRecord())
        before = bundle.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            lines = "; ".join(bundle.history) or "none"
            raise IllegalTransition(f"{name}: no event '{event}' in the state {before}. History: {lines}")
        if before is not after:
            bundle.history.append(f"{now:.1f} s: {before} -> {after} ({event})")
            bundle.state = after
        if after in _BUSY and before not in _BUSY:
            bundle.busy_since = now
        if event in _SUCCESSES and after not in _BROKEN:
            bundle.failure = None
        return after

    def fail(self, name: str, text: str, now: float, wall: float, *, retry: bool = True) -> BundleFailure:
        """Record that writing, loading or unloading failed, and return the failure. `wall` is the Unix time."""
        before = self._bundles[name].failure if name in self._bundles else None
        state = self.conclude(name, BundleEvent.FAIL, now)
        if before is None or state in _BROKEN:
            failure = BundleFailure(text, wall)
        else:
            failure = BundleFailure(text, before.since if before.tries else wall, before.tries + 1)
        if retry and state is not BundleState.UNLOAD_PENDING:
            pause = min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(failure.tries - 1, 10))
            failure = replace(failure, retry_at=now + pause)
        if state not in _BROKEN:  # For a broken bundle, keep the failure that says why the bundle is broken.
            self._bundles[name].failure = failure
        return failure

    def set_broken(
        self, broken: Mapping[str, str], now: float, wall: float, uncompared: Collection[str] = ()
    ) -> dict[str, BundleFailure]:
        """Record which bundles of the whole repository are broken, with the reasons. Return the new and changed failures.

        Bundles in `uncompared` keep their state. A model in the state LOADING or UNLOADING keeps this state until Triton has
        finished and the bundle is compared again.
        """
        for name in self._in(_BROKEN) - broken.keys() - set(uncompared):
            self._bundles[name].failure = None
            self.apply(name, BundleEvent.CHECK, now)
        news = {}
        for name, text in broken.items():
            state = self.state(name)
            known = self._bundles[name].failure if state in _BROKEN else None
            if state not in (BundleState.LOADING, BundleState.UNLOADING) and (
                known is None or known.text != text
            ):
                self.conclude(name, BundleEvent.BREAK, now)
                news[name] = self._bundles[name].failure = BundleFailure(text, wall)
        return news

    def orphan(self, name: str, carriers: tuple[str, ...], now: float) -> None:
        """Plan to unload the model. The unload waits for the loads in progress, and until the `carriers` serve."""
        match self.state(name):
            case BundleState.LOADING:
                self.check(name, now)  # A comparison after the load decides whether the model is unloaded.
            case BundleState.UNLOADING:
                pass
            case _:
                self.conclude(name, BundleEvent.ORPHAN, now)
                bundle = self._bundles[name]
                bundle.carriers, bundle.waits_for = carriers, self.busy - {name}

    def forget(self, name: str, now: float) -> None:
        """Record that there is neither a bundle nor a model.

        If Triton is loading or unloading the model, the bundle is compared again when Triton has finished.
        """
        if self.state(name) in _BUSY:
            self.check(name, now)
        else:
            self.conclude(name, BundleEvent.FORGET, now)

    def retain(self, name: str, now: float) -> None:
        """Cancel a planned unload, because the bundle is back or in a missing root, or the carriers do not serve."""
        if self.state(name) in (BundleState.UNLOAD_PENDING, BundleState.RELOADING_UNWANTED):
            self.apply(name, BundleEvent.CHECK, now)

    # --- times ------------------------------------------------------------------------------------------------

    def changed(self, names: Iterable[str], now: float) -> None:
        """Plan to compare these bundles, which have changed, with the repository as soon as possible."""
        for name in names:
            self.check(name, now)
            bundle = self._bundles[name]
            # The recorded failure is about the bundle before the change, so count attempts from 0 again.
            if bundle.failure is not None and bundle.state not in _BROKEN:
                bundle.failure = replace(bundle.failure, tries=0, retry_at=None)

    def check(self, name: str, at: float) -> None:
        """Plan to compare the bundle with the repository at this time, or when Triton has loaded or unloaded the model."""
        bundle = self._bundles.setdefault(name, _BundleRecord())
        bundle.check_at = at if bundle.check_at is None else min(at, bundle.check_at)

    def due(self, now: float) -> frozenset[str]:
        """Return the bundles to compare now, and clear their times. Bundles that Triton is loading or unloading must wait."""
        due = {
            name
            for name, bundle in self._bundles.items()
            if bundle.state not in _BUSY and bundle.due_at is not None and bundle.due_at <= now
        }
        for name in due:
            bundle = self._bundles[name]
            bundle.check_at = None
            if bundle.failure is not None:
                bundle.failure = replace(bundle.failure, retry_at=None)
            self._drop_idle(name)
        return frozenset(due)

    def unloadable(self, now: float) -> list[str]:
        """Return the models that need not wait any longer for loads before they are unloaded. The caller checks the carriers."""
        loading = {name for name in self.busy if now - self._bundles[name].busy_since < LOAD_PATIENCE_S}
        return [name for name in self._pending(now) if self._bundles[name].waits_for.isdisjoint(loading)]

    def next_time(self, now: float) -> float | None:
        """Return the time of the next comparison or unload, if no event causes an earlier one. None: nothing is planned."""
        waited_for = itertools.chain(*(self._bundles[name].waits_for for name in self._pending(now)))
        busy = self.busy.intersection(waited_for)
        times = [self._bundles[name].busy_since + LOAD_PATIENCE_S for name in busy]
        times += [
            bundle.due_at
            for bundle in self._bundles.values()
            if bundle.state not in _BUSY and bundle.due_at is not None
        ]
        return min(times, default=None)

    def _pending(self, now: float) -> list[str]:
        """Return the models to unload, except models whose bundles must be compared first."""
        return [
            name
            for name, bundle in self._bundles.items()
            if bundle.state is BundleState.UNLOAD_PENDING
            and (bundle.check_at is None or bundle.check_at > now)
        ]

    def _drop_idle(self, name: str) -> None:
        """Drop the record if the bundle is UNCHECKED, without a failure and a planned comparison."""
        bundle = self._bundles[name]
        if bundle.state is BundleState.UNCHECKED and bundle.check_at is None and bundle.failure is None:
            del self._bundles[name]
