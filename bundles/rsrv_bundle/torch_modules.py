"""Checks of PyTorch modules before an export, and their state around a call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rsrv_bundle.errors import BundleError


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the attributes, parameters and buffers of all parts of a module when the block ends.

    Many modules cache values for the shapes of their latest call. The contents of tensors are not restored.
    """
    before = []
    for part in module.modules():
        for holder in (vars(part), *vars(part).values()):
            # Other containers, such as frozen ones, are not restored.
            if type(holder) in (dict, list, OrderedDict):
                before.append((holder, holder.copy()))
    try:
        yield
    finally:
        for holder, contents in before:
            holder.clear()
            _fill(holder, contents)


def _fill(holder: Any, contents: Any) -> None:
    holder.update(contents) if isinstance(holder, dict) else holder.extend(contents)


@contextmanager
def without_idle_conversions() -> Iterator[None]:
    """Skip conversions of modules to the element type and device that they already have.

    Some modules convert their parts in `forward`, for example `self.head = self.head.to(self.dtype)`. Tracing cannot replace the
    tensors of a module.
    """
    apply: Any = nn.Module._apply

    def applied(part: nn.Module, convert: Any, recurse: bool = True) -> Any:
        tensors = [*part.parameters(recurse), *part.buffers(recurse)]
        converted = map(convert, tensors)
        if all((t.dtype, t.device) == (c.dtype, c.device) for t, c in zip(tensors, converted, strict=True)):
            return part
        return apply(part, convert, recurse)

    with patch.object(nn.Module, "_apply", applied):
        yield


def plain(module: nn.Module) -> nn.Module:
    """Return the original of a compiled module, so that the names of weights have no prefix. Return other modules unchanged."""
    if not isinstance(module, torch._dynamo.OptimizedModule):
        return module
    inner = module._orig_mod
    assert isinstance(inner, nn.Module)
    return inner


def check_module(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise BundleError(
            "module: is TorchScript; export the module that it was made from, as docs/coming-from.md says under"
            " TorchScript"
        )
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise BundleError(f"module: is a {type(module).__name__}; export module.module")
    for name, part in module.named_modules():
        if type(part).__module__.startswith("torch.ao.nn.quantized"):
            raise BundleError(
                f"module: {name or 'the module itself'}: is quantised, and quantised modules cannot be exported; export the original module"
            )
    problems = dict.fromkeys(
        _elsewhere(name, tensor.device, moves)
        for name, tensor, moves in _tensors(module)
        if tensor.device.type != "cpu"
    )
    if problems:
        raise BundleError(problems)
    training = [name or "the module itself" for name, part in module.named_modules() if part.training]
    if training:
        raise BundleError(
            f"module: is in training mode ({', '.join(training[:3])}); call module.eval() first, so that dropout and"
            " batch normalisation work as in serving"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name of each tensor, the tensor, and whether module.cpu() moves it."""
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
    return f"module: {name}: is on {device}, and module.cpu() does not move it; call register_buffer for it"
