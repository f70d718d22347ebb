"""Model for comparison, as one would write it without rsrv: a Python-backend model that executes in its own process.

`comparison` copies it into a model repository as model.py. It executes a bundle's modules, so both sides compile the
same; requests are batched as Triton passes them, and padded to the next compiled size.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.runtime.cuda import MemoryShare
from rsrv.runtime.device import run
from rsrv.runtime.jax_device import JaxDevice
from rsrv.stub.tensors import Tensors
from rsrv_bundle import read_bundle
from rsrv_bundle.modules import check_signatures, read_module, signature_of
from rsrv_bundle.weights import load_weights


class TritonPythonModel:
    """x: f32 [n, width] -> y: f32 [n, width]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Compile every size, and load the weights."""
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self._tensors = Tensors(pb_utils)
        parameters = json.loads(args["model_config"])["parameters"]
        bundle = read_bundle(Path(parameters["bundle"]["string_value"]))
        # The runtime of the other side is on the same device.
        memory = MemoryShare(0.4, preallocate=False)
        self._device = JaxDevice(parameters["platform"]["string_value"], memory=memory)
        self._executables = {
            key[1]: self._device.compile(read_module(bundle, key, signature), signature)
            for key, signature in sorted(check_signatures(bundle, signature_of).items())
        }
        self._weights = self._device.upload(load_weights(bundle))
        for size in self._executables:
            self._answer(np.zeros((size, *bundle.input_shape(0, 0, size)[1:]), np.float32))

    def _answer(self, x: Any) -> Any:
        """Return the rows of one execution, whose other rows are zeros."""
        size = next(size for size in self._executables if size >= len(x))
        padded = np.concatenate([x, np.zeros((size - len(x), x.shape[1]), x.dtype)]) if size > len(x) else x
        (y,), _ = run(self._device, self._executables[size], self._weights, [padded])
        return y[: len(x)]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Execute once for all requests."""
        found = [self._pb.get_input_tensor_by_name(request, "x") for request in requests]
        inputs = [self._tensors.read(tensor, "f32") for tensor in found]
        y = self._answer(np.concatenate(inputs))
        ends = np.cumsum([len(x) for x in inputs])
        return [
            self._pb.InferenceResponse([self._tensors.make("y", part)]) for part in np.split(y, ends[:-1])
        ]
