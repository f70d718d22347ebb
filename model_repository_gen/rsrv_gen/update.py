"""Comparison of a repository with its bundles, and its update. Both the command and a running server use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from rsrv.settings import Front, ModelSection, Settings, Shares, Transport
from rsrv_bundle import BundleError
from rsrv_gen.aliases import AliasRecipe, plan_aliases
from rsrv_gen.config import ConfigError
from rsrv_gen.known import Known
from rsrv_gen.plan import LinkMode, ModelPlan, Recipe, SourceBundle, plan_repository
from rsrv_gen.signatures import Signature
from rsrv_gen.sources import Sources, read_sources, read_unverified, verify
from rsrv_gen.staging import Replaced
from rsrv_gen.write import (
    carried,
    is_alias,
    is_current,
    is_foreign,
    is_ours,
    open_repository,
    our_models,
    refusal,
)

#: `foreign`: the model's place is taken by a directory that rsrv-gen did not make. `internal`: the model has no directory,
#: because only meta models call it. `unread`: a bundle changed during the run, and cannot be read any more. `refused`: an
#: alias that cannot be served.
Verb = Literal["unchanged", "new", "changed", "removed", "kept", "internal", "foreign", "unread", "refused"]


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """Planned action for one model of a repository."""

    name: str
    verb: Verb
    #: Plan of the directory, or None if there is nothing to write.
    plan: ModelPlan | None = None
    #: Text after the name: empty, or " (...)".
    note: str = ""
    #: Digest of the model's recipe, for `Known`.
    recipe: str = ""
    #: Signatures of the copied bundles by path. They were taken before the bundles were read for the plan.
    signed: Mapping[Path, Signature] = field(default_factory=dict)
    #: Meta models that carry an internal model. They must be in place before the internal model's directory is removed.
    carriers: tuple[str, ...] = ()
    #: Targets of an alias.
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """The settings from which a repository is made."""

    link: LinkMode = "hard"
    transport: Transport = "direct"
    models: Mapping[str, ModelSection] = field(default_factory=dict)
    aliases: Mapping[str, Shares] = field(default_factory=dict)
    front: Front = "python"
    #: Path of the program that serves the repository, or None if it is not known.
    tritonserver: str | None = None

    @classmethod
    def of(cls, settings: Settings, tritonserver: str | None) -> RepositorySettings:
        return cls(
            settings.lifecycle.link,
            settings.meta.transport,
            settings.models,
            settings.aliases,
            settings.stub.front,
            tritonserver,
        )


def steps(
    repository: Path,
    sources: Sources,
    settings: RepositorySettings,
    *,
    stays: Callable[[str], str],
    known: Known,
    only: Collection[str] | None = None,
) -> Iterator[PlannedAction]:
    """Yield the actions that bring the repository up to date, in their order.

    `stays` returns why a model without a bundle is not removed, or an empty text if it is removed. `only` limits the models
    that are compared; None means all. This writes nothing in the repository. Each action is decided when it is requested.
    """
    stay, go = {}, []
    ours = our_models(repository)
    known_aliases, refused = plan_aliases(
        settings.aliases, sources.good, sources.broken, settings.models, settings.link, ours
    )
    for name in sorted(ours - {*sources.good, *known_aliases, *refused}):
        if is_alias(repository / name):
            go.append(name)
            continue
        reason = "as it was before its bundle broke" if name in sources.broken else stays(name)
        if reason:
            stay[name] = reason
        else:
            go.append(name)
    plan = plan_repository(
        sources.good,
        mode=settings.link,
        transport=settings.transport,
        models=settings.models,
        front=settings.front,
        tritonserver=settings.tritonserver,
    )

    def is_compared(name: str) -> bool:
        return only is None or name in only

    for name, recipe in plan.models.items():
        if is_compared(name):
            note = _note(sources.good[name], plan.internal.get(name, ()))
            if recipe.choice:
                note += f" ({recipe.choice})"
            yield _compared(repository / name, recipe, note, known)
    for name, alias in known_aliases.items():
        if is_compared(name):
            without = ", ".join(alias.shares.keys() - alias.targets.keys())
            note = f" (without {without}: a broken bundle)" if without else ""
            yield replace(_compared(repository / name, alias, note, known), targets=tuple(alias.targets))
    for name, reason in refused.items():
        if is_compared(name) or is_compared(name.removeprefix("aliases.")):
            yield PlannedAction(name, "refused", note=f" ({reason})")
    # Remove models last: for a Triton that polls, the meta models must be in place before their callees are removed.
    for name, metas in plan.internal.items():
        if is_compared(name) and name not in plan.models:
            yield _without_directory(repository / name, metas)
    for name, reason in stay.items():
        if is_compared(name):
            yield PlannedAction(name, "kept", note=f" ({reason})")
    for name in go:
        if is_compared(name):
            yield PlannedAction(name, "removed")


def _compared(folder: Path, recipe: Recipe | AliasRecipe, note: str, known: Known) -> PlannedAction:
    """Compare a model's directory with its recipe."""
    name = folder.name
    try:
        digest = recipe.digest()
        if known.is_current(folder, digest):
            return PlannedAction(name, "unchanged", note=note, recipe=digest)
        if isinstance(recipe, AliasRecipe):
            made_of = [*recipe.targets.values()]
        else:
            made_of = [recipe.source, *recipe.callees]
        signed = {source.path: known.sign(source.path) for source in made_of}
        if any(signed.get(source.path) != source.signature for source in made_of):
            digest = ""
        plan = recipe.plan()
    except (BundleError, ConfigError, OSError) as error:
        if isinstance(recipe, AliasRecipe) and isinstance(error, ConfigError):
            return PlannedAction(name, "refused", note=f" ({error})")
        return PlannedAction(name, "unread", note=f" ({error})")
    try:
        current = is_current(folder, plan, recipe.mode)
    except OSError:
        current = False  # The directory cannot be read. The attempt to replace it will report the reason.
    if current:
        known.made(folder, digest, signed)
        return PlannedAction(name, "unchanged", plan, note, digest, signed)
    if is_foreign(folder):
        return PlannedAction(name, "foreign", note=note)
    return PlannedAction(name, "changed" if is_ours(folder) else "new", plan, note, digest, signed)


