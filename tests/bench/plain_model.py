"""A model as a user writes it without rsrv: a Triton Python-backend model that computes with jax in its own process.

The benchmark copies this file into the plain side's model repository as model.py, together with the weights.
"""

from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1, 2, 4, 8, 16, 32)


class TritonPythonModel:
    """A model x: f32 [n, 256] -> logits: f32 [n, 10]. It executes all requests that Triton passes together."""

    def initialize(self, args: dict[str, str]) -> None:
        """Compile every size, and execute it once."""
        import asyncio  # noqa: F401  else the first request would import it

        import jax
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        folder = Path(args["model_repository"]) / args["model_version"]
        with np.load(folder / "weights.npz") as file:
            weights = {name: jax.device_put(file[name]) for name in file.files}

        def apply(weights: Any, x: Any) -> Any:
            hidden = jax.nn.relu(x @ weights["hidden_kernel"] + weights["hidden_bias"])
            return hidden @ weights["output_kernel"] + weights["output_bias"]

        self._weights = weights
        self._apply = jax.jit(apply)
        for size in SIZES:
            np.asarray(self._apply(weights, np.zeros((size, 256), np.float32)))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run one execution for all requests. Rows are padded to the next compiled size."""
        pb = self._pb
        inputs = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        x = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        rows = len(x)
        size = next(size for size in SIZES if size >= rows)
        if size > rows:
            x = np.concatenate([x, np.zeros((size - rows, x.shape[1]), x.dtype)])
        logits = np.asarray(self._apply(self._weights, x))
        responses, at = [], 0
        for part in inputs:
            own = logits[at : at + len(part)]
            at += len(part)
            responses.append(pb.InferenceResponse([pb.Tensor("logits", own)]))
        return responses
