"""A model that reports facts about its stub. `rsrv check-triton` adds it to a model repository as model.py.

Requests and answers are JSON in UINT8 tensors, because some pairs of Triton and numpy cannot exchange text.
"""

import json
import platform
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np

from rsrv.stub.tensors import Tensors


class StubFacts:
    """request: u8 [n] -> facts: u8 [m]."""

    def initialize(self, args: dict[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self._tensors = Tensors(pb_utils)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tensor = self._pb.get_input_tensor_by_name(request, "request")
        question = json.loads(self._tensors.read(tensor, "u8").tobytes())
        facts = self._call(question["call"]) if question else self._facts()
        out = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        return self._pb.InferenceResponse([self._tensors.make("facts", out)])

    def _facts(self) -> dict[str, Any]:
        return {
            "python": platform.python_version(),
            "prefix": sys.prefix,
            "numpy": np.__version__,
            "numpy_works": self._tensors.carries_text,
            "missing": [name for name in ("PIL", "tokenizers") if find_spec(name) is None],
        }

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Call a model through Triton with zeros. Returns the text of the error, or an empty text if there was none."""
        inputs = [
            self._tensors.make(name, np.zeros(shape, dtype))
            for name, (dtype, shape) in call["inputs"].items()
        ]
        response = self._pb.InferenceRequest(
            model_name=call["model"], requested_output_names=call["outputs"], inputs=inputs
        ).exec()
        return {"error": response.error().message() if response.has_error() else ""}


#: Triton's Python backend looks for this name.
TritonPythonModel = StubFacts