def _without_directory(folder: Path, metas: tuple[str, ...]) -> PlannedAction:
    """Plan the action for an internal model, which Triton does not know."""
    called = f"called by {', '.join(metas)}" if metas else "no meta model calls it"
    if not is_ours(folder):
        return PlannedAction(folder.name, "internal", note=f" ({called})", carriers=metas)
    note = f" (its manifest says internal: clients cannot address it any more; {called})"
    return PlannedAction(folder.name, "removed", note=note, carriers=metas)


def _note(source: SourceBundle, metas: Sequence[str]) -> str:
    """Return the note after a model's name: the callees that it carries, or the callers of an internal model."""
    if source.facts.calls:
        return f" (contains {', '.join(source.facts.calls)})"
    return f" (internal: called by {', '.join(metas)})" if metas else ""


# --- results ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """The model was written. `replaced` can restore the previous version."""

    replaced: Replaced


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The model equals its bundle."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The model has no bundle. It is removed once the meta models `carriers`, which carry it, are in place."""

    carriers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retained:
    """The model has no bundle and is kept."""


@dataclass(frozen=True, slots=True)
class Later:
    """The model was not changed because one of its bundles is not ready to be read."""


@dataclass(frozen=True, slots=True)
class Unsure:
    """The model was not changed, because its files have no checksums. A second reading must give the same digest as the first."""

    digest: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The bundle is broken, a foreign directory is in the model's place, or the alias cannot be served."""

    reason: str


@dataclass(frozen=True, slots=True)
class Torn:
    """The model was not changed because a file does not match its bundle's manifest."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be written."""

    reason: str


