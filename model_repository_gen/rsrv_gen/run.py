"""The command rsrv-gen: plan the repository, carry the plan out, and report a line for each model."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rsrv import progress
from rsrv.command import Terminated, put
from rsrv.explain import YamlError, read_yaml
from rsrv.settings import LifecycleSection, Settings, SettingsError, dump_settings, read_settings
from rsrv.text import os_error
from rsrv.triton_command_line import unusable_characters
from rsrv_bundle import BundleError
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import SignatureReader
from rsrv_gen.known import Known
from rsrv_gen.sources import (
    SETTINGS_FILE,
    Sources,
    read_sources,
    unknown_models,
    unserved_models,
    verify,
)
from rsrv_gen.update import PlannedAction, RepositorySettings, steps
from rsrv_gen.write import RepositoryWriter, open_repository, our_models, refusal


def run(options: argparse.Namespace) -> int:
    """Bring the repository up to date. Return the exit status, as `cli.main` does."""
    actions: list[dict[str, str]] = []
    done = _update(options, actions)
    if options.json:
        put(json.dumps(actions, indent=2))
    if isinstance(done, int):
        return done
    failed = bool(done.failed or done.refused)
    if options.compile_for:
        arguments = options.output, options.compile_for
        failed |= run_in_runtime("rsrv.runtime.compile_for", *arguments, quiet=options.json) != 0
    return int(failed or (options.check and done.changes > 0))


def _update(options: argparse.Namespace, actions: list[dict[str, str]]) -> _Generator | int:
    """Bring the repository up to date, and append the actions to `actions`.

    Return the generator with its results. If nothing can be served, or an error ended the update, return the exit status.
    """
    try:
        settings = read_settings(options.config)
        output = Path(os.path.abspath(options.output))
        if characters := unusable_characters(output):
            _complain(
                f"{output}: tritonserver cannot load models from a path with the characters {characters}. Up to release "
                "25.08 it hangs without a message; characters that are not ASCII fail on all releases. Choose another "
                "folder with -o, or give tritonserver a link whose path is free of them"
            )
        known = Known(output, linked=(options.link or settings.lifecycle.link) == "hard")
        sources = read_sources(options.bundles, known)
        for problem in sources.unusable.values():
            _complain(problem)
        for name, problems in sources.broken.items():
            _complain(f"{name} is skipped:", *problems)
        for line in unserved_models(sources):
            _complain(line)
        if not sources.good:
            return 1 if sources.broken else 2
        present = {path.name for path in options.output.glob("*/")}
        if unknown := unknown_models(settings, {*sources.good, *sources.broken, *present}):
            _complain(*(f"{options.config or 'the environment'}: {line}" for line in unknown))
            return 1
        settings = _with_places(settings, options, sources)
        made = [] if options.check else [path for path in (output, *output.parents) if not path.exists()]
        opened = nullcontext() if options.check else open_repository(options.output, settings.lifecycle.link)
        with opened as writer, closing(Inspector({})) as inspector:
            for name in writer.lost if writer else ():
                _complain(
                    f"{name}: a server ended while it loaded this version; the previous version is no longer kept"
                )
            reader = inspector if find_spec("jaxlib") is not None else None
            if reader is None:
                _complain(
                    "jaxlib is not installed, so rsrv-gen does not check the modules. The server checks them when it loads them"
                )
            done = _Generator(options.output, options, writer, reader, actions)
            done.models(sources, settings, known)
            served = not sources.good.keys() <= done.failed
            # If the run made no model, remove everything: a wrong path must not become a watched folder.
            if served:
                done.settings(settings)
                if writer is not None:
                    known.save(sources.places)
        if not served:
            for path in made:
                path.rmdir()
            return 1
    except (OSError, SettingsError) as error:
        _complain(os_error(error) if isinstance(error, OSError) else str(error))
        return 1
    return done


def run_in_runtime(module: str, *arguments: object, quiet: bool = False) -> int:
    """Run a module as a program with the runtime's interpreter, because only that interpreter must have jax.

    If `quiet`, its output goes to stderr. Return the exit status.
    """
    python = os.environ.get("RSRV_RUNTIME_PYTHON") or sys.executable
    command = [python, "-P", "-m", module, *map(str, arguments)]
    try:
        process = subprocess.Popen(command, stdout=sys.stderr if quiet else None)
    except OSError as error:
        _complain(
            f"{python} cannot be started: {error.strerror}. RSRV_RUNTIME_PYTHON must name a Python where "
            "'rsrv[serve]' is installed"
        )
        return 1
    try:
        return process.wait()
    except KeyboardInterrupt as interrupt:
        # Ctrl-C also reaches the program, which then finishes the current module and writes its results. SIGTERM does not
        # reach the program, so send it SIGINT.
        if isinstance(interrupt, Terminated):
            process.send_signal(signal.SIGINT)
        return process.wait()


def _with_places(settings: Settings, options: argparse.Namespace, sources: Sources) -> Settings:
    """Return the settings with the link mode of the command line, and with the bundles' folders unless the settings name some."""
    # Leave out folders without bundles: such a folder is more likely a typing error than a disk that is mounted later.
    places = [Path(os.path.abspath(path)) for path in options.bundles if path not in sources.unusable]
    if not settings.lifecycle.bundles:
        file = options.output / SETTINGS_FILE
        before = [] if options.prune else recorded(file).bundles
        new = [path for path in places if not covered(path, before)]
        old = [path for path in before if path in new or not covered(path, new)]
        settings = _with_lifecycle(settings, bundles=list(dict.fromkeys([*old, *new])))
    for path in places:
        if not covered(path, settings.lifecycle.bundles):
            _complain(f"{path} will not be watched: lifecycle.bundles names other folders")
    return _with_lifecycle(settings, link=options.link) if options.link else settings


