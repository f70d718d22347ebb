"""A Python model as any user may write it, for calls by other models. Tests copy this file into repositories as model.py.

The input `what` selects the action. With a value of `rsrv.wire.frames.Status`, the request fails, and its text has a tag with
this status. The other values are defined below.
"""

import json
import threading
from typing import Any

import numpy as np

#: Values of `what`. ECHO: return `x`. RAISE: raise an error. TERMS: return the request's parameters and timeout. WAIT: hold the request
#: until a later request releases all held requests.
ECHO, RAISE, TERMS, WAIT = 100, 101, 102, 103
#: A value of TOGETHER + n holds the request. When n or more requests are held, the model answers all of them.
TOGETHER = 1000


class TritonPythonModel:
    """Inputs: what: i32 [1], x: u8 [n]. Outputs: x: u8 [n], and most: i32 [1], the highest number of requests held at the same time."""

    def initialize(self, args: dict[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self._held: list[tuple[Any, Any]] = []
        self._most = 0

    def execute(self, requests: list[Any]) -> None:
        """Send each answer from a separate thread. An answer from this thread would be an easier case for callers."""
        for request in requests:
            what = int(self._pb.get_input_tensor_by_name(request, "what").as_numpy()[0])
            x = self._pb.get_input_tensor_by_name(request, "x").as_numpy()
            if what == RAISE:
                raise OSError("cannot open /secret/place/weights.bin")
            if what == TERMS:
                terms = {"parameters": json.loads(request.parameters()), "timeout": request.timeout()}
                x = np.frombuffer(json.dumps(terms).encode(), np.uint8)
            self._held.append((request.get_response_sender(), x))
            if what < ECHO:
                self._answer(self._held.pop(), self._failure(what))
                continue
            waiting = len(self._held)
            self._most = max(self._most, waiting)
            if what != WAIT and waiting >= what - TOGETHER:
                held, self._held = self._held, []
                for each in held:
                    self._answer(each)

    def _failure(self, status: int) -> Any:
        from rsrv.stub.replies import tag_failure
        from rsrv.wire.frames import Status

        error = self._pb.TritonError(
            tag_failure(Status(status), "for the test"), self._pb.TritonError.UNAVAILABLE
        )
        return self._pb.InferenceResponse([], error=error)

    def _answer(self, held: tuple[Any, Any], response: Any = None) -> None:
        sender, x = held
        if response is None:
            most = np.array([self._most], np.int32)
            response = self._pb.InferenceResponse([self._pb.Tensor("x", x), self._pb.Tensor("most", most)])
        final = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        threading.Thread(target=sender.send, args=(response, final), daemon=True).start()
