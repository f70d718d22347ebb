"""Notes of earlier runs about bundles and models. With these notes, an unchanged bundle costs only a few calls of stat.

The notes are in a file next to the repository. A note is valid while its bundle or model has the same signature. A bundle that
changed within the last seconds gets no note, because after another change its files might have the same times. If the file is
missing or damaged, all bundles are read again. The file also records where each model's bundle was.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import rsrv_bundle
import rsrv_gen
from rsrv_gen.metas import BundleFacts
from rsrv_gen.signatures import Signature, last_change, sign
from rsrv_gen.staging import place_beside

#: A bundle gets a note only if its files have not changed for this many nanoseconds.
SETTLED_NS = 2 * 10**9


@dataclass(slots=True)
class _Notes:
    """The file's content."""

    #: Signature of the program that wrote the file.
    program: str = ""
    #: Device, signature and facts of each bundle, by its path.
    bundles: dict[str, tuple[int, str, BundleFacts]] = field(default_factory=dict)
    #: Recipe and signature of each model's directory, by the model's name.
    models: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Path of each model's last valid bundle, by the model's name.
    places: dict[str, str] = field(default_factory=dict)


_FORMAT = TypeAdapter(_Notes)


class Known:
    """Notes about one repository. Not thread-safe."""

    def __init__(self, repository: Path | None = None, *, linked: bool = True) -> None:
        """Read the notes.

        Without a `repository`, the notes last as long as the process. `linked` is True if the repository has hard links to files
        of bundles.
        """
        self._repository = repository
        self.linked = linked
        self._notes = _Notes(_program())
        self._changed = False
        if repository is not None:
            with suppress(OSError, ValidationError):
                notes = _FORMAT.validate_json(_read(repository))
                same = notes.program == self._notes.program
                self._notes = notes if same else _Notes(_program(), places=notes.places)

    def sign(self, bundle: Path) -> Signature:
        return sign(bundle, linked=self.linked)

    def facts(self, bundle: Path, signed: Signature) -> BundleFacts | None:
        """Return the facts of a bundle with this signature, if they are known."""
        device, same, facts = self._notes.bundles.get(str(bundle), (0, "", None))
        return facts if facts is not None and signed == same and device == _device(bundle) else None

    def learn(self, bundle: Path, signed: Signature, facts: BundleFacts) -> Signature:
        """Record the facts of a bundle that was read after it had this signature.

        Return the signature, or None if it is not reliable because the bundle has just changed.
        """
        try:
            settled = last_change(bundle) + SETTLED_NS < time.time_ns()
        except OSError:
            settled = False
        # Sign the bundle again. Its path may be a link, which may have pointed to another bundle during the read.
        if signed is None or not settled or self.sign(bundle) != signed:
            return None
        self._notes.bundles[str(bundle)] = _device(bundle), signed, facts
        self._changed = True
        return signed

    def is_current(self, folder: Path, recipe: str) -> bool:
        """Return whether a model's directory is known to match this recipe."""
        known, same = self._notes.models.get(folder.name, ("", ""))
        return recipe != "" and known == recipe and same == sign(folder, linked=self.linked)

    def place(self, name: str) -> str | None:
        """Return the path of a model's last valid bundle, if it is known."""
        return self._notes.places.get(name)

    def holds(self, signed: Mapping[Path, Signature]) -> bool:
        """Return whether bundles still have these signatures."""
        return all(self.sign(bundle) == same for bundle, same in signed.items())

    def made(self, folder: Path, recipe: str, signed: Mapping[Path, Signature]) -> None:
        """Record that a model's directory matches the recipe, if its bundles still have these signatures."""
        made = sign(folder, linked=self.linked)
        if recipe and made is not None and self.holds(signed):
            self._notes.models[folder.name] = recipe, made
            self._changed = True

    def save(self, bundles: Mapping[str, Path]) -> None:
        """Write the notes if they have changed. Keep only notes about these bundles, and the places of the repository's models.

        If the write fails, this run continues, and the next run only takes longer.
        """
        if self._repository is None:
            return
        notes = self._notes
        existing = {name: path for name, path in notes.places.items() if (self._repository / name).is_dir()}
        places = existing | {name: str(path) for name, path in bundles.items()}
        self._changed |= places != notes.places
        if not self._changed:
            return
        paths, notes.places = {*map(str, bundles.values())}, places
        notes.bundles = {
            path: notes_of_bundle for path, notes_of_bundle in notes.bundles.items() if path in paths
        }
        notes.models = {name: note for name, note in notes.models.items() if name in bundles}
        file = _file(self._repository)
        with suppress(OSError, ValueError):  # ValueError: a path is not valid text.
            content = _FORMAT.dump_json(notes)
            # Use a random name. If other users can write to the folder, and can guess the name, they could create a link with
            # this name to one of our files.
            handle, new = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
            try:
                with open(handle, "wb") as out:
                    out.write(content)
                os.replace(new, file)
                self._changed = False
            except OSError:
                os.unlink(new)


def _file(repository: Path) -> Path:
    return place_beside(repository) / f".{repository.name}-known.json"


def _read(repository: Path) -> bytes:
    """Return the text of the notes.

    Raises OSError if they cannot be read, or if neither this user nor the owner of the repository owns the file.
    """
    handle = os.open(_file(repository), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), repository.stat().st_uid):
            raise PermissionError
        return file.read()


def _device(bundle: Path) -> int:
    try:
        return bundle.stat().st_dev
    except OSError:
        return 0


def _program() -> str:
    """Return a signature of the code that reads bundles and plans models."""
    packages = (Path(module.__file__ or "").parent for module in (rsrv_bundle, rsrv_gen))
    return " ".join(str(sign(package, linked=False)) for package in packages)
