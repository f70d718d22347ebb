"""The bundles below the given paths: find, read and verify them. Writes nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rsrv.native import LIBRARY
from rsrv.settings import Settings
from rsrv.text import nearest
from rsrv_bundle import Bundle, BundleError, find_bundles, read_bundle
from rsrv_bundle.hooks import check_hooks
from rsrv_bundle.mistakes import mistaken, other_models
from rsrv_bundle.modules import SignatureReader, check_signatures
from rsrv_bundle.reader import checksums
from rsrv_gen import config
from rsrv_gen.known import Known
from rsrv_gen.metas import BundleFacts, unusable_metas
from rsrv_gen.plan import SourceBundle

#: File with the settings, next to the models.
SETTINGS_FILE = "rsrv.yaml"
#: Maximum number of new bundles that are kept in memory from their check to their plan. A bundle takes about 30 kB, and another
#: 30 kB for each hundred weights.
_MAX_KEPT_BUNDLES = 2000


@dataclass
class Sources:
    """Bundles below the given paths, valid and broken."""

    #: The given paths.
    given: list[Path] = field(default_factory=list)
    #: Bundles that can be served, together with the models that they call, by model name.
    good: dict[str, SourceBundle] = field(default_factory=dict)
    #: Reasons why a model cannot be served, by its name.
    broken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Reasons why paths have no bundles, by path. Each reason contains the path. If this is not empty, bundles may be missing
    #: in `good` and `broken`.
    unusable: dict[Path, str] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, Path]:
        """Paths of the valid bundles, by name."""
        return {name: source.path for name, source in self.good.items()}


def unserved_models(sources: Sources) -> list[str]:
    """Return a line for each model in the given directories that is not a bundle. Skip directories that cannot be listed."""
    lines: list[str] = []
    for path in sources.given:
        if path not in sources.unusable and not (path / "manifest.yaml").is_file():
            with suppress(OSError):
                lines += other_models(path, {*sources.good, *sources.broken})
    return lines


def read_sources(paths: Iterable[Path], known: Known | None = None) -> Sources:
    """Find the bundles below the paths, and read the bundles that have no valid note in `known`.

    A path is a bundle or a directory of bundles.
    """
    known = Known() if known is None else known
    sources = Sources(given=[*paths])
    places, sources.unusable = find_places(sources.given)
    room = _MAX_KEPT_BUNDLES
    for name, same in sorted(places.items()):
        try:
            sources.good[name] = _read(name, same, known, room)
            if (checked := sources.good[name].checked) is not None:
                room -= 1 + len(checked.weights) // 100
        except (BundleError, config.ConfigError, OSError) as error:
            sources.broken[name] = error.problems if isinstance(error, BundleError) else (str(error),)
    bundles = {name: source.facts for name, source in sources.good.items()}
    for name, problems in unusable_metas(bundles, sources.broken).items():
        sources.broken[name] = problems
        del sources.good[name]
    return sources


def find_places(paths: Iterable[Path]) -> tuple[dict[str, list[Path]], dict[Path, str]]:
    """Find the bundles below the paths, and read none.

    Return the absolute paths of the bundles by model name, and the reasons why paths have no bundles (`Sources.unusable`).
    """
    places: dict[str, list[Path]] = {}
    unusable: dict[Path, str] = {}
    for path in paths:
        # Make the path absolute, but do not resolve links: the directory's name is the model's name, even if it is a
        # link.
        place = Path(os.path.abspath(path))
        try:
            is_bundle = (place / "manifest.yaml").is_file()
            paths_here = [place] if is_bundle else find_bundles(place) if place.is_dir() else []
            if not paths_here:
                why = mistaken(place) or (
                    "neither a bundle (no manifest.yaml) nor a directory of bundles; export a model into it with "
                    "`rsrv-bundle export`"
                )
                unusable[path] = f"{path}: {why}"
        except OSError as error:
            unusable[path] = f"{path}: {error.strerror}"
            continue
        for bundle in paths_here:
            if bundle not in places.setdefault(bundle.name, []):
                places[bundle.name].append(bundle)
    return places, unusable


def _read(name: str, places: Sequence[Path], known: Known, room: int) -> SourceBundle:
    if name in (SETTINGS_FILE, LIBRARY.name):
        raise BundleError(f"{name} is the name of a file of the repository; rename the bundle")
    if len(places) > 1:
        raise BundleError(["there are several bundles of this name; rename all but one:", *map(str, places)])
    signed, bundle = known.sign(places[0]), None
    if (facts := known.facts(places[0], signed)) is None:
        bundle, facts = _check(places[0])
        signed = known.learn(places[0], signed, facts)
    checked = bundle if signed is not None and room > 0 else None
    return SourceBundle(places[0], signed, facts, checked, known.linked)


def _check(path: Path) -> tuple[Bundle, BundleFacts]:
    """Read a bundle completely, except its weights and modules. Raises BundleError, ConfigError, OSError."""
    bundle = read_bundle(path, digest=False)
    if bundle.hooks is not None:
        check_hooks(bundle.hooks, bundle.manifest.kind)
    # Render the configuration only to find out whether Triton accepts it, because no meta model may call a model that Triton
    # refuses.
    config.render(bundle)
    return bundle, BundleFacts.of(bundle)


def unknown_models(settings: Settings, known: Collection[str]) -> list[str]:
    """Return a line for each model in the settings whose name is not `known`. The line suggests the most similar known name."""
    return [
        f"models.{name}: no bundle has this name{nearest(name, sorted(known))}"
        for name in settings.models
        if name not in known
    ]


def verify(name: str, sources: Sources, read_signature: SignatureReader | None = None) -> None:
    """Compare the weights and modules of a good model, and of the models that it calls, with their checksums.

    Only files with a checksum are read. If `read_signature` is given, also check that the inputs, outputs and weights of the
    modules match the manifest. Raises InspectorError, and BundleError if a file does not match the manifest.
    """
    for bundle in _made_of(name, sources):
        try:
            if bundle.manifest.sha256:
                checksums(bundle)
            if read_signature is not None:
                check_signatures(bundle, read_signature)
        except BundleError as error:
            if bundle.name == name:
                raise
            raise BundleError(
                f"model '{bundle.name}', which it calls: {line}" for line in error.problems
            ) from error


def read_unverified(name: str, sources: Sources) -> str:
    """Read the weights and modules without checksums of a model and of the models that it calls. Return their digest.

    The digest is empty if there are no such files. Raises BundleError if a file is gone.
    """
    unverified = [bundle for bundle in _made_of(name, sources) if not bundle.manifest.sha256]
    sums = [(bundle.name, checksums(bundle)) for bundle in unverified if bundle.summed_files]
    return hashlib.sha256(repr(sums).encode()).hexdigest() if sums else ""


def _made_of(name: str, sources: Sources) -> list[Bundle]:
    source = sources.good[name]
    return [bundle.read() for bundle in (source, *(sources.good[callee] for callee in source.facts.calls))]
