"""Hooks of the digits bundle, copied into it as `model.py`."""

import numpy as np

from rsrv.hooks.labels import softmax, top_k


def postprocess(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """logits: f32 [n, 10] -> class: i64 [n, 1], score: f32 [n, 1], the softmax of that class."""
    scores, classes = top_k(softmax(outputs["logits"]), 1)
    return {"class": classes, "score": scores}
