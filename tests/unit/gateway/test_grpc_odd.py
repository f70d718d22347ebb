"""Clients and workers that send data which gRPC's own implementations would not send."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from rsrv.placement.contract import Routes, Worker
from tests.unit.gateway import http2
from tests.unit.gateway.proxies import SERVICE, Infer, refusal, serving
from tests.waiting import looped

INFER = f"{SERVICE}ModelInfer".encode()
REQUEST = Infer(model_name="m").SerializeToString()


@pytest.mark.parametrize("value", [b"\xff\xfe", "é".encode(), b"a\nb", b"a\0b"])
@looped
async def test_metadata_that_cannot_be_sent_on(value: bytes) -> None:
    """Metadata that gRPC accepts but cannot send is left out, and the request is answered."""
    async with serving(1) as house:
        odd = [(b"odd", value), (b"kept", b"1")]
        assert await http2.status(house.proxy.grpc.port, INFER, REQUEST, odd) == 0
        (metadata,) = house.workers[0].metadata["ModelInfer"]
        assert metadata["kept"] == "1"
        assert "odd" not in metadata
        assert house.proxy.counts().requests == {("m", "a", "OK"): 1}


@looped
async def test_a_method_whose_name_is_no_text() -> None:
    """A method name that is not UTF-8 ends gRPC's server. A new server takes the port, and calls in progress end well."""
    async with serving(1) as house:
        (worker,) = house.workers
        go = asyncio.Event()

        async def late(request: Any, context: Any) -> Any:
            await go.wait()
            return await worker.echo(request, context)

        worker.does["ModelInfer"] = late
        call = house.infer()
        await worker.called.wait()

        for _ in range(2):
            await http2.status(house.proxy.grpc.port, INFER + b"\xff", REQUEST)
            while await status_of_a_call(house) is grpc.StatusCode.UNAVAILABLE:
                pass
        go.set()

        assert (await call).model_version == "a"
        assert (await house.infer()).model_version == "a"
        await house.proxy.drain(30)


@looped
async def test_what_a_worker_adds_that_cannot_be_sent_on() -> None:
    """Trailing metadata of a worker that cannot be sent is left out of its refusal."""
    trailers = [(b"odd", b"\xff"), (b"kept", b"1")]
    async with serving(0) as house, http2.refusing(13, b"oh", trailers) as port:
        where = Worker("a", f"127.0.0.1:{port}")
        await house.proxy.apply({"a": where}, {"m": Routes(ready=("a",))})
        call = house.infer()
        assert await refusal(call) == ("INTERNAL", "oh")
        assert tuple(await call.trailing_metadata()) == (("kept", "1"),)


@pytest.mark.parametrize("seconds", [b"2562047H", b"99999999H", b"99999999S"])
@looped
async def test_a_deadline_that_is_none(seconds: bytes) -> None:
    """The longest possible deadline, which some clients send for no deadline, is accepted."""
    async with serving(1) as house:
        deadline = [(b"grpc-timeout", seconds)]
        assert await http2.status(house.proxy.grpc.port, INFER, REQUEST, deadline) == 0


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "../m", '"', "%s", "é" * 5000, "x" * 2_000_000])
@looped
async def test_odd_names_of_models(name: str) -> None:
    """Unusual names of models are NOT_FOUND. The message cuts a long name."""
    async with serving(1) as house:
        code, message = await refusal(house.infer(name))
        assert code == "NOT_FOUND"
        assert message.startswith(f"Request for unknown model: '{name[:50]}")


async def status_of_a_call(house: Any) -> Any:
    try:
        await house.call("ServerLive", timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
