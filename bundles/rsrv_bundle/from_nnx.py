"""Export of Flax NNX modules. Needs flax, and the packages that rsrv_bundle.export needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from rsrv_bundle.calling import Results, caller
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.spec import Bundle


def export_nnx(model: nnx.Module, example_inputs: Mapping[str, Any], **options: Any) -> Bundle:
    """Write `model(**inputs)` as a bundle, and compare the bundle with the uncompiled model.

    model: the model in evaluation mode (`model.eval()`). All its variables except the states of random number generators are weights,
        and their names are their paths.
    example_inputs, options: as for `rsrv_bundle.export.export_bundle`.

    Raises BundleError for a model that changes its variables or draws random numbers when it runs. Also raises the errors of
    `export_bundle`.
    """
    graph, rngs, state = _split(model)

    def run(streams: Any, params: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        weights = _copy(state)
        nnx.replace_by_pure_dict(weights, params)
        copy = nnx.merge(graph, _copy(streams), weights)
        return caller(copy, tuple(inputs))(inputs), _split(copy)

    def fn(params: Any, **inputs: Any) -> Any:
        result, (_, streams, after) = run(rngs, params, inputs)
        drawn = _changed(nnx.to_pure_dict(rngs), streams)
        # Accept random numbers on which the results do not depend. Recurrent layers draw such numbers when they make their zero
        # state.
        if drawn and _matters(lambda *arguments: Results.of(run(*arguments)[0]).values, rngs, params, inputs):
            raise BundleError(
                f"model: {drawn}: draws random numbers that its results depend on; call model.eval() first, or make"
                " them an input"
            )
        if changed := _changed(params, after):
            raise BundleError(
                f"model: {changed}: changes when the model runs, and requests may not touch each other; call"
                " model.eval() first"
            )
        return result

    return export_bundle(
        fn,
        nnx.to_pure_dict(state),
        example_inputs,
        original=_original(model),
        **{"code": type(model), **options},
    )


def eager_nnx(model: nnx.Module) -> Callable[..., Results]:
    """Return the model, uncompiled, as a function from numpy arrays by name to numpy arrays. The model does not change."""
    return _original(model).eager


def _original(model: nnx.Module) -> Original:
    graph, state = nnx.split(model)

    def run(**inputs: Any) -> Any:
        arrays = {name: jnp.asarray(value) for name, value in inputs.items()}
        return caller(nnx.merge(graph, _copy(state)), tuple(arrays))(arrays)

    return Original(run, ("flax",))


def _split(model: nnx.Module) -> Any:
    """Return the structure, the states of random number generators, and all other variables."""
    return nnx.split(model, nnx.RngState, ...)


def _copy(state: Any) -> Any:
    """Copy the variables, so that a model that is built from the copies can change without changing other models."""
    return jax.tree.map(lambda leaf: leaf, state)


def _changed(before: Any, after: Any) -> str:
    """Return the path of a variable that was replaced, or an empty text."""
    old = dict(jax.tree_util.tree_flatten_with_path(before)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(after))[0]:
        if old.get(path) is not leaf:
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return ""


def _matters(function: Callable[..., tuple[Any, ...]], first: Any, *others: Any) -> bool:
    """Return whether the results depend on the first argument, after dead code is removed."""
    jaxpr = jax.make_jaxpr(function)(first, *others).jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return any(used[: len(jax.tree.leaves(first))])
