
from pathlib import Path

import numpy as np

SCALE = float((Path(__file__).parent / "scale.txt").read_text())


def preprocess(inputs):
    """pixels: u8 [n, 3] -> x: f32 [n, 3]."""
    return {"x": inputs["pixels"].astype(np.float32) / SCALE}


def postprocess(outputs):
    """y: f32 [n, 2] -> best: i64 [n, 1]."""
    return {"best": outputs["y"].argmax(1, keepdims=True)}
