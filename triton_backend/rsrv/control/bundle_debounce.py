"""What is on disk, look after look, and which changes count. Pure: time is an argument, and nothing is read.

A change counts when two looks that are far enough apart agree, so that what is being copied is not taken. Of a root
that is not there nothing is known, so nothing below it has changed: it may be a disk that is not mounted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: What tells a bundle from itself at another time; None: it could not be read as a whole.
Signature = str | None
#: How the signature of a directory starts that has files, and no manifest: no bundle, but one may be on its way there.
NO_BUNDLE = "-"
#: The bundles of one name, each below another root. Empty: there is none.
_State = tuple[tuple[Path, Signature], ...]


def signature(files: Iterable[tuple[str, int, int, int, int]]) -> str:
    """Of every file of a bundle: relative name, size, mtime and ctime in nanoseconds, inode."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        total.update(f"{file!r}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _is_bundle(signature: Signature) -> bool:
    return signature is None or not signature.startswith(NO_BUNDLE)


def _bundles(state: _State) -> _State:
    return tuple((root, found) for root, found in state if _is_bundle(found))


@dataclass(frozen=True, slots=True)
class Seen:
    """A root, as one look found it."""

    #: Device and inode of the directory; None when it could not be listed, and `trouble` says why.
    identity: tuple[int, int] | None
    #: Name -> signature of the bundles below it, and of the directories that may become some.
    bundles: Mapping[str, Signature] = field(default_factory=dict)
    trouble: str = ""


@dataclass(slots=True)
class _Root:
    #: The directory that had bundles when some were seen last.
    identity: tuple[int, int] | None = None
    bundles: Mapping[str, Signature] = field(default_factory=dict)
    missing: bool = False


class BundleDebounce:
    """What successive looks at all roots came to."""

    def __init__(self, pause: float) -> None:
        """`pause`: seconds between two looks that are to agree."""
        self._pause = pause
        self._roots: dict[Path, _Root] = {}
        #: Name -> the state that counts.
        self._settled: dict[str, _State] = {}
        #: Names that ever had a bundle.
        self._known: set[str] = set()
        #: Name -> a state that differs from that one, and when it was first seen.
        self._pending: dict[str, tuple[_State, float]] = {}
        self._first: float | None = None
        #: Whether two looks could agree by now on every root in sight. Before that nothing is known.
        self.agreed = False
        #: How often a root has come into sight: what went meanwhile, or before the first look, shows in no change.
        self.sightings = 0

    @property
    def restless(self) -> bool:
        """Whether a further look is needed for what has been seen to count."""
        return bool(self._pending) or not self.agreed

    def look(self, roots: Mapping[Path, Seen], now: float) -> tuple[frozenset[str], list[str]]:
        """One look at all roots: names of the bundles whose change counts from now on, and what to tell people."""
        # One that is not to be looked at any more takes its bundles with it.
        self._roots = {path: self._roots.get(path, _Root()) for path in roots}
        seen_before = self.sightings
        told = [line for path, seen in roots.items() if (line := self._root(path, seen))]
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
        return frozenset(changed), told

    def _root(self, path: Path, seen: Seen) -> str:
        """Takes one root's look; returns what there is to tell."""
        root = self._roots[path]
        trouble = seen.trouble
        if not trouble and not any(map(_is_bundle, seen.bundles.values())) and seen.identity != root.identity:
            trouble = "holds no bundles" if root.identity is None else "has become another, empty directory"
        was_missing, root.missing = root.missing, bool(trouble)
        if not trouble:
            self.sightings += was_missing or root.identity is None
            root.identity, root.bundles = seen.identity, seen.bundles
            return f"{path} is back: its bundles are watched again" if was_missing else ""
        if was_missing:
            return ""
        return f"{path} {trouble}: is a disk not mounted? No model is unloaded because of that"

    def _states(self) -> dict[str, _State]:
        states: dict[str, _State] = {}
        for path, root in self._roots.items():
            for name, found in root.bundles.items():
                states[name] = (*states.get(name, ()), (path, found))
        return states

    def settled(self, name: str) -> tuple[tuple[Path, Signature], ...] | None:
        """The signatures of this name's bundles, by root, if the looks agree on them; None while they do not."""
        return None if name in self._pending else _bundles(self._settled.get(name, ()))

    def gone(self, name: str) -> bool:
        """Whether this name's bundle is not there any more, or never was, rather than out of sight."""
        if not self.agreed or self.settled(name) != ():
            return False
        return self.knew(name) or (
            bool(self._roots) and all(root.identity is not None for root in self._roots.values())
        )

    def knew(self, name: str) -> bool:
        """Whether there was a bundle of this name at any time."""
        return name in self._known

    @property
    def roots(self) -> Collection[Path]:
        """Those of the last look."""
        return self._roots.keys()
