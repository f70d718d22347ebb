"""The server's model repository, made from the bundles."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rsrv.serve.plan import NoBundlesError, ServeError
from rsrv.settings import Settings, dump_settings
from rsrv.text import os_error
from rsrv_bundle import BundleError, read_bundle
from rsrv_bundle.mistakes import mistaken
from rsrv_gen.known import Known
from rsrv_gen.plan import BUNDLE_FOLDER, CALLS_FOLDER, CONFIG_FILE, missing_library
from rsrv_gen.run import run_in_runtime
from rsrv_gen.sources import SETTINGS_FILE, Sources, read_sources
from rsrv_gen.update import PlannedAction, RepositorySettings, steps
from rsrv_gen.write import RepositoryWriter, carried, is_alias, is_ours, open_repository


def complaints(sources: Sources, repository: Path | None = None) -> list[str]:
    """Return a line for each path without bundles and for each broken bundle.

    If `repository` has an earlier version of a broken bundle, the line says that this version serves.
    """
    lines = [*sources.unusable.values()]
    for name, reasons in sources.broken.items():
        effect = "is not served"
        if repository is not None and is_ours(repository / name):
            written = time.localtime((repository / name / CONFIG_FILE).stat().st_mtime)
            day = time.strftime("%Y-%m-%d %H:%M", written)
            effect = f"serves its earlier version of {day}, because its bundle cannot be served"
        lines.append(f"{name} {effect}: {'; '.join(reasons)}")
    return lines


def call_through_triton(sources: Sources, settings: Settings) -> bool:
    """Return True if one of the bundles calls other models through Triton."""
    by_triton = settings.meta.transport == "bls"
    facts = [source.facts for source in sources.good.values()]
    return any(bool(bundle.external or (by_triton and bundle.calls)) for bundle in facts)


def check(bundles: Sequence[Path], settings: Settings, known: Known | None = None) -> Sources:
    """Return the bundles that can be served now. Raises ServeError if no bundle can ever be served."""
    sources = read_sources(bundles, known)
    if sources.good:
        return sources
    problems = complaints(sources)
    if all(place in sources.unusable and mistaken(place) for place in bundles):
        raise NoBundlesError("\n".join(problems))
    if settings.lifecycle.mode != "dynamic" or not settings.control.enabled:
        problems.append(
            "there is no bundle that can be served, and with these settings (lifecycle.mode, control.enabled) no process "
            "watches for new bundles: put a bundle there first"
        )
        raise ServeError("\n".join(problems))
    return sources


def model_folders(repository: Path) -> set[str]:
    """Return the names of the models that a server would find in a repository."""
    with os.scandir(repository) as entries:
        return {entry.name for entry in entries if entry.is_dir()}


def watched(settings: Settings, bundles: Sequence[Path]) -> Settings:
    """Return the settings with `bundles` as the folders that the control process watches.

    If the settings already name folders, they do not change.
    """
    if settings.lifecycle.bundles:
        return settings
    places = [Path(os.path.abspath(place)) for place in bundles]
    lifecycle = settings.lifecycle.model_copy(update={"bundles": list(dict.fromkeys(places))})
    return settings.model_copy(update={"lifecycle": lifecycle})


def generate(
    repository: Path,
    sources: Sources,
    settings: Settings,
    known: Known | None = None,
    tritonserver: str | None = None,
) -> list[str]:
    """Generate a repository. Return lines about problems. Raises OSError.

    There is a line for each model that failed.

    `tritonserver` is the path of the program that will serve the repository, or None if it is unknown. A model without a valid
    bundle keeps its earlier version. If its bundle is known to be outside the given paths, the model is removed.
    """
    known = Known(repository, linked=settings.lifecycle.link == "hard") if known is None else known
    # Remove models without a bundle. But if some places cannot be read now, keep the models whose bundles may be there.
    stays = "not all of the given paths hold bundles" if sources.unusable else ""
    failed: dict[str, str] = {}
    named = {text for place in (*sources.given, *settings.lifecycle.bundles) for text in _spellings(place)}
    with open_repository(repository, settings.lifecycle.link) as writer:
        planned = steps(
            repository,
            sources,
            RepositorySettings.of(settings, tritonserver),
            stays=lambda name: stays,
            known=known,
        )
        for step in planned:
            try:
                _carry_out(step, writer, known, failed)
                stayed = step.verb in ("kept", "refused") and is_ours(repository / step.name)
                if stayed and not (
                    _may_be_given(repository / step.name, named, known)
                    and _may_serve(step.name, repository, sources)
                ):
                    writer.remove(step.name)
                if step.verb in ("new", "changed"):
                    known.made(repository / step.name, step.recipe, step.signed)
            except (OSError, ValueError) as error:
                failed[step.name] = os_error(error) if isinstance(error, OSError) else str(error)
        writer.put_file(SETTINGS_FILE, dump_settings(settings))
        known.save(sources.places)
    return [f"{repository / name}: {reason}" for name, reason in failed.items()]


def cost_of_missing_library(settings: Settings) -> str:
    """Return what the server lacks because the C library is missing, or an empty text if the library is there."""
    why = missing_library()
    if not why:
        return ""
    fronts = {settings.stub.front, *(section.front for section in settings.models.values())}
    python = (
        "all models have the Python front, which takes a process for each model, and "
        if "native" in fronts
        else ""
    )
    return f"{python}requests do not share executions, because {why}"


def _may_be_given(folder: Path, named: set[str], known: Known) -> bool:
    """Return False if a model's bundle, or one of an alias's bundles, is known to be outside the given places."""
    names = carried(folder) if is_alias(folder) else [folder.name]
    places = [_spellings(place) for name in names if (place := known.place(name)) is not None]
    return all(any({text, os.path.dirname(text)} & named for text in place) for place in places)


def _spellings(path: str | Path) -> set[str]:
    """Return three spellings of an absolute path: unchanged, with the links of its folder resolved, and with all resolved.

    The last part may itself be a link. A link into a folder that is not mounted cannot be resolved.
    """
    plain = os.path.abspath(path)
    folder, name = os.path.split(plain)
    return {plain, os.path.join(os.path.realpath(folder), name), os.path.realpath(plain)}


def _may_serve(name: str, repository: Path, sources: Sources) -> bool:
    """Return False if the earlier version of a broken bundle is also broken, for example because it is a link to the bundle."""
    folder = repository / name
    bundles = [folder / BUNDLE_FOLDER, *(folder / CALLS_FOLDER / callee for callee in carried(folder))]
    try:
        for bundle in bundles if name in sources.broken else ():
            read_bundle(bundle, digest=False)
    except (BundleError, OSError):
        return False
    return True


def compile_for(card: str, repository: Path) -> None:
    """Compile the models of a repository for a card, and print the results. Raises KeyboardInterrupt.

    The server will compile the models that could not be compiled here.
    """
    if run_in_runtime("rsrv.runtime.compile_for", repository, card) == 130:
        raise KeyboardInterrupt


def _carry_out(step: PlannedAction, writer: RepositoryWriter, known: Known, failed: dict[str, str]) -> None:
    match step.verb:
        case "refused":
            failed[step.name] = step.note.strip(" ()")
        case "unread":
            failed[step.name] = f"its bundle changed while it was read{step.note}"
        case "foreign":
            failed[step.name] = "was not made by rsrv: move it away, or rename the bundle"
        case "new" | "changed" if step.plan is not None:
            writer.put(step.name, step.plan, lambda: known.holds(step.signed))
        case "removed" if failed.keys().isdisjoint(step.carriers):
            writer.remove(step.name)
