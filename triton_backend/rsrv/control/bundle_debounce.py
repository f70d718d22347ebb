"""Decides when to accept a change of the bundles on disk, by comparing successive scans.

Pure: time is an argument, and nothing is read.

A root is a watched directory that contains bundles. A change is accepted when two scans with enough time between them agree, so
that a bundle is not read while it is being copied. A missing root changes nothing, because it may be a disk that is not mounted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rsrv_gen.signatures import Signature

#: Prefix of the signature of a directory that has files but no manifest. Somebody may be copying a bundle into it.
NO_BUNDLE = "-"
#: Root and signature of each bundle of one name. Several roots may have a bundle of this name.
_State = tuple[tuple[Path, Signature], ...]


def _is_bundle(signature: Signature) -> bool:
    return signature is None or not signature.startswith(NO_BUNDLE)


def _bundles(state: _State) -> _State:
    return tuple((root, bundle) for root, bundle in state if _is_bundle(bundle))


@dataclass(frozen=True, slots=True)
class Seen:
    """State of a root in one scan."""

    #: Device and inode of the root. None: the root could not be listed, and `trouble` says why.
    identity: tuple[int, int] | None
    #: Signatures of the bundles in the root, and of directories that may become bundles, by name.
    bundles: Mapping[str, Signature] = field(default_factory=dict)
    trouble: str = ""


@dataclass(slots=True)
class _Root:
    #: Device and inode of the root when it last had bundles.
    identity: tuple[int, int] | None = None
    bundles: Mapping[str, Signature] = field(default_factory=dict)
    missing: bool = False


class BundleDebounce:
    """Finds the changes of bundles from successive scans of all roots."""

    def __init__(self, pause: float) -> None:
        """`pause` is the minimum number of seconds between the two scans that must agree."""
        self._pause = pause
        self._roots: dict[Path, _Root] = {}
        #: The accepted states, by name.
        self._settled: dict[str, _State] = {}
        #: Names that had a bundle at any time.
        self._known: set[str] = set()
        #: States that differ from the accepted states, with the time of the first scan that saw them, by name.
        self._pending: dict[str, tuple[_State, float]] = {}
        self._first: float | None = None
        #: True once enough time has passed for two scans to agree, since the first scan and since the last root appeared. While
        #: this is False, no bundle counts as gone.
        self.agreed = False
        #: Number of times that a root was seen for the first time or was back. Scans do not show what changed in the root before
        #: that, so the caller must then compare all bundles.
        self.sightings = 0

    @property
    def unsettled(self) -> bool:
        """True if another scan is needed before the changes that were seen are accepted."""
        return bool(self._pending) or not self.agreed

    def add_scan(self, roots: Mapping[Path, Seen], now: float) -> tuple[frozenset[str], list[str]]:
        """Evaluate a scan of all roots. Return the names of the bundles whose change is accepted now, and lines for the log."""
        # Forget roots that are not watched any more. Their bundles count as removed.
        self._roots = {path: self._roots.get(path, _Root()) for path in roots}
        seen_before = self.sightings
        lines = [line for path, seen in roots.items() if (line := self._root(path, seen))]
        if self._first is None or self.sightings != seen_before:
            self._first = now
        self.agreed = now - self._first >= self._pause
        states = self._states()
        changed = set()
        for name in {*states, *self._settled, *self._pending}:
            state = states.get(name, ())
            if state == self._settled.get(name, ()) and None not in dict(state).values():
                self._pending.pop(name, None)
                continue
            first, since = self._pending.setdefault(name, (state, now))
            if first != state or None in dict(state).values():
                self._pending[name] = state, now
            elif now - since >= self._pause:
                del self._pending[name]
                before, self._settled[name] = self._settled.get(name, ()), state
                if _bundles(state):
                    self._known.add(name)
                if _bundles(state) != _bundles(before):
                    changed.add(name)
        return frozenset(changed), lines

    def _root(self, path: Path, seen: Seen) -> str:
        """Evaluate a scan of one root. Return a line for the log, or an empty text."""
        root = self._roots[path]
        trouble = seen.trouble
        if not trouble and not any(map(_is_bundle, seen.bundles.values())) and seen.identity != root.identity:
            trouble = (
                "holds no bundles"
                if root.identity is None
                else "was replaced by another directory, which holds no bundles"
            )
        was_missing, root.missing = root.missing, bool(trouble)
        if not trouble:
            self.sightings += was_missing or root.identity is None
            root.identity, root.bundles = seen.identity, seen.bundles
            return f"{path} can be read again: its bundles are watched again" if was_missing else ""
        if was_missing:
            return ""
        return f"{path} {trouble}. If a disk is not mounted, mount it. No model is unloaded because of this"

    def _states(self) -> dict[str, _State]:
        states: dict[str, _State] = {}
        for path, root in self._roots.items():
            for name, bundle_state in root.bundles.items():
                states[name] = (*states.get(name, ()), (path, bundle_state))
        return states

    def settled(self, name: str) -> tuple[tuple[Path, Signature], ...] | None:
        """Return the root and the signature of each bundle of this name, or None while successive scans differ."""
        return None if name in self._pending else _bundles(self._settled.get(name, ()))

    def gone(self, name: str) -> bool:
        """Return True if there is certainly no bundle of this name. Return False if a bundle may be in a missing root."""
        if not self.agreed or self.settled(name) != ():
            return False
        return self.was_known(name) or (
            bool(self._roots) and all(root.identity is not None for root in self._roots.values())
        )

    def was_known(self, name: str) -> bool:
        """Return True if the name had a bundle at any time."""
        return name in self._known

    @property
    def roots(self) -> Collection[Path]:
        """Roots of the last scan."""
        return self._roots.keys()
