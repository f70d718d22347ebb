"""Exporting PyTorch modules, by torch.export and torchax. Needs the extra `export-torch`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from rsrv.extras import install_command
from rsrv.progress import steps
from rsrv_bundle.calling import Results, caller
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.interface import InputPlan, plan_inputs, value_of
from rsrv_bundle.spec import Bundle
from rsrv_bundle.stateful import export_stateful
from rsrv_bundle.torch_arrays import dtype_of, to_numpy, to_torch
from rsrv_bundle.writer import free_target


def export_torch(
    module: nn.Module,
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
        weights, named as in its state_dict; shared tensors are stored once.
    example_inputs: name of an argument of `forward` -> tensor, array or jax.ShapeDtypeStruct.
    The rest is as for `rsrv_bundle.export.export_bundle`. 64-bit element types need no switch.

    The module is traced at each size separately, so that it need not work for sizes in general. Raises
    BundleError for a module in training mode, one that draws random numbers or changes its buffers, one that
    torch.export cannot trace, for operations that torchax lacks, and as `export_bundle`. torchax registers a device
    with PyTorch, so that afterwards torch.compile and nn.DataParallel do not work in this process.
    """
    free_target(out_dir, options.get("overwrite", False))
    sizes = {
        "batch_sizes": batch_sizes,
        "batch_axis": batch_axis,
        "axes": axes or {},
        "input_shapes": input_shapes,
    }
    module, examples, programs = _traced(module, example_inputs, {}, Path(out_dir).name, sizes)
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
    **options: Any,
) -> Bundle:
    """Write a module with state as a bundle: `forward` takes state tensors by name, and returns them under these names.

    state: argument of `forward` -> tensor or array: the state that a sequence begins with, without the batch axis.
    output_names: of a tuple, with the state's names among them.
    The rest is as for `export_torch` and `rsrv_bundle.stateful.export_stateful`.
    """
    free_target(out_dir, options.get("overwrite", False))
    sizes = {"batch_sizes": batch_sizes, "axes": axes or {}, "input_shapes": input_shapes}
    first = {name: _example(f"state: {name}", value) for name, value in state.items()}
    name = Path(out_dir).name
    module, examples, programs = _traced(module, example_inputs, first, name, {"batch_axis": 0, **sizes})
    eager = _original(module)

    def split(result: Any) -> tuple[Any, Any]:
        found = Results.of(result).named(output_names)
        if missing := [name for name in first if name not in found]:
            raise BundleError(
                f"module: {missing[0]}: forward takes this state, and must return it by this name"
            )
        after = {name: found.pop(name) for name in first}
        return found, after

    def run(before: Any, **inputs: Any) -> Any:
        found, after = split(eager.run(**inputs, **before))
        return found, {name: to_numpy(name, value) for name, value in after.items()}

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
) -> tuple[nn.Module, dict[str, Any], Any]:
    """Trace a module at each size, with the state of as many rows. Returns it, the examples, and the traced modules."""
    module = _plain(module)
    _check_module(module)
    examples = {name: _example(name, value) for name, value in example_inputs.items()}
    inputs = plan_inputs(
        {name: value_of(name, value.dtype, value.shape) for name, value in examples.items()}, **sizes
    )
    programs = _torch_programs().TracedModules(
        module, {name: dtype_of(value.dtype) for name, value in {**examples, **state}.items()}
    )
    keys = list(inputs.keys())
    with steps(f"trace {name}", len(keys)) as traced:
        for variant, size in keys:
            rows = [(size, *value.shape) for value in state.values()]
            try:
                programs.at([*inputs.shapes(variant, size), *rows])
            except BundleError as e:
                raise ((not state and _without_batch(module, examples, inputs)) or e) from e
            traced.step(f"batch size {size}" if inputs.batched else "")
    return module, examples, programs


