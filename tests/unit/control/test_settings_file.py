"""rsrv.yaml of a running server is read again: some changes apply at once, some wait for a restart, and some are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rsrv.control.settings_file import Rereading, SettingsFile
from rsrv.control.v1 import control_pb2 as pb
from rsrv.settings import SettingsError, load_settings
from rsrv.settings_changes import CHANGEABLE, differences, effect, read_or_keep, refusal_file
from tests.unit.control.peers import Served, served
from tests.waiting import looped


class Scene:
    """A server whose rsrv.yaml the test writes."""

    def __init__(self, server: Served, text: str) -> None:
        self.server = server
        self.path = server.repository / "rsrv.yaml"
        self.path.write_text(text)
        self.said: list[str] = []
        self.file: SettingsFile = server.service._server.file
        lifecycle: Any = server.lifecycle
        self.rereading = Rereading(self.file, server.runtimes, server.placing, lifecycle, self.said.append)

    async def reread(self, text: str | None = None) -> list[dict[str, Any]]:
        """Write the file, if a text is given, and let it be checked twice. Return the changes that the runtime received."""
        if text is not None:
            self.path.write_text(text)
        before = len(self.server.runtime.commands)
        await self.rereading.check()
        await self.rereading.check()
        await self.server.link.record()  # The runtime answers this after the changes.
        return self.server.runtime.commands[before:]

    async def notes(self) -> list[str]:
        status = await self.server.control.GetStatus(pb.GetStatusRequest())
        return list(status.server.settings_notes)


@asynccontextmanager
async def scene(tmp_path: Path, text: str = "") -> AsyncIterator[Scene]:
    async with served(tmp_path, models=["a"], settings=text) as server:
        yield Scene(server, text)


@looped
async def test_a_policy_of_the_file_reaches_the_runtime_at_once(tmp_path: Path) -> None:
    """Changed settings are sent once. If a model's section is removed from the file, None is sent for the model."""
    async with scene(tmp_path) as here:
        await here.reread()

        (change,) = await here.reread("runtime: {idle: {host: 1h}}\nmodels: {a: {weight: 3, start: lazy}}")

        assert change["runtime"]["idle"]["host"] == 3600
        assert change["models"] == {"a": {"settings": {"weight": 3.0, "start": "lazy"}}}
        assert await here.reread() == []
        assert "changes in force: runtime.idle, models.a.weight, models.a.start" in here.said[0]
        status = await here.server.control.GetStatus(pb.GetStatusRequest())
        assert status.models[0].policy.weight == 3

        assert (await here.reread(""))[0]["models"] == {"a": None}


@looped
async def test_an_error_of_the_file_of_config_is_in_the_status(tmp_path: Path) -> None:
    """`rsrv serve` writes the server's file from the file of --config. If that file has an error, the status shows it."""
    async with scene(tmp_path) as here:
        refusal_file(here.path).write_text("mine.yaml: scheduler: unknown key 'max_queue_dept'")
        await here.reread()
        assert await here.notes() == ["not used: mine.yaml: scheduler: unknown key 'max_queue_dept'"]

        refusal_file(here.path).unlink()
        await here.reread()
        assert await here.notes() == []


@looped
async def test_aliases_of_the_file_are_followed(tmp_path: Path) -> None:
    """An alias that is added, changed or removed in the file is followed, even if an operator has changed it before."""
    async with scene(tmp_path) as here:
        await here.reread("aliases: {fraud: a, mine: b}")
        assert "changes in force: aliases.fraud, aliases.mine" in here.said[0]
        here.server.runtimes.desired.set_aliases({"mine": {"a": 1.0}, "fraud": None})

        await here.reread("aliases: {fraud: a, mine: b, more: a}")
        assert here.server.lifecycle.aliases == {"mine": {"a": 1.0}, "more": {"a": 1.0}}
        await here.reread("aliases: {fraud: b, mine: b}")
        assert here.server.lifecycle.aliases == {"mine": {"a": 1.0}, "fraud": {"b": 1.0}}
        await here.reread("")
        assert here.server.lifecycle.aliases == {}