Result = Written | Unchanged | Gone | Retained | Later | Unsure | Broken | Torn | Failed
R = TypeVar("R", Written, Unchanged, Gone, Retained, Later, Unsure, Broken, Torn, Failed)


@dataclass
class Update:
    """The result of each model that was compared, and of each broken bundle."""

    #: Names of all bundles.
    bundles: set[str] = field(default_factory=set)
    #: Reasons why folders have no bundles.
    unusable: list[str] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    #: Aliases that were not compared, so that no result says whether they are refused.
    uncompared: set[str] = field(default_factory=set)

    def of(self, kind: type[R]) -> dict[str, R]:
        """Return the models with a result of this kind."""
        return {name: result for name, result in self.results.items() if isinstance(result, kind)}

    def names(self, kind: type[R]) -> set[str]:
        return {*self.of(kind)}


class UpdatePolicy:
    """The decisions that a running server makes about an update. By default, no server restricts it."""

    #: If False, models that need to be written become `Failed`.
    may_write = True

    def reason_to_keep(self, name: str) -> str:
        """Return why a model without a bundle is not removed, or an empty text if it is removed."""
        return ""

    def is_readable(self, name: str) -> bool:
        """Return whether a bundle may be read now. This is called before the reading, and again after it."""
        return True

    def reserve(self, name: str) -> bool:
        """Return whether a model may be written. This is called once, just before the writing."""
        return True

    def newer_than(self, name: str) -> int:
        """Return the `later_than` of `RepositoryWriter.put_undoably`."""
        return 0


class RepositoryUpdate:
    """Writes the models of a repository that differ from their bundles below `roots`.

    Each model is verified before it is written. `policy` may postpone models. No model is removed here: the caller calls
    `remove` after it has loaded the other models.
    """

    def __init__(
        self,
        repository: Path,
        roots: Sequence[Path],
        settings: RepositorySettings,
        policy: UpdatePolicy | None = None,
        known: Known | None = None,
    ) -> None:
        self._repository = repository
        self._roots = roots
        self._wanted = settings
        self._policy = policy or UpdatePolicy()
        self._known = known or Known()

    def write(self, names: Collection[str] | None, *, twice: bool = False) -> Update:
        """Write the named models (None: all), the meta models that carry one of them, and the callees of those meta models.

        If `twice`, models with files that have no checksum are `Unsure` until `confirm` has read them again.
        """
        sources = self._read()
        done = Update({*sources.good, *sources.broken}, [*sources.unusable.values()])
        self._note_broken(sources, names, done)
        only = None
        if names is not None:
            aliases = self._wanted.aliases
            only = _touched(names, sources, self._repository, aliases)
            uncompared = aliases.keys() - only
            done.uncompared = {text for name in uncompared for text in (name, f"aliases.{name}")} - only
        self._write(sources, only, {} if twice else None, done)
        return done

    def confirm(self, done: Update) -> None:
        """Read the unsure models of an earlier `write` again, write the models with unchanged files, and complete `done`."""
        first = {name: entry.digest for name, entry in done.of(Unsure).items()}
        for name in first:
            del done.results[name]
        sources = self._read()
        done.bundles, done.unusable = {*sources.good, *sources.broken}, [*sources.unusable.values()]
        self._note_broken(sources, first.keys(), done)
        self._write(sources, first.keys(), first, done)

    def _read(self) -> Sources:
        return read_sources(self._roots, self._known)

    def _note_broken(self, sources: Sources, names: Collection[str] | None, done: Update) -> None:
        for name, lines in sources.broken.items():
            if isinstance(done.results.get(name), Written):
                continue  # The bundle broke after it was written, and the written version can be loaded.
            if self._policy.is_readable(name):
                done.results[name] = Broken("; ".join(lines))
            elif names is None or name in names:
                # A bundle that is being copied looks broken for a moment, which is not an error.
                done.results[name] = Later()

    def _write(
        self,
        sources: Sources,
        only: Collection[str] | None,
        first: Mapping[str, str] | None,
        done: Update,
    ) -> None:
        """Carry out the actions for the models `only`, and store their results. `first` is as in `_flaw`."""
        planned = steps(
            self._repository,
            sources,
            self._wanted,
            stays=self._policy.reason_to_keep,
            known=self._known,
            only=only,
        )
        for step in planned:
            made_of = step.targets or (step.name, *_calls(step.name, sources))
            result = self._carry_out(step, made_of, sources, first)
            if result is not None:
                done.results[step.name] = result
        self._known.save(sources.places)

    def _carry_out(
        self,
        step: PlannedAction,
        made_of: Sequence[str],
        sources: Sources,
        first: Mapping[str, str] | None,
    ) -> Result | None:
        """Write a model if the planned action is to write it."""
        policy = self._policy
        match step.verb:
            case "new" | "changed" | "unchanged" if not all(map(policy.is_readable, made_of)):
                return Later()
            case "unread":
                return Later()
            case "unchanged":
                return Unchanged()
            case "foreign":
                return Broken(refusal(self._repository / step.name))
            case "refused":
                return Broken(step.note.strip(" ()"))
            case "kept":
                return None if step.name in sources.broken else Retained()
            case "removed":
                return Gone(step.carriers)
            case "internal":
                return None
        if step.plan is None or not policy.may_write:
            subject = "the alias" if step.targets else "its bundle"
            return Failed(f"{subject} is {step.verb}, but the repository is not updated")
        if not policy.reserve(step.name):
            return Later()
        return _flaw(step, sources, first) or self._put(step, step.plan, made_of)

    def _put(self, step: PlannedAction, plan: ModelPlan, made_of: Sequence[str]) -> Result:
        try:
            # Open the repository for each model separately. A large model may take minutes to copy, and other runs of rsrv-gen
            # wait while the repository is open.
            with open_repository(self._repository, self._wanted.link) as writer:
                replaced = writer.put_undoably(step.name, plan, self._policy.newer_than(step.name))
        except OSError as error:
            return Failed(f"could not be written: {error}")
        if not all(map(self._policy.is_readable, made_of)):
            replaced.undo()
            return Later()
        self._known.made(self._repository / step.name, step.recipe, step.signed)
        return Written(replaced)


