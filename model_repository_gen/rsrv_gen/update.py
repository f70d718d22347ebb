"""Comparison of a repository with its bundles, and its update: for the command, and for a running server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rsrv.settings import Front, ModelSection, Shares, Transport
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

#: `foreign`: a directory that rsrv-gen did not make has the name. `internal`: no directory, because metas carry the model.
#: `unread`: a bundle changed a moment ago, and cannot be read any more. `refused`: an alias that cannot be served.
Verb = Literal["unchanged", "new", "changed", "removed", "kept", "internal", "foreign", "unread", "refused"]


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """Planned action for one model of a repository."""

    name: str
    verb: Verb
    #: None if there is nothing to write
    plan: ModelPlan | None = None
    #: text behind the name: empty, or " (...)"
    note: str = ""
    #: digest of the model's recipe, for `Known`
    recipe: str = ""
    #: paths and signatures of the bundles that are copied, from before they were read for the plan
    signed: Mapping[Path, Signature] = field(default_factory=dict)
    #: metas that carry a model without a directory; they must be in place before its directory is removed
    carriers: tuple[str, ...] = ()
    #: the models behind an alias
    targets: tuple[str, ...] = ()


def steps(
    repository: Path,
    sources: Sources,
    *,
    link: LinkMode,
    transport: Transport,
    models: Mapping[str, ModelSection],
    aliases: Mapping[str, Shares] | None = None,
    front: Front = "python",
    stays: Callable[[str], str],
    known: Known,
    only: Collection[str] | None = None,
) -> Iterator[PlannedAction]:
    """Yield the actions that bring the repository up to date, in their order.

    `stays` returns why a model without a bundle is not removed; empty: it is removed. `only` limits the models that
    are compared; None: all. Writes nothing in the repository; each action is decided when it is requested.
    """
    kept, go = {}, []
    ours = our_models(repository)
    known_aliases, refused = plan_aliases(aliases or {}, sources.good, sources.broken, models, link, ours)
    for name in sorted(ours - {*sources.good, *known_aliases, *refused}):
        if is_alias(repository / name):
            go.append(name)
            continue
        reason = "as it was before its bundle broke" if name in sources.broken else stays(name)
        if reason:
            kept[name] = reason
        else:
            go.append(name)
    plan = plan_repository(sources.good, mode=link, transport=transport, models=models, front=front)

    def wanted(name: str) -> bool:
        return only is None or name in only

    for name, recipe in plan.models.items():
        if wanted(name):
            note = _note(sources.good[name], plan.internal.get(name, ()))
            if name in plan.python:
                note += f" (Python front: {plan.python[name]})"
            yield _compared(repository / name, recipe, note, known)
    for name, alias in known_aliases.items():
        if wanted(name):
            without = ", ".join(alias.shares.keys() - alias.targets.keys())
            note = f" (without {without}: a broken bundle)" if without else ""
            yield replace(_compared(repository / name, alias, note, known), targets=tuple(alias.targets))
    for name, reason in refused.items():
        if wanted(name) or wanted(name.removeprefix("aliases.")):
            yield PlannedAction(name, "refused", note=f" ({reason})")
    # Last: for a Triton that polls, the metas must be in place before their callees are removed.
    for name, metas in plan.internal.items():
        if wanted(name) and name not in plan.models:
            yield _without_directory(repository / name, metas)
    for name, reason in kept.items():
        if wanted(name):
            yield PlannedAction(name, "kept", note=f" ({reason})")
    for name in go:
        if wanted(name):
            yield PlannedAction(name, "removed")


def _compared(folder: Path, recipe: Recipe | AliasRecipe, note: str, known: Known) -> PlannedAction:
    """Compare a model's directory with what its recipe makes."""
    name = folder.name
    try:
        digest = recipe.digest()
        if known.is_current(folder, digest):
            return PlannedAction(name, "unchanged", note=note, recipe=digest)
        if isinstance(recipe, AliasRecipe):
            made_of = [*recipe.targets.values()]
        else:
            made_of = [recipe.source, *recipe.callees]
        # A link to a bundle stays right when the bundle changes.
        signed = {one.path: known.sign(one.path) for one in made_of if recipe.mode != "symlink"}
        if any(signed.get(one.path) != one.signature for one in made_of):
            digest = ""
        plan = recipe.plan()
    except (BundleError, ConfigError, OSError) as error:
        if isinstance(recipe, AliasRecipe) and isinstance(error, ConfigError):
            return PlannedAction(name, "refused", note=f" ({error})")
        return PlannedAction(name, "unread", note=f" ({error})")
    try:
        current = is_current(folder, plan, recipe.mode)
    except OSError:
        current = False  # writing it reports the reason
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
    """Return the text behind a model's name: the callees that it carries, or the metas that alone call it."""
    if source.facts.calls:
        return f" (carries {', '.join(source.facts.calls)})"
    return f" (internal: called by {', '.join(metas)})" if metas else ""


