"""The reconciler on real directories, with a fake server and a virtual clock."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rsrv.control import model_loader, watching
from rsrv.control.bundle_debounce import Seen
from rsrv.control.reconciler import Reconciler, ReloadError
from rsrv.control.stub_monitor import stub_processes
from rsrv.control.triton import TritonError
from rsrv.settings import Shares
from rsrv.settings_changes import change_settings
from rsrv_gen import fronts, plan, sources
from rsrv_gen.cli import main as rsrv_gen
from rsrv_gen.plan import NATIVE_MARK
from rsrv_gen.staging import version_of
from rsrv_gen.update import remove
from rsrv_gen.write import front_of, open_repository, our_models
from tests.builders import FEW_EXAMPLES
from tests.unit.control.virtual import in_virtual_time, run
from tests.unit.control.worlds import BAD, World, place, whole
from tests.unit.gen.bundles_for_tests import write_bundle, write_meta


@pytest.fixture(autouse=True)
def silent_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the kernel's notifications, so that only polling finds changes."""

    async def listen(roots: Iterable[Path], notices: watching.Notices) -> None:
        return

    monkeypatch.setattr(watching, "_listen", listen)


@asynccontextmanager
async def living(world: World) -> AsyncIterator[Reconciler]:
    """Run the reconciler of a world."""
    triton: Any = world.triton
    lifecycle = Reconciler(world.settings, world.repository, triton.view, triton, triton.processes)
    task = asyncio.create_task(lifecycle.run())
    try:
        yield lifecycle
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def story(
    folder: Path, bundles: dict[str, dict[str, str]], **options: Any
) -> AsyncIterator[tuple[World, Reconciler]]:
    """Make a world and run its reconciler. A test changes the world after the first scans."""
    world = World(folder, bundles, **options)
    async with living(world) as lifecycle:
        await asyncio.sleep(20)
        world.triton.log.clear()
        yield world, lifecycle


def add_meta(world: World, name: str, callee: str, *, internal: bool = True) -> None:
    """Add a meta model and make its callee internal.

    The meta model also has modules, because the fake server reads modules.
    """
    if internal:
        place(world.roots["r"] / callee, "v1", internal=True)
    aside = write_meta(world.roots["r"] / f".{name}", [callee])
    manifest = (aside / "manifest.yaml").read_text()
    write_bundle(aside, "meta").joinpath("manifest.yaml").write_text(manifest)
    aside.rename(world.roots["r"] / name)


@pytest.mark.parametrize(
    ("age_s", "loads"), [(-60, ["load b", "loaded b"]), (60, ["load a", "load b", "loaded b"])]
)
@in_virtual_time
async def test_a_server_that_serves_what_is_there_is_left_alone(
    tmp_path: Path, age_s: int, loads: list[str]
) -> None:
    """In its first round, the reconciler writes nothing.

    It lets Triton load the models that failed, and the models whose files are newer than Triton's start.
    """
    world = World(tmp_path, {"r": {"a": "v1", "b": "v1"}})
    world.triton.started_ns = time.time_ns() - age_s * 10**9
    del world.triton.served["b"]
    world.triton.failed = {"b"}
    before = dict(world.triton.served)

    async with living(world):
        await asyncio.sleep(60)
    assert sorted(world.triton.log) == loads
    assert world.triton.served["a"] == before["a"]


@in_virtual_time
async def test_a_meta_model_that_comes_takes_nothing_away(tmp_path: Path) -> None:
    """A model that a new meta model calls can still be addressed, whether the meta model is valid or broken."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        write_meta(tmp_path / "r" / "meta", ["a", "missing"])
        await asyncio.sleep(200)
        assert world.triton.texts() == {"a": "v1"}
        assert lifecycle.failures.keys() == {"meta"}
        shutil.rmtree(tmp_path / "r" / "meta")
        add_meta(world, "whole", "a", internal=False)
        await asyncio.sleep(90)
        assert world.triton.served.keys() == {"a", "whole"}
        assert lifecycle.failures == {}


@in_virtual_time
async def test_an_alias_comes_changes_and_goes(tmp_path: Path) -> None:
    """Each change of an alias is one load. A changed target also reloads the alias, and an alias without settings is unloaded."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        steps: list[tuple[Mapping[str, Shares], list[str]]] = [
            ({"fraud": {"a": 95.0, "b": 5.0}}, ["load fraud", "loaded fraud"]),
            ({"fraud": {"a": 50.0, "b": 50.0}}, ["load fraud", "loaded fraud"]),
            ({}, ["unload fraud"]),
        ]
        for aliases, log in steps:
            lifecycle.follow_aliases(aliases)
            await asyncio.sleep(20)
            assert world.triton.log == log
            world.triton.log.clear()
        assert our_models(world.repository) == {"a", "b"}
        await lifecycle.change_alias("fraud", {"a": 1.0})
        assert "fraud" in world.triton.served
        place(tmp_path / "r" / "a", "v2")
        await asyncio.sleep(20)
        assert sorted(world.triton.log[2:]) == ["load a", "load fraud", "loaded a", "loaded fraud"]
        assert lifecycle.failures == {}


