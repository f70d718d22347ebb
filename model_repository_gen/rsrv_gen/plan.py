"""The plan of a model repository: its models, and the contents of each model's directory. Pure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal

from rsrv.native import GUARD, LIBRARY
from rsrv.settings import Front, ModelSection, Transport
from rsrv_bundle import Bundle, BundleError, read_bundle
from rsrv_bundle.compatibility import Feature, native_obstacle
from rsrv_gen import config
from rsrv_gen.fronts import load_obstacle, triton_obstacle
from rsrv_gen.metas import BundleFacts, callers
from rsrv_gen.signatures import Signature, sign

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
BUNDLE_FOLDER = f"{VERSION}/bundle"
#: Folder with the bundles of a meta model's callees, or of an alias's targets, by name.
CALLS_FOLDER = f"{VERSION}/calls"

MODEL_PY = b"""from rsrv.stub.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
#: Empty file in the directory of a model with the native front. A newer time of this file makes Triton load the model again.
NATIVE_MARK = f"{VERSION}/native"
META_MODEL_PY = MODEL_PY.replace(b"rsrv.stub.model", b"rsrv.stub.meta_model")

#: How the files of a bundle get into the repository. `hard` makes hard links to large files, and copies small files. A link takes
#: no space, and the file remains after the bundle is removed. `copy` copies all files.
LinkMode = Literal["hard", "copy"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Content of a file, which is linked or copied."""

    path: Path


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Content of a file that all models of the repository share, as links to one copy."""

    path: Path


Content = bytes | SourceFile | SharedFile
#: Contents by path relative to the model's directory. Folders are created with their files.
ModelPlan = Mapping[PurePosixPath, Content]


@dataclass(frozen=True, slots=True, eq=False)
class SourceBundle:
    """A valid bundle as it was on disk at one time.

    Two objects are never equal, so content that is cached for one object is not used for a bundle that is found later.
    """

    path: Path
    #: Signature of the files before they were read, or None if they had changed just before.
    signature: Signature
    facts: BundleFacts
    #: The bundle as read with this signature, or None if it must be read again.
    checked: Bundle | None = field(default=None, repr=False)
    #: The argument `linked` of `sign` with which the signature was computed.
    linked: bool = True

    def read(self) -> Bundle:
        """Return the bundle. Read it again if its files have changed. Raises BundleError, also if its facts have changed."""
        return _read_once(self)


@lru_cache(maxsize=8)
def _read_once(source: SourceBundle) -> Bundle:
    """Read a bundle. The plan reads it first. The verification of the plan then gets the same object from the cache."""
    if source.checked is not None and sign(source.path, linked=source.linked) == source.signature:
        return source.checked
    # Do not compute a digest, because that reads every weight.
    bundle = read_bundle(source.path, digest=False)
    if BundleFacts.of(bundle) != source.facts:  # The plan was made with these facts.
        raise BundleError(
            f"{bundle.name}: the bundle's kind, hooks or calls have changed in the meantime; try again"
        )
    return bundle


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the contents of a model's directory."""

    source: SourceBundle
    #: Callees of a meta model. The meta model's directory contains their bundles, whatever the transport is, so that Triton loads
    #: the meta model again when a callee changes.
    callees: Sequence[SourceBundle] = ()
    mode: LinkMode = "hard"
    #: True if only meta models can call the model.
    internal: bool = False
    limits: config.RowLimits = field(default_factory=config.RowLimits)
    native: bool = False
    #: The front and its reason if rsrv-gen chose it, or empty if the settings name the front.
    choice: str = ""

    def digest(self) -> str:
        """Return a value that changes if the contents of the directory change.

        Return an empty text if computing the value would need to read the bundles.
        """
        made_of = (self.source, *self.callees)
        if any(bundle.signature is None for bundle in made_of):
            return ""
        bundles = [(str(bundle.path), bundle.signature) for bundle in made_of]
        library = LIBRARY.stat() if LIBRARY.is_file() else None
        identity = library and (library.st_ino, library.st_size, library.st_mtime_ns)
        front = (self.native, self.choice)
        text = repr((bundles, self.mode, self.internal, self.limits, front, request_room(), identity))
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def plan(self) -> ModelPlan:
        """Plan the directory. Raises BundleError, ConfigError, OSError."""
        bundle = self.source.read()
        callees = [callee.read() for callee in self.callees]
        guard = {} if self.native else guard_files([bundle])
        plan: dict[PurePosixPath, Content] = {
            PurePosixPath(CONFIG_FILE): config.render(
                bundle,
                callees,
                internal=self.internal,
                limits=self.limits,
                room=request_room(),
                native=self.native,
                choice=self.choice,
                guarded=bool(guard),
            ),
            **guard,
            **bundle_files(bundle.path, PurePosixPath(BUNDLE_FOLDER)),
        }
        if self.native:
            plan |= {PurePosixPath(NATIVE_MARK): b"", PurePosixPath(LIBRARY.name): SharedFile(LIBRARY)}
            return plan
        plan[PurePosixPath(VERSION, "model.py")] = META_MODEL_PY if self.source.facts.meta else MODEL_PY
        for callee in callees:
            plan |= bundle_files(callee.path, PurePosixPath(CALLS_FOLDER, callee.name))
        return without_caches(plan)


@dataclass(frozen=True, slots=True)
class RepositoryPlan:
    """Contents of a repository."""

    #: Recipes of the models' directories, by name. Models come before the meta models that may call them.
    models: Mapping[str, Recipe]
    #: Meta models that call each internal model, by its name. Clients cannot address these models, and some have no directory.
    internal: Mapping[str, tuple[str, ...]]


def plan_repository(
    sources: Mapping[str, SourceBundle],
    *,
    mode: LinkMode = "hard",
    transport: Transport = "direct",
    models: Mapping[str, ModelSection] | None = None,
    front: Front = "python",
    tritonserver: str | None = None,
) -> RepositoryPlan:
    """Plan the repository of these bundles. `sources` must include the callees of all meta models in it.

    `tritonserver` is the path of the program that will serve the repository, or None if it is not known.

    Clients can address every model whose manifest does not have `internal`. An internal model has a directory only if meta models
    call it through Triton.
    """
    calls = {name: source.facts.calls for name, source in sources.items()}
    metas = callers(calls)
    internal = {
        name: metas.get(name, ())
        for name, source in sources.items()
        if Feature.INTERNAL in source.facts.features
    }
    planned: dict[str, Recipe] = {}

    @cache
    def obstacle_here(setting: Front) -> str:
        missing = missing_library()
        return missing or (
            load_obstacle(LIBRARY) or triton_obstacle(tritonserver) if setting == "auto" else ""
        )

    for name in sorted(sources, key=lambda name: (sources[name].facts.meta, name)):
        if name not in internal or (internal[name] and transport == "bls"):
            section = models[name] if models and name in models else None
            setting: Front = (section.front if section else None) or front
            choice = "native front: it needs no Python" if setting == "auto" else ""
            if setting != "python" and (
                why := native_obstacle(sources[name].facts.features) or obstacle_here(setting)
            ):
                setting, choice = "python", f"Python front: {why}"
            planned[name] = Recipe(
                sources[name],
                [sources[callee] for callee in calls[name]],
                mode,
                internal=name in internal,
                limits=row_limits(section),
                native=setting != "python",
                choice=choice,
            )
    return RepositoryPlan(planned, internal)


def row_limits(section: ModelSection | None) -> config.RowLimits:
    """Return the limits on rows of a model's section of rsrv.yaml."""
    return config.RowLimits(section.max_batch_size, section.max_rows) if section else config.RowLimits()


@cache
def request_room() -> int:
    """Return the number of bytes that the inputs and outputs of a request may take.

    It depends on the size of this machine's /dev/shm.
    """
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return config.EXECUTE_BYTES
    return min(config.EXECUTE_BYTES, int(config.SHM_SHARE * space.f_blocks * space.f_frsize))


def guard_files(bundles: Sequence[Bundle]) -> ModelPlan:
    """Plan the guard of a model with these bundles. Return nothing if Triton does not batch it, or the library is missing."""
    if not LIBRARY.is_file() or not all(map(config.is_batched, bundles)):
        return {}
    return {PurePosixPath(GUARD): SharedFile(LIBRARY)}


def missing_library() -> str:
    """Return why no model can have the native front or a guard, or an empty text if models can."""
    if LIBRARY.is_file():
        return ""
    return (
        f"{LIBRARY} is missing. Install rsrv's wheel for Linux on x86-64, or run `make native` in the clone before you "
        "install rsrv from it"
    )


def without_caches(plan: ModelPlan) -> ModelPlan:
    """Return the plan with an empty file where Python would make a folder for its compiled files.

    Triton's poll mode treats a new file in the version's folder as a change, and would load every model again just after its
    first load. With the empty file in place, Python keeps the compiled code only in memory.
    """
    code = {path.parent for path in plan if path.suffix == ".py"}
    return {**plan, **{parent / "__pycache__": b"" for parent in code}}


def bundle_files(bundle: Path, folder: PurePosixPath) -> ModelPlan:
    """Plan the bundle's files below this folder."""
    return {folder / name: SourceFile(bundle / name) for name in _files(bundle)}


def _files(bundle: Path) -> list[PurePosixPath]:
    """Return every file of a bundle, relative to it, without Python's caches."""
    files: list[PurePosixPath] = []
    for parent, folders, names in os.walk(bundle):
        folders[:] = sorted(folder for folder in folders if folder != "__pycache__")
        relative = Path(parent).relative_to(bundle)
        files += [PurePosixPath(relative / name) for name in sorted(names) if name != "__pycache__"]
    return files
