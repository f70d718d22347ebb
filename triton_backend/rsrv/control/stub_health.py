"""Which models have lost their stub. Pure: time is an argument.

Triton calls a model ready whose stub is dead, so the runtime's word counts: no stub of that name is connected. A runtime
that has just started says that of all models, and one that is dead says nothing; both get the time that stubs need
to find it again, or to start another.
"""

from __future__ import annotations

from collections.abc import Collection

#: Seconds between the two looks that have to agree.
AGREE = 0.5
#: Seconds that stubs have to connect to a runtime, from when it is there.
CONNECT = 10.0
#: Seconds that stubs have to start a runtime again; when they are all dead, nobody does.
RESTART = 15.0


class StubHealth:
    """What successive looks at Triton and the runtime came to."""

    def __init__(self) -> None:
        #: Ready models without a stub -> when that was first seen.
        self._suspects: dict[str, float] = {}
        #: Models that are not looked at until then.
        self._pardoned: dict[str, float] = {}
        self._down_since: float | None = None

    @property
    def suspicious(self) -> bool:
        """Whether a further look may soon find a model dead."""
        return bool(self._suspects)

    def look(
        self, ready: Collection[str], alive: Collection[str], up_since: float | None, now: float
    ) -> frozenset[str]:
        """Of the models that Triton calls ready, those whose stub is dead; `alive` have one at the runtime.

        `up_since`: when the runtime came up, None while it is down.
        """
        if up_since is not None:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        self._pardoned = {name: until for name, until in self._pardoned.items() if until > now}
        without = set(ready) - set(alive) - self._pardoned.keys()
        self._suspects = {name: self._suspects.get(name, now) for name in without}
        if up_since is not None:
            waited = now - up_since >= CONNECT
        else:
            waited = self._down_since is not None and now - self._down_since >= RESTART
        return frozenset(name for name, since in self._suspects.items() if waited and now - since >= AGREE)

    def pardon(self, name: str, until: float) -> None:
        """It was seen to, and is not dead before that time."""
        self._suspects.pop(name, None)
        self._pardoned[name] = until
