"""Aliases of rsrv.yaml as models of the repository: find their targets and the errors in them. This module writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from rsrv.settings import ModelSection, Shares
from rsrv.text import nearest
from rsrv_bundle.compatibility import Feature, refusal
from rsrv_bundle.reader import may_be_name
from rsrv_gen import config
from rsrv_gen.plan import (
    CALLS_FOLDER,
    CONFIG_FILE,
    MODEL_PY,
    VERSION,
    Content,
    LinkMode,
    ModelPlan,
    SourceBundle,
    bundle_files,
    guard_files,
    request_room,
    row_limits,
    without_caches,
)

_ALIAS_PY = MODEL_PY.replace(b"rsrv.stub.model", b"rsrv.stub.alias")


@dataclass(frozen=True, slots=True)
class AliasRecipe:
    """Everything that decides the contents of an alias's directory.

    An alias is a model that hands its requests to its targets. Its directory contains their bundles, so that Triton also loads
    the alias again when a target changes.
    """

    name: str
    shares: Shares
    targets: Mapping[str, SourceBundle]
    limits: Mapping[str, config.RowLimits]
    mode: LinkMode = "hard"

    def digest(self) -> str:
        """Return "", so that the directory is compared each time. The comparison reads only a few small files."""
        return ""

    def plan(self) -> ModelPlan:
        """Plan the directory. Raises BundleError, ConfigError, OSError."""
        bundles = {name: source.read() for name, source in self.targets.items()}
        guard = guard_files([*bundles.values()])
        plan: dict[PurePosixPath, Content] = {
            PurePosixPath(CONFIG_FILE): config.render_alias(
                self.name, self.shares, bundles, self.limits, room=request_room(), guarded=bool(guard)
            ),
            **guard,
            PurePosixPath(VERSION, "model.py"): _ALIAS_PY,
        }
        for name, bundle in bundles.items():
            plan |= bundle_files(bundle.path, PurePosixPath(CALLS_FOLDER, name))
        return without_caches(plan)


def plan_aliases(
    aliases: Mapping[str, Shares],
    good: Mapping[str, SourceBundle],
    broken: Collection[str],
    models: Mapping[str, ModelSection],
    mode: LinkMode,
    written: Collection[str] = (),
) -> tuple[dict[str, AliasRecipe], dict[str, str]]:
    """Return the recipes of the aliases that can be served, and the reasons why the other aliases cannot, each by name.

    `good` are all valid bundles by name; `broken` are the names of the broken bundles. If an alias has the name of a bundle, the
    bundle is served, and the reason against the alias has the key aliases.NAME. `written` are the aliases that the repository
    already has. If a target of such an alias breaks, the alias keeps its directory. A new alias starts without broken targets.
    """
    recipes, refused = {}, {}
    for name, shares in aliases.items():
        answering = {target for target, weight in shares.items() if weight and weight != "shadow"}
        begins = name not in written and not answering.isdisjoint(good)
        targets = [target for target in shares if not (begins and target in broken)]
        if name in good or name in broken:
            refused[f"aliases.{name}"] = "a bundle has this name: rename the alias, or the bundle"
        elif not may_be_name(name):
            refused[f"aliases.{name}"] = (
                "a model cannot have this name: use letters, digits, '_', '-' and '.'"
            )
        elif wrong := next(
            (why for target in targets if (why := _wrong(target, shares[target], aliases, good, broken))), ""
        ):
            refused[name] = f"an alias of {wrong}"
        else:
            limits = {target: row_limits(models.get(target)) for target in targets}
            recipes[name] = AliasRecipe(
                name, shares, {target: good[target] for target in targets}, limits, mode
            )
    return recipes, refused


def _wrong(
    target: str,
    share: float | Literal["shadow"],
    aliases: Mapping[str, Shares],
    good: Mapping[str, SourceBundle],
    broken: Collection[str],
) -> str:
    """Return why a model cannot be the target of an alias, or an empty text if it can."""
    if target in broken:
        return f"'{target}', whose bundle is broken: fix it first"
    if target not in good:
        if target in aliases:
            return f"'{target}', which is an alias: name the models of that alias"
        return f"'{target}', which is not a bundle here{nearest(target, [*good, *broken])}"
    role = Feature.SHADOW if share == "shadow" else Feature.ALIAS
    why = refusal(role, good[target].facts.features)
    return f"'{target}', {why}" if why else ""
