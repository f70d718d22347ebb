"""Looks at the bundles on disk: soon after a notice of the kernel, and periodically because notices may be missing.

Network and bind mounts give no notices, so only the looks count; a notice makes the next look come sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from watchfiles import awatch

from rsrv.control.bundle_debounce import NO_BUNDLE, Seen
from rsrv.settings import LifecycleSection, SettingsError, read_settings
from rsrv_bundle.reader import may_be_bundle
from rsrv_gen.signatures import Signature, sign

log = logging.getLogger("rsrv.control")


class BundleSources:
    """The places of bundles, as the repository's settings name them now: another rsrv-gen may have added some."""

    def __init__(self, places: Sequence[Path], file: Path) -> None:
        self._places = places
        self._file = file
        self._version = self._look()

    def read(self) -> Sequence[Path]:
        if (version := self._look()) != self._version:
            # The environment takes precedence here, too. A file that can't be read changes nothing.
            with contextlib.suppress(SettingsError):
                self._places = read_settings(self._file).lifecycle.bundles
            self._version = version
        return self._places

    def _look(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


_MANIFEST = "manifest.yaml"


def scan(root: Path, *, linked: bool) -> Seen:
    """Look at a root: a bundle, or a directory of bundles. `linked`: rsrv-gen makes hard links of large files."""
    try:
        status = os.stat(root)
        single = os.path.exists(root / _MANIFEST)
        folders = [root] if single else [Path(entry) for entry in os.scandir(root)]
    except FileNotFoundError:
        return Seen(None, trouble="is not there")
    except OSError as error:
        return Seen(None, trouble=f"cannot be read ({error.strerror})")
    bundles: dict[str, Signature] = {}
    for folder in folders:
        if single or may_be_bundle(folder.name):
            try:
                os.stat(folder / _MANIFEST)
            except NotADirectoryError:
                continue
            except FileNotFoundError:
                # This may be the copy of a bundle whose manifest comes last.
                if _holds_something(folder) and (found := sign(folder, linked=linked)) is not None:
                    bundles[folder.name] = NO_BUNDLE + found
            except OSError:
                bundles[folder.name] = None
            else:
                bundles[folder.name] = sign(folder, linked=linked)
    return Seen((status.st_dev, status.st_ino), bundles)


def _holds_something(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def look(roots: Callable[[], Sequence[Path]], *, linked: bool) -> dict[Path, Seen]:
    """Look at all current roots."""
    return {root: scan(root, linked=linked) for root in roots()}


async def watch(
    roots: Callable[[], Sequence[Path]],
    settings: LifecycleSection,
    took: Callable[[Mapping[Path, Seen]], bool],
) -> None:
    """Look at the current roots until cancelled; `roots` is called on a thread.

    `took` gets each look, and returns True if the next one should follow soon.
    """
    linked = settings.link == "hard"
    hint = asyncio.Event()
    listener: asyncio.Task[None] | None = None
    listened: list[Path] | None = None
    identities: object = None

    try:
        while True:
            hint.clear()
            seen = await asyncio.to_thread(look, roots, linked=linked)
            now = {root: each.identity for root, each in seen.items()}
            if now != identities:
                # The kernel watches directories, not names: register the new directories.
                identities = now
                listened = [root for root, identity in now.items() if identity is not None]
                if listener is not None:
                    await _stop(listener)
                listener = asyncio.create_task(_listen(listened, hint), name="listen for changes of bundles")
            soon = took(seen)
            await asyncio.sleep(settings.look_s)
            if not soon:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(settings.poll_s - settings.look_s):
                        await hint.wait()
    finally:
        if listener is not None:
            await _stop(listener)


async def _listen(roots: Iterable[Path], hint: asyncio.Event) -> None:
    """Set `hint` at each change below the roots; return if the kernel gives no notices."""
    try:
        async for _ in awatch(*roots, watch_filter=None, step=50, debounce=200):
            hint.set()
    except (OSError, RuntimeError) as error:
        log.info(
            "the kernel gives no notices of changes of bundles (%s): they are found at the periodic looks",
            error,
        )


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
