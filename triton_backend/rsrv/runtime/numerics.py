"""`runtime.numerics`: what it asks of modules and of the device, and the probe that finds out how the device multiplies."""

import logging
import re
from typing import Literal

import numpy as np

from rsrv.runtime.device import Array, Device, DeviceError, Hardware, run
from rsrv.settings import Numerics
from rsrv_bundle.modules import Signature
from rsrv_bundle.precision import Treatment, product, treat

log = logging.getLogger("rsrv.numerics")

#: CUDA's libraries read it when they are first used: with 0 they do not round to TF32, whatever they are asked for
OVERRIDE = "NVIDIA_TF32_OVERRIDE"

#: how a device multiplies matrices of f32
Computes = Literal["f32", "tf32", "indeterminate"]

#: rows and columns of the matrix that is multiplied by 1
_SIDE = 512


def hardware_of(platform: str, version: str, capability: object) -> Hardware:
    """What jax's names for a device say: its platform, its client's version, and its compute capability, if any."""
    if "cuda" not in version.lower():
        return Hardware(platform)
    found = re.fullmatch(r"(\d+)\.(\d+)", str(capability))
    return Hardware("cuda", (int(found[1]), int(found[2])) if found else None)


def treatment(numerics: Numerics, hardware: Hardware) -> Treatment:
    """What is done to every module before it is compiled for that hardware."""
    if numerics == "f32":
        return "pin"
    return "keep" if hardware.has_tf32 else "strip"


def judge(result: Array) -> Computes:
    """How the probe's matrix was multiplied by 1, from the product.

    TF32 keeps 10 bits of the mantissa: there everything in the matrix is 1.
    """
    if np.array_equal(result, _matrix()):
        return "f32"
    return "tf32" if np.array_equal(result, np.ones((_SIDE, _SIDE), np.float32)) else "indeterminate"


def _matrix() -> Array:
    """A[i, j] = 1 + ((i + j) mod 512) 2^-20 for i, j from 1 to 512: exact in f32, and below the half of TF32's step."""
    index = np.arange(1, _SIDE + 1)
    return (1 + (index[:, None] + index) % _SIDE * 2.0**-20).astype(np.float32)


def multiply(device: Device, module: bytes, signature: Signature) -> Computes:
    """How the device multiplies, with a module of two f32 matrices of 512 x 512. Raises DeviceError if it cannot."""
    try:
        executable = device.compile(module, signature)
        (result,), _ = run(device, executable, [], [_matrix(), np.eye(_SIDE, dtype=np.float32)])
    except Exception as error:
        raise DeviceError(
            f"the device cannot multiply two matrices, which is tried before any model: {type(error).__name__}: {error}"
        ) from error
    return judge(result)


def probe(device: Device, numerics: Numerics) -> Computes | None:
    """Before any model is compiled: how the device multiplies by default; None on a CPU, where there is no question.

    Raises DeviceError if the device cannot do what `numerics` promises.
    """
    hardware = device.hardware
    if numerics == "tf32" and not hardware.has_tf32:
        raise DeviceError(
            f"runtime.numerics is tf32, and {_why_not(hardware)}; set it to auto or f32, or serve from a GPU with TF32"
        )
    if hardware.platform == "cpu":
        return None
    module, signature = product(_SIDE)
    found = multiply(device, module, signature)
    log.info("%s multiplies f32 in: %s; runtime.numerics: %s", hardware, found, numerics)
    if numerics == "f32":
        pinned, _ = treat(module, "the probe", "pin", signature.precision)
        if (exact := multiply(device, pinned, signature)) != "f32":
            raise DeviceError(
                f"runtime.numerics is f32, but {hardware} multiplies in {exact} where a module asks for f32: the fault "
                "is the driver's or the compiler's, no model's; set it to auto to serve as the hardware does"
            )
    elif found == "indeterminate":
        log.warning(
            "that is neither f32 nor TF32: compare what models answer here with what their sources do"
        )
    elif numerics == "tf32" and found == "f32":
        log.warning(
            "runtime.numerics is tf32, but products without an algorithm are in f32: perhaps %s is 0",
            OVERRIDE,
        )
    return found


def _why_not(hardware: Hardware) -> str:
    if hardware.platform == "cpu":
        return (
            "the models would run on a CPU, which has no TF32 (if there is a GPU, jax does not find it: see what it "
            "says above)"
        )
    return f"{hardware} is not known to have TF32, which takes CUDA's compute capability 8.0"
