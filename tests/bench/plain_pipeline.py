"""The detector as a user writes it without rsrv: a Triton Python-backend model that calls two others by BLS.

The benchmark copies this file into the plain side's model repository as model.py, and the detector's steps as `steps.py`. Both
sides compute the same, and only their way of serving differs.
"""

from typing import Any

import numpy as np


class Call:
    """Calls other models of this server, one after the other."""

    def __init__(self, pb: Any, outputs: dict[str, list[str]]) -> None:
        self._pb = pb
        self._outputs = outputs

    def __call__(self, name: str, inputs: dict[str, Any]) -> dict[str, Any]:
        pb = self._pb
        tensors = [pb.Tensor(key, array) for key, array in inputs.items()]
        outputs = self._outputs[name]
        request = pb.InferenceRequest(model_name=name, requested_output_names=outputs, inputs=tensors)
        response = request.exec()
        if response.has_error():
            raise pb.TritonModelException(response.error().message())
        return {output: pb.get_output_tensor_by_name(response, output).as_numpy() for output in outputs}

    def many(self, calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        return [self(name, inputs) for name, inputs in calls]

    def scratch(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)


class TritonPythonModel:
    """A model image: u8 [n, side, side, 3] -> boxes, scores, classes and count of the detector."""

    def initialize(self, args: dict[str, str]) -> None:
        """Keep Triton's module and the callees' outputs. There are no weights to load."""
        import asyncio  # noqa: F401  else the first request would import it

        import steps  # type: ignore[import-not-found]  # it is copied there
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self._detect = steps.run
        self._call = Call(
            pb_utils,
            {
                "detector_backbone": ["objectness", "deltas", "features"],
                "detector_head": ["logits", "deltas"],
            },
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests one after the other."""
        pb = self._pb
        responses = []
        for request in requests:
            image = pb.get_input_tensor_by_name(request, "image").as_numpy()
            outputs = self._detect({"image": image}, self._call)
            responses.append(
                pb.InferenceResponse([pb.Tensor(name, array) for name, array in outputs.items()])
            )
        return responses