@in_virtual_time
async def test_a_refused_alias_stays_among_the_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If an alias is invalid, the reason is logged once.

    The reason stays among the failures until the alias is fixed or removed, even while bundles change.
    """
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (_, lifecycle):
        refused = {"lost": {"c": 1.0}, "b": {"a": 1.0}}
        lifecycle.follow_aliases({**refused, "fraud": {"a": 1.0}})
        for version in ("v2", "v3"):
            await asyncio.sleep(100)
            assert lifecycle.failures.keys() == {"lost", "aliases.b"}
            place(tmp_path / "r" / "a", version)
        await lifecycle.change_alias("lost", {"b": 1.0})
        assert lifecycle.failures.keys() == {"aliases.b"}
        lifecycle.follow_aliases({})
        await asyncio.sleep(20)
        assert lifecycle.failures == {}
    assert caplog.text.count("lost was not changed") == 1


@pytest.mark.parametrize(
    ("shares", "reason"),
    [({"c": 1.0}, "an alias of 'c', which is not a bundle here"), ({"b": 1.0}, "cannot load")],
)
@in_virtual_time
async def test_a_change_of_an_alias_that_fails_changes_nothing(
    tmp_path: Path, shares: Shares, reason: str
) -> None:
    """If a change of an alias fails, the error has the reason, and the alias serves as before."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        await lifecycle.change_alias("fraud", {"a": 1.0})
        before, load = world.triton.texts(), world.triton.load

        async def refuse(name: str) -> None:
            await asyncio.sleep(1)
            raise TritonError("cannot load")

        world.triton.load = refuse  # type: ignore[method-assign]
        with pytest.raises(ReloadError, match=f"^fraud: .*{reason}"):
            await lifecycle.change_alias("fraud", shares)
        world.triton.load = load  # type: ignore[method-assign]

        await asyncio.sleep(20)
        assert lifecycle.aliases == {"fraud": {"a": 1.0}}
        assert world.triton.texts() == before
        assert lifecycle.failures == {}


@in_virtual_time
async def test_changes_while_the_control_process_was_down_are_found(tmp_path: Path) -> None:
    """A new control process finds bundles that were changed, added or removed while no control process ran."""
    world = World(tmp_path, {"r": {"a": "v1", "b": "v1", "c": "v1", "d": "v1"}})
    place(tmp_path / "r" / "d", "v2")
    assert rsrv_gen([str(tmp_path / "r"), "-o", str(world.repository)]) == 0
    place(tmp_path / "r" / "a", "v2")
    place(tmp_path / "r" / "e", "v1")
    shutil.rmtree(tmp_path / "r" / "b")

    async with living(world):
        await asyncio.sleep(20)
    assert world.triton.texts() == {"a": "v2", "c": "v1", "d": "v2", "e": "v1"}


@in_virtual_time
async def test_another_run_of_rsrv_gen_adds_a_place(tmp_path: Path) -> None:
    """Models that another run of rsrv-gen writes stay, and changes of their bundles are followed."""
    world = World(tmp_path, {"r": {"a": "v1"}})
    place(tmp_path / "more" / "b", "v1")

    async with living(world):
        await asyncio.sleep(0.1)  # The next writer waits for the repository's lock.
        with open_repository(world.repository, "hard") as writer:
            shutil.copytree(world.repository / "a", world.repository / "b")
            await asyncio.sleep(60)
            assert "unload b" not in world.triton.log
            writer.remove("b")
        assert rsrv_gen([str(tmp_path / "more"), "-o", str(world.repository)]) == 0
        await asyncio.sleep(60)
        assert world.triton.texts() == {"a": "v1", "b": "v1"}
        place(tmp_path / "more" / "b", "v2")
        await asyncio.sleep(20)
        assert world.triton.texts() == {"a": "v1", "b": "v2"}
        assert rsrv_gen([str(tmp_path / "r"), "-o", str(world.repository), "--prune"]) == 0
        await asyncio.sleep(20)
        assert world.triton.texts() == {"a": "v1"}


@in_virtual_time
async def test_what_went_while_its_root_was_out_of_sight_goes_when_that_is_back(tmp_path: Path) -> None:
    """A bundle that was removed while its root was missing is unloaded when the root returns. Other bundles stay."""
    world = World(tmp_path, {"r": {"a": "v1"}, "s": {"x": "v1", "y": "v1", "z": "v1"}})
    away = tmp_path / "away"
    world.roots["s"].rename(away)

    async with living(world):
        await asyncio.sleep(20)
        assert sorted(world.triton.served) == ["a", "x", "y", "z"]
        shutil.rmtree(away / "x")
        place(away / "z", "v2")
        away.rename(world.roots["s"])
        await asyncio.sleep(20)
    assert world.triton.texts() == {"a": "v1", "y": "v1", "z": "v2"}


@in_virtual_time
async def test_what_was_unloaded_by_hand_stays_so_until_its_bundle_changes(tmp_path: Path) -> None:
    """A model that was unloaded by hand stays unloaded until its bundle changes. A model that failed at the start is retried."""
    world = World(tmp_path, {"r": {"a": "v1", "b": "v1", "failed": "v1"}})
    for name in ("a", "b", "failed"):
        del world.triton.served[name]
    world.triton.dismissed = {"a", "b"}

    async with living(world):
        await asyncio.sleep(20)
        assert world.triton.texts() == {"failed": "v1"}
        place(tmp_path / "r" / "a", "v2")
        await asyncio.sleep(20)
    assert world.triton.texts() == {"a": "v2", "failed": "v1"}


@in_virtual_time
async def test_what_is_unloaded_by_hand_is_known_to_be_unwanted_until_it_is_loaded(tmp_path: Path) -> None:
    """A model that is unloaded by hand is unwanted until it is loaded again, so that the health service ignores it."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        await world.triton.unload("a")
        world.triton.dismissed.add("a")
        await asyncio.sleep(6)
        assert lifecycle.unwanted == {"a"}
        assert world.triton.log == ["unload a"]
        place(world.roots["r"] / "a", "v2")
        await asyncio.sleep(20)
        assert not lifecycle.unwanted
    assert world.triton.texts() == {"a": "v2", "b": "v1"}


@in_virtual_time
async def test_what_leaves_is_unwanted_until_the_repository_has_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed model is unwanted until its folder is gone. The repository's lock may delay the removal of the folder."""
    seen: list[set[str]] = []

    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):

        def record_and_remove(*what: Any) -> None:
            seen.append(set(lifecycle.unwanted))
            remove(*what)

        with monkeypatch.context() as patch:
            patch.setattr(model_loader, "remove", record_and_remove)
            shutil.rmtree(world.roots["r"] / "a")
            await asyncio.sleep(20)
        assert not lifecycle.unwanted
    assert world.triton.texts() == {"b": "v1"}
    assert seen == [{"a"}]


