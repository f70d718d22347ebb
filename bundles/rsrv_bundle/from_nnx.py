"""Exporting Flax NNX modules. Needs flax, beside what rsrv_bundle.export needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rsrv_bundle.calling import Results, caller
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.spec import Bundle


def export_nnx(model: nnx.Module, example_inputs: Mapping[str, Any], **options: Any) -> Bundle:
    """Write `model(**inputs)` as a bundle, checked against the model's own answers, uncompiled.

    model: in evaluation mode (`model.eval()`). All its variables are weights, called by their paths, except the
        states of random number generators.
    example_inputs, options: as `rsrv_bundle.export.export_bundle` takes them.

    Raises BundleError for a model that changes its variables or draws random numbers when it runs, and as
    `export_bundle`.
    """
    graph, rngs, state = _split(model)

    def fn(params: Any, **inputs: Any) -> Any:
        weights, streams = _copy(state), _copy(rngs)
        nnx.replace_by_pure_dict(weights, params)
        copy = nnx.merge(graph, streams, weights)
        result = caller(copy, tuple(inputs))(inputs)
        _, streams_after, after = _split(copy)
        _check_unchanged(nnx.to_pure_dict(rngs), streams_after, "draws random numbers")
        _check_unchanged(params, after, "changes when the model runs, and requests may not touch each other")
        return result

    original = Original(eager_nnx(model), ("flax",))
    return export_bundle(
        fn, nnx.to_pure_dict(state), example_inputs, original=original, **{"code": type(model), **options}
    )


def eager_nnx(model: nnx.Module) -> Callable[..., Results]:
    """The model's own answers, from numpy arrays by name to numpy arrays; the model stays as it is."""
    graph, state = nnx.split(model)

    def eager(**inputs: Any) -> Results:
        arrays = {name: jnp.asarray(value) for name, value in inputs.items()}
        result = caller(nnx.merge(graph, _copy(state)), tuple(arrays))(arrays)
        return Results.of(result).convert(lambda _, value: np.asarray(value))

    return eager


def _split(model: nnx.Module) -> Any:
    """Structure, states of random number generators, all other variables."""
    return nnx.split(model, nnx.RngState, ...)


def _copy(state: Any) -> Any:
    """The same values in other variables: a model that is put together from it can change without changing others."""
    return jax.tree.map(lambda leaf: leaf, state)


def _check_unchanged(before: Any, after: Any, why: str) -> None:
    old = dict(jax.tree_util.tree_flatten_with_path(before)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(after))[0]:
        if old.get(path) is not leaf:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise BundleError(f"model: {name}: {why}; call model.eval() first")
