"""Reads the bundles on disk (a "scan"), soon after a notice from the kernel, and periodically.

The periodic scans are necessary because network and bind mounts give no notices. A notice names changed paths, and only makes the
next scan of their bundles start sooner. A full scan of ten thousand bundles takes a second of CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from watchfiles import awatch

from rsrv.control.bundle_debounce import NO_BUNDLE, Seen
from rsrv.settings import LifecycleSection, SettingsError, read_settings
from rsrv_bundle.reader import may_be_bundle
from rsrv_gen.signatures import Signature, sign

log = logging.getLogger(__name__)


class BundleSources:
    """The places of bundles in the repository's settings. Another rsrv-gen may add places while the server runs."""

    def __init__(self, places: Sequence[Path], file: Path) -> None:
        self._places = places
        self._file = file
        self._version = self._read_version()

    def read(self) -> Sequence[Path]:
        if (version := self._read_version()) != self._version:
            # `read_settings` also applies environment variables. A file that cannot be read changes nothing.
            with contextlib.suppress(SettingsError):
                self._places = read_settings(self._file).lifecycle.bundles
            self._version = version
        return self._places

    def _read_version(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


_MANIFEST = "manifest.yaml"
#: Pause between two full scans, as a multiple of the CPU time of a full scan. So full scans take at most 0.3 % of a core.
_SCAN_PAUSE = 300


def scan(root: Path, *, linked: bool, before: Mapping[str, Signature] | None = None) -> Seen:
    """Scan a root, which is a bundle or a directory of bundles.

    `linked` is True if rsrv-gen makes hard links of large files. `before` has the signatures of bundles that have not changed
    since the last scan.
    """
    try:
        status = os.stat(root)
        single = os.path.exists(root / _MANIFEST)
        names = [root.name] if single else os.listdir(root)
    except FileNotFoundError:
        return Seen(None, trouble="does not exist")
    except OSError as error:
        return Seen(None, trouble=f"cannot be read ({error.strerror})")
    bundles: dict[str, Signature] = {}
    for name in names:
        if before and name in before:
            bundles[name] = before[name]
        elif single or may_be_bundle(name):
            folder = root if single else root / name
            try:
                os.stat(folder / _MANIFEST)
            except NotADirectoryError:
                continue
            except FileNotFoundError:
                # This may be an unfinished copy of a bundle, because the manifest may be copied last.
                if _holds_something(folder) and (signature := sign(folder, linked=linked)) is not None:
                    bundles[name] = NO_BUNDLE + signature
            except OSError:
                bundles[name] = None
            else:
                bundles[name] = sign(folder, linked=linked)
    return Seen((status.st_dev, status.st_ino), bundles)


def _holds_something(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def scan_all(roots: Callable[[], Sequence[Path]], *, linked: bool) -> dict[Path, Seen]:
    """Scan all roots that `roots` returns now."""
    return {root: scan(root, linked=linked) for root in roots()}


class BundleScanner:
    """Scans the current roots again and again. Between full scans, only bundles with changes are scanned."""

    def __init__(self, roots: Callable[[], Sequence[Path]], *, linked: bool) -> None:
        self._roots = roots
        self._linked = linked
        self._seen: Mapping[Path, Seen] = {}
        #: Bundles that differed between the last two scans.
        self._moving: set[tuple[Path, str]] = set()
        #: Seconds of CPU time of the last full scan.
        self.cost_s = 0.0

    def scan(self, changed: Iterable[str] | None = None) -> Mapping[Path, Seen]:
        """Scan the bundles that have the `changed` paths, and bundles that differed in the last scan.

        If `changed` is None, scan all bundles.
        """
        began, before = time.thread_time(), self._seen
        if changed is None:
            self._seen = scan_all(self._roots, linked=self._linked)
            self.cost_s = time.thread_time() - began
        else:
            named = self._moving | {(root, name) for path in changed for root, name in self._bundles_of(path)}
            self._seen = {
                root: scan(root, linked=self._linked, before=self._unchanged(root, named))
                for root in self._roots()
            }
        self._moving = {
            (root, name)
            for root, seen in self._seen.items()
            for name, signed in seen.bundles.items()
            if root in before and before[root].bundles.get(name, "") != signed
        }
        return self._seen

    def _unchanged(self, root: Path, named: Collection[tuple[Path, str]]) -> dict[str, Signature]:
        seen = self._seen.get(root, Seen(None))
        return {
            name: signed
            for name, signed in seen.bundles.items()
            if (root, name) not in named and signed is not None and not signed.startswith(NO_BUNDLE)
        }

    def _bundles_of(self, path: str) -> Iterator[tuple[Path, str]]:
        """Yield each root with the name of the bundle that a path belongs to."""
        for root in self._seen:
            with contextlib.suppress(ValueError):
                below = Path(path).relative_to(root).parts
                yield root, below[0] if below else root.name
                yield root, root.name  # if the root is a bundle


class Notices:
    """Notices of the kernel about changes below the roots."""

    def __init__(self) -> None:
        self.some = asyncio.Event()
        self._paths: set[str] = set()

    def add(self, paths: Iterable[str]) -> None:
        self._paths.update(paths)
        self.some.set()

    def take(self) -> set[str]:
        """Return the changed paths since the last call."""
        self.some.clear()
        paths, self._paths = self._paths, set()
        return paths


async def watch(
    roots: Callable[[], Sequence[Path]],
    settings: LifecycleSection,
    took: Callable[[Mapping[Path, Seen]], bool],
) -> None:
    """Scan the current roots until cancelled; `roots` is called on a thread.

    `took` is called with each scan. It returns True if the next scan should follow soon.
    """
    scanner = BundleScanner(roots, linked=settings.link == "hard")
    clock = asyncio.get_running_loop().time
    notices = Notices()
    listener: asyncio.Task[None] | None = None
    identities: object = None
    full_at = clock()

    try:
        while True:
            changed = notices.take()
            # If the kernel gives no notices, each scan is a full one.
            full = clock() >= full_at or listener is None or listener.done()
            seen = await asyncio.to_thread(scanner.scan, None if full else changed)
            now = {root: each.identity for root, each in seen.items()}
            if full:
                missing = None in now.values()
                full_at = clock() + max(
                    settings.slow_poll_s, 0.0 if missing else _SCAN_PAUSE * scanner.cost_s
                )
            if now != identities:
                # The kernel watches the directories that had these paths before. Start a listener for the present directories.
                identities = now
                listened = [root for root, identity in now.items() if identity is not None]
                if listener is not None:
                    await _stop(listener)
                listener = asyncio.create_task(
                    _listen(listened, notices), name="listen for changes of bundles"
                )
                full_at = clock()  # The kernel gave no notice of earlier changes, so scan all bundles again.
            soon = took(seen)
            await asyncio.sleep(settings.poll_s)
            if not soon:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(
                        max(full_at, clock() + settings.slow_poll_s - settings.poll_s)
                    ):
                        await notices.some.wait()
    finally:
        if listener is not None:
            await _stop(listener)


async def _listen(roots: Iterable[Path], notices: Notices) -> None:
    """Record each change below the roots in `notices`. Return if the kernel gives no notices."""
    try:
        async for changes in awatch(*roots, watch_filter=None, step=200, debounce=400):
            notices.add(path for _, path in changes)
    except* (OSError, RuntimeError) as errors:  # awatch raises a group if its thread cannot start
        log.info(
            "the kernel does not report changes of bundles (%s), so only the periodic scans find them",
            errors.exceptions[0],
        )


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
