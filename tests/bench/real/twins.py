"""Models of other frameworks, rewritten in PyTorch, with the weights of their bundles.

Each function takes the weights by the names that they have in the bundle, and a batch in the bundle's form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as f

from rsrv_bundle import load_weights, read_bundle

Weights = Mapping[str, Tensor]


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a bundle, by name."""
    bundle = read_bundle(folder, digest=False)
    arrays = zip(bundle.weights, load_weights(bundle), strict=True)
    return {weight.name: torch.from_numpy(np.array(array)) for weight, array in arrays}


def fno(weights: Weights, start: Tensor) -> Tensor:
    """Compute the same as `examples.fno.network.apply`."""
    points = start.shape[1]
    angle = 2 * torch.pi * torch.arange(points, dtype=start.dtype) / points
    place = torch.stack([angle.sin(), angle.cos()], -1).expand(*start.shape, 2)
    x = _dense(weights, "lift", torch.cat([start[..., None], place], -1))
    for layer in range(sum(name.endswith("/real") for name in weights)):
        at = f"layers/{layer}"
        kernel = torch.complex(weights[f"{at}/waves/real"], weights[f"{at}/waves/imaginary"])
        spectrum = torch.fft.rfft(x, dim=1)[:, : len(kernel)]
        waves = torch.fft.irfft(torch.einsum("nkc,kcd->nkd", spectrum, kernel), n=points, dim=1)
        x = f.gelu(waves + _dense(weights, f"{at}/points", x), approximate="tanh")
    x = f.gelu(_dense(weights, "project", x), approximate="tanh")
    return _dense(weights, "end", x)[..., 0]


def digits(weights: Weights, image: Tensor) -> Tensor:
    """Compute the same as `examples.family.apply`."""
    x = image.permute(0, 3, 1, 2)
    for layer in ("conv1", "conv2"):
        kernel = weights[f"{layer}/kernel"].permute(3, 2, 0, 1)
        x = f.max_pool2d(f.relu(f.conv2d(x, kernel, weights[f"{layer}/bias"], padding=1)), 2)
    x = x.permute(0, 2, 3, 1).flatten(1)
    return _dense(weights, "head", f.relu(_dense(weights, "dense1", x)))


def unet(weights: Weights, image: Tensor) -> Tensor:
    """Compute the same as `examples.unet.network.UNet` for a batch."""

    def convolve(name: str, x: Tensor) -> Tensor:
        kernel = weights[f"{name}/weight"]
        return f.conv2d(x, kernel, weights[f"{name}/bias"].flatten(), padding=kernel.shape[-1] // 2)

    def pair(name: str, x: Tensor) -> Tensor:
        for part in (0, 1):
            x = convolve(f"{name}/convolutions/{part}", x)
            norm = f"{name}/norms/{part}"
            x = f.relu(f.group_norm(x, 4, weights[f"{norm}/weight"], weights[f"{norm}/bias"]))
        return x

    def rise(name: str, x: Tensor) -> Tensor:
        # Equinox stores the kernel of the transposed convolution. PyTorch stores the kernel of the convolution that is to be transposed.
        kernel = weights[f"{name}/weight"].flip(2, 3).transpose(0, 1)
        return f.conv_transpose2d(x, kernel, weights[f"{name}/bias"].flatten(), stride=2)

    x = pair("down/0", image.float().permute(0, 3, 1, 2) / 64 - 2)
    levels = []
    for level in (1, 2):
        levels.append(x)
        x = pair(f"down/{level}", f.max_pool2d(x, 2))
    for level in (1, 0):
        x = pair(f"up/{level}", torch.cat([levels[level], rise(f"ups/{level}", x)], 1))
    return convolve("last", x)[:, 0]


#: Functions by the first word of the model's name.
TWINS: Mapping[str, Callable[[Weights, Tensor], Tensor]] = {"family": digits, "fno": fno, "unet": unet}


def _dense(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]
