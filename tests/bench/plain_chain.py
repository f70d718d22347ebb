"""A chain as a user writes it without rsrv: a Triton Python-backend model that calls others by BLS, one after the other.

The benchmark copies this file into the plain side's model repository as model.py.
"""

from typing import Any

STAGES = ("stage_0", "stage_1", "stage_2")


class TritonPythonModel:
    """A model x: f32 [n, 256] -> logits: f32 [n, 256]. Each stage gets the output of the previous stage."""

    def initialize(self, args: dict[str, str]) -> None:
        """Keep Triton's module. There are no weights to load."""
        import asyncio  # noqa: F401  else the first request would import it

        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests one after the other."""
        pb = self._pb
        responses = []
        for request in requests:
            x = pb.get_input_tensor_by_name(request, "x").as_numpy()
            for stage in STAGES:
                x = self._call(stage, x)
            responses.append(pb.InferenceResponse([pb.Tensor("logits", x)]))
        return responses

    def _call(self, model: str, x: Any) -> Any:
        pb = self._pb
        request = pb.InferenceRequest(
            model_name=model, requested_output_names=["logits"], inputs=[pb.Tensor("x", x)]
        )
        response = request.exec()
        if response.has_error():
            raise pb.TritonModelException(response.error().message())
        return pb.get_output_tensor_by_name(response, "logits").as_numpy()
