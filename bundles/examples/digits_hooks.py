"""Hooks of the digits bundle, copied into it as `model.py`. They run where only numpy is installed."""

import numpy as np


def postprocess(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """logits: f32 [n, 10] -> class: i64 [n, 1], score: f32 [n, 1], the softmax of that class."""
    logits = outputs["logits"]
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return {
        "class": logits.argmax(axis=1).astype(np.int64).reshape(-1, 1),
        "score": (exponentials.max(axis=1) / exponentials.sum(axis=1)).astype(np.float32).reshape(-1, 1),
    }
