"""Note for the next runtime of a device: the models of the present runtime, in the order in which their weights return."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from rsrv.runtime.threads import WorkerThread
from rsrv.wire.paths import write_whole

log = logging.getLogger(__name__)

#: Maximum seconds for which the end of a runtime waits until its note is written.
_MAX_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class HandedModel:
    """One model of the note."""

    key: str
    name: str
    #: Path of the bundle.
    bundle: str
    #: True if the weights were on the device.
    resident: bool


class Handover:
    """A note in the runtime's private directory. Each runtime reads it at its start, and replaces it later.

    The models are in the order of their last use, the latest first. If a note cannot be read or written, models return in any
    order, and models that no stub registers do not return.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the note of the previous runtime. Without a path, nothing is read or written."""
        self._path = path
        #: Models of the previous runtime, or None if unknown.
        self.before: list[HandedModel] | None = None
        self._written: Sequence[HandedModel] = ()
        self._thread = None if path is None else WorkerThread("handover")
        try:
            text = None if path is None else path.read_text()
            if text is not None:
                self.before = [_read(row) for row in json.loads(text)]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read, so models return in any order: %s", path, error)
        self._places = {model.key: place for place, model in enumerate(self.before or ())}

    def place(self, key: str) -> int:
        """Return the place of a model in the order of return. Models that are not in the note come last."""
        return self._places.get(key, len(self._places))

    def returns(self, key: str) -> bool:
        """Return whether a model's weights return to the device. Without a note, all weights return."""
        return self.before is None or (key in self._places and self.before[self._places[key]].resident)

    def write(self, models: Sequence[HandedModel], *, wait: bool = False) -> None:
        """Write a note with these models on a thread, unless the present note already has them in this order.

        `wait`: True to wait until the note is written, but not longer than `_MAX_WAIT_S`.
        """
        if self._thread is None:
            return
        self._thread.put(lambda: self._write(models))
        if wait:
            done = Event()
            self._thread.put(done.set)
            done.wait(_MAX_WAIT_S)

    def _write(self, models: Sequence[HandedModel]) -> None:
        if self._path is None or models == self._written:
            return
        rows = [[model.key, model.name, model.bundle, model.resident] for model in models]
        try:
            write_whole(self._path, json.dumps(rows))
        except OSError as error:
            log.warning("%s cannot be written, so models return in any order: %s", self._path, error)
        else:
            self._written = models


def _read(row: object) -> HandedModel:
    """Read a row. Raises ValueError."""
    match row:
        case [str(key), str(name), str(bundle), bool(resident)]:
            return HandedModel(key, name, bundle, resident)
    raise ValueError(f"not a model: {row!r:.200}")