@in_virtual_time
async def test_a_rename_loads_the_new_names_before_it_unloads_the_old_ones(tmp_path: Path) -> None:
    """If prod becomes old and staging becomes prod in one scan, both are loaded before staging is unloaded."""
    async with story(tmp_path, {"r": {"prod": "v1", "staging": "v2"}}) as (world, _):
        root = world.roots["r"]
        (root / "prod").rename(root / "old")
        (root / "staging").rename(root / "prod")
        await asyncio.sleep(20)
    assert world.triton.texts() == {"old": "v1", "prod": "v2"}
    *loads, last = world.triton.log
    assert sorted(loads[:2]) == ["load old", "load prod"]
    assert sorted(loads[2:]) == ["loaded old", "loaded prod"]
    assert last == "unload staging"


@in_virtual_time
async def test_a_failed_load_is_taken_back_and_tried_again_ever_more_seldom(tmp_path: Path) -> None:
    """After a failed load, the old folder is restored, and the load is retried.

    The failure is reported with its reason until a new bundle is loaded, or the bundle is removed.
    """
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        place(world.roots["r"] / "a", BAD)
        place(world.roots["r"] / "new", BAD)
        await asyncio.sleep(15)
        assert lifecycle.failures["a"].text == "no module"
        assert whole(world.repository / "a" / "1" / "bundle") == "v1"
        assert not (world.repository / "new").exists()
        await asyncio.sleep(3600)
        assert 8 <= world.triton.log.count("load a") <= 12
        assert lifecycle.failures["new"].tries == world.triton.log.count("load new")
        assert world.triton.texts() == {"a": "v1"}
        place(world.roots["r"] / "a", "v2")
        shutil.rmtree(world.roots["r"] / "new")
        await asyncio.sleep(10)
        assert not lifecycle.failures
    assert world.triton.texts() == {"a": "v2"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".gen.")]


def forsake(lifecycle: Reconciler) -> None:
    """Release the reconciler's locks, as the kernel does when the process is killed."""
    for put in lifecycle._loader._replaced.values():
        put.leave()


async def killed_while_loading(world: World, texts: Mapping[str, str]) -> None:
    """Let a reconciler load these bundles, and stop it before Triton answers, as if its process were killed."""
    async with living(world) as lifecycle:
        await asyncio.sleep(20)
        for name, text in texts.items():
            place(world.roots["r"] / name, text)
        world.triton.log.clear()
        world.triton.seconds = 1e6
        reloads = [
            asyncio.create_task(lifecycle.reload(name)) for name in texts if name in world.triton.served
        ]
        while len(world.triton.log) < len(reloads):
            await asyncio.sleep(0.1)
    for task in reloads:
        task.cancel()
    forsake(lifecycle)
    world.triton.seconds = 1


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["", "rsrv-gen"])
@in_virtual_time
async def test_what_a_killed_process_left_undecided_is_decided_by_the_next(
    tmp_path: Path, mode: str, by_hand: bool
) -> None:
    """A killed control process leaves models undecided. The next one keeps a version that loads, and restores the old one otherwise."""
    world = World(tmp_path, {"r": {"a": "v1", "b": "v1"}}, lifecycle=f"mode: {mode}")

    await killed_while_loading(world, {"a": BAD, "b": "v2"})
    if by_hand:
        rsrv_gen(
            [
                str(tmp_path / "r"),
                "-o",
                str(world.repository),
                "--config",
                str(tmp_path / "settings.yaml"),
            ]
        )
    assert whole(world.repository / "a" / "1" / "bundle") == BAD
    async with living(world) as lifecycle:
        await asyncio.sleep(8)
        assert whole(world.repository / "a" / "1" / "bundle") == "v1"
        assert lifecycle.failures["a"].text == "no module"
        assert set(lifecycle.failures) == {"a"}
        assert world.triton.texts() == {"a": "v1", "b": "v2"}
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".gen.")]


@in_virtual_time
async def test_a_server_that_ended_while_it_loaded_serves_the_old_version_when_it_is_back(
    tmp_path: Path,
) -> None:
    """If the server ends during a load and starts with a bad version, the old version is restored."""
    world = World(tmp_path, {"r": {"a": "v1", "b": "v1"}})

    await killed_while_loading(world, {"a": BAD})
    del world.triton.served["a"]
    world.triton.failed.add("a")
    async with living(world) as lifecycle:
        while "a" not in world.triton.served:
            await asyncio.sleep(0.1)
        assert world.triton.texts()["a"] == "v1"
        await asyncio.sleep(60)
        assert world.triton.texts() == {"a": "v1", "b": "v1"}
        assert set(lifecycle.failures) == {"a"}


@in_virtual_time
async def test_what_was_left_undecided_is_not_decided_while_somebody_writes_it(tmp_path: Path) -> None:
    """A model that a killed process left undecided is decided only after a running reload of it ends."""
    world = World(tmp_path, {"r": {"a": "v1"}}, lifecycle="mode: static")

    await killed_while_loading(world, {"a": "v2"})
    world.triton.log.clear()
    async with living(world) as lifecycle:
        async with lifecycle._writing:
            assert lifecycle._loader.reserve("a")
            await asyncio.sleep(5)
            assert not world.triton.log
            lifecycle._loader.release()
        await asyncio.sleep(5)
        assert world.triton.log == ["load a", "loaded a"]
        assert world.triton.texts() == {"a": "v2"}


@in_virtual_time
async def test_a_new_model_that_a_killed_process_left_undecided_goes_when_it_fails(tmp_path: Path) -> None:
    """A new model left undecided by a killed process is removed when it fails."""
    world = World(tmp_path, {"r": {"a": "v1"}})

    await killed_while_loading(world, {"new": BAD})
    async with living(world):
        await asyncio.sleep(8)
        assert not (world.repository / "new").exists()


