"""Suspect requests. If two workers died while they executed a request, the request may be the cause, so it is a suspect.

A worker counts as dead if it served the model, its connection broke, and nothing listens at its port any more. A worker that was
stopped is not dead: it answers its requests in flight, and reports in probes that it is stopping. A broken connection alone does
not prove a death either. After a death, the requests that were in flight execute one at a time on the next worker. If the next
worker also dies, the request that it executed is the suspect. Requests equal to a suspect are refused for some minutes. The front
does the same with requests that crash a runtime.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from time import monotonic

from google.protobuf.message import DecodeError
from grpc import StatusCode
from tritonclient.grpc import service_pb2

from rsrv_gateway.outcomes import Refusal

#: Seconds for which requests equal to a suspect are refused.
_REFUSED_S = 300.0
#: Maximum number of stored digests.
_DIGESTS_MAX = 64
#: Maximum number of seconds for which a request waits for its turn. After that, it executes without a turn, concurrently with others.
#: It cannot become a suspect then, and neither can a request that has the turn on the same worker meanwhile.
_TURN_S = 2.0
#: JSON of at most this many bytes is parsed, so that its digest can leave out the id and the parameters.
_PARSED_MAX = 1 << 20

SUSPECT = Refusal(
    StatusCode.INTERNAL,
    "two servers ended while they executed this request, so it is not tried again, and equal ones are refused for some "
    "minutes. Send other inputs; the servers' logs may say why they ended",
)
EQUAL = Refusal(
    StatusCode.INTERNAL,
    "two servers ended while they executed an equal request, so this one is not tried. Send other inputs, or try again in "
    "some minutes; the servers' logs may say why they ended",
)


class Execution:
    """A request of a dead worker, while other workers execute it."""

    def __init__(self, has_turn: bool, beside: Iterable["Execution"]) -> None:
        self.has_turn = has_turn
        #: Workers that got the request.
        self.workers: set[str] = set()
        #: Executions without a turn at the same time.
        self.beside = list(beside)

    def was_alone(self, worker: str) -> bool:
        """Return whether the request had the turn, and no other request of a dead worker was sent to `worker` meanwhile."""
        return self.has_turn and not any(worker in other.workers for other in self.beside)


class Suspects:
    """The digests of suspect requests. One event loop owns the object."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        #: Time until which requests are refused, by model and digest.
        self._until: dict[tuple[str, bytes], float] = {}
        self._lock = asyncio.Lock()
        #: The execution that has the turn.
        self._holder: Execution | None = None
        #: Executions without a turn.
        self._late: set[Execution] = set()

    def has(self, model: str) -> bool:
        """Return True if requests for the model must be compared with suspects."""
        if not self._until:
            return False
        now = self._clock()
        self._until = {key: until for key, until in self._until.items() if now < until}
        return any(name == model for name, _ in self._until)

    def is_equal(self, model: str, digest: bytes) -> bool:
        return self._until.get((model, digest), 0.0) > self._clock()

    def add(self, model: str, digest: bytes) -> None:
        """Refuse requests with this digest from now on."""
        if len(self._until) >= _DIGESTS_MAX:
            del self._until[next(iter(self._until))]
        self._until[model, digest] = self._clock() + _REFUSED_S

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Execution]:
        """Wait for this request's turn, at most `_TURN_S` seconds. Then yield its execution, which lasts until the end of the context."""
        locked = False
        with suppress(TimeoutError):
            async with asyncio.timeout(_TURN_S):
                locked = await self._lock.acquire()
        execution = Execution(locked, self._late)
        if locked:
            self._holder = execution
        else:
            self._late.add(execution)
            if self._holder is not None:
                self._holder.beside.append(execution)
        try:
            yield execution
        finally:
            if locked:
                self._holder = None
                self._lock.release()
            else:
                self._late.remove(execution)


def call_digest(data: bytes) -> bytes:
    """Return a digest of a ModelInferRequest without its id and parameters."""
    with suppress(DecodeError):
        request = service_pb2.ModelInferRequest.FromString(data)
        request.id = ""
        request.parameters.clear()
        data = request.SerializeToString(deterministic=True)
    return blake2b(data, digest_size=16).digest()


def body_digest(body: bytes, encoding: str, length: int | None) -> bytes:
    """Return a digest of a request over HTTP. If its JSON is small, leave out the id and the parameters."""
    digest = blake2b(encoding.encode(errors="replace"), digest_size=16)
    end = len(body) if length is None else length
    if end <= _PARSED_MAX:
        with suppress(ValueError, RecursionError):
            request = json.loads(body[:end])
            if isinstance(request, dict):
                request.pop("id", None)
                request.pop("parameters", None)
                digest.update(json.dumps(request, sort_keys=True).encode(errors="replace"))
                digest.update(body[end:])
                return digest.digest()
    digest.update(body)
    return digest.digest()
