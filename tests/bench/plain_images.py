"""The model `images` as a user would write it today: a Triton Python-backend model with jax in its own process.

It is copied into the plain side's model repository as model.py, with the weights beside it.
"""

from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1, 2, 4, 8)


class TritonPythonModel:
    """image: f32 [n, 3, 224, 224] -> scores: f32 [n, 10], batched over the requests that Triton passes."""

    def initialize(self, args: dict[str, str]) -> None:
        """Compile every size and run it once."""
        import asyncio  # noqa: F401  else the first request would import it

        import jax
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        with np.load(Path(args["model_repository"]) / args["model_version"] / "weights.npz") as file:
            kernel = jax.device_put(file["kernel"])
        self._apply = jax.jit(lambda image: image[:, :, ::32, ::32].reshape(image.shape[0], -1) @ kernel)
        for size in SIZES:
            np.asarray(self._apply(np.zeros((size, 3, 224, 224), np.float32)))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run one execution for all requests, padded to the next compiled size."""
        pb = self._pb
        inputs = [pb.get_input_tensor_by_name(request, "image").as_numpy() for request in requests]
        size = next(size for size in SIZES if size >= sum(map(len, inputs)))
        image = inputs[0]
        if size > 1:
            image = np.zeros((size, *image.shape[1:]), np.float32)
            np.concatenate(inputs, out=image[: sum(map(len, inputs))])
        scores = np.asarray(self._apply(image))
        responses, at = [], 0
        for part in inputs:
            own = scores[at : at + len(part)]
            at += len(part)
            responses.append(pb.InferenceResponse([pb.Tensor("scores", own)]))
        return responses