def _flaw(
    step: PlannedAction, sources: Sources, first: Mapping[str, str] | None
) -> Torn | Unsure | Later | None:
    """Return why a model's bundles cannot be written yet, or None if their files are complete.

    `first` has, by model, the digest of the files without checksums at their first reading. A model that is not in `first` is
    Unsure. If `first` is None, these files are not compared with an earlier reading.
    """
    roots = step.targets or (step.name,)
    try:
        for root in roots:
            verify(root, sources)
        sums = "" if first is None else "".join(read_unverified(root, sources) for root in roots)
    except BundleError as error:
        return Torn("; ".join(error.problems))
    if first is None or not sums or first.get(step.name) == sums:
        return None
    return Later() if step.name in first else Unsure(sums)


def remove(repository: Path, name: str, link: LinkMode) -> None:
    """Remove a model that rsrv-gen made, if it exists. Raises OSError."""
    with open_repository(repository, link) as writer:
        if is_ours(repository / name):
            writer.remove(name)


def _calls(name: str, sources: Sources) -> Sequence[str]:
    return sources.good[name].facts.calls if name in sources.good else ()


def _touched(
    names: Collection[str], sources: Sources, repository: Path, aliases: Mapping[str, Shares]
) -> set[str]:
    """Return these models, the metas and aliases that carry one of them, and the callees of all these models.

    The callees are included because they may become internal.
    """
    known = {*sources.good, *our_models(repository)}
    calls = {name: {*_calls(name, sources), *carried(repository / name)} for name in known}
    touched = {*names, *(meta for meta, called in calls.items() if not called.isdisjoint(names))}
    touched |= {alias for alias, shares in aliases.items() if not shares.keys().isdisjoint(names)}
    return touched.union(*(calls.get(name, set()) for name in touched))
