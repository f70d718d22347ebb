"""Scans of directories with bundles, and the pauses between them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from rsrv.control.bundle_debounce import NO_BUNDLE, Seen
from rsrv.control.watching import BundleScanner, Notices, _listen, scan, watch
from rsrv.settings import LifecycleSection
from rsrv_gen.signatures import LINK_BYTES, sign
from tests.unit.gen.bundles_for_tests import write_bundle
from tests.waiting import looped


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "bundles"
    write_bundle(root / "one", files={"labels.txt": "a"})
    (root / "one" / "nested").mkdir()
    (root / "one" / "nested" / "deep.txt").write_text("b")
    write_bundle(root / ".hidden")
    (root / "no_bundle").mkdir()
    (root / "a file").write_text("")
    return root


def test_a_root_holds_its_bundles_or_is_one(root: Path, tmp_path: Path) -> None:
    """A root is a bundle or contains bundles. Hidden folders and folders without a manifest are not bundles."""
    seen = scan(root, linked=False)
    assert set(seen.bundles) == {"one"}
    assert seen.identity == (root.stat().st_dev, root.stat().st_ino)
    assert scan(root / "one", linked=False).bundles == seen.bundles
    assert scan(root / "no_bundle", linked=False) == Seen(
        seen.identity and scan(root / "no_bundle", linked=False).identity
    )
    for missing in (tmp_path / "missing", root / "a file"):
        assert scan(missing, linked=False).identity is None
        assert scan(missing, linked=False).trouble


def test_an_entry_that_cannot_be_read_hides_no_other(root: Path) -> None:
    """An unreadable entry has no signature, and other entries are still found. lost+found is skipped."""
    (root / "odd").symlink_to("x" * 300)
    (root / "lost+found").mkdir()
    (root / "lost+found" / "file").touch()
    bundles = scan(root, linked=False).bundles
    assert set(bundles) == {"one", "odd"}
    assert bundles["odd"] is None


def test_a_directory_whose_manifest_is_still_to_come_is_told_apart(root: Path) -> None:
    """A folder without a manifest has another kind of signature, which changes while its files grow."""
    seen = []
    for size in (1, 2):
        (root / "no_bundle" / "weights").write_bytes(bytes(size))
        seen.append(scan(root, linked=False).bundles["no_bundle"])
    assert all(signature is not None and signature.startswith(NO_BUNDLE) for signature in seen)
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    "path", ["manifest.yaml", "model.b1.mlir", "labels.txt", "nested/deep.txt", "nested/new.py", "linked"]
)
def test_every_file_of_a_bundle_counts(root: Path, path: str) -> None:
    """A change of any file changes the signature, even if the file keeps its size and mtime.

    Auxiliary, nested, new and linked files count as well.
    """
    bundle = root / "one"
    (bundle / "linked").symlink_to("labels.txt")
    before = sign(bundle, linked=True)
    assert sign(bundle, linked=True) == before
    target = bundle / path
    age = target.stat() if target.exists() else bundle.stat()
    target.write_text("z" * age.st_size)
    os.utime(target, ns=(age.st_atime_ns, age.st_mtime_ns))
    after = sign(bundle, linked=True)
    assert after not in (before, None)


def test_what_python_leaves_does_not_count(root: Path) -> None:
    """Python's bytecode and empty folders do not change the signature."""
    before = sign(root / "one", linked=True)
    (root / "one" / "__pycache__").mkdir()
    (root / "one" / "__pycache__" / "model.pyc").write_text("")
    (root / "one" / "empty").mkdir()
    assert sign(root / "one", linked=True) == before


def test_a_hard_link_to_a_large_file_does_not_count(root: Path, tmp_path: Path) -> None:
    """If rsrv-gen makes hard links (`linked`), a new hard link to a large file does not change the signature.

    Otherwise, the link changes the signature, because it changes the file's ctime.
    """
    large = root / "one" / "large"
    large.write_bytes(bytes(LINK_BYTES))
    linked, copied = (sign(root / "one", linked=linked) for linked in (True, False))
    os.link(large, tmp_path / "link")
    assert sign(root / "one", linked=True) == linked
    assert sign(root / "one", linked=False) != copied


def test_a_link_to_nothing_is_a_fact_and_not_a_riddle(root: Path) -> None:
    """A dangling link has a signature, so that the broken bundle is reported."""
    (root / "one" / "dangling").symlink_to("nothing")
    assert sign(root / "one", linked=True) is not None


