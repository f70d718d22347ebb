"""Exporting PyTorch modules, by torch.export and torchax. Needs the extra `export-torch`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from rsrv.progress import steps
from rsrv_bundle.calling import Results, caller
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.interface import plan_inputs, value_of
from rsrv_bundle.spec import Bundle
from rsrv_bundle.torch_arrays import dtype_of, to_numpy, to_torch
from rsrv_bundle.torch_programs import Programs
from rsrv_bundle.writer import free_target


def export_torch(
    module: torch.nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    batch_sizes: Sequence[int],
    out_dir: str | os.PathLike[str],
    batch_axis: int | Mapping[str, int] | None = 0,
    axes: Mapping[str, str] | None = None,
    input_shapes: Sequence[Mapping[str, int]] = (),
    **options: Any,
) -> Bundle:
    """Write `module(**inputs)` as a bundle, checked against the module itself, run eagerly.

    module: in evaluation mode (`module.eval()`), on the CPU. The parameters and buffers that it uses are the
        weights, called as in its state_dict, shared ones once.
    example_inputs: name of an argument of `forward` -> tensor, array or jax.ShapeDtypeStruct.
    The rest is as for `rsrv_bundle.export.export_bundle`. 64-bit element types need no switch.

    The module is traced at each size by itself, so that nothing in it needs to work for sizes in general. Raises
    BundleError for a module in training mode, one that draws random numbers or changes its buffers, one that
    torch.export cannot trace, for operations that torchax lacks, and as `export_bundle`.
    """
    free_target(out_dir, options.get("overwrite", False))
    _check_module(module)
    examples = {name: _example(name, value) for name, value in example_inputs.items()}
    inputs = plan_inputs(
        {name: value_of(name, value.dtype, value.shape) for name, value in examples.items()},
        batch_sizes=batch_sizes,
        batch_axis=batch_axis,
        axes=axes or {},
        input_shapes=input_shapes,
    )
    programs = Programs(module, {name: dtype_of(value.dtype) for name, value in examples.items()})
    keys = list(inputs.keys())
    with steps(f"trace {Path(out_dir).name}", len(keys)) as traced:
        for variant, size in keys:
            programs.at(inputs.shapes(variant, size))
            traced.step(f"batch size {size}" if inputs.batched else "")
    # Not left to the caller: PyTorch's integers are 64 bits wide.
    with jax.enable_x64(True):
        return export_bundle(
            programs,
            programs.weights(),
            examples,
            batch_sizes=batch_sizes,
            out_dir=out_dir,
            batch_axis=batch_axis,
            axes=axes,
            input_shapes=input_shapes,
            original=Original(eager_torch(module), ("torch", "torchax")),
            **{"code": type(module), **options},
        )


def eager_torch(module: torch.nn.Module) -> Callable[..., Results]:
    """The module's own answers, from numpy arrays by name to numpy arrays. Asked in training mode it raises BundleError."""

    def eager(**inputs: Any) -> Results:
        _check_module(module)
        tensors = {name: to_torch(np.asarray(value)) for name, value in inputs.items()}
        with torch.no_grad():
            result = caller(module, tuple(inputs), like=module.forward)(tensors)
        return Results.of(result).convert(to_numpy)

    return eager


def _check_module(module: torch.nn.Module) -> None:
    elsewhere = {str(tensor.device) for tensor in module.state_dict().values()} - {"cpu"}
    if elsewhere:
        raise BundleError(
            f"module: is on {', '.join(sorted(elsewhere))}; export module.cpu(), for any platform"
        )
    training = [name or "it" for name, part in module.named_modules() if part.training]
    if training:
        raise BundleError(
            f"module: is in training mode ({', '.join(training[:3])}); call module.eval() first, so that dropout and"
            " batch normalisation do what they shall do when serving"
        )


def _example(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_numpy(name, value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    raise BundleError(
        f"{name}: is a {type(value).__name__}; give a tensor, an array or a jax.ShapeDtypeStruct"
    )
