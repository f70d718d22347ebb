"""The least that a gRPC gateway in Python can do: every unary call goes on as bytes, over one channel, to one server.

    python -m tests.bench.gateway.bare 127.0.0.1:9001 127.0.0.1:8001

What a gateway costs beyond this is its own doing; what this costs is grpc.aio's.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class _PassThrough(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._handlers: dict[str, Any] = {}

    def service(self, details: Any) -> Any:
        handler = self._handlers.get(details.method)
        if handler is None:
            handler = self._handlers[details.method] = self._handler(details.method)
        return handler

    def _handler(self, method: str) -> Any:
        call = self._channel.unary_unary(method)

        async def pass_on(data: bytes, _: Any) -> Any:
            return await call(data)

        return grpc.unary_unary_rpc_method_handler(pass_on)


async def serve(listen: str, server: str) -> None:
    """Until it is cancelled; both are HOST:PORT."""
    async with grpc.aio.insecure_channel(server, options=_LIMITS) as channel:
        front = grpc.aio.server(handlers=[_PassThrough(channel)], options=_LIMITS)
        front.add_insecure_port(listen)
        await front.start()
        await front.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
