"""Exporting PyTorch modules, by torch.export and torchax. Needs the extra `export-torch`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from rsrv.extras import install_command
from rsrv.progress import steps
from rsrv_bundle.calling import Results, caller
from rsrv_bundle.errors import BundleError, summary
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.inputs import repeated
from rsrv_bundle.interface import plan_inputs, value_of
from rsrv_bundle.spec import Bundle
from rsrv_bundle.stateful import export_stateful
from rsrv_bundle.torch_arrays import Array, dtype_of, tensors_of, to_numpy, to_torch
from rsrv_bundle.torch_modules import check_module, plain, unchanged
from rsrv_bundle.writer import free_target

#: Maps a PyTorch operation, or its name, to a JAX function with the same arguments.
Lowerings = Mapping[Any, Callable[..., Any]]


def export_torch(
    module: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    batch_sizes: Sequence[int],
    out_dir: str | os.PathLike[str],
    batch_axis: int | Mapping[str, int] | None = 0,
    axes: Mapping[str, str] | None = None,
    input_shapes: Sequence[Mapping[str, int]] = (),
    lowerings: Lowerings = MappingProxyType({}),
    **options: Any,
) -> Bundle:
    """Write `module(**inputs)` as a bundle, and compare it with the module itself, run eagerly.

    module: a module in evaluation mode (`module.eval()`) on the CPU. The weights are the parameters and buffers that it
        uses, named as in its state_dict. Shared tensors are stored once.
    example_inputs: name of an argument of `forward` -> tensor, array or jax.ShapeDtypeStruct.
    lowerings: PyTorch operation, or its name such as "mylib::scale" -> JAX function with the same arguments. Such a
        function is for an operation of your own, or replaces the exporter's lowering.
    The rest is as for `rsrv_bundle.export.export_bundle`. 64-bit element types do not need `jax_enable_x64`.

    The module is traced at each size separately, so it need not work for other sizes. torchax registers a device with
    PyTorch. After that, torch.compile and nn.DataParallel do not work in this process.

    Raises BundleError for a module that is in training mode, draws random numbers, changes its buffers, cannot be traced
    by torch.export, or uses operations that torchax lacks. It also raises the errors of `export_bundle`.
    """
    free_target(out_dir, options.get("overwrite", False))
    sizes = {
        "batch_sizes": batch_sizes,
        "batch_axis": batch_axis,
        "axes": axes or {},
        "input_shapes": input_shapes,
    }
    module, examples, programs = _traced(module, example_inputs, {}, Path(out_dir).name, sizes, lowerings)
    # PyTorch's integers are 64 bits wide.
    with jax.enable_x64(True):
        return export_bundle(
            programs,
            programs.weights(),
            examples,
            out_dir=out_dir,
            original=_original(module),
            **{"code": type(module), **sizes, **options},
        )


def export_stateful_torch(
    module: nn.Module,
    state: Mapping[str, Any],
    example_inputs: Mapping[str, Any],
    *,
    batch_sizes: Sequence[int],
    out_dir: str | os.PathLike[str],
    slots: int,
    axes: Mapping[str, str] | None = None,
    input_shapes: Sequence[Mapping[str, int]] = (),
    output_names: Sequence[str] | None = None,
    lowerings: Lowerings = MappingProxyType({}),
    **options: Any,
) -> Bundle:
    """Write a module with state as a bundle: `forward` takes state tensors by name, and returns them under these names.

    state: argument of `forward` -> tensor or array: the state that a sequence begins with, without the batch axis.
    output_names: names for the parts of a tuple, including the names of the state tensors.
    The rest is as for `export_torch` and `rsrv_bundle.stateful.export_stateful`.
    """
    free_target(out_dir, options.get("overwrite", False))
    sizes = {"batch_sizes": batch_sizes, "axes": axes or {}, "input_shapes": input_shapes}
    first = {name: _example(f"state: {name}", value) for name, value in state.items()}
    name = Path(out_dir).name
    sizes_of_rows = {"batch_axis": 0, **sizes}
    module, examples, programs = _traced(module, example_inputs, first, name, sizes_of_rows, lowerings)
    eager = _original(module)

    def split(result: Any) -> tuple[Any, Any]:
        named = Results.of(result).named(output_names)
        if missing := [name for name in first if name not in named]:
            raise BundleError(
                f"module: {missing[0]}: forward takes this state, and must return it by this name"
            )
        after = {name: named.pop(name) for name in first}
        return named, after

    def run(before: Any, **inputs: Any) -> Any:
        outputs, after = split(eager.run(**inputs, **before))
        return outputs, {name: to_numpy(name, value) for name, value in after.items()}

    def begin(_: Any) -> Any:
        return {name: jnp.asarray(value) for name, value in first.items()}

    with jax.enable_x64(True):
        return export_stateful(
            lambda params, before, **inputs: split(programs(params, **inputs, **before)),
            begin,
            programs.weights(),
            examples,
            out_dir=out_dir,
            slots=slots,
            original=Original(run, eager.packages, eager.to_numpy),
            **{"code": type(module), **sizes, **options},
        )


def _traced(
    module: nn.Module,
    example_inputs: Mapping[str, Any],
    state: Mapping[str, Any],
    name: str,
    sizes: Mapping[str, Any],
    lowerings: Lowerings,
) -> tuple[nn.Module, dict[str, Any], Any]:
    """Trace a module at each size. Return the module, the examples, and the traced modules.

    The traced modules also take the state tensors, with the same number of rows as the inputs.
    """
    module = plain(module)
    check_module(module)
    examples = {name: _example(name, value) for name, value in example_inputs.items()}
    inputs = plan_inputs(
        {name: value_of(name, value.dtype, value.shape) for name, value in examples.items()}, **sizes
    )
    _check_eager(module, examples, state)
    programs = _torch_programs().TracedModules(
        module, {name: dtype_of(value.dtype) for name, value in {**examples, **state}.items()}, lowerings
    )
    keys = list(inputs.keys())
    with steps(f"trace {name}", len(keys)) as traced:
        for key in keys:
            rows = [(key[1], *value.shape) for value in state.values()]
            shapes = inputs.shapes(*key)
            try:
                programs.at([*shapes, *rows])
            except BundleError as e:
                sized = {
                    name: repeated(array, shape)
                    for (name, array), shape in zip(_arrays(examples).items(), shapes, strict=True)
                }
                error = None if state else _failure(module, sized)
                if error is None:
                    raise
                raise BundleError(
                    f"module: works with {_shapes(examples)}, but fails with {_shapes(sized)}, which the batch sizes and input"
                    f" shapes require ({summary(error)}); give examples with the batch axis in front, or, if the module takes no"
                    " batches, leave out the batch sizes"
                ) from e
            traced.step(inputs.describe(*key))
    return module, examples, programs


def _check_eager(module: nn.Module, examples: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Run the module on its examples, before any export. Raises BundleError if it fails, or changes a buffer."""
    arrays = _arrays(examples)
    rows = next(iter(arrays.values())).shape[0] if state else 0
    first = {name: np.broadcast_to(value, (rows, *value.shape)) for name, value in state.items()}
    versions = {name: buffer._version for name, buffer in module.named_buffers()}
    error = _failure(module, {**arrays, **first})
    if changed := [name for name, buffer in module.named_buffers() if buffer._version != versions[name]]:
        raise BundleError(f"module: {changed[0]}: forward changes it, and requests may not touch each other")
    if error is None:
        return
    batch = {name: array[np.newaxis] for name, array in arrays.items()}
    if not state and _failure(module, batch) is None:
        raise BundleError(
            f"module: fails with {_shapes(arrays)} ({summary(error)}), but works with {_shapes(batch)}; give examples with the"
            " batch axis in front"
        )
    raise BundleError(
        f"module: {type(module).__name__} itself fails with the example inputs, without an export: {_shapes(arrays)}"
        f" ({summary(error)}); correct the inputs or the module"
    ) from error


