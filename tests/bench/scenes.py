"""The detector's requests, and the answers of the sides: images with shapes, because noise has none."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from examples.detector_scenes import scenes
from tests.bench.load import BenchFailed
from tests.bench.models import Array
from tests.bench.places import WORK

DETECTOR = "detector"
#: Images that requests carry in turns.
_IMAGES = 32
#: The allowed differences of boxes (pixels) and scores, computed by two versions of jax.
_TOLERANCE = {"boxes": 0.05, "scores": 1e-3}

Answer = Mapping[str, Array]


def images() -> Array:
    """Return u8 [n, side, side, 3], the same in every process."""
    return np.asarray(scenes(_IMAGES, seed=11).images)


def write_requests() -> Path:
    """Write a file of requests of one image each, as perf_analyzer reads them."""
    file = WORK / "scenes.json"
    entries = [
        {"image": {"b64": base64.b64encode(image.tobytes()).decode(), "shape": list(image.shape)}}
        for image in images()
    ]
    file.write_text(json.dumps({"data": entries}))
    return file


def detect(grpc_url: str) -> list[Answer]:
    """Return the answer to each image, asked alone."""
    client = triton.InferenceServerClient(grpc_url)
    found: list[Answer] = []
    for image in images():
        tensor = triton.InferInput("image", [1, *image.shape], "UINT8")
        tensor.set_data_from_numpy(image[None])
        answer = client.infer(DETECTOR, [tensor])
        found.append({name: answer.as_numpy(name) for name in ("boxes", "scores", "classes", "count")})
    client.close()
    return found


def compare(side: str, answers: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    """Compare the finds of two sides. Raises BenchFailed."""
    for index, (answer, other) in enumerate(zip(answers, wanted, strict=True)):
        for name, array in answer.items():
            difference = np.abs(array.astype(np.float64) - other[name]).max()
            if not difference <= _TOLERANCE.get(name, 0):
                raise BenchFailed(f"{side}: {name} of image {index} differ by {difference:.2g}")
    if not any(answer["count"].any() for answer in answers):
        raise BenchFailed(f"{side}: nothing was found in any image")
