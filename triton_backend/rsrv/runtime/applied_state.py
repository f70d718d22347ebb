"""The desired document in the runtime: a new document is checked, and its differences from the former one are applied."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, cast

from rsrv.desired import DesiredChanges, DesiredDocument, check_changes, difference
from rsrv.runtime.host_memory import memory_limit
from rsrv.runtime.registry import Registry
from rsrv.runtime.sequences import SequenceTable
from rsrv.runtime.weight_manager import Outbox
from rsrv.scheduler import events as ev
from rsrv.settings import SettingsError

log = logging.getLogger(__name__)


class AppliedState:
    """The document that the runtime follows. Belongs to the loop."""

    def __init__(self, registry: Registry, sequences: SequenceTable, outbox: Outbox) -> None:
        self._registry = registry
        self._catalog = registry.catalog
        self._policy = registry.catalog.policy
        self._weights = registry.weights
        self._sequences = sequences
        self._outbox = outbox
        #: Identifier of the control process that sent the document. Empty: the document was made from rsrv.yaml.
        self.instance = ""
        self.revision = 0
        #: Earlier control processes. Their last frames may still arrive.
        self._former: set[str] = set()

    @property
    def reached(self) -> dict[str, Any]:
        """The revision that the runtime follows, as an answer to the control process."""
        return {"instance": self.instance, "revision": self.revision}

    def take(self, instance: str, revision: int, since: int | None, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Follow a document unless it is too old. Return the revision that the runtime follows afterwards.

        Args:
            instance: The control process that sent the document.
            revision: Number of the document. It rises with each change.
            since: The revision to which `raw` applies. None: `raw` is a whole document.
            raw: A whole document, or changes.

        Raises:
            SettingsError: The document is wrong. Nothing has changed.
        """
        same = instance == self.instance
        if instance in self._former or (same and revision <= self.revision):
            return self.reached
        if since is not None and not (same and since == self.revision):
            return self.reached  # The control process then sends the whole document.
        changes = check_changes(raw)
        if since is None:
            if missing := DesiredDocument.__annotations__.keys() - changes.keys():
                raise SettingsError(f"the whole document lacks its {min(missing)!r}")
            changes = difference(self._policy.document, cast(DesiredDocument, changes))
        self._apply(changes)
        if not same:
            self._former |= {self.instance} - {""}
        self.instance, self.revision = instance, revision
        return self.reached

    def _apply(self, changes: DesiredChanges) -> None:
        policy, before = self._policy, self._policy.settings
        names = changes.get("models", {}).keys()
        weights = {
            name: (policy.residency(name), policy.asked(name), policy.prefetched(name)) for name in names
        }
        may_pause = (
            {entry.name for entry in self._catalog.entries.values()} if "paused" in changes else set(names)
        )
        pauses = {name: policy.paused(name) for name in may_pause}

        policy.change(changes)

        after = policy.settings
        changed = [name for name, (residency, asked, _) in weights.items()
                if (residency, asked) != (policy.residency(name), policy.asked(name))]  # fmt: skip
        if changed:
            self._weights.follow_residencies(changed)
        if changed or "scheduler" in changes:
            self._weights.update_budget()
        for name, (_, asked, prefetched) in weights.items():
            if policy.prefetched(name) and not (prefetched and asked == policy.asked(name)):
                self._outbox.extend(ev.Prefetch(key) for key in self._catalog.compiled([name]))
            elif prefetched and not policy.prefetched(name):
                self._outbox.append(ev.Evict(self._catalog.compiled([name])))
        self._follow_host_limit(before.runtime.host_memory_bytes, after.runtime.host_memory_bytes)
        general = (after.scheduler.max_queue_depth, after.runtime.idle) != (
            before.scheduler.max_queue_depth,
            before.runtime.idle,
        )
        self._change_policies(None if general else names)
        paused = [name for name, mode in pauses.items() if policy.paused(name) is not mode]
        # Make one event per mode, not per model, because a command may pause a thousand models.
        for mode in {policy.paused(name) for name in paused}:
            keys = self._catalog.compiled(name for name in paused if policy.paused(name) is mode)
            self._sequences.accept(keys)
            self._outbox.append(ev.Paused(keys, mode))
        self._registry.check_idle_soon()
        if changed or paused:
            self._registry.tell_all()

    def _follow_host_limit(self, before: int | None, now: int | None) -> None:
        if now != before and self._weights.mover is not None:
            self._weights.mover.host.limit = memory_limit(now)

    def _change_policies(self, names: Iterable[str] | None) -> None:
        for key in self._catalog.compiled(names):
            program = self._policy.program(self._catalog.get(key).program, self._catalog.entries[key].name)
            self._outbox.append(
                ev.PolicyChanged(
                    key, program.weight, program.max_delay, program.max_queue_depth, program.idle_seconds
                )
            )
