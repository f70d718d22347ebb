"""Modules that this server's runtimes have parsed, compiled and measured.

The next runtime need not repeat this work.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

from rsrv_bundle.inspection import signature_from_json
from rsrv_bundle.modules import Signature

log = logging.getLogger(__name__)

#: A start is recorded only if it takes less than this share of the shortest recorded start, so that a model has few lines.
_MUCH_SHORTER = 0.7


class KnownModules(MutableMapping[str, Signature]):
    """Signatures by the SHA-256 of the module, names of executables in the compilation cache, and costs and starts of models.

    Each item is a line of a file in the runtime's private directory. If a line cannot be read or written, the next runtime
    does that work again. Every method may be called from any thread.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read what earlier runtimes wrote. Without a path, nothing outlives the process."""
        self._path = path
        self._lock = Lock()
        self._signatures: dict[str, Signature] = {}
        #: Keys in the cache by (SHA-256 of a module, circumstances of its compilation).
        self._entries: dict[tuple[str, str], str] = {}
        #: Seconds of an execution of each (variant, size), by (key of a model, circumstances).
        self._costs: dict[tuple[str, str], Mapping[tuple[int, int], float]] = {}
        #: Seconds of the shortest start, by (key of a model, circumstances).
        self._starts: dict[tuple[str, str], float] = {}
        try:
            lines = [] if path is None else path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read, so modules are parsed again: %s", path, error)
            return
        damaged = 0
        for line in filter(None, lines):
            try:
                self._take(json.loads(line))
            except Exception:  # noqa: BLE001 - no line may keep models from being served
                damaged += 1
        if damaged:
            log.warning("%s has %d damaged lines; their modules are parsed again", path, damaged)

    def _take(self, line: dict[str, Any]) -> None:
        if "entry" in line:
            self._entries[str(line["module"]), str(line["circumstances"])] = str(line["entry"])
        elif "costs" in line:
            costs = {(int(variant), int(size)): float(seconds) for variant, size, seconds in line["costs"]}
            if not all(0.0 < seconds < inf for seconds in costs.values()):
                raise ValueError("a cost that is not a duration")
            self._costs[str(line["model"]), str(line["circumstances"])] = costs
        elif "start_s" in line:
            if not 0.0 < (seconds := float(line["start_s"])) < inf:
                raise ValueError("a start that is not a duration")
            self._starts[str(line["model"]), str(line["circumstances"])] = seconds
        else:
            signature = signature_from_json(line)
            self._signatures[signature.digest] = signature

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            if self._path is None:
                return
            try:
                with self._path.open("a") as file:
                    # Begin with a newline, because the last line of a process that was killed while it wrote may have none.
                    file.write(f"\n{json.dumps(line)}")
            except OSError as error:
                log.warning(
                    "%s cannot be written, so the next runtime parses modules again: %s", self._path, error
                )
                self._path = None

    # --- executables --------------------------------------------------------------------------------------

    def entry(self, module: str, circumstances: str) -> str | None:
        """Return the key of a module's executable in the compilation cache."""
        return self._entries.get((module, circumstances))

    def add_entry(self, module: str, circumstances: str, entry: str) -> None:
        if self.entry(module, circumstances) != entry:
            self._entries[module, circumstances] = entry
            self._write({"module": module, "circumstances": circumstances, "entry": entry})

    # --- costs --------------------------------------------------------------------------------------------

    def costs(self, model: str, circumstances: str) -> Mapping[tuple[int, int], float] | None:
        """Return the seconds of a model's executions, as first measured."""
        return self._costs.get((model, circumstances))

    def add_costs(self, model: str, circumstances: str, costs: Mapping[tuple[int, int], float]) -> None:
        known = self.costs(model, circumstances)
        # Keep the first costs of the same sizes. Later costs are no better, and each would add a line to the file.
        if known is None or known.keys() != costs.keys():
            self._costs[model, circumstances] = costs
            rows = [[*key, seconds] for key, seconds in costs.items()]
            self._write({"model": model, "circumstances": circumstances, "costs": rows})

    def start_seconds(self, model: str, circumstances: str) -> float | None:
        """Return the seconds of a model's shortest start."""
        return self._starts.get((model, circumstances))

    def add_start(self, model: str, circumstances: str, seconds: float) -> None:
        if seconds < _MUCH_SHORTER * self._starts.get((model, circumstances), inf):
            self._starts[model, circumstances] = seconds
            self._write({"model": model, "circumstances": circumstances, "start_s": seconds})

    # --- signatures ---------------------------------------------------------------------------------------

    def __getitem__(self, module: str) -> Signature:
        return self._signatures[module]

    def __setitem__(self, module: str, signature: Signature) -> None:
        self._signatures[module] = signature
        self._write(dataclasses.asdict(signature))

    def __delitem__(self, module: str) -> None:
        raise TypeError("a module's signature does not change")

    def __iter__(self) -> Iterator[str]:
        return iter(self._signatures)

    def __len__(self) -> int:
        return len(self._signatures)
