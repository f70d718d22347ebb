"""Model for comparison, as one would write it without rsrv: a Python-backend model that executes in its own process.

    python plain_model.py BUNDLE PLATFORM

`rsrv.gpu.plain` copies this file into a model repository as model.py. The model executes a bundle's modules, so that it compiles
the same modules as rsrv. It batches the requests that Triton passes together, and pads the batch to the next compiled size. As a
program, without Triton, it holds the card's memory until its standard input ends, as Triton's stub would.
"""

import json
import sys
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


class PlainModel:
    """A bundle's modules and weights on a device of this process."""

    def __init__(self, path: Path, platform: str) -> None:
        """Compile every size, load the weights, and execute each size once."""
        bundle = read_bundle(path)
        # Do not take all memory, because other plain models or rsrv's runtime are on the same device.
        self._device = JaxDevice(platform, memory=MemoryShare(0.4, preallocate=False))
        self._executables = {
            key[1]: self._device.compile(read_module(bundle, key, signature), signature)
            for key, signature in sorted(check_signatures(bundle, signature_of).items())
        }
        self._weights = self._device.upload(load_weights(bundle))
        for size in self._executables:
            self.answer(np.zeros((size, *bundle.input_shape(0, 0, size)[1:]), np.float32))

    def answer(self, x: Any) -> Any:
        """Execute the rows of `x` once, padded with rows of zeros. Return only their results."""
        size = next(size for size in self._executables if size >= len(x))
        padded = np.concatenate([x, np.zeros((size - len(x), x.shape[1]), x.dtype)]) if size > len(x) else x
        (y,), _ = run(self._device, self._executables[size], self._weights, [padded])
        return y[: len(x)]


class TritonPythonModel:
    """x: f32 [n, width] -> y: f32 [n, width]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the model that the configuration names."""
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self._tensors = Tensors(pb_utils)
        parameters = json.loads(args["model_config"])["parameters"]
        bundle, platform = (parameters[key]["string_value"] for key in ("bundle", "platform"))
        self._model = PlainModel(Path(bundle), platform)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests with one execution."""
        tensors = [self._pb.get_input_tensor_by_name(request, "x") for request in requests]
        inputs = [self._tensors.read(tensor, "f32") for tensor in tensors]
        y = self._model.answer(np.concatenate(inputs))
        ends = np.cumsum([len(x) for x in inputs])
        return [
            self._pb.InferenceResponse([self._tensors.make("y", part)]) for part in np.split(y, ends[:-1])
        ]


if __name__ == "__main__":
    model = PlainModel(Path(sys.argv[1]), sys.argv[2])
    print("ready", flush=True)
    sys.stdin.read()
