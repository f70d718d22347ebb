"""The table of the states that can occur together: the word of `rsrv status` for a model, and the states behind the word."""

from __future__ import annotations

from typing import NamedTuple


class Combination(NamedTuple):
    """States of one model at one moment."""

    #: Word of docs/operating.md, without details.
    word: str
    #: The bundle, in the control process.
    bundle: str
    #: The model, in Triton. It is absent if Triton's repository index does not list it.
    triton: str
    #: The model's fronts: connected, or waiting for a request or for a runtime.
    front: str
    #: The version that the runtime shows: the ready version, if there is one. It is `none` if the runtime does not know the model.
    runtime: str
    #: The weights. A meta model has none.
    weights: str


class Row(NamedTuple):
    """A row of the table. All combinations of its states are known. A cell with "any" stands for all states."""

    word: str
    cells: tuple[frozenset[str], ...]

    def has(self, combination: Combination) -> bool:
        pairs = zip(self.cells, combination[1:], strict=True)
        return combination.word == self.word and all("any" in cell or value in cell for cell, value in pairs)


def _row(word: str, *cells: str) -> Row:
    return Row(word, tuple(frozenset(cell.split(", ")) for cell in cells))


#: States of a bundle while Triton loads, replaces or unloads the model.
_CHANGING = "served, unchecked, loading, reloading, unload_pending, unloading"
#: States of a bundle whose newest content cannot be loaded.
_BROKEN = "failed, broken, loading, reloading_broken, reload_failed"
#: States of weights that are not on the device.
_AWAY = "absent, on disk, queued, reading, loading, backoff"

#: Cells in the order of `Combination`. An internal model, which only meta models call, is always unchecked and absent.
ROWS = [
    _row("cold", "served", "READY", "waiting", "none", "none"),
    _row(
        "cold", "unchecked, loading, reloading, unload_pending", "READY, LOADING", "waiting", "none", "none"
    ),
    _row("cold, in an older version", "failed, broken, reload_failed", "READY", "waiting", "none", "none"),
    _row("starting", "unchecked", "absent", "waiting", "loading", "any"),
    _row("starting", "unchecked", "absent", "waiting", "none", "none"),
    _row(
        "starting",
        "unchecked, loading, served, reloading, failed, broken",
        "READY, LOADING",
        "connected, waiting",
        "none, loading, ready, asleep",
        "any",
    ),
    _row("warm", _CHANGING, "READY, LOADING, UNLOADING, absent", "connected, waiting", "ready", _AWAY),
    _row("warm, in an older version", _BROKEN, "READY, LOADING", "connected, waiting", "ready", _AWAY),
    _row(
        "resident",
        _CHANGING,
        "READY, LOADING, UNLOADING, absent",
        "connected, waiting",
        "ready",
        "resident, reserved, evicting",
    ),
    _row(
        "resident, in an older version",
        _BROKEN,
        "READY, LOADING",
        "connected, waiting",
        "ready",
        "resident, reserved, evicting",
    ),
    _row("ready", _CHANGING, "READY, LOADING, UNLOADING, absent", "connected, waiting", "ready", "none"),
    _row("ready, in an older version", _BROKEN, "READY, LOADING", "connected, waiting", "ready", "none"),
    _row("leaving", "any", "any", "connected, waiting", "leaving", "any"),
    _row("failed", "failed, broken", "READY, absent", "waiting", "none, failed", "none, absent"),
    _row(
        "failed",
        "unchecked, loading, unload_pending, unloading",
        "READY, LOADING, absent",
        "waiting",
        "failed",
        "none, absent",
    ),
    _row("asleep", "served", "READY", "waiting", "asleep", "absent, on disk, none"),
    _row("asleep", "unchecked", "absent", "waiting", "asleep", "absent, on disk"),
    _row("asleep", "served, unchecked", "READY", "connected", "asleep", "absent, on disk, none"),
]