@in_virtual_time
async def test_a_broken_bundle_keeps_its_old_version(tmp_path: Path) -> None:
    """A broken bundle is reported, and its old version serves. The failure ends when the bundle is restored."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        manifest = world.roots["r"] / "a" / "manifest.yaml"
        good = manifest.read_text()
        manifest.write_text("nothing: good\n")
        await asyncio.sleep(20)
        assert "format_version: is missing" in lifecycle.failures["a"].text
        manifest.write_text(good)
        await asyncio.sleep(20)
        assert not lifecycle.failures
    assert world.triton.log == []


@in_virtual_time
async def test_a_load_that_never_ends_delays_only_unloads(tmp_path: Path) -> None:
    """During an endless load, other models are loaded. Unloads wait for it, for at most ten minutes."""
    async with story(tmp_path, {"r": {"slow": "v1", "a": "v1", "b": "v1"}}) as (world, _):
        world.triton.seconds = 1e6
        place(world.roots["r"] / "slow", "v2")
        await asyncio.sleep(10)
        world.triton.seconds = 1
        place(world.roots["r"] / "a", "v2")
        shutil.rmtree(world.roots["r"] / "b")
        await asyncio.sleep(10)
        assert world.triton.texts() == {"slow": "v1", "a": "v2", "b": "v1"}
        await asyncio.sleep(600)
        assert world.triton.texts() == {"slow": "v1", "a": "v2"}


@in_virtual_time
async def test_a_bundle_that_returns_in_time_is_not_unloaded(tmp_path: Path) -> None:
    """A removed bundle that returns before its unload is kept, unless only one scan sees it."""
    async with story(tmp_path, {"r": {"slow": "v1", "back": "v1", "glimpse": "v1"}}) as (world, lifecycle):
        root = world.roots["r"]
        world.triton.seconds = 20
        place(root / "slow", "v2")
        for name in ("back", "glimpse"):
            shutil.rmtree(root / name)
        while "load slow" not in world.triton.log:
            await asyncio.sleep(0.1)
        # This scan sees the bundles just before the load ends, so no second scan can agree with it in time.
        await asyncio.sleep(19.9)
        seen = dict.fromkeys(("back", "glimpse", "slow"), "1")
        place(root / "back", "v1")
        lifecycle._on_scan({root: watching.scan(root, linked=True)})
        identity = watching.scan(root, linked=True).identity
        lifecycle._on_scan({root: Seen(identity, seen)})
        await asyncio.sleep(0.5)
        assert "loaded slow" in world.triton.log
        assert not any(line.startswith("unload") for line in world.triton.log)
        await asyncio.sleep(40)
        assert world.triton.texts() == {"slow": "v2", "back": "v1"}
        assert "unload back" not in world.triton.log


@in_virtual_time
async def test_a_callee_that_changes_while_its_meta_loads_is_taken_next(tmp_path: Path) -> None:
    """If a callee changes during a load of its meta model, the change does not affect this load, but the next one."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, _):
        add_meta(world, "meta", "a")
        await asyncio.sleep(20)
        world.triton.seconds = 20
        world.triton.log.clear()
        place(world.roots["r"] / "a", "v2", internal=True)
        await asyncio.sleep(10)
        before = version_of(world.repository / "meta")
        place(world.roots["r"] / "a", "v3", internal=True)
        await asyncio.sleep(10)
        assert version_of(world.repository / "meta") == before
        await asyncio.sleep(60)
        assert world.triton.log == 2 * ["load meta", "loaded meta"]
        assert whole(world.repository / "meta" / "1" / "calls" / "a") == "v3"


@in_virtual_time
async def test_a_bundle_that_is_being_written_is_not_reloaded(tmp_path: Path) -> None:
    """A requested reload is refused with UNAVAILABLE while the bundle is being written."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        (world.roots["r"] / "a" / "model.b1.mlir").write_text("half 1")
        for _ in ("before a scan", "after the first one"):
            with pytest.raises(ReloadError, match="is being written") as caught:
                await lifecycle.reload("a")
            assert caught.value.code == "UNAVAILABLE"
            while lifecycle._debounce.settled("a") is not None:
                await asyncio.sleep(0.1)
        write_bundle(world.roots["r"] / "a", "half")
        await asyncio.sleep(20)
    assert world.triton.texts() == {"a": "half"}


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@in_virtual_time
async def test_a_bundle_that_is_broken_while_it_is_copied_is_not_reported_as_reloaded(
    tmp_path: Path, mode: str
) -> None:
    """While the manifest is half written, a requested reload is refused, because the old version would be taken for the new one."""
    async with story(tmp_path, {"r": {"a": "v1"}}, lifecycle=f"mode: {mode}") as (world, lifecycle):

        async def copy(name: str) -> None:
            folder = write_bundle(world.roots["r"] / name, "v2")
            manifest = (folder / "manifest.yaml").read_text()
            for length in range(1, 20):
                (folder / "manifest.yaml").write_text(manifest[:length])
                await asyncio.sleep(0.4)
            (folder / "manifest.yaml").write_text(manifest)

        for name in ("a", "new") if mode == "dynamic" else ("a",):
            copying = asyncio.create_task(copy(name))
            # A bundle exists for the reconciler only after a scan has seen it.
            await asyncio.sleep(5.5 if name == "new" else 1.3)
            with pytest.raises(ReloadError, match="is being written") as caught:
                await lifecycle.reload(name)
            assert caught.value.code == "UNAVAILABLE"
            await copying
            await asyncio.sleep(10)
        await lifecycle.reload("a")
        assert world.triton.texts()["a"] == "v2"


@in_virtual_time
async def test_a_bundle_that_is_copied_file_by_file_is_not_reloaded_in_between(tmp_path: Path) -> None:
    """A requested reload waits until a bundle that is copied file by file is complete."""
    async with story(tmp_path, {"r": {"a": "v1"}}, lifecycle="mode: static") as (world, lifecycle):

        async def copy() -> None:
            (world.roots["r"] / "a" / "model.b1.mlir").write_text("v2 1")
            await asyncio.sleep(0.9)
            write_bundle(world.roots["r"] / "a", "v2")
            await asyncio.sleep(0.9)

        copying = asyncio.create_task(copy())
        await asyncio.sleep(0.5)
        await lifecycle.reload("a")
        await copying
        assert world.triton.texts() == {"a": "v2"}


@in_virtual_time
async def test_a_model_serves_while_its_next_bundle_is_copied(tmp_path: Path) -> None:
    """A model serves its old version while its bundle is removed and copied again with the weights first."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, _):
        folder = world.roots["r"] / "a"
        shutil.rmtree(folder)
        folder.mkdir()
        for part in range(20):
            (folder / "labels.txt").write_bytes(bytes(1 + part))
            await asyncio.sleep(0.7)
        place(folder, "v2")
        await asyncio.sleep(20)
    assert world.triton.log == ["load a", "loaded a"]
    assert world.triton.texts() == {"a": "v2", "b": "v1"}


