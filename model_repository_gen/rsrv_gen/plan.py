"""Which models a repository has, and what the directory of each holds. Pure: nothing is read or written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from rsrv.settings import Transport
from rsrv_bundle import Bundle
from rsrv_gen import config
from rsrv_gen.metas import callers

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
BUNDLE_FOLDER = f"{VERSION}/bundle"
#: A meta model's directory has the bundles of its callees here, by name.
CALLS_FOLDER = f"{VERSION}/calls"

MODEL_PY = b"""from rsrv.stub.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
META_MODEL_PY = MODEL_PY.replace(b"rsrv.stub.model", b"rsrv.stub.meta_model")

#: How a bundle's files come into the repository. `hard` shares the large files, which costs no space and survives the
#: removal of the bundle, and copies the small ones; `copy` is for a repository that shall share nothing with the
#: bundles; `symlink` is one link to the whole bundle: what happens to the bundle happens to the model, half done too.
LinkMode = Literal["hard", "copy", "symlink"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The content is that of this file."""

    path: Path


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """The content is this folder, by a symbolic link."""

    path: Path


Content = bytes | SourceFile | SourceFolder
#: Path relative to the model's directory -> content. Folders come into being with their files.
ModelPlan = Mapping[PurePosixPath, Content]


@dataclass(frozen=True, slots=True)
class SourceBundle:
    """A good bundle."""

    bundle: Bundle
    #: All its files, relative to it.
    files: Sequence[PurePosixPath]


@dataclass(frozen=True, slots=True)
class RepositoryPlan:
    """What a repository holds."""

    #: Model name -> its directory; models come before the metas that may call them.
    models: Mapping[str, ModelPlan]
    #: Model that clients can't address -> the metas that call it. It may have a directory or none.
    internal: Mapping[str, tuple[str, ...]]


def plan_repository(
    sources: Mapping[str, SourceBundle],
    kept: Mapping[str, Collection[str]],
    *,
    mode: LinkMode = "hard",
    transport: Transport = "direct",
) -> RepositoryPlan:
    """The repository of these bundles, each of which may be served: what metas call is among them.

    `kept` are the metas that are not made anew, because they stay as they are or are broken, with their callees: these are
    as internal as what the others call.
    """
    calls = {name: source.bundle.manifest.meta_calls for name, source in sources.items()}
    internal = {
        callee: metas
        for callee, metas in callers({**kept, **calls}).items()
        if callee in sources and _may_be_internal(sources[callee].bundle)
    }
    models = {}
    for name in sorted(sources, key=lambda name: (sources[name].bundle.manifest.kind == "meta", name)):
        if name not in internal or transport == "bls":
            callees = [sources[callee] for callee in calls[name]]
            models[name] = plan_model(sources[name], callees, internal=name in internal, mode=mode)
    return RepositoryPlan(models, internal)


def _may_be_internal(bundle: Bundle) -> bool:
    """A meta model may not: only a broken one would call it."""
    return bundle.manifest.kind == "model" and not bundle.manifest.public


def plan_model(
    source: SourceBundle,
    callees: Sequence[SourceBundle] = (),
    *,
    internal: bool = False,
    mode: LinkMode = "hard",
) -> ModelPlan:
    """One model's directory. Raises ConfigError.

    The callees of a meta model are carried whichever way it calls them: so a change of one of them is a change of
    the meta model, which is what makes Triton load it anew.
    """
    bundle = source.bundle
    meta = bundle.manifest.kind == "meta"
    plan: dict[PurePosixPath, Content] = {
        PurePosixPath(CONFIG_FILE): config.render(
            bundle, [callee.bundle for callee in callees], internal=internal
        ),
        PurePosixPath(VERSION, "model.py"): META_MODEL_PY if meta else MODEL_PY,
        **_bundle_files(source, PurePosixPath(BUNDLE_FOLDER), mode),
    }
    for callee in callees:
        plan |= _bundle_files(callee, PurePosixPath(CALLS_FOLDER, callee.bundle.name), mode)
    # An empty file where Python wants to make a folder for its compiled files: a new file in the version's folder
    # is a change to Triton's poll mode, which would load every model a second time just after the first.
    # Python takes it in its stride and keeps the compiled code in memory only.
    code = {path.parent for path in plan if path.suffix == ".py"}
    plan |= {parent / "__pycache__": b"" for parent in code}
    return plan


def _bundle_files(source: SourceBundle, folder: PurePosixPath, mode: LinkMode) -> ModelPlan:
    """A bundle, in this folder."""
    path = source.bundle.path
    if mode == "symlink":
        return {folder: SourceFolder(path)}
    return {folder / name: SourceFile(path / name) for name in source.files}
