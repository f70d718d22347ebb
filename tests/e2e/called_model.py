"""A model that others call, as any user may write it; it is copied into repositories as model.py.

`what` decides its action: any of `rsrv.wire.frames.Status` fails with that status, tagged; the others are below.
"""

import json
import threading
from typing import Any

import numpy as np

#: Values of `what`: answers; raises; answers with the request's parameters and timeout; is answered by TELL or later.
ECHO, RAISE, TERMS, WAIT = 100, 101, 102, 103
#: From here on, it answers when so many more requests are there than this value.
TOGETHER = 1000


class TritonPythonModel:
    """Inputs what: i32 [1], x: u8 [n]; outputs x: u8 [n], most: i32 [1], the highest number of requests at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        self._held: list[tuple[Any, Any]] = []
        self._most = 0

    def execute(self, requests: list[Any]) -> None:
        """Send every answer later, from a thread, which is harder for callers."""
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
