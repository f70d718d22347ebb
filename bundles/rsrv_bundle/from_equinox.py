"""Export of Equinox modules. Needs equinox, and the packages that rsrv_bundle.export needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from rsrv_bundle.calling import Results, caller
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.spec import Bundle


def export_equinox(
    model: eqx.Module, example_inputs: Mapping[str, Any], *, rows: bool = True, **options: Any
) -> Bundle:
    """Write an Equinox module as a bundle, and compare the bundle with the uncompiled module.

    model: the module in inference mode (`eqx.nn.inference_mode`). Its arrays are the weights, and their names are their paths.
    rows: True if the model takes one row, as Equinox's layers do. A batch is then `jax.vmap(model)` of inputs whose first axis
        is the batch. False if the model takes whole batches. Without batch sizes, the model gets the inputs as they are.
    example_inputs, options: as for `rsrv_bundle.export.export_bundle`. The examples have a batch axis.

    Raises BundleError, as `export_bundle` does.
    """
    weights, static = eqx.partition(model, eqx.is_array)
    by_row = rows and bool(options.get("batch_sizes"))
    if by_row and _batch_is_elsewhere(
        options.get("batch_axis", 0), options.get("axes") or {}, example_inputs
    ):
        raise BundleError("rows: with rows=True the batch is the first axis of every input")

    def fn(params: Any, **inputs: Any) -> Any:
        return _call(eqx.combine(params, static), inputs, by_row)

    original = _original(model, by_row)
    return export_bundle(fn, weights, example_inputs, original=original, **{"code": type(model), **options})


def eager_equinox(model: eqx.Module, *, rows: bool = True) -> Callable[..., Results]:
    """Return the model, uncompiled, as a function from numpy arrays by name to numpy arrays. rows: see `export_equinox`."""
    return _original(model, rows).eager


def _original(model: eqx.Module, by_row: bool) -> Original:
    def run(**inputs: Any) -> Any:
        return _call(model, {name: jnp.asarray(value) for name, value in inputs.items()}, by_row)

    return Original(run, ("equinox",))


def _batch_is_elsewhere(batch_axis: Any, axes: Mapping[str, str], inputs: Iterable[str]) -> bool:
    positions = batch_axis if isinstance(batch_axis, Mapping) else dict.fromkeys(inputs, batch_axis)
    return any(
        axes[name][:1] not in ("n", "b") if name in axes else positions.get(name, 0) != 0 for name in inputs
    )


def _call(model: Any, inputs: Mapping[str, Any], by_row: bool) -> Any:
    call = caller(model, tuple(inputs))
    try:
        return jax.vmap(call)(dict(inputs)) if by_row else call(inputs)
    except RuntimeError as e:
        if "requires a key" not in str(e):
            raise
        raise BundleError(f"model: draws random numbers ({e}); use eqx.nn.inference_mode(model)") from e
    except NameError as e:
        if "unbound axis name" not in str(e):
            raise
        raise BundleError(
            f"model: compares the rows of a batch, as batch normalisation does in training ({e}); use"
            " eqx.nn.inference_mode(model)"
        ) from e
