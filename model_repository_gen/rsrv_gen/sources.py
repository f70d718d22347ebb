"""Finding and reading the bundles that rsrv-gen was given. Reads, and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rsrv_bundle import Bundle, BundleError, find_bundles, read_bundle
from rsrv_gen.config import ConfigError
from rsrv_gen.plan import LinkMode, ModelPlan, plan_model

#: The settings beside the models; a model can't have this name.
SETTINGS_FILE = "rsrv.yaml"


@dataclass
class Sources:
    """What the command line's paths came to."""

    #: Model name -> its planned directory.
    plans: dict[str, ModelPlan] = field(default_factory=dict)
    #: Model name -> why there is no plan for it.
    broken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Paths that hold no bundle at all: part of the input is not known.
    unusable: list[str] = field(default_factory=list)


def read_sources(paths: Iterable[Path], mode: LinkMode) -> Sources:
    """Plans every bundle below the paths; a path is a bundle, or a directory of bundles."""
    sources = Sources()
    places: dict[str, list[Path]] = {}
    for path in paths:
        # Absolute, but links stay: the directory's name is the model's name, also when it is a link.
        place = Path(os.path.abspath(path))
        try:
            found = [place] if (place / "manifest.yaml").is_file() else find_bundles(place)
        except OSError as error:
            sources.unusable.append(f"{path}: {error.strerror}")
            continue
        if not found:
            sources.unusable.append(f"{path}: neither a bundle (no manifest.yaml) nor a directory of bundles")
        for bundle in found:
            if bundle not in places.setdefault(bundle.name, []):
                places[bundle.name].append(bundle)
    for name, same in sorted(places.items()):
        try:
            sources.plans[name] = _plan(name, same, mode)
        except BundleError as error:
            sources.broken[name] = error.problems
        except (ConfigError, OSError) as error:
            sources.broken[name] = (str(error),)
    return sources


def _plan(name: str, places: Sequence[Path], mode: LinkMode) -> ModelPlan:
    if name == SETTINGS_FILE:
        raise BundleError(f"{name} is the name of the settings file; rename the bundle")
    if len(places) > 1:
        raise BundleError(["there are several bundles of this name; rename all but one:", *map(str, places)])
    # The digest would read every weight; nothing here needs it.
    bundle: Bundle = read_bundle(places[0], digest=False)
    return plan_model(bundle, bundle_files(bundle.path), mode)


def bundle_files(bundle: Path) -> list[PurePosixPath]:
    """Every file of a bundle that was read, relative to it, without Python's caches."""
    files: list[PurePosixPath] = []
    for parent, folders, names in os.walk(bundle):
        folders[:] = sorted(folder for folder in folders if folder != "__pycache__")
        relative = Path(parent).relative_to(bundle)
        files += [PurePosixPath(relative / name) for name in sorted(names) if name != "__pycache__"]
    return files