@in_virtual_time
async def test_a_disk_that_fails_once_breaks_no_bundle_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that could not be read because of one disk error is loaded later, although no scan sees a change."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("stale file handle")

    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        place(world.roots["r"] / "a", "v2")
        with monkeypatch.context() as patch:
            patch.setattr(sources, "read_bundle", fail)
            await asyncio.sleep(20)
        assert lifecycle.failures["a"].text == "stale file handle"
        await asyncio.sleep(70)
        assert not lifecycle.failures
    assert world.triton.texts() == {"a": "v2"}


@in_virtual_time
async def test_a_callee_serves_until_the_meta_that_carries_it_does(tmp_path: Path) -> None:
    """A callee that becomes internal serves until the meta model that contains it is loaded."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, _):
        world.triton.seconds = 900
        add_meta(world, "meta", "a")
        await asyncio.sleep(880)
        assert world.triton.log == ["load meta"]
        await asyncio.sleep(60)
        assert world.triton.log == ["load meta", "loaded meta", "unload a"]
    assert world.triton.texts() == {"meta": "meta"}


@pytest.mark.parametrize("mode", ["dynamic", "static", "explicit"])
@in_virtual_time
async def test_a_dead_stub_is_replaced_in_any_mode(tmp_path: Path, mode: str) -> None:
    """A dead stub is replaced by a reload in each lifecycle mode."""
    bundles = {"r": {"a": "v1", "b": "v1"}}
    async with story(tmp_path, bundles, lifecycle=f"mode: {mode}") as (world, lifecycle):
        world.triton.kill("a")
        await asyncio.sleep(3)
        assert not world.triton.dead
        assert lifecycle.process_ends == {"a": 1}
    assert world.triton.log == ["load a", "loaded a"]


@in_virtual_time
async def test_a_cold_model_is_not_dead_and_costs_triton_nothing(tmp_path: Path) -> None:
    """A stub without a connection is replaced only if its process is dead. For cold models, Triton is asked once a minute."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1", "c": "v1"}}) as (world, _):
        world.triton.cold = {"a", "b", "c"}
        (world.repository / "b" / NATIVE_MARK).touch()
        world.triton.view.stir()
        await asyncio.sleep(5)
        before = world.triton.asked
        await asyncio.sleep(120)
        assert world.triton.log == []
        assert world.triton.asked - before <= 3
        assert set(world.triton.view.cold) == {"a", "b", "c"}
        world.triton.kill("a")
        world.triton.kill("b")  # the native front is a part of Triton's process
        await asyncio.sleep(10)
        assert world.triton.log == ["load a", "loaded a"]


@in_virtual_time
async def test_a_dead_stub_behind_an_alias_is_replaced(tmp_path: Path) -> None:
    """If a model's own stub is dead, it is replaced, even if the stub of an alias is connected under the model's name.

    While both stubs live, the model is not cold.
    """
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        await lifecycle.change_alias("fraud", {"a": 1.0})
        await asyncio.sleep(60)
        before = world.triton.asked
        await asyncio.sleep(120)
        assert world.triton.asked - before <= 3
        assert not world.triton.view.cold
        world.triton.log.clear()
        world.triton.kill("a")
        await asyncio.sleep(10)
        assert world.triton.log == ["load a", "loaded a"]


@in_virtual_time
async def test_a_stub_that_dies_as_the_runtime_comes_back_is_not_cold(tmp_path: Path) -> None:
    """A stub that dies after an outage of the runtime is replaced.

    It has no connection, but neither has the living stub of a cold model.
    """
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, _):
        view = world.triton.view
        view.up = False
        view.stir()
        await asyncio.sleep(0.4)
        view.up = True
        world.triton.kill("a")
        await asyncio.sleep(0.3)
        assert not view.cold
        await asyncio.sleep(3)
        assert world.triton.log == ["load a", "loaded a"]


@in_virtual_time
async def test_a_stub_that_waits_for_another_models_compilation_is_not_dead(tmp_path: Path) -> None:
    """After an outage of the runtime, a living stub is not replaced, however long it waits for a compilation.

    A dead stub is replaced soon.
    """
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1", "c": "v1"}}) as (world, lifecycle):
        view = world.triton.view
        view.up = False
        view.presence.devices[0]._before = {"a", "b", "c"}
        view.stir()
        await asyncio.sleep(1)
        world.triton.cold = {"a", "b", "c"}
        view.up = True
        view.stir()
        await asyncio.sleep(300)
        assert (world.triton.log, lifecycle.failures, view.presence.returning) == ([], {}, {"a", "b", "c"})
        world.triton.kill("b")
        await asyncio.sleep(8)
        assert world.triton.log == ["load b", "loaded b"]
        assert view.presence.returning == {"a", "c"}
    assert lifecycle.process_ends == {"b": 1}


