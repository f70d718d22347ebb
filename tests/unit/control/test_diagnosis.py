"""The control process takes snapshots of a runtime's figures, and derives findings from them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rsrv.control import diagnosis as module
from rsrv.control.bundle_states import BundleFailure
from rsrv.control.diagnosis import Diagnosis
from rsrv.control.health import Health
from rsrv.control.runtimes import Runtimes
from rsrv.control.settings_file import SettingsFile
from rsrv.settings import load_settings
from rsrv_gen.plan import BUNDLE_FOLDER
from tests.unit.control.peers import FakeLifecycle, FakeRuntime, entry, linked, no_queues, until
from tests.unit.control.test_findings import model, outcomes
from tests.waiting import looped


@dataclass
class Diagnosed:
    runtime: FakeRuntime
    runtimes: Runtimes
    diagnosis: Diagnosis
    failures: dict[str, BundleFailure]

    def fail(self) -> None:
        self.runtime.models["a"] = model(name="a", device_bytes=1000, outcomes=outcomes(failed=30))

    @property
    def names(self) -> list[str]:
        return [finding.name for finding in self.diagnosis.findings]


@asynccontextmanager
async def diagnosed(tmp_path: Path) -> AsyncIterator[Diagnosed]:
    """Serve a runtime with one healthy model."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries["a@1"] = entry("a")
    runtime.models["a"] = model(name="a", device_bytes=1000)
    runtime.record.shared.add(bytes=500, models=["a", "b"], on_device=True)
    async with linked(tmp_path) as runtimes:
        await until(runtimes, lambda: runtimes.up)
        bundles: Any = FakeLifecycle()
        file = SettingsFile(tmp_path / "rsrv.yaml", load_settings(""), 1)
        health = Health(runtimes, tmp_path, bundles, decides=False)
        diagnosis = Diagnosis(runtimes, file, bundles, health, {}, no_queues)
        server = Diagnosed(runtime, runtimes, diagnosis, bundles.failures)
        try:
            yield server
        finally:
            runtime.die()


@looped
async def test_findings_are_those_of_the_latest_update(tmp_path: Path) -> None:
    """Each update computes the findings anew, from counters, failed bundles, and the status of the models."""
    async with diagnosed(tmp_path) as server:
        figures, _ = await server.diagnosis.update()
        assert server.names == []
        (shared,) = figures.devices[0].records.shared
        assert (shared.bytes, [*shared.models]) == (500, ["a", "b"])

        server.fail()
        server.failures["b"] = BundleFailure("no manifest", since=0.0)
        await server.diagnosis.update()
        assert server.names == ["model_failed", "requests_fail"]


@looped
async def test_a_model_that_could_not_start_is_no_finding_once_it_is_removed(tmp_path: Path) -> None:
    """A failed start is no finding after the model is removed from the repository, although the runtime still remembers the failure."""
    async with diagnosed(tmp_path) as server:
        server.runtime.change("b@", entry("b", state="failed", error="torn", digest="", stubs=[]))
        (bundle := tmp_path / "b" / BUNDLE_FOLDER).mkdir(parents=True)
        await until(server.runtimes, lambda: "b@" in server.runtimes.entries)
        await server.diagnosis.update()
        assert server.names == ["model_failed"]

        bundle.rmdir()
        await server.diagnosis.update()
        assert server.names == []


@looped
async def test_without_a_runtime_there_is_what_is_known(tmp_path: Path) -> None:
    """An update without a runtime still reports failed bundles. The end of a runtime alone is no finding yet."""
    async with diagnosed(tmp_path) as server:
        server.runtime.die()
        server.failures["b"] = BundleFailure("no manifest", since=0.0)
        await server.diagnosis.update()
        assert server.names == ["model_failed"]


@looped
async def test_a_failure_and_its_end_are_findings_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The findings about failed models change when a model fails or recovers, and do not wait for the next snapshot."""
    monkeypatch.setattr(module, "_SNAPSHOT_S", 3600.0)
    monkeypatch.setattr(module, "_FAILURES_S", 0.001)
    async with diagnosed(tmp_path) as server:
        running = asyncio.create_task(server.diagnosis.run())
        try:
            await server.runtime.came(lambda: len(server.diagnosis._snapshots) == 1)
            server.failures["b"] = BundleFailure("no manifest", since=0.0)
            await server.runtime.came(lambda: server.names == ["model_failed"])
            del server.failures["b"]
            await server.runtime.came(lambda: server.names == [])
            assert len(server.diagnosis._snapshots) == 1
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@looped
async def test_trouble_is_forgotten_after_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are a finding until the oldest kept snapshot is newer than the failures.

    All snapshots share one record of an idle model.
    """
    monkeypatch.setattr(module, "_SNAPSHOT_S", 0.001)
    monkeypatch.setattr(module, "_FAILURES_S", 0.001)
    async with diagnosed(tmp_path) as server:
        running = asyncio.create_task(server.diagnosis.run())
        try:
            polls = server.runtime.asked
            await server.runtime.came(lambda: len(polls) > 1)
            server.fail()
            await server.runtime.came(lambda: len(polls) > 3)
            assert server.names == ["requests_fail"]
            seen = len(polls)
            await server.runtime.came(lambda: len(polls) > seen + 2 * module._SNAPSHOTS)
            assert server.names == []
            first, *others = server.diagnosis._snapshots
            assert all(
                snapshot.devices[0].records.models["a"] is first.devices[0].records.models["a"]
                for snapshot in others
            )
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
