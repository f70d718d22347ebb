"""Requests to the detector, and the answers of the sides. The images have shapes, because the detector finds none in noise."""

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
#: Number of images. Requests use them in turn.
_IMAGES = 32
#: Largest allowed differences of boxes (in pixels) and of scores. rsrv and the plain model use different versions of jax.
_TOLERANCE = {"boxes": 0.05, "scores": 1e-3}

Answer = Mapping[str, Array]


def images() -> Array:
    """Return images, u8 [n, side, side, 3]. They are the same in every process."""
    return np.asarray(scenes(_IMAGES, seed=11).images)


def write_requests() -> Path:
    """Write a file for perf_analyzer with requests of one image each."""
    file = WORK / "scenes.json"
    entries = [
        {"image": {"b64": base64.b64encode(image.tobytes()).decode(), "shape": list(image.shape)}}
        for image in images()
    ]
    file.write_text(json.dumps({"data": entries}))
    return file


def detect(grpc_url: str) -> list[Answer]:
    """Return the answers to all images. Each image is sent alone."""
    client = triton.InferenceServerClient(grpc_url)
    answers: list[Answer] = []
    for image in images():
        tensor = triton.InferInput("image", [1, *image.shape], "UINT8")
        tensor.set_data_from_numpy(image[None])
        answer = client.infer(DETECTOR, [tensor])
        answers.append({name: answer.as_numpy(name) for name in ("boxes", "scores", "classes", "count")})
    client.close()
    return answers


def compare(side: str, answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Compare the shapes that two sides find. Raises BenchFailed."""
    for index, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        for name, array in answer.items():
            difference = np.abs(array.astype(np.float64) - other[name]).max()
            if not difference <= _TOLERANCE.get(name, 0):
                raise BenchFailed(f"{side}: {name} of image {index} differ by {difference:.2g}")
    if not any(answer["count"].any() for answer in answers):
        raise BenchFailed(f"{side}: nothing was found in any image")