@in_virtual_time
async def test_auto_asks_the_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front of a new model is one that the running server supports, whatever tritonserver is in PATH."""
    library = tmp_path / "libtriton_rsrv.so"
    library.write_bytes(b"\x7fELF")
    monkeypatch.setattr(plan, "LIBRARY", library)
    monkeypatch.setattr(plan, "load_obstacle", lambda library: "")
    monkeypatch.setattr(fronts, "backend_api", lambda program: "1.99" if program == "/proc/7/exe" else "1.19")
    world = World(tmp_path, {"r": {"a": "v1"}})
    stub = world.settings.stub.model_copy(update={"front": "auto"})
    world.settings = world.settings.model_copy(update={"stub": stub})
    world.triton.program = "/proc/7/exe"
    async with living(world):
        place(world.roots["r"] / "b", "v1")
        await asyncio.sleep(20)
    assert front_of(world.repository / "b").startswith("Python front: Triton's backend API 1.99")


@in_virtual_time
async def test_a_model_that_was_unloaded_while_the_runtime_was_down_does_not_return(tmp_path: Path) -> None:
    """A model that is unloaded during an outage of the runtime is not expected to return.

    Its stub process is gone. The native front has no process, so Triton's answer decides.
    """
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1", "c": "v1"}}) as (world, _):
        view = world.triton.view
        (world.repository / "b" / NATIVE_MARK).touch()
        await asyncio.sleep(20)
        view.presence.devices[0]._before = {"a", "b", "c"}
        for name in ("a", "b"):
            world.triton.dismissed.add(name)
            await world.triton.unload(name)
        await asyncio.sleep(8)
        assert view.presence.returning == {"c"}


@pytest.mark.parametrize(
    "form", ["{relative}/a/1/model.py", "{absolute}//a/1/model.py", "{relative}/./a/1/model.py"]
)
def test_a_process_is_found_however_the_server_spells_its_repository(tmp_path: Path, form: str) -> None:
    """The stub of a model is found by any spelling of the repository's path, for example by a relative path.

    Stubs of other servers are ignored.
    """
    file = tmp_path / "gen/a/1/model.py"
    file.parent.mkdir(parents=True)
    file.write_text("import os, sys; os.chdir('/'); print(flush=True); sys.stdin.read()")
    path = form.format(absolute=tmp_path / "gen", relative=os.path.relpath(tmp_path / "gen"))
    with subprocess.Popen([sys.executable, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stub:
        assert stub.stdout is not None
        stub.stdout.readline()
        assert stub_processes(os.getpid(), tmp_path / "gen") == {"a"}
        assert stub_processes(os.getppid(), tmp_path / "gen") == set()
        stub.kill()
    assert stub_processes(os.getpid(), tmp_path / "gen") == set()


@in_virtual_time
async def test_a_dead_stub_is_replaced_while_the_repository_is_written(tmp_path: Path) -> None:
    """A dead stub is replaced while other models of the repository are written, but not while its own model is written."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        async with lifecycle._writing:
            assert lifecycle._loader.reserve("a")
            for name in ("a", "b"):
                world.triton.kill(name)
            await asyncio.sleep(5)
            assert world.triton.dead == {"a"}
            lifecycle._loader.release()
        await asyncio.sleep(10)
        assert not world.triton.dead


@in_virtual_time
async def test_a_model_that_is_being_loaded_is_not_written_to(tmp_path: Path) -> None:
    """While a model is reloaded because its stub died, nothing is written to it."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        world.triton.seconds = 20
        world.triton.kill("a")
        while not world.triton.log:
            await asyncio.sleep(0.1)
        assert not lifecycle._loader.reserve("a")
        place(world.roots["r"] / "a", "v2")
        await asyncio.sleep(15)
        assert whole(world.repository / "a" / "1" / "bundle") == "v1"
        await asyncio.sleep(40)
        assert world.triton.texts() == {"a": "v2"}


@in_virtual_time
async def test_a_dead_stub_that_could_not_be_replaced_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed replacement of a stub is reported and retried, although the bundle has not changed."""

    async def refuse(name: str) -> None:
        raise TritonError("no memory")

    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        # The stub's health is checked again after a minute.
        world.triton.mode = "poll"
        with monkeypatch.context() as patch:
            patch.setattr(world.triton, "load", refuse)
            world.triton.kill("a")
            await asyncio.sleep(8)
        assert lifecycle.failures["a"].text == "no memory"
        await asyncio.sleep(12)
        assert not lifecycle.failures
        assert not world.triton.dead


