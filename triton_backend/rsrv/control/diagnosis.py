"""The findings of a running server: regular looks at its figures, of which those of the last minute are kept."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from time import time
from typing import Any

from rsrv.control.figures import (
    DeviceFigures,
    DeviceWindow,
    ModelActivity,
    ModelFacts,
    ServerFigures,
    windows,
)
from rsrv.control.findings import SEVERITIES, Case, ServerFinding
from rsrv.control.grpc_service import StatusError
from rsrv.control.health import Readiness
from rsrv.control.model_findings import COMMON_RULES, MODEL_RULES, ModelRule
from rsrv.control.protocols import Reconciling
from rsrv.control.runtimes import Answers, Runtimes
from rsrv.control.server_findings import DEVICE_RULES, SERVER_RULES
from rsrv.control.settings_file import SettingsFile
from rsrv.control.triton import TritonError
from rsrv.text import by_number, some

log = logging.getLogger("rsrv.control")

#: Seconds between two looks, and looks that are kept: findings are of the last minute.
_LOOK_S, _LOOKS = 15.0, 5


def find(before: ServerFigures, now: ServerFigures) -> list[ServerFinding]:
    """Return the findings of the window between two moments, the severest first."""
    case = Case(before, now, windows(before, now))
    found = [finding for rule in SERVER_RULES for finding in rule(case)]
    for window in case.windows:
        where = f"device {window.number}: " if len(now.devices) > 1 else ""
        on_device = [finding for rule in DEVICE_RULES for finding in rule(case, window)]
        for rules, models in (
            (MODEL_RULES, window.models),
            (COMMON_RULES, {**window.models, **window.metas}),
        ):
            on_device += [finding for rule in rules for finding in _worst(case, window, rule, models)]
        found += [replace(one, evidence=where + one.evidence) for one in on_device]
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def _worst(
    case: Case, window: DeviceWindow, rule: ModelRule, models: Mapping[str, ModelActivity]
) -> Iterator[ServerFinding]:
    """Yield one finding of each name: that of the model with most requests, naming the others."""
    several: dict[str, list[tuple[str, ServerFinding]]] = {}
    for one in models.values():
        if (finding := rule(case, window, one)) is not None:
            several.setdefault(finding.name, []).append((one.name, finding))
    for found in several.values():
        found.sort(key=lambda one: (-models[one[0]].ended, by_number(one[0])))
        worst = min((one for _, one in found), key=lambda one: SEVERITIES.index(one.severity))
        others = [name for name, one in found if one is not worst]
        yield replace(worst, evidence=worst.evidence + (f"; also {some(others)}" if others else ""))


class Diagnosis:
    """Looks at the runtimes. `findings` are those of the latest look; `run` drives it."""

    def __init__(
        self,
        runtimes: Runtimes,
        file: SettingsFile,
        lifecycle: Reconciling,
        readiness: Readiness,
        spans: Mapping[str, int],
        queues: Callable[[], Awaitable[Mapping[str, tuple[int, float]]]],
    ) -> None:
        """Make it.

        Args:
            runtimes: of the server.
            file: rsrv.yaml.
            lifecycle: knows of models what the runtimes do not.
            readiness: knows which models should serve and do not, and which there are.
            spans: of traces, by outcome; read at each look.
            queues: asks Triton for `ServerFigures.queues`. Raises TritonError.
        """
        self._runtimes, self._file = runtimes, file
        self._lifecycle, self._readiness, self._spans, self._queues = lifecycle, readiness, spans, queues
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._looks: deque[ServerFigures] = deque(maxlen=_LOOKS)
        self._facts: dict[str, ModelFacts] = {}
        self._shared: dict[int, list[tuple[int, frozenset[str]]]] = {}
        #: The runtimes' count of changes, when the facts were read.
        self._facts_of = -1
        #: Model that should serve and does not -> time of the first look at it after Triton's first loads.
        self._missing_since: dict[str, float] = {}
        self.findings: list[ServerFinding] = []

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                # Prometheus asks as often as we do, and its answers do for both.
                now, _ = await self.look(0.9 * _LOOK_S)
                self._looks.append(now)
            except Exception:
                # A fault of the diagnosis must not end the control process.
                log.exception("a look at the server's figures failed")
            await asyncio.sleep(_LOOK_S)

    async def look(self, max_age_s: float = 0.0) -> tuple[ServerFigures, float]:
        """Find again, from counters that may be so old; return the figures, and the seconds of the window that they end."""
        now = await self._figures(max_age_s)
        before = self._looks[0] if self._looks else replace(now, t=self._began, devices={})
        self.findings = find(before, now)
        return now, now.t - before.t

    async def _figures(self, max_age_s: float) -> ServerFigures:
        runtimes, file, at = self._runtimes, self._file, self._loop.time()
        answers: Answers = {}
        queues: Mapping[str, tuple[int, float]] = {}
        with suppress(TritonError):  # it may want TLS, or keep its statistics to itself
            queues = await self._queues()
        if runtimes.live:
            with suppress(StatusError):  # a runtime has just ended
                answers, at = await runtimes.metrics(max_age_s)
                await self._read_facts()
        overrides = runtimes.overrides
        missing, starting = self._readiness.missing(), not self._lifecycle.reached
        since = dict.fromkeys(missing, self._began) if starting else self._missing_since
        self._missing_since = {} if starting else {name: since.get(name, at) for name in missing}
        return ServerFigures(
            t=at,
            unix_s=time(),
            devices={
                number: DeviceFigures(
                    instance=link.instance if number in answers else "",
                    since=link.since,
                    counts=self._kept(number, answers.get(number, {})),
                    lives=link.lives,
                    restarts=link.restarts,
                    down_s=link.down_s,
                    silent_pid=link.silent_pid,
                    obstacle="" if link.up else link.obstacle,
                    asleep=link.asleep_since is not None,
                    shared=self._shared.get(number, ()),
                )
                for number, link in enumerate(runtimes.links)
            },
            # A runtime is not told of the end of a model that it could not start.
            entries={
                key: one
                for key, one in runtimes.entries.items()
                if one["state"] != "failed" or self._readiness.has(one["name"])
            },
            failures=dict(self._lifecycle.failures),
            process_ends=dict(self._lifecycle.process_ends),
            settings=file.settings,
            scheduler=dict(overrides.scheduler),
            policies={name: dict(overrides.policy(name)) for name in overrides.models},
            settings_refused=file.refused,
            settings_waiting=file.waiting,
            facts=self._facts,
            missing={name: at - since.get(name, at) for name in missing},
            starting=starting,
            loading=frozenset(self._lifecycle.loading),
            load_threads=self._lifecycle.load_threads,
            cold=frozenset(runtimes.cold),
            shm=_shm(),
            spans=dict(self._spans),
            queues=queues,
        )

    async def _read_facts(self) -> None:
        """Read bytes, sharing and costs, if models came or went: they take the runtime longer than the counters."""
        seen = self._runtimes.other_changes
        if seen != self._facts_of:
            self._facts = {
                name: ModelFacts(said["device_bytes"], _costs(said))
                for status in (await self._runtimes.status()).values()
                for name, said in status["models"].items()
            }
            self._shared = {
                number: [(group["bytes"], frozenset(group["models"])) for group in said["groups"]]
                for number, said in (await self._runtimes.query({"command": "memory"})).items()
            }
            self._facts_of = seen

    def _kept(self, number: int, counts: dict[str, Any]) -> dict[str, Any]:
        """Return the counters, with those of idle models as they are kept: looks share them."""
        last = self._looks[-1].devices.get(number) if self._looks else None
        if last is not None and last.counts and counts:
            old = last.counts["models"]
            counts["models"] = {
                name: old[name] if old.get(name) == said else said for name, said in counts["models"].items()
            }
        return counts


def _costs(said: Mapping[str, Any]) -> dict[int, float]:
    """Return the seconds by size, of the input shape that was executed most."""
    costs, counts = said["costs"], said["sizes"]
    shapes: dict[str, int] = dict.fromkeys((which.partition("/")[0] for which in costs), 0)
    for which, count in counts.items():
        shapes[which.partition("/")[0]] = shapes.get(which.partition("/")[0], 0) + count
    most = max(shapes, key=lambda shape: shapes[shape], default="")
    return {
        int(which.partition("/")[2]): cost for which, cost in costs.items() if which.partition("/")[0] == most
    }


def _shm() -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return None
