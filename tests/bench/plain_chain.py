"""What a user would write today: a Triton Python-backend model that calls others, one after the other, by BLS.

It is copied into the plain side's model repository as model.py.
"""

from typing import Any

STAGES = ("stage_0", "stage_1", "stage_2")


class TritonPythonModel:
    """x: f32 [n, 256] -> logits: f32 [n, 256], each stage applied to the output of the one before."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load nothing."""
        import asyncio  # noqa: F401  else the first request would import it

        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer one request after the other."""
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
