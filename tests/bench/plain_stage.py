"""A network of the detector as a user writes it without rsrv: a Triton Python-backend model that computes with jax.

The benchmark copies this file into the plain side's model repository as model.py, together with `networks.py` and the weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np


class TritonPythonModel:
    """A model with the function of `networks.py` that its configuration names. It executes all requests that Triton passes together."""

    def initialize(self, args: dict[str, str]) -> None:
        """Compile every size, and execute it once."""
        import asyncio  # noqa: F401  else the first request would import it

        import jax
        import networks  # type: ignore[import-not-found]  # it is copied there
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        config = json.loads(args["model_config"])
        settings = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        with np.load(folder / "weights.npz") as file:
            self._weights: dict[str, dict[str, Any]] = {}
            for name in file.files:
                layer, part = name.split("/")
                self._weights.setdefault(layer, {})[part] = jax.device_put(file[name])
        self._apply = jax.jit(getattr(networks, settings["function"]))
        self._sizes = [int(size) for size in settings["sizes"].split(",")]
        (tensor,) = config["input"]
        self._input = tensor["name"]
        self._outputs = [each["name"] for each in config["output"]]
        shape = [int(extent) for extent in tensor["dims"]]
        dtype = pb_utils.triton_string_to_numpy(tensor["data_type"])
        for size in self._sizes:
            self._run(np.zeros((size, *shape), dtype))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run one execution for all requests. Rows are padded to the next compiled size."""
        pb = self._pb
        inputs = [pb.get_input_tensor_by_name(request, self._input).as_numpy() for request in requests]
        x = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        size = next(size for size in self._sizes if size >= len(x))
        if size > len(x):
            x = np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])
        results = self._run(x)
        responses, at = [], 0
        for part in inputs:
            own = [pb.Tensor(name, array[at : at + len(part)]) for name, array in results.items()]
            at += len(part)
            responses.append(pb.InferenceResponse(own))
        return responses

    def _run(self, x: Any) -> dict[str, Any]:
        results = self._apply(self._weights, x)
        return {name: np.asarray(results[name]) for name in self._outputs}