def _arrays(examples: Mapping[str, Any]) -> dict[str, Array]:
    return {
        name: value if isinstance(value, np.ndarray) else np.zeros(value.shape, value.dtype)
        for name, value in examples.items()
    }


def _failure(module: nn.Module, arrays: Mapping[str, Array]) -> Exception | None:
    """Return the exception of the module run eagerly on these inputs, or None."""
    try:
        _original(module).run(**arrays)
    except BundleError:
        raise
    except Exception as e:  # noqa: BLE001 - the module may raise anything
        return e
    return None


def _shapes(arrays: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def eager_torch(module: nn.Module) -> Callable[..., Results]:
    """Return the module as a function from numpy arrays by name to numpy arrays. Raises BundleError in training mode."""
    return _original(plain(module)).eager


def _original(module: nn.Module) -> Original:
    def run(**inputs: Any) -> Any:
        check_module(module)
        tensors = {name: to_torch(np.asarray(value)) for name, value in inputs.items()}
        # Disable compiled parts, which would fail on the device that torchax registers.
        with (
            unchanged(module),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            # A warning of a library is not a failure of the module, even where warnings are errors.
            warnings.simplefilter("ignore")
            return tensors_of(caller(module, tuple(inputs), like=module.forward)(tensors))

    return Original(run, ("torch", "torchax"), to_numpy)


def _torch_programs() -> Any:
    """Import `torch_programs`. Raises BundleError if torchax is missing, or if it does not fit this PyTorch.

    `torch_programs` is imported only when an export needs it, because torchax changes PyTorch for the whole process.
    """
    try:
        from rsrv_bundle import torch_programs
    except (ImportError, AttributeError) as e:
        raise BundleError(
            f"torchax: cannot be imported with torch {torch.__version__} ({type(e).__name__}: {e}); run"
            f" {install_command('export-torch')}{_pins()}"
        ) from e
    return torch_programs


def _pins() -> str:
    try:
        requirements = [text.partition(";") for text in metadata.requires("rsrv") or ()]
    except metadata.PackageNotFoundError:
        return ""
    pins = [
        package.strip() for package, _, when in requirements if "export-torch" in when and "==" in package
    ]
    return f", which is {', '.join(pins)}" if pins else ""


def _example(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_numpy(name, value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    raise BundleError(
        f"{name}: is a {type(value).__name__}; give a tensor, an array or a jax.ShapeDtypeStruct"
    )
