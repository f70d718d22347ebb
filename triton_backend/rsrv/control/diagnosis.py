"""Diagnosis of a running server: its rules compare the current figures with the figures of a minute ago."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from time import time
from typing import Any

from rsrv.control.figures import (
    DeviceFigures,
    DeviceWindow,
    ModelActivity,
    ServerFigures,
    windows,
)
from rsrv.control.findings import SEVERITIES, Case, ServerFinding
from rsrv.control.grpc_service import StatusError
from rsrv.control.health import Health
from rsrv.control.model_findings import COMMON_RULES, MODEL_RULES, ModelRule
from rsrv.control.reconciler import Reconciler
from rsrv.control.records import RuntimeRecords
from rsrv.control.runtimes import Runtimes
from rsrv.control.server_findings import DEVICE_RULES, SERVER_RULES
from rsrv.control.settings_file import SettingsFile
from rsrv.control.shm_usage import measure_shm
from rsrv.control.triton import TritonError
from rsrv.openai.port import TaskScanner, closed_reason
from rsrv.renewal import Renewed
from rsrv.settings import OpenaiSection
from rsrv.text import by_number, some

log = logging.getLogger(__name__)

#: Seconds between two snapshots of the figures.
_SNAPSHOT_S = 15.0
#: Seconds between two checks whether a model has failed or recovered. Findings about models then do not wait for a snapshot.
_FAILURES_S = 1.0
#: Number of snapshots that are kept. They cover the last minute. Findings are about this time.
_SNAPSHOTS = 5


def find(before: ServerFigures, now: ServerFigures) -> list[ServerFinding]:
    """Return the findings about the time between two snapshots, the severest first."""
    case = Case(before, now, windows(before, now))
    findings = [finding for rule in SERVER_RULES for finding in rule(case)]
    for window in case.windows:
        where = f"device {window.number}: " if len(now.devices) > 1 else ""
        on_device = [finding for rule in DEVICE_RULES for finding in rule(case, window)]
        for rules, models in (
            (MODEL_RULES, window.models),
            (COMMON_RULES, {**window.models, **window.metas}),
        ):
            on_device += [finding for rule in rules for finding in _worst(case, window, rule, models)]
        findings += [replace(finding, evidence=where + finding.evidence) for finding in on_device]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _worst(
    case: Case, window: DeviceWindow, rule: ModelRule, models: Mapping[str, ModelActivity]
) -> Iterator[ServerFinding]:
    """Apply a rule to models. Of several findings with the same name, yield only the severest.

    Its evidence lists the other models with a finding of this name. Among equally severe findings, choose the finding about the
    model with the most requests.
    """
    several: dict[str, list[tuple[str, ServerFinding]]] = {}
    for activity in models.values():
        if (finding := rule(case, window, activity)) is not None:
            several.setdefault(finding.name, []).append((activity.name, finding))
    for pairs in several.values():
        pairs.sort(key=lambda pair: (-models[pair[0]].ended, by_number(pair[0])))
        worst = min((finding for _, finding in pairs), key=lambda finding: SEVERITIES.index(finding.severity))
        other_models = [name for name, finding in pairs if finding is not worst]
        yield replace(
            worst, evidence=worst.evidence + (f"; also {some(other_models)}" if other_models else "")
        )


class Diagnosis:
    """Makes findings from the figures of the runtimes. `run` updates `findings` until it is cancelled."""

    def __init__(
        self,
        runtimes: Runtimes,
        file: SettingsFile,
        lifecycle: Reconciler,
        health: Health,
        spans: Mapping[str, int],
        queues: Callable[[], Awaitable[Mapping[str, tuple[int, float]]]],
        renewals: Iterable[Renewed[Any]] = (),
    ) -> None:
        """Make the diagnosis of a server.

        Args:
            runtimes: The server's runtimes.
            file: The file rsrv.yaml.
            lifecycle: Has the facts about models that the runtimes do not know.
            health: Knows the models that should serve and do not.
            spans: Number of spans of traces by outcome. The exporter updates this mapping.
            queues: Asks Triton for `ServerFigures.queues`. Raises TritonError.
            renewals: Files with certificates and tokens.
        """
        self._runtimes, self._file = runtimes, file
        self._lifecycle, self._health, self._spans, self._queues = lifecycle, health, spans, queues
        self._renewals = renewals
        self._tasks = TaskScanner(file.path.parent)
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._snapshots: deque[ServerFigures] = deque(maxlen=_SNAPSHOTS)
        #: For each model that should serve and does not, the time when the diagnosis first saw this. Empty until Triton has
        #: loaded its first models.
        self._missing_since: dict[str, float] = {}
        self.findings: list[ServerFinding] = []

    async def run(self) -> None:
        """Run until cancelled."""
        due, reasons = self._loop.time(), self._lifecycle.reasons
        while True:
            is_due = self._loop.time() >= due
            if is_due or reasons != self._lifecycle.reasons:
                reasons = self._lifecycle.reasons
                try:
                    now, _ = await self.update()
                    if is_due:
                        self._snapshots.append(now)
                except Exception:
                    # A fault of the diagnosis must not end the control process.
                    log.exception("reading the server's figures failed")
            if is_due:
                due = self._loop.time() + _SNAPSHOT_S
            await asyncio.sleep(_FAILURES_S)

    async def update(self) -> tuple[ServerFigures, float]:
        """Update the findings. Return the figures, and the seconds that the findings cover."""
        now = await self._figures()
        before = self._snapshots[0] if self._snapshots else replace(now, t=self._began, devices={})
        self.findings = find(before, now)
        return now, now.t - before.t

    async def _figures(self) -> ServerFigures:
        runtimes, file, at = self._runtimes, self._file, self._loop.time()
        records: Mapping[int, RuntimeRecords] = {}
        queues: Mapping[str, tuple[int, float]] = {}
        with suppress(TritonError):  # Triton may require TLS, or report no statistics
            queues = await self._queues()
        with suppress(StatusError):  # no runtime answers
            records, at = await runtimes.records(), self._loop.time()
        overrides = runtimes.desired.overrides
        stubs = {entry["name"]: entry["stubs"] for entry in runtimes.entries.values()}
        missing, starting = self._health.missing(), not self._lifecycle.reached
        since = dict.fromkeys(missing, self._began) if starting else self._missing_since
        self._missing_since = {} if starting else {name: since.get(name, at) for name in missing}
        return ServerFigures(
            t=at,
            unix_s=time(),
            devices={
                number: DeviceFigures(
                    instance=link.state.instance if number in records else "",
                    since=link.since,
                    records=records.get(number, RuntimeRecords()),
                    lives=link.state.lives,
                    restarts=link.restarts,
                    down_s=link.down_s,
                    silent_pid=link.silent_pid,
                    obstacle="" if link.up else link.obstacle,
                    asleep=link.asleep_since is not None,
                )
                for number, link in enumerate(runtimes.links)
            },
            # Leave out failed versions of models that are no longer in the repository. A runtime that could not start a model
            # keeps the failed version, because the runtime does not learn that the model was removed.
            entries={
                key: entry
                for key, entry in runtimes.entries.items()
                if entry["state"] != "failed" or self._health.has(entry["name"])
            },
            failures=dict(self._lifecycle.failures),
            process_ends=dict(self._lifecycle.process_ends),
            settings=file.settings,
            scheduler=dict(overrides.scheduler),
            policies={name: dict(override.settings) for name, override in overrides.models.items()},
            settings_refused=file.refused,
            settings_waiting=file.waiting,
            openai_closed=await asyncio.to_thread(self._openai_closed, file.settings.openai),
            missing={name: at - since.get(name, at) for name in missing},
            starting=starting,
            loading=frozenset(self._lifecycle.loading),
            load_threads=self._lifecycle.load_threads,
            barred=self._lifecycle.barred,
            cold=frozenset(runtimes.cold),
            shm=await asyncio.to_thread(measure_shm, stubs),
            spans=dict(self._spans),
            renewals=[files.state for files in self._renewals],
            queues=queues,
        )

    def _openai_closed(self, section: OpenaiSection) -> str:
        """Return why the port of OpenAI's endpoints stays closed although a model has a task. Called on a thread."""
        reason = "" if section.listen is None else closed_reason(section.listen, section.keys_file)
        return reason if reason and self._tasks.found() else ""
