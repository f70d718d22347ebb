"""Copies of an alias's requests for a shadow model, whose answers are compared with the answers that clients get.

No client gets an answer of the shadow model. The shadow model gets a copy after the request was submitted, at the lowest
priority. The two answers to a request are compared when both exist.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np

from rsrv.logs import of_request, request_name
from rsrv.stub.replies import free_shared_memory
from rsrv.stub.tensors import Array, Tensors, size_of
from rsrv.throttle import Throttle, more

log = logging.getLogger(__name__)

#: Maximum number of copies in progress. Further requests are not copied, because copies for a slow model would fill the memory.
_MAX_COPIES = 64
#: Maximum number of bytes of answers that wait for the other answer to the same request.
_MAX_ANSWER_BYTES = 64 * 2**20
#: A request is copied only if this many bytes of shared memory are free. Copies stay in shared memory until they are answered,
#: and the requests of clients also need shared memory.
_MIN_FREE_BYTES = 16 * 2**20
#: Timeout of a copy, in microseconds.
_TIMEOUT_US = 30_000_000
#: Parameters of a copy. It has the lowest priority, and none of the client's parameters, such as its deadline.
_PARAMETERS = json.dumps({"rsrv_priority": 0xFFFE})
#: Relative and absolute tolerances for floats of two answers. They suit bf16, which has two to three decimal digits.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-5


def differing(answer: Mapping[str, Array], copy: Mapping[str, Array], dtypes: Mapping[str, str]) -> str:
    """Return the name of the first output in which two answers differ by more than rounding, or "" if there is none."""
    for name, dtype in dtypes.items():
        if name not in answer or name not in copy:
            if name in answer or name in copy:
                return name
            continue
        first, second = answer[name], copy[name]
        if dtype == "bf16":  # The bits of a bf16 are the upper half of an f32's bits.
            first, second = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (first, second))
        if first.shape != second.shape:
            return name
        if first.dtype.kind == "f":
            same = np.allclose(first, second, _RELATIVE, _ABSOLUTE, equal_nan=True)
        else:
            same = np.array_equal(first, second)
        if not same:
            return name
    return ""


class Shadow:
    """The copies for one model behind an alias. `count` counts an outcome: same, different, failed, or skipped."""

    def __init__(
        self,
        where: str,
        tensors: Tensors,
        dtypes: Mapping[str, str],
        execute: Callable[[Sequence[Any]], object],
        count: Callable[[str], object],
    ) -> None:
        """`where` names the alias and the model in logs. `dtypes` are the outputs' types. `execute` answers the copies."""
        self._where = where
        self.take = tensors.take
        self._dtypes = dtypes
        self._execute = execute
        self._count = count
        #: Requests with a copy in progress. Any thread may remove a request.
        self._pending: set[ShadowedRequest] = set()
        #: Thread that submits the copies, so that clients do not wait until copies are read.
        self._thread = ThreadPoolExecutor(1, "shadow")
        self._throttle = Throttle()

    def begin(self, request: Any) -> "ShadowedRequest | None":
        """Copy a request. Return the comparison of the two answers, or None if the request is not copied."""
        pending = list(self._pending)
        scarce = free_shared_memory() < _MIN_FREE_BYTES
        if (
            scarce
            or len(pending) >= _MAX_COPIES
            or sum(shadowed.kept_bytes for shadowed in pending) > _MAX_ANSWER_BYTES
        ):
            self._count("skipped")
            return None
        try:
            begun = ShadowedRequest(self, request)
        except Exception:  # noqa: BLE001 - the request's own model refuses it
            self._count("skipped")
            return None
        self._pending.add(begun)
        return begun

    def execute(self, copies: Sequence["RequestCopy"]) -> None:
        """Let a thread submit the copies. If no thread can start, the copies wait until one starts later, or forever."""
        with suppress(RuntimeError):
            self._thread.submit(self._execute, copies)

    def close(self) -> None:
        """Wait until the last copies are submitted."""
        self._thread.shutdown()

    def end(self, shadowed: "ShadowedRequest") -> None:
        """Compare the two answers of a copied request, and count the outcome."""
        self._pending.discard(shadowed)
        id, answer, copy = shadowed.id, shadowed.answers[False], shadowed.answers[True]
        if answer is None or copy is None:
            self._count("skipped" if answer is None else "failed")
            return
        name = differing(answer, copy, self._dtypes)
        if name and (left_out := self._throttle.take("different")) is not None:
            text = "%s: %s answers differently: output %r%s"
            log.warning(text, request_name(id), self._where, name, more(left_out), extra=of_request(id))
        self._count("different" if name else "same")


