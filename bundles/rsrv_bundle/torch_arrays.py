"""Conversion between numpy arrays and PyTorch tensors, including element types that numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rsrv_bundle import dtypes
from rsrv_bundle.calling import Results
from rsrv_bundle.errors import BundleError
from rsrv_bundle.interface import nameless

Array = np.ndarray[Any, Any]

#: Element types with different names in the two libraries: numpy's name -> PyTorch's name.
_NAMES = {"bool_": "bool"}


def dtype_of(dtype: Any) -> torch.dtype:
    """Return the PyTorch type for a numpy element type of the bundle format."""
    name = np.dtype(dtype).name
    value = getattr(torch, _NAMES.get(name, name))
    assert isinstance(value, torch.dtype)
    return value


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of `array` as a tensor."""
    # Convert through bytes, because neither library knows all element types of the other.
    flat = torch.from_numpy(np.array(array, order="C").reshape(-1).view(np.uint8))
    return flat.view(dtype_of(array.dtype)).reshape(array.shape)


def to_numpy(name: str, value: Any) -> Array:
    """Return a copy of a tensor as an array.

    Raises BundleError, which contains `name`, if `value` is not a tensor, or if the format lacks its element type.
    """
    if not isinstance(value, torch.Tensor):
        raise BundleError(f"{name}: is a {type(value).__name__}; it must be a tensor")
    token = dtypes.meant(str(value.dtype))
    if token is None:
        raise nameless(name, str(value.dtype).removeprefix("torch."))
    dtype = dtypes.numpy_dtype(token)
    # A view of bytes needs the stride 1. contiguous() would not change the stride of a single element.
    dense = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(value.shape))


def tensors_of(result: Any) -> Results:
    """Return the tensors of a module's result, flattened. Parts that are not tensors, such as caches, are left out."""
    return Results.of(result).only(lambda value: isinstance(value, torch.Tensor))
