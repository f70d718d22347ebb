"""Calls of meta models: find calls that cannot work, and the callers of each model. This module has no side effects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rsrv.text import nearest
from rsrv_bundle import Bundle, manifest
from rsrv_bundle.compatibility import Feature, refusal
from rsrv_bundle.errors import Problems


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """Facts of a bundle on which the plan of the repository and the plans of other models depend."""

    features: frozenset[Feature]
    calls: tuple[str, ...] = ()
    external: tuple[str, ...] = ()

    @property
    def meta(self) -> bool:
        return Feature.META in self.features

    @classmethod
    def of(cls, bundle: Bundle) -> BundleFacts:
        manifest = bundle.manifest
        return cls(manifest.features, tuple(manifest.meta_calls), tuple(manifest.meta_external))


def unusable_metas(
    bundles: Mapping[str, BundleFacts], broken: Collection[str]
) -> Mapping[str, tuple[str, ...]]:
    """Find meta models that name unusable models. Return the problems by meta model.

    `bundles` are all valid bundles by name; `broken` are the names of the broken bundles.
    """
    unusable = {}
    for name, bundle in bundles.items():
        problems = Problems()
        for callee in bundle.calls:
            if rule := _wrong_call(callee, bundles, broken):
                problems.add(manifest.FILE, "meta.calls", rule)
        for external in bundle.external:
            if rule := _wrong_external(external, bundles, broken):
                problems.add(manifest.FILE, "meta.external", rule)
        if problems.lines:
            unusable[name] = tuple(problems.lines)
    return unusable


def _wrong_call(callee: str, bundles: Mapping[str, BundleFacts], broken: Collection[str]) -> str:
    if callee in broken:
        return f"calls '{callee}', and that bundle is broken; fix it first"
    if callee not in bundles:
        rule = "add its bundle, or list it under meta.external if it is another Triton model"
        return f"calls '{callee}', which is not a bundle here: {rule}{nearest(callee, [*bundles, *broken])}"
    why = refusal(Feature.CALLED, bundles[callee].features)
    return f"calls '{callee}', {why}" if why else ""


def _wrong_external(name: str, bundles: Mapping[str, BundleFacts], broken: Collection[str]) -> str:
    if name in bundles and bundles[name].meta:
        return f"'{name}' is a meta model; list the models that it calls"
    if name in bundles or name in broken:
        return f"'{name}' is a bundle here; move it to meta.calls"
    return ""


def callers(calls: Mapping[str, Collection[str]]) -> Mapping[str, tuple[str, ...]]:
    """Return the sorted meta models that call each callee. `calls` has the callees of each meta model."""
    callers: dict[str, list[str]] = {}
    for meta in sorted(calls):
        for callee in calls[meta]:
            callers.setdefault(callee, []).append(meta)
    return {callee: tuple(metas) for callee, metas in callers.items()}
