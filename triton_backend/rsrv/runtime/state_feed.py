"""What watchers are told: an entry for each model and meta model, and every change of one, once and in order."""

import secrets
from typing import Any, Literal, NamedTuple

from rsrv.runtime.transport import Connection, Transport
from rsrv.wire.frames import Kind

#: entries of what failed that are remembered
_MAX_FAILED = 256


State = Literal["loading", "ready", "leaving", "failed"]
Weights = Literal["absent", "loading", "resident"]


class Entry(NamedTuple):
    """A model or a meta model, one of its versions, as watchers see it."""

    name: str
    kind: Literal["model", "meta"]
    #: of its bundle
    digest: str
    state: State
    #: with failed
    error: str | None = None
    #: where its weights are for sure, and whether they are on the device; None of metas
    residency: str | None = None
    weights: Weights | None = None
    #: pids of the stubs that have registered it, or are about to
    stubs: tuple[int, ...] = ()
    #: of a meta: keys of what it calls
    models: tuple[str, ...] = ()
    #: how it is paused, if it is; of a meta, that of the first of its models that is
    paused: str | None = None


class StateFeed:
    """The entries, each by its key, and who watches them.

    A change is sent at the end of the loop's round that it happened in (`flush`), for a watcher whose connection
    fails changes entries itself. One that does not read is closed on, as any connection is.
    """

    def __init__(self, transport: Transport) -> None:
        #: differs from one runtime to the next, and with it the meaning of a revision
        self.instance = secrets.token_hex(8)
        #: number of changes so far
        self.revision = 0
        self._transport = transport
        self._entries: dict[str, Entry] = {}
        #: keys of entries that failed, oldest first
        self._failed: dict[str, None] = {}
        self._watchers: dict[int, Connection] = {}
        #: changes that are not sent yet
        self._news: list[dict[str, Any]] = []

    # --- what changes -------------------------------------------------------------------------------------

    def put(self, key: str, entry: Entry) -> None:
        """How something is now. What failed under its name before is forgotten when it comes."""
        known = self._entries.get(key)
        if entry == known:
            return
        if known is None:
            for failed in [one for one in self._failed if self._entries[one].name == entry.name]:
                self._change(failed, None)
        self._change(key, entry)
        if len(self._failed) > _MAX_FAILED:
            self._change(next(iter(self._failed)), None)

    def gone(self, key: str) -> None:
        """Something is there no longer; unless it has failed: that stays to be seen."""
        if key in self._entries and key not in self._failed:
            self._change(key, None)

    def _change(self, key: str, entry: Entry | None) -> None:
        self._failed.pop(key, None)
        if entry is None:
            del self._entries[key]
        else:
            self._entries[key] = entry
            if entry.state == "failed":
                self._failed[key] = None
        self.revision += 1
        if self._watchers:
            told = None if entry is None else entry._asdict()
            self._news.append({"revision": self.revision, "key": key, "entry": told})

    # --- who is told --------------------------------------------------------------------------------------

    def watch(self, connection: Connection) -> None:
        """Tell a connection how all is now, and from then on every change."""
        self.flush()
        connection.send_document(Kind.STATE, self.snapshot())
        self._watchers[connection.id] = connection

    def leave(self, connection: Connection) -> None:
        """A connection ended."""
        self._watchers.pop(connection.id, None)

    def snapshot(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "revision": self.revision,
            "entries": {key: entry._asdict() for key, entry in self._entries.items()},
        }

    def flush(self) -> None:
        """Tell all watchers what has changed."""
        while self._news:
            news, self._news = self._news, []
            for watcher in list(self._watchers.values()):
                for change in news:
                    self._transport.guard(watcher, watcher.send_object, Kind.STATE, change)
