"""Executables beside a model repository, which `rsrv-gen --compile-for` compiled for a card: GEN/CARD.executables.

Such a file is a zip archive without compression. index.json describes the executables and their target. Each other entry
is one executable in the form of jax's compilation cache. Its name is the SHA-256 of the module that was compiled.
Executables are machine code, so the file must belong to root or to the runtime's user, and no other user may write to it.
The digest of each entry detects damage, but is not a signature.
"""

import hashlib
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

log = logging.getLogger(__name__)

SUFFIX = ".executables"
_INDEX = "index.json"
_FORMAT = 2


class StoredExecutablesError(Exception):
    """A file of executables cannot be used. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """Circumstances that an executable depends on, in addition to its module."""

    #: The driver's name of the device, or "".
    card: str
    #: The device's CUDA compute capability, or "".
    capability: str
    #: Versions of jax and its CUDA plugin.
    versions: str
    #: The flags in XLA_FLAGS, sorted.
    flags: str

    def differences(self, here: "CompileTarget") -> str:
        """Return a text that says how this target differs from `here`, the target of this process, or "" if they are equal."""
        values = (
            (field.name, getattr(self, field.name), getattr(here, field.name)) for field in fields(self)
        )
        return ", ".join(
            f"{name} {own or 'none'} (here: {present or 'none'})"
            for name, own, present in values
            if own != present
        )


@dataclass(frozen=True, slots=True)
class Contents:
    """Index of a file of executables."""

    target: CompileTarget
    #: True if the compiler had the results of a card's autotuning.
    tuned: bool
    #: SHA-256 of each entry, by the SHA-256 of its module. Both are hexadecimal.
    digests: Mapping[str, str]
    #: Estimated seconds of an execution on the card, by the SHA-256 of the module. Empty if the card's rates are unknown.
    seconds: Mapping[str, float]
    #: SHA-256 of each module, by the model's name, and then by "variant/size".
    models: Mapping[str, Mapping[str, str]]
    #: SHA-256 of the modules without an executable. Only a server on the card can compile them.
    left: Sequence[str] = ()


class StoredExecutables:
    """A file of executables, open for reading. Raises StoredExecutablesError if it is damaged or others can write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("rb"))
                status = os.fstat(file.fileno())
                if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
                    raise StoredExecutablesError(
                        f"{path} must belong to root or to uid {os.getuid()} and be writable by no other user, who could "
                        "run code in the runtime. Change its owner and mode"
                    )
                self._archive = stack.enter_context(zipfile.ZipFile(file))
                index = json.loads(self._archive.read(_INDEX))
                if index["format"] != _FORMAT:
                    raise ValueError(f"its format is {index['format']}, not {_FORMAT}")
                for name in ("digests", "seconds", "models"):
                    if not isinstance(index[name], dict):
                        raise TypeError(f"{name} of its index is not an object")
                self.contents = Contents(
                    CompileTarget(**index["target"]),
                    index["tuned"],
                    index["digests"],
                    index["seconds"],
                    index["models"],
                    index["left"],
                )
            except StoredExecutablesError:
                raise
            except Exception as error:  # noqa: BLE001 - of a damaged archive, zipfile raises a dozen types
                raise StoredExecutablesError(
                    f"{path} is damaged or cannot be read ({error}). Remove it, or run rsrv-gen --compile-for again"
                ) from None
            self.close = stack.pop_all().close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, module: str) -> bytes | None:
        """Return the executable of the module with this digest. None: there is none, or it is damaged."""
        digest = self.contents.digests.get(module)
        if digest is None:
            return None
        try:
            entry = self._archive.read(module)
        except Exception as error:  # noqa: BLE001 - as in __init__
            log.warning("%s: %s cannot be read (%s), so it is compiled", self.path, module, error)
            return None
        if hashlib.sha256(entry).hexdigest() != digest:
            log.warning("%s: %s is damaged, so it is compiled", self.path, module)
            return None
        return entry


def write_executables(
    path: Path,
    target: CompileTarget,
    tuned: bool,
    entries: Mapping[str, bytes],
    seconds: Mapping[str, float] = MappingProxyType({}),
    models: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    left: Sequence[str] = (),
) -> None:
    """Write a file of executables atomically. It replaces an earlier file. Raises OSError.

    `entries` has the executables by the SHA-256 of their modules. For the other parameters, see `Contents`.
    """
    digests = {module: hashlib.sha256(entry).hexdigest() for module, entry in entries.items()}
    index: dict[str, Any] = {
        "format": _FORMAT,
        **asdict(Contents(target, tuned, digests, dict(seconds), dict(models), list(left))),
    }
    fd, unfinished = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(fd, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_INDEX, json.dumps(index, indent=1))
            for module, entry in entries.items():
                archive.writestr(module, entry)
            # Servers of other users may read the file.
            os.fchmod(file.fileno(), 0o644)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def find_executables(repository: Path, here: CompileTarget) -> StoredExecutables | None:
    """Return the executables in this repository for this target. None: models are compiled, and the log says why.

    If several files are for the target, use the first tuned file. If no file is tuned, use the first file by name.
    """
    refused, usable = [], []
    for path in sorted(repository.glob(f"*{SUFFIX}")):
        try:
            stored = StoredExecutables(path)
        except StoredExecutablesError as error:
            refused.append(str(error))
            continue
        if why := stored.contents.target.differences(here):
            stored.close()
            refused.append(f"{path} is for {why}")
        else:
            usable.append(stored)
    if usable:
        chosen = max(usable, key=lambda stored: stored.contents.tuned)
        for unused in usable:
            if unused is not chosen:
                unused.close()
        tuned = "tuned on such a card" if chosen.contents.tuned else "not tuned"
        log.info("%s: %d executables for this device, %s", chosen.path, len(chosen.contents.digests), tuned)
        return chosen
    if refused:
        log.warning("no stored executable is used, and models are compiled: %s", "; ".join(refused))
    return None
