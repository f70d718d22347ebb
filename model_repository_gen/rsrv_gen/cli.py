"""The command rsrv-gen: bundles in, a Triton model repository out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rsrv.settings import Settings, SettingsError, dump_settings, load_settings
from rsrv_gen.plan import ModelPlan, Source, plan_repository
from rsrv_gen.sources import SETTINGS_FILE, Sources, read_sources
from rsrv_gen.write import (
    RepositoryWriter,
    carried,
    is_current,
    is_foreign,
    is_ours,
    open_repository,
    our_models,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 1 when a bundle is broken or, with --check, something would change."""
    options = _parser().parse_args(argv)
    try:
        text = options.config.read_text(encoding="utf-8") if options.config else ""
        settings = load_settings(text, str(options.config or SETTINGS_FILE))
        sources = read_sources(options.bundles)
        for problem in sources.unusable:
            _complain(problem)
        for name, problems in sources.broken.items():
            _complain(f"{name} is skipped:", *problems)
        opened = nullcontext() if options.check else open_repository(options.output, options.link)
        with opened as writer:
            run = _Run(options.output, options, writer)
            run.models(sources, settings)
            run.settings(dump_settings(settings))
    except (OSError, SettingsError) as error:
        _complain(str(error))
        return 1
    failed = bool(sources.unusable or sources.broken or run.failed)
    return int(failed or (options.check and run.changes > 0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rsrv-gen",
        description="Writes a Triton model repository: one Python-backend model for each bundle.",
        epilog="Serve it with: tritonserver --model-repository=GEN",
    )
    parser.add_argument(
        "bundles", metavar="BUNDLES", nargs="+", type=Path, help="a bundle, or a directory of bundles"
    )
    parser.add_argument(
        "-o", "--output", metavar="GEN", required=True, type=Path, help="the model repository"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help=f"settings of the runtime; all of them, with the defaults, are written to GEN/{SETTINGS_FILE}",
    )
    parser.add_argument(
        "--link",
        choices=("hard", "copy", "symlink"),
        default="hard",
        help="how the bundles' files come into GEN. hard (default): large ones are shared, or copied where that can't "
        "be; never rewrite such a file in place, but write a new one and rename it. copy: nothing is shared. "
        "symlink: one link to the bundle, for development",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="remove models that rsrv-gen made from bundles that are no longer given",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; leave with 1 if anything would change or is broken",
    )
    return parser


def _complain(first: str, *more: str) -> None:
    print(f"rsrv-gen: {first}", *(f"  {line}" for line in more), sep="\n", file=sys.stderr)


def _note(source: Source, metas: Sequence[str]) -> str:
    """What the line of a model says beside its name: what a meta model carries, and which metas alone call it."""
    if calls := source.bundle.manifest.meta_calls:
        return f" (carries {', '.join(calls)})"
    return f" (internal: called by {', '.join(metas)})" if metas else ""


class _Run:
    """One run over a repository: decides for each model, does it unless this is a check, and reports a line."""

    def __init__(
        self, repository: Path, options: argparse.Namespace, writer: RepositoryWriter | None
    ) -> None:
        self._repository = repository
        self._options = options
        self._writer = writer
        self.changes = 0
        #: Names of the models that could not be written.
        self.failed: set[str] = set()

    def models(self, sources: Sources, settings: Settings) -> None:
        stay, go = self._not_given(sources)
        plan = plan_repository(
            sources.good,
            {name: carried(self._repository / name) for name in stay},
            mode=self._options.link,
            transport=settings.meta.transport,
        )
        for name, model in plan.models.items():
            self._model(name, model, _note(sources.good[name], plan.internal.get(name, ())))
        # Only now: to a Triton that polls, the metas are there before their callees go.
        for name, metas in plan.internal.items():
            if name not in plan.models:
                self._without_directory(name, metas)
        for name, reason in stay.items():
            print(f"kept       {name} ({reason})")
        for name in go:
            self._remove(name)

    def _not_given(self, sources: Sources) -> tuple[dict[str, str], list[str]]:
        """Our models in the repository that have no good bundle: those that stay, with the reason, and the others."""
        stay, go = {}, []
        for name in sorted(our_models(self._repository) - set(sources.good)):
            if name in sources.broken:
                stay[name] = "as it was before its bundle broke"
            elif not self._options.prune:
                stay[name] = "its bundle was not given; --prune removes it"
            elif sources.unusable:
                # A path without bundles may be a disk that is not mounted, no reason to remove its models.
                stay[name] = "not all of the given paths hold bundles"
            else:
                go.append(name)
        return stay, go

    def _model(self, name: str, plan: ModelPlan, note: str) -> None:
        folder = self._repository / name
        if is_current(folder, plan, self._options.link):
            print(f"unchanged  {name}{note}")
        elif is_foreign(folder):
            self.failed.add(name)
            _complain(f"{folder} was not made by rsrv-gen: move it away, or rename the bundle")
        else:
            verb = "changed" if is_ours(folder) else "new"
            self._change(verb, name, lambda writer: writer.put(name, plan), note)

    def _without_directory(self, name: str, metas: Sequence[str]) -> None:
        """A model that its metas carry, and that Triton does not know."""
        called = f"called by {', '.join(metas)}"
        if not is_ours(self._repository / name):
            print(f"internal   {name} ({called})")
        elif self.failed.isdisjoint(metas):
            self._remove(name, f" (internal: {called}; public: true in its manifest would keep it)")
        else:
            print(f"kept       {name} (not every model that is to carry it could be written)")

    def _remove(self, name: str, note: str = "") -> None:
        self._change("removed", name, lambda writer: writer.remove(name), note)

    def settings(self, text: str) -> None:
        """The effective settings, beside the models."""
        file = self._repository / SETTINGS_FILE
        present = file.read_text(encoding="utf-8") if file.is_file() else None
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
            # One model that can't be written must not keep the others from it.
            self.failed.add(name)
            _complain(f"{name}: {error}")
        else:
            print(f"{verb:<10} {name}{note}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
