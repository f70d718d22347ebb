"""A watcher and an operator of a runtime, each on one connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from rsrv.wire.frames import Kind, pack_json, read_header, unpack_json
from rsrv.wire.memory import read_document
from rsrv.wire.socket import send

if TYPE_CHECKING:
    from tests.unit.runtime.conftest import Runtime

Entries = dict[str, dict[str, Any]]


class Watcher:
    """`entries` are the snapshot's, with all changes that were read since."""

    def __init__(self, runtime: Runtime) -> None:
        self._greeted = runtime.open()
        self._greeted.sock.settimeout(20)
        send(self._greeted.sock, pack_json(Kind.WATCH, {}))
        first = self._receive()
        self.instance: str = first["instance"]
        self.revision: int = first["revision"]
        self.entries: Entries = first["entries"]
        #: All changes that were read: the keys' names, and the fields that changed.
        self.seen: list[tuple[str, dict[str, Any] | None]] = []

    def _receive(self) -> dict[str, Any]:
        frame, fds = self._greeted.receiver.receive()
        try:
            assert read_header(frame)[0] is Kind.STATE
            return read_document(fds[0]) if fds else unpack_json(frame)
        finally:
            for fd in fds:
                os.close(fd)

    def read(self) -> None:
        """Wait for one change."""
        change = self._receive()
        assert change["revision"] == self.revision + 1
        self.revision = change["revision"]
        key, entry = change["key"], change["entry"]
        before = self.entries.pop(key, None)
        assert entry != before
        known = entry or before
        assert known is not None, "what was not there is gone"
        name = known["name"]
        if entry is None:
            self.seen.append((name, None))
        else:
            self.entries[key] = entry
            self.seen.append((name, {k: v for k, v in entry.items() if before is None or before[k] != v}))

    def until(self, condition: Callable[[], object]) -> None:
        """Read until a condition holds."""
        while not condition():
            self.read()

    def catch_up(self, revision: int) -> None:
        """Read until the change with that number."""
        self.until(lambda: self.revision >= revision)

    def of(self, name: str) -> dict[str, Any] | None:
        """Return the one entry of that name."""
        found = [entry for entry in self.entries.values() if entry["name"] == name]
        assert len(found) <= 1
        return found[0] if found else None

    def is_(self, name: str, **fields: Any) -> bool:
        """Return whether the entry of that name has these fields."""
        entry = self.of(name)
        return entry is not None and fields.items() <= entry.items()

    def history(self, name: str, field: str) -> list[Any]:
        """Return the values of a field of that name's entries in order; None when an entry went."""
        return [None if change is None else change[field] for who, change in self.seen
                if who == name and (change is None or field in change)]  # fmt: skip

    def close(self) -> None:
        self._greeted.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Operator:
    """Sends commands and reads their answers."""

    def __init__(self, runtime: Runtime) -> None:
        self._greeted = runtime.open()
        self._greeted.sock.settimeout(20)

    def send(self, **command: Any) -> None:
        send(self._greeted.sock, pack_json(Kind.COMMAND, command))

    def hear(self) -> dict[str, Any]:
        """Return the next answer."""
        frame, fds = self._greeted.receiver.receive()
        try:
            assert read_header(frame)[0] is Kind.COMMANDED
            return read_document(fds[0]) if fds else unpack_json(frame)
        finally:
            for fd in fds:
                os.close(fd)

    def do(self, command: str, **fields: Any) -> dict[str, Any]:
        self.send(command=command, **fields)
        return self.hear()

    def close(self) -> None:
        self._greeted.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