@in_virtual_time
async def test_a_new_stub_has_time_to_start(tmp_path: Path) -> None:
    """Triton reports a reloaded model as ready before its process exists. A process that does not appear in time is replaced."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}, lifecycle="mode: explicit") as (
        world,
        lifecycle,
    ):
        world.triton.kill("a")
        while "loaded a" not in world.triton.log:
            await asyncio.sleep(0.1)
        world.triton.kill("a")
        await asyncio.sleep(5)
        assert lifecycle.process_ends == {"a": 1}
        await asyncio.sleep(20)
        assert lifecycle.process_ends == {"a": 2}


@in_virtual_time
async def test_a_model_whose_stub_dies_as_it_is_to_be_unloaded_is_not_unloaded_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a model's stub dies just before the model's unload, the stub is replaced first. The model is unloaded after that.

    A thread decides whether the model may be unloaded, and the stub dies in that time.
    """
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        decide = lifecycle._may_unload

        async def stub_dies_meanwhile(name: str) -> bool:
            monkeypatch.setattr(lifecycle, "_may_unload", decide)
            lifecycle._replace(name)
            return await decide(name)

        monkeypatch.setattr(lifecycle, "_may_unload", stub_dies_meanwhile)
        shutil.rmtree(world.roots["r"] / "a")
        await asyncio.sleep(60)
        assert world.triton.log == ["load a", "loaded a", "unload a"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@in_virtual_time
async def test_a_model_that_leaves_does_so_although_its_stub_dies(tmp_path: Path) -> None:
    """If the stub of a model dies while its unload waits, the stub is replaced, and the model is still unloaded."""
    async with story(tmp_path, {"r": {"slow": "v1", "a": "v1"}}) as (world, _):
        world.triton.seconds = 60
        place(world.roots["r"] / "slow", "v2")
        shutil.rmtree(world.roots["r"] / "a")
        await asyncio.sleep(10)
        world.triton.seconds = 1
        world.triton.kill("a")
        await asyncio.sleep(10)
        assert world.triton.texts()["a"] == "v1"
        assert not world.triton.dead
        await asyncio.sleep(60)
    assert world.triton.texts() == {"slow": "v2"}


@pytest.mark.parametrize("mode", ["static", "explicit"])
@in_virtual_time
async def test_a_dead_stub_that_is_tried_again_brings_no_new_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A retry of a stub's replacement keeps the old bundle. Only a requested reload takes the new bundle."""

    async def refuse(name: str) -> None:
        raise TritonError("no memory")

    async with story(tmp_path, {"r": {"a": "v1"}}, lifecycle=f"mode: {mode}") as (world, lifecycle):
        # The stub's health is checked again after a minute.
        world.triton.mode = "poll"
        place(world.roots["r"] / "a", "v2")
        with monkeypatch.context() as patch:
            patch.setattr(world.triton, "load", refuse)
            world.triton.kill("a")
            await asyncio.sleep(8)
        assert lifecycle.failures
        await asyncio.sleep(12)
        assert not lifecycle.failures
        assert not world.triton.dead
        assert world.triton.texts() == {"a": "v1"}
        with monkeypatch.context() as patch:
            patch.setattr(world.triton, "load", refuse)
            with pytest.raises(ReloadError, match="no memory"):
                await lifecycle.reload("a")
        await asyncio.sleep(20)
        assert world.triton.texts() == {"a": "v2"}


@in_virtual_time
async def test_static_follows_nothing_and_reloads_when_asked(tmp_path: Path) -> None:
    """Static mode loads a changed bundle only on request, and refuses unknown names."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}, lifecycle="mode: static") as (world, lifecycle):
        place(world.roots["r"] / "a", "v2")
        await asyncio.sleep(60)
        assert world.triton.texts() == {"a": "v1", "b": "v1"}
        await lifecycle.reload("a")
        assert world.triton.texts() == {"a": "v2", "b": "v1"}
        await lifecycle.reload("b")
        assert world.triton.log[-2:] == ["load b", "loaded b"]
        with pytest.raises(ReloadError, match="there is no model 'c'") as caught:
            await lifecycle.reload("c")
        assert caught.value.code == "NOT_FOUND"
        shutil.rmtree(world.roots["r"] / "b")
        with pytest.raises(
            ReloadError, match="b: there is no bundle, or its directory is not mounted"
        ) as caught:
            await lifecycle.reload("b")
        assert caught.value.code == "FAILED_PRECONDITION"
        place(world.roots["r"] / "a", BAD)
        with pytest.raises(ReloadError, match="a failed: no module") as caught:
            await lifecycle.reload("a")
        assert caught.value.code == "INTERNAL"


@pytest.mark.parametrize("mode", ["dynamic", "static", "explicit"])
@in_virtual_time
async def test_a_new_bundle_is_loaded_when_asked(tmp_path: Path, mode: str) -> None:
    """In either mode, a new bundle is generated and loaded on request."""
    async with story(tmp_path, {"r": {"a": "v1"}}, lifecycle=f"mode: {mode}") as (world, lifecycle):
        place(world.roots["r"] / "fresh", "v1")
        place(world.roots["r"] / "other", "v1")
        # In dynamic mode, a scan must have seen the bundle first.
        await asyncio.sleep(5.5 if mode == "dynamic" else 0.0)
        await lifecycle.reload("fresh")
        assert world.triton.texts()["fresh"] == "v1"
        assert mode == "dynamic" or "other" not in world.triton.texts()


@in_virtual_time
async def test_a_reload_of_what_metas_carry_reloads_them(tmp_path: Path) -> None:
    """A requested reload of a callee reloads the meta models that contain it."""
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        add_meta(world, "meta", "a")
        await asyncio.sleep(20)
        assert world.triton.texts() == {"b": "v1", "meta": "meta"}
        assert world.triton.log.index("loaded meta") < world.triton.log.index("unload a")
        world.triton.log.clear()
        await lifecycle.reload("a")
        assert world.triton.log == ["load meta", "loaded meta"]
        world.triton.log.clear()
        place(world.roots["r"] / "a", "v2", internal=True)
        await asyncio.sleep(20)
        assert world.triton.log == ["load meta", "loaded meta"]


@in_virtual_time
async def test_a_server_whose_models_are_fixed_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If Triton runs with --model-control-mode=none, nothing is written. The log says once that models cannot be loaded.

    Failures are still reported.
    """
    world = World(tmp_path, {"r": {"a": "v1", "b": "v1"}})
    world.triton.mode = "none"

    async with living(world) as lifecycle:
        await asyncio.sleep(20)
        place(world.roots["r"] / "a", "v2")
        world.triton.kill("b")
        await asyncio.sleep(60)
        assert "the repository is not updated" in lifecycle.failures["a"].text
        assert "its stub process is dead" in lifecycle.failures["b"].text
        with pytest.raises(ReloadError, match="--model-control-mode=explicit") as caught:
            await lifecycle.reload("a")
        assert caught.value.code == "FAILED_PRECONDITION"
        place(world.roots["r"] / "a", "v1")
        await asyncio.sleep(20)
        assert "a" not in lifecycle.failures
        lifecycle.follow_aliases({"fraud": {"a": 1.0}})
        await asyncio.sleep(20)
        assert "the alias is new, but the repository is not updated" in lifecycle.failures["fraud"].text
        lifecycle.follow_aliases({})
        await asyncio.sleep(20)
        assert "fraud" not in lifecycle.failures
    assert world.triton.log == []
    assert caplog.text.count("models cannot be loaded") == 1


@in_virtual_time
async def test_settings_of_a_model_whose_bundle_went_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings of a model without a bundle are named once in the log, and the server continues. rsrv-gen would refuse them."""
    world = World(tmp_path, {"r": {"a": "v1", "b": "v1"}})
    world.settings = change_settings(world.settings, {"models": {"b": {"weight": 2}}})

    async with living(world) as lifecycle:
        await asyncio.sleep(20)
        assert "no bundle has this name" not in caplog.text
        shutil.rmtree(world.roots["r"] / "b")
        await asyncio.sleep(20)
        place(world.roots["r"] / "a", "v2")
        await asyncio.sleep(20)
        assert not lifecycle.failures
    assert world.triton.texts() == {"a": "v2"}
    assert caplog.text.count("rsrv.yaml: models.b: no bundle has this name; known are a") == 1


@pytest.mark.parametrize("mode", ["dynamic", "static", "explicit"])
@in_virtual_time
async def test_a_server_that_ends_at_a_model_that_fails_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """If tritonserver exits on errors, one line asks for --exit-on-error=false. In explicit mode there is no such line."""
    world = World(tmp_path, {"r": {"a": "v1"}}, lifecycle=f"mode: {mode}")
    world.triton.exits_on_error = True

    async with living(world):
        await asyncio.sleep(60)
    assert caplog.text.count("--exit-on-error=false") == (mode != "explicit")


# --- random changes
# -------------------------------------------------------------------------------------------------

NAMES = {"r": ("a", "b", "c"), "s": ("x", "y")}
ROOTS = st.sampled_from(sorted(NAMES))
TEXTS = st.sampled_from(["v1", "v2", "v3", BAD])
HELD = {
    root: st.dictionaries(st.sampled_from(names), st.sampled_from(["v1", "v2"]))
    for root, names in NAMES.items()
}


@st.composite
def deeds(draw: st.DrawFn) -> tuple[str, str, str, str, str]:
    """Draw a change on disk: its kind, a root, two names of bundles in the root, and a text."""
    root = draw(ROOTS)
    names = st.sampled_from(NAMES[root])
    deed = draw(
        st.sampled_from(
            [
                *("place", "slowly", "remove", "rename", "swap", "break", "touch"),
                *("unmount", "mount", "kill", "crash"),
            ]
        )
    )
    return deed, root, draw(names), draw(names), draw(TEXTS)


class Disk:
    """Applies changes to the bundles of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        #: Missing roots.
        self.away: set[str] = set()

    def aside(self, root: str) -> Path:
        return self.world.repository.parent / f"aside-{root}"

    def held(self, root: str) -> set[str]:
        """Return the names of the bundles of a root, even while the root is missing."""
        folder = self.aside(root) if root in self.away else self.world.roots[root]
        return {path.name for path in folder.iterdir() if not path.name.startswith(".")}

    async def do(self, deed: str, root: str, name: str, other: str, text: str) -> None:
        folder = self.world.roots[root]
        first, second = folder / name, folder / other
        match deed:
            case "mount" if root in self.away:
                shutil.rmtree(folder, ignore_errors=True)
                self.aside(root).rename(folder)
                self.away.remove(root)
            case "unmount" if root not in self.away:
                folder.rename(self.aside(root))
                self.away.add(root)
                if text != "v1":
                    folder.mkdir()  # The directory of an empty mount point.
            case "kill" if name in self.world.triton.served:
                self.world.triton.kill(name)
            case _ if root in self.away:
                return
            case "place":
                place(first, text)
            case "slowly":
                # The copy takes less time than the pause between two scans.
                write_bundle(first, text)
                (first / "model.b8.mlir").write_text("half 8")
                await asyncio.sleep(0.4)
                (first / "model.b8.mlir").write_text(f"{text} 8")
            case "remove" if first.exists():
                shutil.rmtree(first)
            case "rename" if first.exists() and not second.exists():
                first.rename(second)
            case "swap" if first.exists() and second.exists() and first != second:
                first.rename(folder / ".swap")
                second.rename(first)
                (folder / ".swap").rename(second)
            case "break" if first.exists():
                (first / "manifest.yaml").write_text("nothing: good\n")
            case "touch" if first.exists():
                (first / "manifest.yaml").touch()


def good(bundle: Path) -> bool:
    return "nothing" not in (bundle / "manifest.yaml").read_text() and whole(bundle) != BAD


@FEW_EXAMPLES
@given(
    held=st.fixed_dictionaries(HELD),
    done=st.lists(st.tuples(deeds(), st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0])), max_size=14),
    seconds=st.sampled_from([0.1, 1.0, 8.0]),
)
# A root is missing for a second while its new bundle waits for the first loads. No scan sees that.
@example(
    held={"s": {"y": "v1", "x": "v1"}, "r": {"b": "v1", "a": "v1"}},
    done=[
        (("place", "r", "c", "a", "v2"), 2.5),
        (("break", "s", "y", "y", "v3"), 0.3),
        (("place", "s", "x", "y", "v3"), 2.5),
        (("unmount", "r", "a", "c", "bad"), 1.0),
        (("mount", "r", "c", "a", "v2"), 0.0),
    ],
    seconds=8.0,
)
def test_the_models_become_those_on_disk(
    held: dict[str, dict[str, str]],
    done: list[tuple[tuple[str, str, str, str, str], float]],
    seconds: float,
) -> None:
    """After any changes in any order, exactly the valid bundles are served.

    No half-written bundle is served. No model is unloaded while its folder cannot be read. The broken content of a bundle is
    never served.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), held)
        world.triton.seconds = seconds
        disk = Disk(world)
        unload = world.triton.unload

        async def checked(name: str) -> None:
            assert not any(name in disk.held(root) for root in disk.away), f"{name} is only out of sight"
            await unload(name)

        world.triton.unload = checked  # type: ignore[method-assign]

        async def main() -> None:
            async with AsyncExitStack() as stack:
                lifecycle = await stack.enter_async_context(living(world))
                await asyncio.sleep(2.5)
                for deed, pause in done:
                    if deed[0] == "crash":
                        await stack.aclose()
                        forsake(lifecycle)
                        lifecycle = await stack.enter_async_context(living(world))
                    await disk.do(*deed)
                    await asyncio.sleep(pause)
                for root in NAMES:
                    await disk.do("mount", root, "", "", "")
                await asyncio.sleep(120)

        run(main())
        served = world.triton.texts()
        deeds_done = {deed for (deed, *_), _ in done}
        assert BAD not in served.values()
        for root, names in NAMES.items():
            for name in names:
                bundle = world.roots[root] / name
                # If nobody saw a bundle's removal, its root is unknown, and may be a missing root.
                known = "crash" not in deeds_done or all(map(disk.held, NAMES))
                if not bundle.exists() and disk.held(root) and known:
                    assert name not in served, f"{name} is gone"
                elif bundle.exists() and good(bundle):
                    assert served.get(name) == whole(bundle)
        assert not world.triton.dead & served.keys()
        for name in our_models(world.repository):
            assert whole(world.repository / name / "1" / "bundle") == served.get(name), (
                f"{name} has no way back"
            )
