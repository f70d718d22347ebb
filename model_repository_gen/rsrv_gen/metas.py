"""Meta models among their callees: which calls can't work, and who calls whom. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from rsrv_bundle import Bundle

_MANIFEST = "manifest.yaml"


def unusable_metas(bundles: Mapping[str, Bundle], broken: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Meta model -> what is wrong with the models that it names; only those with something wrong.

    `bundles` are all good bundles of a run by name, `broken` the names of the others.
    """
    found = {}
    for name, bundle in bundles.items():
        manifest = bundle.manifest
        problems = [_wrong_call(callee, bundles, broken) for callee in manifest.meta_calls]
        problems += [_wrong_external(other, bundles, broken) for other in manifest.meta_external]
        if any(problems):
            found[name] = tuple(f"{_MANIFEST}: {problem}" for problem in problems if problem)
    return found


def _wrong_call(callee: str, bundles: Mapping[str, Bundle], broken: Collection[str]) -> str:
    if callee in broken:
        return f"meta.calls: calls '{callee}', whose bundle is broken; mend that one first"
    if callee not in bundles:
        near = difflib.get_close_matches(callee, [*bundles, *broken], n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        rule = "add its bundle, or list it under meta.external if it is another Triton model"
        return f"meta.calls: calls '{callee}', which is no bundle here{hint}; {rule}"
    if bundles[callee].manifest.kind == "meta":
        return f"meta.calls: calls '{callee}', which is itself a meta model; list the models that it calls"
    return ""


def _wrong_external(name: str, bundles: Mapping[str, Bundle], broken: Collection[str]) -> str:
    if name in bundles and bundles[name].manifest.kind == "meta":
        return f"meta.external: '{name}' is itself a meta model; list the models that it calls"
    if name in bundles or name in broken:
        return f"meta.external: '{name}' is a bundle here; move it to meta.calls"
    return ""


def callers(calls: Mapping[str, Collection[str]]) -> Mapping[str, tuple[str, ...]]:
    """Callee -> the meta models that call it, by name; `calls` has it the other way round."""
    found: dict[str, list[str]] = {}
    for meta in sorted(calls):
        for callee in calls[meta]:
            found.setdefault(callee, []).append(meta)
    return {callee: tuple(metas) for callee, metas in found.items()}