@dataclass
class Update:
    """Result of an update, and the work that remains when the new versions are loaded."""

    #: models that were written; each can be undone
    put: dict[str, Replaced] = field(default_factory=dict)
    #: models that equal their bundles
    unchanged: set[str] = field(default_factory=set)
    #: models to remove -> metas that must be in place before
    go: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: models without a bundle that are kept
    kept: set[str] = field(default_factory=set)
    #: all models with a broken bundle, or with a foreign directory in their place -> reason
    broken: dict[str, str] = field(default_factory=dict)
    #: aliases that were not compared, so that `broken` lacks them
    uncompared: set[str] = field(default_factory=set)
    #: models that could not be written -> reason
    failed: dict[str, str] = field(default_factory=dict)
    #: models left as they are because a file does not match its bundle's manifest -> reason
    torn: dict[str, str] = field(default_factory=dict)
    #: models left as they are until a second reading finds the same -> digest of the first reading
    unsure: dict[str, str] = field(default_factory=dict)
    #: models left as they are because one of their bundles is not ready to be read
    later: set[str] = field(default_factory=set)
    #: names of all bundles
    bundles: set[str] = field(default_factory=set)
    #: reasons why folders have no bundles
    unusable: list[str] = field(default_factory=list)


class UpdatePolicy:
    """The decisions that a running server makes about an update. By default, no server restricts it."""

    #: False: the models that would be written are in `Update.failed`
    may_write = True

    def reason_to_keep(self, name: str) -> str:
        """Return why a model without a bundle is not removed; empty: it is removed."""
        return ""

    def is_readable(self, name: str) -> bool:
        """Return whether a bundle may be read now; called before and again after the reading."""
        return True

    def reserve(self, name: str) -> bool:
        """Return whether a model may be written; called once, just before."""
        return True

    def newer_than(self, name: str) -> int:
        """Return the `later_than` of `RepositoryWriter.put_undoably`."""
        return 0