def _with_lifecycle(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"lifecycle": settings.lifecycle.model_copy(update=changes)})


def recorded(file: Path) -> LifecycleSection:
    """Return the section `lifecycle` of a repository's settings. Environment variables do not change it.

    Return the defaults if the file is missing or damaged.
    """
    try:
        text = file.read_text(encoding="utf-8")
        return LifecycleSection(**read_yaml(text, of="sections").get("lifecycle", {}))
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, YamlError, TypeError, ValidationError):
        return LifecycleSection()


def covered(path: Path, places: Sequence[Path]) -> bool:
    """Return whether a folder is one of the places, or a bundle in one of the places."""
    return path in places or path.parent in places


def _complain(first: str, *more: str) -> None:
    put("\n".join((f"rsrv-gen: {first}", *(f"  {line}" for line in more))), sys.stderr)


class _Generator:
    """Carry out the planned actions, unless this is a check, and report a line for each model."""

    def __init__(
        self,
        repository: Path,
        options: argparse.Namespace,
        writer: RepositoryWriter | None,
        read_signature: SignatureReader | None,
        actions: list[dict[str, str]],
    ) -> None:
        self._repository = repository
        self._options = options
        self._writer = writer
        self._read_signature = read_signature
        self.changes = 0
        #: Actions for --json.
        self._actions = actions
        #: True if a given path or bundle is unusable.
        self.refused = False
        #: Models that could not be written.
        self.failed: set[str] = set()

    def models(self, sources: Sources, settings: Settings, known: Known) -> None:
        def stays(name: str) -> str:
            if not self._options.prune:
                return "its bundle was not given; --prune removes the model"
            # A path without bundles may be a disk that is not mounted, so keep its models.
            return "not all of the given paths hold bundles" if sources.unusable else ""

        self.refused = bool(sources.unusable or sources.broken)
        planned = steps(
            self._repository,
            sources,
            RepositorySettings.of(settings, shutil.which("tritonserver")),
            stays=stays,
            known=known,
        )
        # The plan has at most one action for each of these models, so their number is the length of the progress bar.
        names = our_models(self._repository) | sources.good.keys() | settings.aliases.keys()
        with progress.steps("rsrv-gen", len(names)) as shown:
            for step in planned:
                written = step.verb in ("new", "changed")
                if not (written and step.plan is not None and self._is_wrong(step, sources)):
                    self._carry_out(step, known)
                    if written and step.name not in self.failed:
                        known.made(self._repository / step.name, step.recipe, step.signed)
                shown.step(step.name)

    def _is_wrong(self, step: PlannedAction, sources: Sources) -> bool:
        name = step.name
        if step.targets:  # The targets of an alias were verified before the alias.
            if wrong := self.failed.intersection(step.targets):
                self.failed.add(name)
                _complain(f"{name} is skipped: an alias of {', '.join(sorted(wrong))}, which is broken")
            return bool(wrong)
        try:
            verify(name, sources, self._read_signature)
        except (BundleError, InspectorError) as error:
            self.failed.add(name)
            _complain(f"{name} is skipped:", *str(error).splitlines())
            return True
        return False

    def _carry_out(self, step: PlannedAction, known: Known) -> None:
        name, plan = step.name, step.plan
        match step.verb:
            case "foreign":
                self.failed.add(name)
                _complain(refusal(self._repository / name))
            case "refused":
                self.failed.add(name)
                _complain(f"{name} is skipped: {step.note.strip(' ()')}")
            case "unread":
                self.failed.add(name)
                _complain(f"{name} is skipped: it changed while it was read{step.note}")
            case "new" | "changed" if plan is not None:

                def put_model(writer: RepositoryWriter) -> None:
                    writer.put(name, plan, lambda: known.holds(step.signed))

                self._change(step.verb, name, put_model, step.note)
            case "removed" if not self.failed.isdisjoint(step.carriers):
                self._say("kept", name, " (a meta model that must carry it could not be written)")
            case "removed":
                self._change("removed", name, lambda writer: writer.remove(name), step.note)
            case _:
                self._say(step.verb, name, step.note)

    def settings(self, settings: Settings) -> None:
        """Write the effective settings beside the models."""
        file = self._repository / SETTINGS_FILE
        present = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
        if self._options.check and present is not None:
            # A check compares the resulting models. Ignore the link mode and the folders of the bundles, because the folders
            # may differ from machine to machine.
            before = recorded(file)
            settings = _with_lifecycle(settings, bundles=before.bundles, link=before.link)
        text = dump_settings(settings)
        if present == text:
            self._say("unchanged", SETTINGS_FILE)
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
            self._say(verb, name, note)

    def _say(self, verb: str, name: str, note: str = "") -> None:
        if self._options.json:
            self._actions.append({"action": verb, "name": name, "note": note.strip(" ()")})
        else:
            put(f"{verb:<10} {name}{note}")