def _without_batch(module: nn.Module, examples: Mapping[str, Any], inputs: InputPlan) -> BundleError | None:
    """Return an error about the batch axis, if the module takes the examples as they are, or with one more axis in front."""

    def takes(arrays: Mapping[str, Any]) -> bool:
        try:
            _original(module).run(**arrays)
        except Exception:  # noqa: BLE001 - the module's own
            return False
        return True

    failed = [size for size in inputs.batch_sizes if not takes(_zeros(inputs, size))]
    if not failed:
        return None
    tried = ", ".join(
        f"{spec.name} {list(array.shape)}"
        for spec, array in zip(inputs.specs, _zeros(inputs, failed[0]).values(), strict=True)
    )
    for rows in ((), (failed[0],)):
        arrays = {name: np.zeros((*rows, *value.shape), value.dtype) for name, value in examples.items()}
        if takes(arrays):
            taken = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            cure = "" if rows else ", or, if the module takes no batches, leave out the batch sizes"
            return BundleError(
                f"module: takes {taken}, and fails with {tried}, where batch size {failed[0]} replaces an axis of the"
                f" example; give examples with the batch axis in front{cure}"
            )
    return None


def _zeros(inputs: InputPlan, size: int) -> dict[str, Any]:
    shapes = inputs.shapes(0, size)
    return {
        spec.name: np.zeros(shape, numpy_dtype(spec.dtype))
        for spec, shape in zip(inputs.specs, shapes, strict=True)
    }


def eager_torch(module: nn.Module) -> Callable[..., Results]:
    """Return the module as a function from numpy arrays by name to numpy arrays; in training mode it raises BundleError."""
    return _original(_plain(module)).eager


def _original(module: nn.Module) -> Original:
    def run(**inputs: Any) -> Any:
        _check_module(module)
        tensors = {name: to_torch(np.asarray(value)) for name, value in inputs.items()}
        # Compiled parts would fail on the device that torchax registers.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return caller(module, tuple(inputs), like=module.forward)(tensors)

    return Original(run, ("torch", "torchax"), to_numpy)


def _torch_programs() -> Any:
    """Import `torch_programs`. Raises BundleError if torchax is missing, or not made for this PyTorch.

    Imported only when it is needed: importing torchax changes PyTorch for the whole process.
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
    pins = [what.strip() for what, _, when in requirements if "export-torch" in when and "==" in what]
    return f", which is {', '.join(pins)}" if pins else ""


def _plain(module: nn.Module) -> nn.Module:
    """Return the module inside a compiled one, whose weights have no prefix; any other module unchanged."""
    if not isinstance(module, torch._dynamo.OptimizedModule):
        return module
    inner = module._orig_mod
    assert isinstance(inner, nn.Module)
    return inner


def _check_module(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise BundleError(
            "module: is TorchScript; export the module that it was made from, as docs/coming-from.md says under Coming"
            " from TorchScript"
        )
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise BundleError(f"module: is a {type(module).__name__}; export module.module")
    for name, part in module.named_modules():
        if type(part).__module__.startswith("torch.ao.nn.quantized"):
            raise BundleError(
                f"module: {name or 'it'}: is quantised, which bundles are not; export it as it was before"
            )
    problems = dict.fromkeys(
        _elsewhere(name, tensor.device, moves)
        for name, tensor, moves in _tensors(module)
        if tensor.device.type != "cpu"
    )
    if problems:
        raise BundleError(problems)
    training = [name or "it" for name, part in module.named_modules() if part.training]
    if training:
        raise BundleError(
            f"module: is in training mode ({', '.join(training[:3])}); call module.eval() first, so that dropout and"
            " batch normalisation work as in serving"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield all tensors: name, tensor, and whether module.cpu() moves it."""
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            yield prefix + key, value, True
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield prefix + key, value, False


def _elsewhere(name: str, device: torch.device, moves: bool) -> str:
    if device.type == "meta":
        return "module: is on meta, where tensors have no values; load its weights on the CPU first"
    if moves:
        return f"module: is on {device}; export module.cpu(), for any platform"
    return f"module: {name}: is on {device}, and module.cpu() does not move it; make it a buffer by register_buffer"


def _example(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_numpy(name, value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    raise BundleError(
        f"{name}: is a {type(value).__name__}; give a tensor, an array or a jax.ShapeDtypeStruct"
    )
