"""How the device multiplies f32 after each treatment of a module, by the runtime's own probe.

Not yet run on a GPU (docs/exporting.md): a failure there may be the check's fault, and not the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from rsrv.runtime.device import Device, DeviceError
from rsrv.runtime.numerics import Computes, multiply, probe, treatment
from rsrv.settings import Numerics
from rsrv_bundle.modules import signature_of
from rsrv_bundle.precision import Treatment, treat

#: Of the probe's matrices.
_SIDE = 512
#: Stated explicitly, because with runtime.numerics: f32 the process has another default.
_DEFAULT = jax.lax.Precision.DEFAULT


@dataclass(frozen=True)
class Product:
    """The result of a module after a treatment."""

    module: str
    treatment: Treatment
    #: Its precision then.
    precision: str
    computes: Computes


def _dot(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision=_DEFAULT)


def _tf32(x: Any, y: Any) -> Any:
    how = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=how)


def _convolution(x: Any, y: Any) -> Any:
    """Return a convolution of images of one pixel and 512 channels: the same product, by another library."""
    images, kernel = x.reshape(_SIDE, 1, 1, _SIDE), y.reshape(1, 1, _SIDE, _SIDE)
    found = jax.lax.conv_general_dilated(
        images,
        kernel,
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=_DEFAULT,
    )
    return found.reshape(_SIDE, _SIDE)


_MODULES: dict[str, Callable[[Any, Any], Any]] = {
    "dot_general": _dot,
    "dot_general, TF32 asked for": _tf32,
    "convolution": _convolution,
}


def measure(device: Device) -> list[Product]:
    found = []
    for name, function in _MODULES.items():
        struct: Any = jax.ShapeDtypeStruct
        exported = jax.export.export(jax.jit(function), platforms=["cuda"])(
            *[struct((_SIDE, _SIDE), jnp.float32)] * 2
        )
        module = bytes(exported.mlir_module_serialized)
        signature = signature_of(module, name)
        for how in ("keep", "strip", "pin"):
            treated, precision = treat(module, name, how, signature.precision)
            found.append(Product(name, how, str(precision), multiply(device, treated, signature)))
    return found


def check(device: Device, numerics: Numerics, products: list[Product]) -> list[str]:
    """Return the violations of what must hold on any device."""
    wrong = [
        f"{one.module}: in {one.computes} although it is pinned"
        for one in _of(products, "pin")
        if one.computes != "f32"
    ]
    try:
        found = probe(device, numerics)
    except DeviceError as error:
        return [*wrong, str(error)]
    kept = {
        one.computes
        for one in _of(products, treatment("auto", device.hardware))
        if one.module == "dot_general"
    }
    if found is not None and kept != {found}:
        wrong.append(f"the probe says {found}, a model's product is in {kept}")
    # With f32 the libraries are told not to use it, for any request.
    if device.hardware.has_tf32 and numerics != "f32":
        wrong += [
            f"{one.module}: in {one.computes}"
            for one in _of(products, "keep")
            if "TF32" in one.module and one.computes != "tf32"
        ]
    return wrong


def _of(products: list[Product], how: Treatment) -> list[Product]:
    return [one for one in products if one.treatment == how]