def update(
    repository: Path,
    roots: Sequence[Path],
    names: Collection[str] | None,
    *,
    link: LinkMode,
    transport: Transport,
    models: Mapping[str, ModelSection] | None = None,
    aliases: Mapping[str, Shares] | None = None,
    front: Front = "python",
    policy: UpdatePolicy | None = None,
    known: Known | None = None,
    into: Update | None = None,
) -> Update:
    """Write the named models (None: all) that differ from their bundles below `roots`.

    A named model brings the models that depend on its bundle: the metas that carry it, and their callees.
    No model is removed: `remove` does that after the others have been loaded. `policy` may postpone models.

    Each model is verified before it is written. A model with a file that does not match its manifest is in `Update.torn`.
    If `into` is given, files without checksums are read twice, some time apart: the first call gets an empty `Update`,
    and leaves their digests in its `unsure`; the second call gets the same `Update`, compares these models only, and
    completes it.
    """
    policy = UpdatePolicy() if policy is None else policy
    known = Known() if known is None else known
    first = None if into is None else into.unsure
    if first:
        names = first.keys()
    ready = policy.is_readable
    sources = read_sources(roots, known)
    # A bundle that is being copied looks broken for a moment; it is no error.
    broken = {name: "; ".join(lines) for name, lines in sources.broken.items() if ready(name)}
    done = Update() if into is None else into
    done.bundles = {*sources.good, *sources.broken}
    done.broken = {**done.broken, **broken} if first else broken
    done.unsure, done.unusable = {}, [*sources.unusable.values()]
    done.later.update(name for name in sources.broken.keys() - broken if names is None or name in names)
    aliases = aliases or {}
    only = set(first) if first else None if names is None else _touched(names, sources, repository, aliases)
    if only is not None and not first:
        done.uncompared = {
            text for name in aliases.keys() - only for text in (name, f"aliases.{name}")
        } - only
    planned = steps(
        repository,
        sources,
        link=link,
        transport=transport,
        models=models or {},
        aliases=aliases,
        front=front,
        stays=policy.reason_to_keep,
        known=known,
        only=only,
    )
    for step in planned:
        wholes = step.targets or (step.name,)
        made_of = step.targets or (step.name, *_calls(step.name, sources))
        if step.verb in ("new", "changed", "unchanged") and not all(map(ready, made_of)):
            done.later.add(step.name)
            continue
        # A link to a folder is equal even if the folder has changed: the names say that.
        followed = link == "symlink" and names is not None and not set(names).isdisjoint(made_of)
        match step.verb:
            case "unread":
                done.later.add(step.name)
            case "unchanged" if not followed:
                done.unchanged.add(step.name)
            case "new" | "changed" | "unchanged" if policy.may_write and not policy.reserve(step.name):
                done.later.add(step.name)
            case "new" | "changed" | "unchanged" if policy.may_write and not _is_whole(
                step.name, wholes, sources, first, done
            ):
                pass
            case "new" | "changed" | "unchanged" if step.plan is not None and policy.may_write:
                _put(repository, link, step.name, step.plan, policy.newer_than(step.name), done)
                if step.name in done.put:
                    if all(map(ready, made_of)):
                        known.made(repository / step.name, step.recipe, step.signed)
                    else:
                        done.put.pop(step.name).undo()
                        done.later.add(step.name)
            case "new" | "changed" | "unchanged":
                what = "the alias" if step.targets else "its bundle"
                done.failed[step.name] = f"{what} is {step.verb}, and nothing may be written"
            case "foreign":
                done.broken[step.name] = refusal(repository / step.name)
            case "refused":
                done.broken[step.name] = step.note.strip(" ()")
            case "kept" if step.name not in sources.broken:
                done.kept.add(step.name)
            case "removed":
                done.go[step.name] = step.carriers
    known.save(sources.places)
    return done


def _is_whole(
    name: str, roots: Sequence[str], sources: Sources, first: Mapping[str, str] | None, done: Update
) -> bool:
    """Return whether the files of a model's bundles are complete; note in `done` why they are not."""
    try:
        for root in roots:
            verify(root, sources)
        found = "" if first is None else "".join(read_unverified(root, sources) for root in roots)
    except BundleError as error:
        done.torn[name] = "; ".join(error.problems)
        return False
    if first is None or not found or first.get(name) == found:
        return True
    if name in first:
        done.later.add(name)
    else:
        done.unsure[name] = found
    return False


def remove(repository: Path, name: str, link: LinkMode) -> None:
    """Remove a model that rsrv-gen made, if it exists. Raises OSError."""
    with open_repository(repository, link) as writer:
        if is_ours(repository / name):
            writer.remove(name)


def _put(repository: Path, link: LinkMode, name: str, plan: ModelPlan, later_than: int, done: Update) -> None:
    try:
        # Opened for each: a large model may take minutes to copy, and another rsrv-gen waits meanwhile.
        with open_repository(repository, link) as writer:
            done.put[name] = writer.put_undoably(name, plan, later_than)
    except OSError as error:
        done.failed[name] = f"could not be written: {error}"


def _calls(name: str, sources: Sources) -> Sequence[str]:
    return sources.good[name].facts.calls if name in sources.good else ()


def _touched(
    names: Collection[str], sources: Sources, repository: Path, aliases: Mapping[str, Shares]
) -> set[str]:
    """Return these models, the metas and aliases that carry one of them, and all callees of these: they may become internal."""
    known = {*sources.good, *our_models(repository)}
    calls = {name: {*_calls(name, sources), *carried(repository / name)} for name in known}
    touched = {*names, *(meta for meta, called in calls.items() if not called.isdisjoint(names))}
    touched |= {alias for alias, shares in aliases.items() if not shares.keys().isdisjoint(names)}
    return touched.union(*(calls.get(name, set()) for name in touched))
