"""The sources of the real models with the weights of the built bundles. Tests compare bundles with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import equinox as eqx
import jax

from examples import digits, family, fno, resnet18, unet, vit
from examples.fno.network import initial
from examples.unet.network import UNet
from tests.examples.built import Arrays, restored


def source(root: Path, name: str) -> Callable[[Arrays], Arrays]:
    """Return a function that computes the answers of a model's source. Its own framework computes them, without compiling."""
    match name.partition("_")[0]:
        case "family":
            return partial(family.reference, params=digits.params_of(root / name))
        case "fno":
            return partial(fno.reference, weights=restored(root / name, initial()))
        case "resnet18":
            return resnet18.reference
        case "unet":
            weights, rest = eqx.partition(UNet(jax.random.key(0)), eqx.is_array)
            network = eqx.combine(restored(root / name, weights), rest)
            return partial(unet.reference, network=network)
        case "vit":
            return vit.reference
        case _:
            raise ValueError(f"no source for {name}")
