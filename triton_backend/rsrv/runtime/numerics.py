"""Precision of f32 products (`runtime.numerics`): changes to modules, and a probe of the device."""

import logging
import re
from typing import Literal

import numpy as np

from rsrv.runtime.device import Array, Device, DeviceError, Hardware, run
from rsrv.settings import Numerics
from rsrv_bundle.modules import Signature, signature_of, strip_locations
from rsrv_bundle.precision import Treatment, product, treat

log = logging.getLogger(__name__)

#: Variable that CUDA's libraries read at their first use. With 0, they never round to TF32, even on request.
OVERRIDE = "NVIDIA_TF32_OVERRIDE"
#: Precision in which a device multiplies matrices of f32.
Computes = Literal["f32", "tf32", "indeterminate"]

#: Rows and columns of the probe's matrix.
_SIDE = 512


def hardware_of(platform: str, version: str, capability: object) -> Hardware:
    """Derive a device's hardware from jax's platform, platform version and compute capability, if any."""
    if "cuda" not in version.lower():
        return Hardware(platform)
    match = re.fullmatch(r"(\d+)\.(\d+)", str(capability))
    return Hardware("cuda", (int(match[1]), int(match[2])) if match else None)


def treatment(numerics: Numerics, hardware: Hardware) -> Treatment:
    """Return the change that is made to every module before it is compiled for that hardware."""
    if numerics == "f32":
        return "pin"
    return "keep" if hardware.has_tf32 else "strip"


def judge(result: Array) -> Computes:
    """Return the precision in which a device has multiplied the probe's matrix by the identity.

    In f32, the product is the matrix itself. TF32 keeps only 10 bits of the mantissa, so each element becomes 1.
    """
    if np.array_equal(result, _matrix()):
        return "f32"
    return "tf32" if np.array_equal(result, np.ones((_SIDE, _SIDE), np.float32)) else "indeterminate"


def _matrix() -> Array:
    """Return A[i, j] = 1 + ((i + j) mod 512) 2^-20, with i, j from 1 to 512.

    The elements are exact in f32. They differ from 1 by less than half a step of TF32.
    """
    index = np.arange(1, _SIDE + 1)
    return (1 + (index[:, None] + index) % _SIDE * 2.0**-20).astype(np.float32)


def multiply(device: Device, module: bytes, signature: Signature) -> Computes:
    """Execute a module that multiplies two f32 matrices of 512 x 512, and return the precision of the product.

    Raises DeviceError if the device cannot execute the module.
    """
    try:
        executable = device.compile(module, signature)
        (result,), _ = run(device, executable, [], [_matrix(), np.eye(_SIDE, dtype=np.float32)])
    except Exception as error:
        raise DeviceError(
            f"the device cannot multiply two matrices, which is tested before any model is built: {type(error).__name__}: {error}"
        ) from error
    return judge(result)


def probes(numerics: Numerics) -> list[tuple[bytes, Signature]]:
    """Return the modules of `probe`. They have the same bytes in each process."""
    blob, _ = product(_SIDE)
    # Remove the debug locations, because they depend on the code that calls this function.
    plain = strip_locations(blob).blob
    signature = signature_of(plain, "the probe")
    if numerics != "f32":
        return [(plain, signature)]
    pinned, _ = treat(plain, "the probe", "pin", signature.precision)
    return [(plain, signature), (pinned, signature)]


def probe(device: Device, numerics: Numerics) -> Computes | None:
    """Return the precision in which the device multiplies by default. None: the device is a CPU, which has only f32.

    Call this before any model is compiled. Raises DeviceError if the device does not support `numerics`.
    """
    hardware = device.hardware
    if numerics == "tf32" and not hardware.has_tf32:
        raise DeviceError(
            f"runtime.numerics is tf32, but {_why_not(hardware)}; set it to auto or f32, or serve from a GPU with TF32"
        )
    if hardware.platform == "cpu":
        return None
    plain, *further = probes(numerics)
    precision = multiply(device, *plain)
    log.info("%s multiplies f32 values in %s; runtime.numerics is %s", hardware, precision, numerics)
    if numerics == "f32":
        if (exact := multiply(device, *further[0])) != "f32":
            raise DeviceError(
                f"runtime.numerics is f32, but {hardware} multiplies in {exact} where a module requests f32: a fault of "
                "the driver or the compiler, not of a model; set it to auto to serve with the hardware's default"
            )
    elif precision == "indeterminate":
        log.warning(
            "the device's products are neither f32 nor TF32: compare the models' answers here with those of their sources"
        )
    elif numerics == "tf32" and precision == "f32":
        log.warning(
            "runtime.numerics is tf32, but the device multiplies in f32 by default: check whether %s is 0",
            OVERRIDE,
        )
    return precision


def _why_not(hardware: Hardware) -> str:
    if hardware.platform == "cpu":
        return (
            "the models would run on a CPU, which has no TF32 (if the machine has a GPU, jax does not find it: see its "
            "messages above)"
        )
    return f"{hardware} is not known to have TF32, which needs CUDA's compute capability 8.0 or higher"
