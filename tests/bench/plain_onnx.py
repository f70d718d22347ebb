"""An ONNX file as a user serves it with Triton's Python backend: onnxruntime computes in the model's own process.

The benchmark copies this module to the plain side's model repository as model.py, and the ONNX file as model.onnx.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np


class TritonPythonModel:
    """A model with the inputs and outputs of the file. It executes all requests that Triton passes together."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the file with as many threads as there are cores."""
        import asyncio  # noqa: F401  else the first request would import it

        import onnxruntime
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        config = json.loads(args["model_config"])
        self._inputs = [entry["name"] for entry in config["input"]]
        self._outputs = [entry["name"] for entry in config["output"]]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        file = Path(args["model_repository"], args["model_version"], "model.onnx")
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the session once for all requests. It takes any number of rows without padding."""
        pb = self._pb
        arrays = [
            [pb.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs]
            for request in requests
        ]
        whole = arrays[0] if len(arrays) == 1 else map(np.concatenate, zip(*arrays, strict=True))
        results = self._session.run(self._outputs, dict(zip(self._inputs, whole, strict=True)))
        responses, at = [], 0
        for parts in arrays:
            end = at + len(parts[0])
            tensors = [
                pb.Tensor(name, value[at:end]) for name, value in zip(self._outputs, results, strict=True)
            ]
            responses.append(pb.InferenceResponse(tensors))
            at = end
        return responses
