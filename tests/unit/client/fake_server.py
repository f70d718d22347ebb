"""A fake server without a network. It records the requests of `rsrv.client`. A test may delay or fail its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rsrv.client.signature import from_bytes
from rsrv.client.transport import Answers, InferRequest, InferTensor

CONFIG: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [1]}],
    "output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [1]}],
}


class FakeServer:
    """Answers y = 2 x for each number, and with the length of each text.

    `before` runs before each answer, with the number of requests so far and the request's values. It may raise AttemptFailed.
    """

    def __init__(self, config: Mapping[str, Any] = CONFIG) -> None:
        self.configuration = config
        self.requests: list[list[Any]] = []
        self.encoded = 0
        #: Time limit of each attempt, in seconds.
        self.timeouts: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.closed = False
        self.before: Callable[[int, list[Any]], Awaitable[None]] | None = None

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        return self.configuration

    def encode(self, message: InferRequest) -> Any:
        self.encoded += 1
        return message

    async def infer(self, request: InferRequest, timeout_s: float) -> Sequence[InferTensor]:
        (tensor,) = request.inputs
        assert isinstance(tensor.content, (bytes, memoryview))
        x = from_bytes(tensor.datatype, tensor.shape, tensor.content)
        values = x.reshape(-1).tolist()
        self.requests.append(values)
        self.timeouts.append(timeout_s)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            if self.before is not None:
                await self.before(len(self.requests), values)
        finally:
            self.in_flight -= 1
        y = np.array([2 * v if isinstance(v, int) else len(v) for v in values], np.int64).reshape(x.shape)
        return [InferTensor("y", "INT64", y.shape, y.tobytes())]

    async def stream(self, request: InferRequest, timeout_s: float) -> Answers:
        """Yield an answer for each value, as if the value were a request."""
        (tensor,) = request.inputs
        assert isinstance(tensor.content, (bytes, memoryview))
        for value in from_bytes(tensor.datatype, tensor.shape, tensor.content).reshape(-1, 1):
            part = InferTensor(tensor.name, tensor.datatype, value.shape, value.tobytes())
            yield await self.infer(InferRequest(request.model, [part]), timeout_s)

    async def regions(self, timeout_s: float) -> Sequence[str]:
        raise NotImplementedError

    async def register(self, region: str, key: str, size: int, timeout_s: float) -> None:
        raise NotImplementedError

    async def unregister(self, region: str, timeout_s: float) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed = True
