"""The command rsrv-gen: bundles in, a Triton model repository out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rsrv.settings import SettingsError, dump_settings, load_settings
from rsrv_gen.plan import ModelPlan
from rsrv_gen.sources import SETTINGS_FILE, Sources, read_sources
from rsrv_gen.write import RepositoryWriter, is_current, is_foreign, is_ours, open_repository, our_models


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 1 when a bundle is broken or, with --check, something would change."""
    options = _parser().parse_args(argv)
    try:
        text = options.config.read_text(encoding="utf-8") if options.config else ""
        settings = dump_settings(load_settings(text, str(options.config or SETTINGS_FILE)))
        sources = read_sources(options.bundles, options.link)
        for problem in sources.unusable:
            _complain(problem)
        for name, problems in sources.broken.items():
            _complain(f"{name} is skipped:", *problems)
        opened = nullcontext() if options.check else open_repository(options.output, options.link)
        with opened as writer:
            run = _Run(options.output, options, writer)
            run.models(sources)
            run.settings(settings)
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


class _Run:
    """One run over a repository: decides for each model, does it unless this is a check, and reports a line."""

    def __init__(
        self, repository: Path, options: argparse.Namespace, writer: RepositoryWriter | None
    ) -> None:
        self._repository = repository
        self._options = options
        self._writer = writer
        self.changes = 0
        self.failed = False

    def models(self, sources: Sources) -> None:
        for name, plan in sources.plans.items():
            self._model(name, plan)
        for name in sorted(our_models(self._repository) - set(sources.plans)):
            if name in sources.broken:
                print(f"kept       {name} (as it was before its bundle broke)")
            elif not self._options.prune:
                print(f"kept       {name} (its bundle was not given; --prune removes it)")
            elif sources.unusable:
                # A path without bundles may be a disk that is not mounted, no reason to remove its models.
                print(f"kept       {name} (not all of the given paths hold bundles)")
            else:
                self._remove(name)

    def _model(self, name: str, plan: ModelPlan) -> None:
        folder = self._repository / name
        if is_current(folder, plan, self._options.link):
            print(f"unchanged  {name}")
        elif is_foreign(folder):
            self.failed = True
            _complain(f"{folder} was not made by rsrv-gen: move it away, or rename the bundle")
        else:
            self._change("changed" if is_ours(folder) else "new", name, lambda writer: writer.put(name, plan))

    def _remove(self, name: str) -> None:
        self._change("removed", name, lambda writer: writer.remove(name))

    def settings(self, text: str) -> None:
        """The effective settings, beside the models."""
        file = self._repository / SETTINGS_FILE
        present = file.read_text(encoding="utf-8") if file.is_file() else None
        if present == text:
            print(f"unchanged  {SETTINGS_FILE}")
        else:
            verb = "new" if present is None else "changed"
            self._change(verb, SETTINGS_FILE, lambda writer: writer.put_file(SETTINGS_FILE, text))

    def _change(self, verb: str, name: str, act: Callable[[RepositoryWriter], None]) -> None:
        self.changes += 1
        try:
            if self._writer is not None:
                act(self._writer)
        except OSError as error:
            # One model that can't be written must not keep the others from it.
            self.failed = True
            _complain(f"{name}: {error}")
        else:
            print(f"{verb:<10} {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
