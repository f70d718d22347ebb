"""The plan of a model repository: its models, and the contents of each one's directory. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from rsrv.native import LIBRARY
from rsrv.settings import Front, ModelSection, Transport
from rsrv_bundle import Bundle
from rsrv_gen import config
from rsrv_gen.metas import callers

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
BUNDLE_FOLDER = f"{VERSION}/bundle"
#: folder of a meta model's directory with the bundles of its callees, by name
CALLS_FOLDER = f"{VERSION}/calls"

MODEL_PY = b"""from rsrv.stub.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
#: empty file of a model with the native front: its time tells Triton to load the model again
NATIVE_MARK = f"{VERSION}/native"
META_MODEL_PY = MODEL_PY.replace(b"rsrv.stub.model", b"rsrv.stub.meta_model")

#: How a bundle's files come into the repository. `hard` shares the large files, which costs no space and survives the
#: removal of the bundle, and copies the small ones; `copy` shares no file with the bundles; `symlink` is one link to
#: the whole bundle: every change of the bundle changes the model at once, half-finished changes included.
LinkMode = Literal["hard", "copy", "symlink"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Content of a file, which is linked or copied."""

    path: Path


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """Folder that a symbolic link leads to."""

    path: Path


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Content of a file that all models of the repository share, as links to one copy."""

    path: Path


Content = bytes | SourceFile | SourceFolder | SharedFile
#: path relative to the model's directory -> content; folders are created with their files
ModelPlan = Mapping[PurePosixPath, Content]


@dataclass(frozen=True, slots=True)
class SourceBundle:
    """Valid bundle with the list of its files."""

    bundle: Bundle
    #: relative to the bundle
    files: Sequence[PurePosixPath]


@dataclass(frozen=True, slots=True)
class RepositoryPlan:
    """Contents of a repository."""

    #: model name -> its directory; models come before the metas that may call them
    models: Mapping[str, ModelPlan]
    #: model that clients cannot address -> the metas that call it; it may have a directory or none
    internal: Mapping[str, tuple[str, ...]]
    #: model that shall have the native front -> why it has the Python front
    python: Mapping[str, str]


def plan_repository(
    sources: Mapping[str, SourceBundle],
    *,
    mode: LinkMode = "hard",
    transport: Transport = "direct",
    models: Mapping[str, ModelSection] | None = None,
    front: Front = "python",
) -> RepositoryPlan:
    """Plan the repository of these bundles, which include the callees of the metas among them.

    Clients can address every model but those whose manifest says `internal`. An internal model has a directory only
    where metas call through Triton.
    """
    calls = {name: source.bundle.manifest.meta_calls for name, source in sources.items()}
    metas = callers(calls)
    internal = {
        name: metas.get(name, ()) for name, source in sources.items() if source.bundle.manifest.internal
    }
    planned, python = {}, {}
    for name in sorted(sources, key=lambda name: (sources[name].bundle.manifest.kind == "meta", name)):
        if name not in internal or (internal[name] and transport == "bls"):
            callees = [sources[callee] for callee in calls[name]]
            section = models.get(name, ModelSection()) if models else ModelSection()
            native = (section.front or front) == "native"
            if native and (why := _obstacle(sources[name], internal=name in internal)):
                native, python[name] = False, why
            planned[name] = plan_model(
                sources[name],
                callees,
                internal=name in internal,
                mode=mode,
                limit=section.max_batch_size,
                native=native,
            )
    return RepositoryPlan(planned, internal, python)


def _obstacle(source: SourceBundle, *, internal: bool) -> str:
    """Return why a model cannot have the native front; empty: it can."""
    if source.bundle.manifest.kind == "meta":
        return "it is a meta model"
    if source.bundle.hooks is not None:
        return "it has hooks"
    if internal:
        return "only meta models call it"
    if not LIBRARY.is_file():
        return f"{LIBRARY} is missing; install rsrv's wheel for Linux on x86-64, or run tools/native_front.py of a clone"
    return ""


def plan_model(
    source: SourceBundle,
    callees: Sequence[SourceBundle] = (),
    *,
    internal: bool = False,
    mode: LinkMode = "hard",
    limit: int | None = None,
    native: bool = False,
) -> ModelPlan:
    """Plan one model's directory. Raises ConfigError.

    A meta model carries its callees for both transports: a change of a callee then changes the meta model's
    directory, and Triton loads it again.
    """
    bundle = source.bundle
    meta = bundle.manifest.kind == "meta"
    plan: dict[PurePosixPath, Content] = {
        PurePosixPath(CONFIG_FILE): config.render(
            bundle, [callee.bundle for callee in callees], internal=internal, limit=limit, native=native
        ),
        **_bundle_files(source, PurePosixPath(BUNDLE_FOLDER), mode),
    }
    if native:
        plan |= {PurePosixPath(NATIVE_MARK): b"", PurePosixPath(LIBRARY.name): SharedFile(LIBRARY)}
        return plan
    plan[PurePosixPath(VERSION, "model.py")] = META_MODEL_PY if meta else MODEL_PY
    for callee in callees:
        plan |= _bundle_files(callee, PurePosixPath(CALLS_FOLDER, callee.bundle.name), mode)
    # An empty file where Python would make a folder for its compiled files: Triton's poll mode takes a new file in
    # the version's folder for a change, and would load every model a second time just after the first.
    # Python then keeps the compiled code in memory only.
    code = {path.parent for path in plan if path.suffix == ".py"}
    plan |= {parent / "__pycache__": b"" for parent in code}
    return plan


def _bundle_files(source: SourceBundle, folder: PurePosixPath, mode: LinkMode) -> ModelPlan:
    """Plan the bundle's files below this folder."""
    path = source.bundle.path
    if mode == "symlink":
        return {folder: SourceFolder(path)}
    return {folder / name: SourceFile(path / name) for name in source.files}
