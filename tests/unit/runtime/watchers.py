"""A watcher and an operator of a runtime, each on one connection."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from rsrv.wire.frames import Kind, pack_json, read_header, unpack_json
from rsrv.wire.memory import read_document
from rsrv.wire.socket import send
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.unit.runtime.conftest import Runtime

Entries = dict[str, dict[str, Any]]


class Watcher:
    """A connection that watches a runtime. `entries` is the snapshot with all changes that were read since."""

    def __init__(self, runtime: Runtime) -> None:
        self._greeted = runtime.open()
        self._greeted.sock.settimeout(PATIENCE_S)
        send(self._greeted.sock, pack_json(Kind.WATCH, {}))
        first = self._receive()
        self.instance: str = first["instance"]
        self.revision: int = first["revision"]
        self.entries: Entries = first["entries"]
        #: All changes that were read: the entry's name, and the fields that changed.
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
        """Read one change, and wait for it."""
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
        """Read changes up to the change with this revision."""
        self.until(lambda: self.revision >= revision)

    def of(self, name: str) -> dict[str, Any] | None:
        """Return the only entry with this name, or None."""
        entries = [entry for entry in self.entries.values() if entry["name"] == name]
        assert len(entries) <= 1
        return entries[0] if entries else None

    def is_(self, name: str, **fields: Any) -> bool:
        """Return whether the entry with this name has these fields."""
        entry = self.of(name)
        return entry is not None and fields.items() <= entry.items()

    def history(self, name: str, field: str) -> list[Any]:
        """Return the values of a field in the order of the changes. The removal of the entry appears as None."""
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
        self._runtime = runtime
        self._greeted = runtime.open()
        self._greeted.sock.settimeout(PATIENCE_S)

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

    # --- the desired document, as a control process sends it ------------------------------------------------

    def follow(
        self, document: Mapping[str, Any], *, whole: bool = False, instance: str = "ours"
    ) -> dict[str, Any]:
        """Send a `follow` command with changes of the settings document, or with the whole document.

        Return the answer if it is an error, otherwise {}.
        """
        now = self._runtime.loop._commands.applied
        since = now.revision if instance == now.instance and not whole else None
        if since is None:
            document = {**self._runtime.loop._catalog.policy.document, **document}
        answer = self.do(
            "follow", instance=instance, revision=now.revision + 1, since=since, document=document
        )
        return answer if "error" in answer else {}

    def want(self, name: str, **settings: Any) -> dict[str, Any]:
        """Set keys of a model's section."""
        return self._change(name, settings=settings)

    def keep(self, name: str, residency: str) -> dict[str, Any]:
        """Set where a model's weights are kept."""
        more = {} if residency == "device" else {"prefetched": False}
        return self._change(name, settings={"residency": residency}, again=True, **more)

    def prefetch(self, name: str) -> dict[str, Any]:
        return self._change(name, prefetched=True, again=True)

    def evict(self, name: str) -> dict[str, Any]:
        """Evict a model's weights, and end its prefetch."""
        answer = self.do("evict", model=name)
        self._change(name, prefetched=False)
        return answer

    def pause(self, name: str | None, mode: str | None) -> dict[str, Any]:
        """Pause a model or all models. A `mode` of None lets them continue."""
        if name is not None:
            return self._change(name, paused=mode)
        models = self._runtime.loop._catalog.policy.document["models"].items()
        rest = {
            name: {key: value for key, value in fields.items() if key != "paused"} for name, fields in models
        }
        return self.follow({"paused": mode, "models": rest})

    def _change(
        self,
        name: str,
        settings: Mapping[str, Any] = MappingProxyType({}),
        again: bool = False,
        **fields: Any,
    ) -> dict[str, Any]:
        models: Mapping[str, Any] = self._runtime.loop._catalog.policy.document["models"]
        entry = {**models.get(name, {}), **fields}
        if again:
            entry["asked"] = entry.get("asked", 0) + 1
        entry["settings"] = {**entry.get("settings", {}), **settings}
        changed = {name: entry}
        applied = self._runtime.loop._commands.applied
        return self.follow({"models": changed if applied.instance == "ours" else {**models, **changed}})

    def close(self) -> None:
        self._greeted.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def configure(runtime: Runtime, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change keys of the scheduler's section. Return the section, with the depth that the runtime uses."""
    with Operator(runtime) as operator:
        section = runtime.loop._catalog.policy.document["scheduler"]
        answer = operator.follow({"scheduler": {**section, **changes}})
        assert "error" not in answer, answer
    return {
        **runtime.loop._catalog.policy.document["scheduler"],
        "depth": runtime.loop._weights.settings.depth,
    }


def set_residency(runtime: Runtime, name: str, residency: str) -> None:
    """Set where a model's weights are kept, without waiting until they are there."""
    with Operator(runtime) as operator:
        answer = operator.keep(name, residency)
        assert "error" not in answer, answer
