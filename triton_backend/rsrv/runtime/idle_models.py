"""Choice of the warm models that fall back to cold.

These are models that no request has used for a long time, and other models if memory is short. The choice belongs to the loop.
The registry dismisses the chosen models.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from math import inf

from rsrv.runtime.catalog import Catalog
from rsrv.runtime.host_copies import Shortage, WarmModel, choose_cold
from rsrv.scheduler.scheduler import Scheduler

#: Minimum and maximum seconds between two checks for idle models.
_MIN_CHECK_S, _MAX_CHECK_S = 1.0, 60.0
#: Maximum number of models that fall back at one check. Each unload blocks the loop for milliseconds.
_FALLS = 16
#: Seconds between two groups of idle models that fall back.
_NEXT_FALLS_S = 0.25
#: If memory is short, the next group of models falls back when the memory of the last group is free. It does not wait longer than
#: this many seconds after the last group was chosen. The stubs take up to 2 s to leave, and a slow disk may delay the rest.
_FREED_S = 4.0
#: After a stub ignores a dismissal, wait this many seconds before asking it again. Such a stub has requests,
#: or imports model.py.
_STAYS_S = 30.0

#: Maps the key of each registration, and of each model that is kept without one, to its name and the keys of the models that it
#: uses.
RegisteredModels = Mapping[str, tuple[str, tuple[str, ...]]]


class IdleModels:
    """Chooses the registered models that fall back to cold."""

    def __init__(self, catalog: Catalog, scheduler: Scheduler) -> None:
        self._catalog = catalog
        self._scheduler = scheduler
        #: Time when models were last chosen because memory was short.
        self._relieved = -inf

    def limit_ends(self, name: str, now: float) -> float:
        """Return the earliest time when a model that serves from now on may reach its idle limit."""
        limit = self._catalog.policy.settings.idle_limits(name).executable
        return now + max(limit, _MIN_CHECK_S)

    def find_idle(self, registered: RegisteredModels, now: float) -> tuple[list[WarmModel], float]:
        """Return a few models that no request has used for `idle.executable`, and the time of the next check."""
        again, idle = now + _MAX_CHECK_S, list[WarmModel]()
        limits = self._catalog.policy.settings.idle_limits
        for model in self._warm(registered, lambda name: limits(name).executable < inf):
            limit = max(model.limit, model.least)
            due = min(now, model.since) + limit
            if due <= now:
                if not self._catalog.is_dismissed(model.key):
                    if len(idle) == _FALLS:
                        return idle, now + _NEXT_FALLS_S
                    idle.append(model)
                due = now + limit
            again = min(again, due)
        return idle, max(again, now + _MIN_CHECK_S)

    def choose_for_shortage(
        self, shortage: Shortage, registered: RegisteredModels, now: float
    ) -> list[WarmModel] | None:
        """Return models that fall back because of a shortage, the least recently used first.

        None: models were dismissed a moment ago, so no model is chosen now. Models that start with the server stay, unless
        `idle.executable` lets them fall back. Only a few models fall back at a time, because only the next measurement shows
        how much memory this frees.
        """
        if self._catalog.is_dismissing or (shortage.outdated and now < self._relieved + _FREED_S):
            return None
        self._relieved = now
        warm = self._warm(registered, self._catalog.policy.settings.may_be_cold)
        idle = [
            model
            for model in warm
            if model.since + model.least <= now and not self._catalog.is_dismissed(model.key, _STAYS_S)
        ]
        users = Counter(chain.from_iterable(self._executables(models) for _, models in registered.values()))
        return choose_cold(idle, users, min(_FALLS, 1 + len(idle) // 4))

    def _executables(self, models: Iterable[str]) -> frozenset[int]:
        """Return the ids of these models' executables."""
        entries = (self._catalog.entries.get(key) for key in models)
        compiled = (entry.model for entry in entries if entry is not None and entry.model is not None)
        return frozenset(id(executable) for model in compiled for executable in model.executables.values())

    def _warm(self, registered: RegisteredModels, may_fall: Callable[[str], bool]) -> Iterator[WarmModel]:
        """Yield the serving models and meta models whose name `may_fall` accepts.

        Pinned models, and meta models that call a pinned model, are left out.
        """
        limits = self._catalog.policy.settings.idle_limits
        for key, (name, models) in registered.items():
            entries = [self._catalog.entries.get(key) for key in models] if may_fall(name) else []
            compiled = [
                entry.model
                for entry in entries
                if entry is not None and entry.ready and entry.model is not None
            ]
            if not compiled or len(compiled) < len(models):
                continue
            if any(model.residency == "device" for model in compiled):
                continue
            yield WarmModel(
                key,
                name,
                max(map(self._scheduler.idle_since, models)),
                limits(name).executable,
                max(
                    (model.pool.spec.idle_timeout_s for model in compiled if model.pool is not None),
                    default=0.0,
                ),
                self._executables(models),
            )
