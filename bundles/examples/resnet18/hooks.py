"""Hooks of the resnet18 bundle, copied into it as `model.py`: from an image's file to five classes."""

import numpy as np

from rsrv.hooks.image import IMAGENET_MEAN, IMAGENET_STD, decode, normalise, resize_crop
from rsrv.hooks.labels import softmax, top_k

#: An image is resized until its shorter side has SHORTER pixels. Then the square of SIDE x SIDE pixels at its centre is used. The
#: ratio is about the ratio of torchvision's 256 and 224.
SHORTER, SIDE = 110, 96


def preprocess(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """file: u8 [n, bytes], JPEG, PNG or WebP with zeros after the file -> image: f32 [n, 3, SIDE, SIDE]."""
    pixels = resize_crop(decode(inputs["file"]), SHORTER, (SIDE, SIDE))
    return {"image": normalise(pixels, IMAGENET_MEAN, IMAGENET_STD)}


def postprocess(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """logits: f32 [n, 1000] -> classes: i64 [n, 5], the best first, and scores: f32 [n, 5]."""
    scores, classes = top_k(softmax(outputs["logits"]), 5)
    return {"classes": classes, "scores": scores}
