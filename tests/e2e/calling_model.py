"""A Python model that only calls other models, through `rsrv.stub.bls`. Tests copy this file into repositories as model.py.

The input and the output are JSON, so a test decides everything. `calls` is a list of {"model", "what"} with any of
{"deadline_ms", "run", "outputs"}. The model makes these calls at the same time, and returns the outputs, or the status and the
text, of each call. If `wait` is false, the model does not wait for the calls. `dtypes` names a model that returns its inputs. The
model calls it with tensors of all types, and returns a list of the tensors that are wrong in the answers.
"""

import json
import logging
import os
import threading
import time
from typing import Any

import numpy as np

from rsrv.stub.bls import Bls, limit, read_pool_size
from rsrv.stub.replies import RequestFailure
from rsrv.stub.tensors import Tensors, make_capsule
from rsrv.wire.layout import NUMPY

#: Time limits of a call in seconds: for calls by the model `hasty`, and for calls by all other models.
HASTY, TIMEOUT = 2.0, 120.0
TOKENS = [token for token in NUMPY if not token.startswith("f8")]


class TritonPythonModel:
    """Input: plan: u8 [n]. Output: result: u8 [n]. Both are JSON."""

    def initialize(self, args: dict[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        logging.basicConfig()
        self._pb = pb_utils
        self._tensors = Tensors(pb_utils)
        self._limit = limit(read_pool_size(os.getppid()))
        self._bls = Bls(
            pb_utils, self._tensors, self._limit, HASTY if args["model_name"] == "hasty" else TIMEOUT
        )

    def execute(self, requests: list[Any]) -> None:
        """Return at once. A thread for each request makes its calls."""
        for request in requests:
            tensor = self._pb.get_input_tensor_by_name(request, "plan")
            plan = json.loads(bytes(self._tensors.read(tensor, "u8")))
            threading.Thread(target=self._run, args=(plan, request.get_response_sender())).start()

    def finalize(self) -> None:
        self._bls.close()

    def _run(self, plan: dict[str, Any], sender: Any) -> None:
        started = time.monotonic()
        result: dict[str, Any] = {"limit": self._limit}
        if "dtypes" in plan:
            result["wrong"] = self._wrong_dtypes(plan["dtypes"])
        futures = [self._start(number, call) for number, call in enumerate(plan.get("calls", []))]
        if plan.get("wait", True):
            result["answers"] = [self._outcome(number, future) for number, future in enumerate(futures)]
        result["seconds"] = time.monotonic() - started
        text = np.frombuffer(json.dumps(result).encode(), np.uint8)
        response = self._pb.InferenceResponse(
            [self._pb.Tensor.from_dlpack("result", make_capsule(text.ctypes.data, "u8", text.shape))]
        )
        sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _start(self, number: int, call: dict[str, Any]) -> Any:
        deadline_ms = call.get("deadline_ms")
        return self._bls.start(
            call["model"],
            {"what": np.array([call["what"]], np.int32), "x": np.full(1000, number, np.uint8)},
            outputs=call.get("outputs", ()),
            deadline_ns=time.monotonic_ns() + deadline_ms * 10**6 if deadline_ms else 0,
            run=call.get("run", 0),
        )

    def _outcome(self, number: int, future: Any) -> dict[str, Any]:
        try:
            answer = future.result()
        except RequestFailure as failure:
            return {"status": failure.status.name, "text": failure.text}
        return {
            "names": list(answer),
            "own": bool(np.all(answer["x"] == number)),
            "text": bytes(answer["x"]).decode(errors="replace"),
            "most": int(answer["most"][0]) if "most" in answer else None,
        }

    def _wrong_dtypes(self, model: str) -> list[str]:
        """Call `model`, which should return its inputs, and return the names of the tensors that it changed."""
        wrong = []
        rng = np.random.default_rng(1)
        for shape in ((3, 5), (1, 1), (0, 4), (40, 5000)):
            sent = {
                token: rng.integers(0, 2, shape).astype(NUMPY[token])
                if token == "bool"
                else rng.integers(0, 120, shape).astype(NUMPY[token])
                for token in TOKENS
            }
            sent["f32"] = np.asfortranarray(sent["f32"])
            sent["i64"] = np.repeat(sent["i64"], 2, axis=1)[:, ::2]
            # Keep the answers of several calls, because a later call must not change an earlier answer.
            answers = [self._bls.start(model, sent, dtypes={"bf16": "bf16"}).result() for _ in range(4)]
            wrong += [
                f"{token} {list(shape)}"
                for answer in answers
                for token, array in sent.items()
                if answer[token].dtype != array.dtype or not np.array_equal(answer[token], array)
            ]
        return wrong
