"""Bundles whose files are overwritten in place: the old version serves until the new version is complete."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rsrv.control.reconciler import ReloadError
from rsrv_gen.signatures import LINK_BYTES
from tests.unit.bundle.forge import seal
from tests.unit.control.test_lifecycle import add_meta, silent_kernel, story
from tests.unit.control.virtual import in_virtual_time
from tests.unit.gen.bundles_for_tests import write_bundle, write_unsummed

__all__ = ["silent_kernel"]


def overwrite(file: Path, text: str) -> None:
    """Overwrite a file in place, and keep its times. The file is large, so the repository has a hard link to it."""
    content = text.ljust(LINK_BYTES).encode()
    before = file.stat().st_mtime_ns
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before, before))


@pytest.mark.parametrize("ending", ["v2", "v1"])
@in_virtual_time
async def test_a_torn_bundle_keeps_its_old_version_until_it_fits(tmp_path: Path, ending: str) -> None:
    """A torn bundle is not loaded, and the failure names the file that does not match the manifest.

    The bundle is loaded when it is finished or restored. Other bundles are not affected.
    """
    async with story(tmp_path, {"r": {"a": "v1", "b": "v1"}}) as (world, lifecycle):
        a = world.roots["r"] / "a"
        await asyncio.sleep(10)
        world.triton.log.clear()
        (a / "model.b8.mlir").write_text("v2 8")
        for _ in range(2):
            await asyncio.sleep(10)
            assert "model.b8.mlir does not match the manifest" in lifecycle.failures["a"].text
            write_bundle(world.roots["r"] / "b", "v2")
        with pytest.raises(ReloadError, match=r"model\.b8\.mlir does not match the manifest") as caught:
            await lifecycle.reload("a")
        assert caught.value.code == "FAILED_PRECONDITION"
        assert world.triton.texts() == {"a": "v1", "b": "v2"}
        assert "load a" not in world.triton.log
        write_bundle(a, ending)
        await asyncio.sleep(10)
        assert world.triton.texts() == {"a": ending, "b": "v2"}
        assert not lifecycle.failures


@in_virtual_time
async def test_a_torn_callee_keeps_its_meta_model(tmp_path: Path) -> None:
    """A meta model with a torn callee keeps its old version. The reason names the callee."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        add_meta(world, "meta", "a")
        a = world.roots["r"] / "a"
        await asyncio.sleep(20)
        before = (world.repository / "meta/1/calls/a/model.b8.mlir").read_text()
        (a / "model.b8.mlir").write_text("v2 8")
        await asyncio.sleep(10)
        assert "model 'a', which it calls: model.b8.mlir does not match" in lifecycle.failures["meta"].text
        assert (world.repository / "meta/1/calls/a/model.b8.mlir").read_text() == before
        seal(a)
        await asyncio.sleep(10)
        assert (world.repository / "meta/1/calls/a/model.b8.mlir").read_text() == "v2 8"
        assert not lifecycle.failures


@in_virtual_time
async def test_static_mode_tries_a_torn_bundle_again_when_it_was_asked_for(tmp_path: Path) -> None:
    """In static mode, a requested reload of a torn bundle is refused. It is retried until the bundle is complete."""
    async with story(tmp_path, {"r": {"a": "v1"}}, lifecycle="mode: static") as (world, lifecycle):
        a = write_bundle(world.roots["r"] / "a", "v2")
        (a / "model.b8.mlir").write_text("half 8")
        with pytest.raises(ReloadError, match="does not match the manifest"):
            await lifecycle.reload("a")
        (a / "model.b8.mlir").write_text("v2 8")
        await asyncio.sleep(20)
        assert world.triton.texts() == {"a": "v2"}
        assert not lifecycle.failures


@in_virtual_time
async def test_without_checksums_two_readings_must_agree(tmp_path: Path) -> None:
    """A bundle without checksums is loaded when two readings agree, because file times may not show a write."""
    async with story(tmp_path, {"r": {"a": "v1"}}) as (world, lifecycle):
        write_unsummed(world.roots["r"] / "a", "v2")
        file = world.roots["r"] / "a" / "model.b8.mlir"
        file.write_bytes(bytes(LINK_BYTES))
        for part in range(50):
            overwrite(file, f"half{part} 8")
            await asyncio.sleep(0.3)
        overwrite(file, "v2 8")
        assert world.triton.log == []
        await asyncio.sleep(15)
        assert world.triton.texts() == {"a": "v2"}
        assert world.triton.log == ["load a", "loaded a"]
        assert not lifecycle.failures
