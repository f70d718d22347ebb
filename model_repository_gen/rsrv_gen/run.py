"""The command rsrv-gen: plan the repository, carry the plan out, and report a line for each model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rsrv import progress
from rsrv.explain import YamlError, read_yaml
from rsrv.settings import LifecycleSection, Settings, SettingsError, dump_settings, load_settings
from rsrv_bundle import BundleError
from rsrv_gen.sources import SETTINGS_FILE, Sources, read_sources, verify
from rsrv_gen.update import PlannedAction, steps
from rsrv_gen.write import RepositoryWriter, open_repository, our_models


def run(options: argparse.Namespace) -> int:
    """Bring the repository up to date. Returns the exit status, as `cli.main`."""
    try:
        text = options.config.read_text(encoding="utf-8") if options.config else ""
        settings = _with_places(load_settings(text, str(options.config or SETTINGS_FILE)), options)
        sources = read_sources(options.bundles)
        for problem in sources.unusable:
            _complain(problem)
        for name, problems in sources.broken.items():
            _complain(f"{name} is skipped:", *problems)
        opened = nullcontext() if options.check else open_repository(options.output, settings.lifecycle.link)
        with opened as writer:
            for name in writer.lost if writer else ():
                _complain(
                    f"{name}: a server ended while it loaded this version; the previous version is no longer kept"
                )
            run = _Generator(options.output, options, writer)
            run.models(sources, settings)
            run.settings(settings)
    except (OSError, SettingsError) as error:
        _complain(str(error))
        return 1
    failed = bool(sources.unusable or sources.broken or run.failed)
    return int(failed or (options.check and run.changes > 0))


def _with_places(settings: Settings, options: argparse.Namespace) -> Settings:
    """Return the settings with the link mode and, unless they name them, the folders of the bundles."""
    given = [Path(os.path.abspath(path)) for path in options.bundles]
    if not settings.lifecycle.bundles:
        file = options.output / SETTINGS_FILE
        keep = file.is_file() and not options.prune
        recorded = _recorded(file.read_text(encoding="utf-8"))["bundles"] if keep else []
        # A missing folder is more likely a typing error than a disk that is mounted later.
        new = [path for path in given if path.is_dir() and not _covered(path, recorded)]
        old = [path for path in recorded if path in new or not _covered(path, new)]
        settings = _with_lifecycle(settings, bundles=list(dict.fromkeys([*old, *new])))
    for path in given:
        if path.is_dir() and not _covered(path, settings.lifecycle.bundles):
            _complain(f"{path} will not be watched: lifecycle.bundles names other folders")
    return _with_lifecycle(settings, link=options.link) if options.link else settings


def _with_lifecycle(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"lifecycle": settings.lifecycle.model_copy(update=changes)})


def _recorded(text: str) -> dict[str, Any]:
    """Return the folders and the link mode of the repository with these settings; the environment does not count."""
    try:
        section = LifecycleSection(**read_yaml(text, of="sections").get("lifecycle", {}))
    except (YamlError, TypeError, ValidationError):
        section = LifecycleSection()
    return {"bundles": section.bundles, "link": section.link}


def _covered(path: Path, places: Sequence[Path]) -> bool:
    return path in places or path.parent in places


def _complain(first: str, *more: str) -> None:
    print(f"rsrv-gen: {first}", *(f"  {line}" for line in more), sep="\n", file=sys.stderr)


class _Generator:
    """Carry out the planned actions, unless this is a check, and report a line for each model."""

    def __init__(
        self, repository: Path, options: argparse.Namespace, writer: RepositoryWriter | None
    ) -> None:
        self._repository = repository
        self._options = options
        self._writer = writer
        self.changes = 0
        #: models that could not be written
        self.failed: set[str] = set()

    def models(self, sources: Sources, settings: Settings) -> None:
        def stays(name: str) -> str:
            if not self._options.prune:
                return "its bundle was not given; --prune removes it"
            # A path without bundles may be a disk that is not mounted: its models stay.
            return "not all of the given paths hold bundles" if sources.unusable else ""

        planned = steps(
            self._repository,
            sources,
            link=settings.lifecycle.link,
            transport=settings.meta.transport,
            stays=stays,
        )
        # Each has an action.
        names = our_models(self._repository) | sources.good.keys()
        with progress.steps("rsrv-gen", len(names)) as shown:
            for step in planned:
                # The target of a symbolic link may change without an action.
                written = step.verb in ("new", "changed") or settings.lifecycle.link == "symlink"
                if not (written and step.plan is not None and self._is_torn(step.name, sources)):
                    self._carry_out(step)
                shown.step(step.name)

    def _is_torn(self, name: str, sources: Sources) -> bool:
        try:
            verify(name, sources)
        except BundleError as error:
            self.failed.add(name)
            _complain(f"{name} is skipped:", *error.problems)
            return True
        return False

    def _carry_out(self, step: PlannedAction) -> None:
        name, plan = step.name, step.plan
        match step.verb:
            case "foreign":
                self.failed.add(name)
                _complain(
                    f"{self._repository / name} was not made by rsrv-gen: move it away, or rename the bundle"
                )
            case "new" | "changed" if plan is not None:
                self._change(step.verb, name, lambda writer: writer.put(name, plan).forget(), step.note)
            case "removed" if not self.failed.isdisjoint(step.carriers):
                print(f"kept       {name} (a meta model that shall carry it could not be written)")
            case "removed":
                self._change("removed", name, lambda writer: writer.remove(name), step.note)
            case _:
                print(f"{step.verb:<10} {name}{step.note}")

    def settings(self, settings: Settings) -> None:
        """Write the effective settings beside the models."""
        file = self._repository / SETTINGS_FILE
        present = file.read_text(encoding="utf-8") if file.is_file() else None
        if self._options.check and present is not None:
            # The folders of the bundles may differ from machine to machine; only the resulting models count.
            settings = _with_lifecycle(settings, **_recorded(present))
        text = dump_settings(settings)
        if present == text:
            print(f"unchanged  {SETTINGS_FILE}")
        else:
            verb = "new" if present is None else "changed"
            self._change(verb, SETTINGS_FILE, lambda writer: writer.put_file(SETTINGS_FILE, text))

    def _change(self, verb: str, name: str, act: Callable[[RepositoryWriter], None], note: str = "") -> None:
        self.changes += 1
        try:
            if self._writer is not None:
                act(self._writer)
        except OSError as error:
            # A model that cannot be written must not stop the others.
            self.failed.add(name)
            _complain(f"{name}: {error}")
        else:
            print(f"{verb:<10} {name}{note}", flush=True)
