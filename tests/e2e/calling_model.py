"""A model that only calls others through `rsrv.stub.bls`; it is copied into repositories as model.py.

It takes and gives JSON, so that a test decides everything: `calls`, a list of {"model", "what"} and any of
{"deadline_ms", "run", "outputs"}, made at once; the answer lists for each its outputs, or its status and text. `wait`:
false does not wait for them. `dtypes`: calls the model of that name with tensors of all types, and lists those that
came back wrong.
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

#: The longest time of a call in seconds: of the model `hasty`, and of others.
HASTY, TIMEOUT = 2.0, 120.0
TOKENS = [token for token in NUMPY if not token.startswith("f8")]


class TritonPythonModel:
    """plan: u8 [n] -> result: u8 [n], both JSON."""

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
        """Return at once; the calls are made afterwards."""
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
        """Return the tensors that the model, which returns its inputs, has changed."""
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
            # Some are kept while others come and go: an answer must not change any more.
            answers = [self._bls.start(model, sent, dtypes={"bf16": "bf16"}).result() for _ in range(4)]
            wrong += [
                f"{token} {list(shape)}"
                for answer in answers
                for token, array in sent.items()
                if answer[token].dtype != array.dtype or not np.array_equal(answer[token], array)
            ]
        return wrong
