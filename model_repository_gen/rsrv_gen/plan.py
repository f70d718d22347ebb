"""What the directory of one model holds. Pure: names and contents, nothing is read or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from rsrv_bundle import Bundle
from rsrv_gen import config

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
BUNDLE_FOLDER = f"{VERSION}/bundle"

MODEL_PY = b"""from rsrv.stub.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""

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


def plan_model(bundle: Bundle, files: Sequence[PurePosixPath], mode: LinkMode = "hard") -> ModelPlan:
    """The model's directory; `files` are those of the bundle, relative to it. Raises ConfigError."""
    plan: dict[PurePosixPath, Content] = {
        PurePosixPath(CONFIG_FILE): config.render(bundle),
        PurePosixPath(VERSION, "model.py"): MODEL_PY,
    }
    folder = PurePosixPath(BUNDLE_FOLDER)
    if mode == "symlink":
        plan[folder] = SourceFolder(bundle.path)
    else:
        plan |= {folder / name: SourceFile(bundle.path / name) for name in files}
    # An empty file where Python wants to make a folder for its compiled files: a new file in the version's folder
    # is a change to Triton's poll mode, which would load every model a second time just after the first.
    # Python takes it in its stride and keeps the compiled code in memory only.
    code = {path.parent for path in plan if path.suffix == ".py"}
    plan |= {parent / "__pycache__": b"" for parent in code}
    return plan