class ShadowedRequest:
    """A client's request and its copy, until both have an answer. Thread-safe."""

    def __init__(self, shadow: Shadow, request: Any) -> None:
        self._shadow = shadow
        self.id = request.request_id()
        self.watched = WatchedRequest(request, self)
        self.copy = RequestCopy(request, self)
        #: Answer to the copy at True, and to the client's request at False. An answer is None if the request failed.
        self.answers: dict[bool, Mapping[str, Array] | None] = {}
        #: Counts the answers. Two threads never get the same number.
        self._numbers = count(1)
        #: Bytes of the answer that arrived first.
        self.kept_bytes = 0

    def answered(self, response: Any, *, copy: bool) -> None:
        """Store one of the two answers. Called before Triton gets the answer. Never raises."""
        answer: dict[str, Array] | None = None
        try:
            if not response.has_error():
                # Copy the answer, because its memory is reused after it was sent.
                answer = {
                    tensor.name(): np.array(self._shadow.take(tensor)) for tensor in response.output_tensors()
                }
        except Exception:
            log.exception(
                "%s: an answer cannot be compared", request_name(self.id), extra=of_request(self.id)
            )
        if copy in self.answers:
            return
        self.answers[copy] = answer
        if next(self._numbers) == 1:
            self.kept_bytes = sum(map(size_of, (answer or {}).values()))
        else:
            self._shadow.end(self)


class WatchedSender:
    """A response sender whose answer is compared with the copy's."""

    def __init__(self, sender: Any, comparison: ShadowedRequest) -> None:
        self._sender, self._comparison = sender, comparison

    def send(self, response: Any = None, flags: int = 0) -> None:
        if response is not None:
            self._comparison.answered(response, copy=False)
            self._sender.send(response, flags=flags)
        else:
            self._sender.send(flags=flags)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class WatchedRequest:
    """A client's request, whose answer is compared with the copy's."""

    def __init__(self, request: Any, comparison: ShadowedRequest) -> None:
        self._request, self._comparison = request, comparison

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def get_response_sender(self) -> WatchedSender:
        return WatchedSender(self._request.get_response_sender(), self._comparison)


class RequestCopy:
    """The copy of a client's request, with the interface of Triton's request objects. It is never traced or cancelled."""

    def __init__(self, request: Any, comparison: ShadowedRequest) -> None:
        """Read the request. Raises Triton's error if that fails."""
        #: The tensors of the request. They keep Triton's memory alive.
        self._inputs = request.inputs()
        self._id = request.request_id()
        self._comparison = comparison

    def inputs(self) -> Any:
        return self._inputs

    def parameters(self) -> str:
        return _PARAMETERS

    def request_id(self) -> str:
        return str(self._id)

    def timeout(self) -> int:
        return _TIMEOUT_US

    def trace(self) -> "RequestCopy":
        return self

    def get_context(self) -> None:
        """Return None: Triton traces no copies."""

    def get_response_sender(self) -> "RequestCopy":
        return self

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Store the answer. The copy is its own response sender."""
        if response is not None:
            self._comparison.answered(response, copy=True)

    def is_cancelled(self) -> bool:
        return False
