"""The measured models, and requests to them. This module imports neither jax nor torch, because the client also uses it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from examples.build import MODELS
from rsrv.hooks.text import as_text

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

SENTENCES = (
    "A man is playing a guitar on stage.",
    "Someone performs music in front of an audience.",
    "The stock market fell sharply today.",
    "Share prices dropped a lot this afternoon.",
)


@dataclass(frozen=True)
class Case:
    """A line of the table: a model, and requests to it."""

    #: The model that clients ask.
    model: str
    source: str
    #: Unit of a request's rows, in the plural.
    unit: str
    #: Bundles of the model and its callees, or all bundles of a family.
    bundles: tuple[str, ...]
    #: Makes a request from a number of rows.
    inputs: Callable[[int], Arrays]
    #: Number of rows in the larger of the two requests.
    most: int = 32

    @property
    def title(self) -> str:
        """The model's name in the table."""
        return self.model if len(self.bundles) == 1 else f"{self.model} ({len(self.bundles)} bundles)"


def _noise(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def _files(rows: int) -> Arrays:
    """Return JPEG files of 160 x 120 pixels."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(rows):
        small = PIL.Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        small.resize((160, 120)).save(file := io.BytesIO(), "JPEG")
        files.append(file.getvalue())
    return {"file": as_text(files)}


def _pixels(rows: int) -> Arrays:
    return {"image": np.random.default_rng(0).integers(0, 256, (rows, 96, 96, 3), np.uint8)}


def _texts(rows: int) -> Arrays:
    texts = [[SENTENCES[row % len(SENTENCES)].encode()] for row in range(rows)]
    return {"text": np.array(texts, object)}


_MINILM = ("minilm", "minilm_encoder", "minilm_pool")
_DETECTOR = ("detector", "detector_backbone", "detector_head")
_FAMILY = tuple(name for name in MODELS if name.startswith("family"))

CASES: Mapping[str, Case] = {
    case.model: case
    for case in (
        Case("resnet18", "PyTorch", "images", ("resnet18",), _files),
        Case("vit_tiny", "Flax NNX", "images", ("vit_tiny",), lambda n: {"image": _noise(n, 64, 64, 3)}),
        Case("unet", "Equinox", "images", ("unet",), _pixels),
        # The encoder is compiled for at most 16 rows.
        Case("minilm", "JAX", "texts", _MINILM, _texts, most=16),
        Case("fno_f32", "JAX", "fields", ("fno_f32",), lambda n: {"start": _noise(n, 64)}),
        Case("fno_f64", "JAX", "fields", ("fno_f64",), lambda n: {"start": _noise(n, 64, dtype=np.float64)}),
        Case("family_half", "JAX", "images", _FAMILY, lambda n: {"image": _noise(n, 8, 8, 1)}),
        Case("detector", "JAX", "images", _DETECTOR, _pixels),
    )
}
