"""Requests of the live page's form: some reach Triton, and others are refused before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rsrv.control import trial
from rsrv.live.source import PageError
from tests.waiting import looped

X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}


@asynccontextmanager
async def triton(
    status: int = 200, text: str = "{}", *, silent: bool = False
) -> AsyncIterator[tuple[str, list[Any]]]:
    """Yield the address of an HTTP server with this answer, or without an answer, and the list of its requests' paths and bodies."""
    requests: list[Any] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        requests.append((request.raw_path, await request.json()))
        if silent:
            await asyncio.Event().wait()
        return web.Response(status=status, text=text, headers={"Location": "/elsewhere"})

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}", requests
    finally:
        await runner.cleanup()


@looped
async def test_a_request_reaches_only_its_model() -> None:
    """Triton gets only the tensors, at the path of the model with its name quoted. Its answer is returned."""
    async with triton(400, '{"error": "unexpected shape"}') as (address, requests):
        shared = {**X, "parameters": {"shared_memory_region": "secret"}, "extra": 1}
        name = "../../repository/index?a=b#c\r\nX: y"
        assert await trial.infer(address, name, [shared]) == (400, '{"error": "unexpected shape"}')
    path = "/v2/models/..%2F..%2Frepository%2Findex%3Fa%3Db%23c%0D%0AX%3A%20y/infer"
    assert requests == [(path, {"inputs": [X]})]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ("x", "inputs must be objects"),
        ([], "inputs must be objects"),
        ([X, 3], "inputs must be objects"),
        ([{**X, "name": None}], "inputs must be objects"),
        ([{**X, "shape": [2147483648, 64]}], "does not fit 2 values"),
        ([{**X, "shape": [-1, -2]}], "does not fit 2 values"),
        ([{**X, "shape": [2.0]}], "does not fit 2 values"),
        ([{**X, "data": [[1], [2]]}], "numbers or texts"),
    ],
)
@looped
async def test_inputs_that_harm_triton_are_not_sent(inputs: Any, why: str) -> None:
    """A shape that its values do not fill is refused, because Triton would first allocate memory for the shape."""
    async with triton() as (address, requests):
        with pytest.raises(PageError, match=why) as wrong:
            await trial.infer(address, "a", inputs)
        assert wrong.value.status == 400
        assert not requests


@looped
async def test_answers_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirections are not followed. A large answer, a silent server and a server without an HTTP port are errors."""
    async with triton(307, "x" * 100) as (address, requests):
        assert (await trial.infer(address, "a", [X]))[0] == 307
        assert len(requests) == 1
        monkeypatch.setattr(trial, "_MAX_ANSWER", 99)
        with pytest.raises(PageError, match="with the command on the page"):
            await trial.infer(address, "a", [X])
    with pytest.raises(PageError, match="does not answer"):
        await trial.infer(address, "a", [X])
    with pytest.raises(PageError, match="--allow-http=false"):
        await trial.infer("", "a", [X])
    monkeypatch.setattr(trial, "_TIMEOUT_S", 0.01)
    async with triton(silent=True) as (address, _):
        with pytest.raises(PageError, match="no answer within"):
            await trial.infer(address, "a", [X])
