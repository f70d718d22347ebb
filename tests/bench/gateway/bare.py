"""A minimal gRPC gateway in Python: it passes every unary call on as bytes.

Inference calls go to the servers in turn, and all other calls to the first server.

    python -m tests.bench.gateway.bare 127.0.0.1:9001 127.0.0.1:8001 127.0.0.1:8011

This gateway does little more than grpc.aio itself. If a real gateway costs more, the additional cost is that of its own code.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any

import grpc

_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class _PassThrough(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, channels: Sequence[Any]) -> None:
        self._channels = channels
        self._handlers: dict[str, Any] = {}

    def service(self, details: Any) -> Any:
        handler = self._handlers.get(details.method)
        if handler is None:
            handler = self._handlers[details.method] = self._handler(details.method)
        return handler

    def _handler(self, method: str) -> Any:
        servers = self._channels if method.endswith("/ModelInfer") else self._channels[:1]
        calls = cycle([channel.unary_unary(method) for channel in servers])

        async def pass_on(data: bytes, _: Any) -> Any:
            return await next(calls)(data)

        return grpc.unary_unary_rpc_method_handler(pass_on)


async def serve(listen: str, servers: Sequence[str]) -> None:
    """Serve until cancelled. Addresses are HOST:PORT."""
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(server, options=_LIMITS))
            for server in servers
        ]
        front = grpc.aio.server(handlers=[_PassThrough(channels)], options=_LIMITS)
        front.add_insecure_port(listen)
        await front.start()
        await front.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))