@looped
async def test_a_file_that_a_restart_reads_first_is_followed_as_well(tmp_path: Path) -> None:
    """If `rsrv restart` reads the file right after an edit, an alias in the file still replaces an operator's alias."""
    async with scene(tmp_path) as here:
        await here.reread("aliases: {mine: a}")
        here.server.runtimes.desired.set_aliases({"mine": {"b": 1.0}})
        here.path.write_text("aliases: {mine: c}\nmodels: {a: {weight: 3}}")
        await here.file.read()

        await here.reread()
        assert here.server.lifecycle.aliases == {"mine": {"c": 1.0}}
        assert "changes in force: models.a.weight, aliases.mine" in here.said[-1]


@looped
async def test_a_command_before_the_first_check_of_the_file_stays(tmp_path: Path) -> None:
    """If an operator sets a discipline before the first check of the file, the check does not set it back to rsrv.yaml's."""
    async with scene(tmp_path, "scheduler: {discipline: fifo}") as here:
        check = asyncio.create_task(here.rereading.check())
        scheduler = pb.Scheduler(discipline=pb.DISCIPLINE_EDF)
        await here.server.control.SetScheduler(pb.SetSchedulerRequest(scheduler=scheduler))
        await check
        await here.reread()

        assert here.server.runtime.document["scheduler"]["discipline"] == "edf"


@looped
async def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    """A broken file changes nothing. The status and the log have the reason until the file is valid again."""
    async with scene(tmp_path) as here:
        await here.reread()

        assert await here.reread("models: {a: {weight: heavy}}") == []

        assert ["not used: " in note and "models.a.weight: " in note for note in await here.notes()] == [True]
        assert "is not used" in here.said[0]
        await here.reread("")
        assert await here.notes() == []


@looped
async def test_a_half_written_file_waits_for_the_next_check(tmp_path: Path) -> None:
    """A file that changes between two checks is not read."""
    async with scene(tmp_path) as here:
        await here.reread()
        for weight in range(2, 5):
            here.path.write_text(f"models: {{a: {{weight: {weight}}}}}" + " " * weight)
            await here.rereading.check()
        assert here.file.settings.for_model("a").weight == 1

        await here.rereading.check()

        assert here.file.settings.for_model("a").weight == 4


@looped
async def test_what_needs_a_restart_is_named_until_then(tmp_path: Path) -> None:
    """The status names keys that wait for a restart of the runtime or of the server, until the restart, or until they are set back."""
    async with scene(tmp_path) as here:
        await here.reread("runtime: {memory_fraction: 0.5}\ncontrol: {listen: null}\nmetrics: {listen: null}")
        assert await here.notes() == [
            "runtime.memory_fraction: run `rsrv restart`",
            "metrics.listen: restart the server",
        ]

        here.server.link.state.instance = "the next runtime"
        await here.rereading.check()

        assert await here.notes() == ["metrics.listen: restart the server"]
        await here.reread("runtime: {memory_fraction: 0.5}")
        assert await here.notes() == []


def test_a_broken_file_leaves_the_settings_of_the_last_start(tmp_path: Path) -> None:
    """If rsrv.yaml is broken, a process starts with the settings of the previous start. If there are none, it fails."""
    file, copy = tmp_path / "rsrv.yaml", tmp_path / "settings.yaml"
    file.write_text("models: {a: {weight: heavy}}")
    with pytest.raises(SettingsError, match=r"models\.a\.weight: "):
        read_or_keep(file, copy)
    file.write_text("models: {a: {weight: 3}}")
    assert read_or_keep(file, copy)[1] == ""
    file.write_text("models: [")

    settings, broken = read_or_keep(file, copy)

    assert settings.for_model("a").weight == 3
    assert f"{file}: not valid YAML" in broken


@pytest.mark.parametrize(
    ("section", "key", "when"),
    [
        ("models", "weight", "at once"),
        ("models", "max_batch_size", "restart"),
        ("runtime", "idle", "at once"),
        ("runtime", "watchdog_s", "restart"),
        ("runtime", "devices", "server"),
        ("traces", "endpoint", "server"),
        ("gateway", "grpc", "gateway"),
        *(("scheduler", key, "at once") for key in CHANGEABLE),
    ],
)
def test_each_key_says_when_it_takes_effect(section: str, key: str, when: str) -> None:
    """For each key, the table names one moment at which a change takes effect."""
    assert effect(section, key) == when


def test_a_name_with_dots_is_a_model() -> None:
    """If a model's name has dots, a changed setting is reported under the model's key."""
    after = load_settings("models: {'a.b': {weight: 2, front: native}}")

    changes = dict(differences(load_settings(), after))

    assert changes == {"models.a.b.weight": "at once", "models.a.b.front": "server"}