class SlowPoll(LifecycleSection):
    @property
    def slow_poll_s(self) -> float:
        return 3600.0


@looped
async def test_a_notice_of_the_kernel_starts_the_next_scan_soon(root: Path) -> None:
    """A notice of the kernel starts the next scan early, even for a root that appears later."""
    settings = SlowPoll(poll_s=0.05)
    scans: asyncio.Queue[Mapping[Path, Seen]] = asyncio.Queue()

    def took(seen: Mapping[Path, Seen]) -> bool:
        scans.put_nowait(seen)
        return False

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch(lambda: [root], settings, took))
        before = (await scans.get())[root]
        while True:
            # Write repeatedly, because it is unknown from when on the kernel sends notices.
            (root / "one" / "labels.txt").write_text(f"{asyncio.get_running_loop().time()}")
            try:
                after = await asyncio.wait_for(scans.get(), 0.5)
            except TimeoutError:
                continue
            if after[root].bundles != before.bundles:
                break
        watcher.cancel()


@looped
async def test_without_a_thread_for_notices_the_periodic_scans_stay(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the system has no thread left for the kernel's notices, one line of the log says so, and periodic scans continue."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with caplog.at_level(logging.INFO), monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        await _listen([root], Notices())

    assert "does not report changes of bundles (can't start new thread)" in caplog.text


def test_directories_a_thousand_deep_end_no_scan(tmp_path: Path) -> None:
    """A folder a thousand levels deep has no signature. Its neighbours have signatures."""
    for name in ("deep", "good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.yaml").touch()
    folders = [tmp_path / "deep"]
    for _ in range(1500):
        folders.append(folders[-1] / "d")
        folders[-1].mkdir()

    seen = scan(tmp_path, linked=True).bundles

    for folder in reversed(folders[1:]):  # Cleaning up by recursion would fail.
        folder.rmdir()
    assert seen["deep"] is None
    assert seen["good"] is not None


def test_a_scan_after_a_notice_reads_the_named_bundles(root: Path) -> None:
    """After a notice about a bundle, the next two scans read only this bundle. A full scan finds every change."""
    write_bundle(root / "two")
    scanner = BundleScanner(lambda: [root], linked=True)
    full = scanner.scan()[root].bundles
    for name in ("one", "two"):
        (root / name / "labels.txt").write_text("changed")

    first = scanner.scan([str(root / "one/labels.txt")])[root].bundles
    (root / "one/labels.txt").write_text("changed again")
    second = scanner.scan([])[root].bundles
    third = scanner.scan([])[root].bundles

    assert len({seen["one"] for seen in (full, first, second)}) == 3
    assert second == third
    assert {seen["two"] for seen in (first, second, third)} == {full["two"]}
    assert scanner.scan()[root].bundles["two"] != full["two"]


def test_bundles_that_come_and_go_need_no_notice_of_their_own(root: Path) -> None:
    """A scan after any notice also finds new and removed bundles, and a bundle that is the root itself."""
    scanner = BundleScanner(lambda: [root, root / "one"], linked=True)
    scanner.scan()
    write_bundle(root / "two")
    assert set(scanner.scan([])[root].bundles) == {"one", "two"}
    shutil.rmtree(root / "two")
    (root / "one/labels.txt").write_text("changed")
    before = scanner.scan([])
    after = scanner.scan([str(root / "one/labels.txt")])
    assert set(after[root].bundles) == {"one"}
    assert after[root / "one"].bundles["one"] == after[root].bundles["one"] != before[root].bundles["one"]


def test_an_unfinished_copy_needs_no_notice_of_its_end(root: Path) -> None:
    """Each scan reads a folder without a manifest, so a finished bundle is found even if a notice is lost."""
    (root / "no_bundle" / "weights").write_bytes(b"1")
    scanner = BundleScanner(lambda: [root], linked=True)
    unfinished = [scanner.scan()[root].bundles["no_bundle"] for _ in range(2)]
    assert all(signed is not None and signed.startswith(NO_BUNDLE) for signed in unfinished)

    write_bundle(root / "no_bundle")

    assert scanner.scan([])[root].bundles["no_bundle"] == sign(root / "no_bundle", linked=True)
