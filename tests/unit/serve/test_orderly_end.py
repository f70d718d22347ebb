"""When a server is stopped, its models are unloaded before it ends, whatever connections its clients keep open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from local_triton import LOOPBACK
from rsrv.control.triton import TritonError
from rsrv.serve import orderly_end
from rsrv.serve.orderly_end import end_in_order
from tests.waiting import looped

pytestmark = pytest.mark.usefixtures("short_times")


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orderly_end, "_QUIET_S", 0.01)
    monkeypatch.setattr(orderly_end, "_POLL_S", 0.001)
    monkeypatch.setattr(orderly_end, "_ANSWER_S", 60.0)


class Server:
    """A fake server with models. `events` has all that happens to it, in order."""

    def __init__(self, *models: str, counts: Sequence[int] = (), http: str = "") -> None:
        self.models = list(models)
        self.http = http
        self.events: list[str] = []
        self.trouble = ""
        #: Results of the next calls of `request_count`, in order. The last result is repeated.
        self._counts = [*counts, 0]

    def terminate(self) -> None:
        self.events.append("terminated")

    async def request_count(self) -> int:
        if self.trouble:
            raise TritonError(self.trouble)
        self.events.append("counted")
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]

    async def remaining(self) -> dict[str, bool]:
        # A model that is being unloaded still answers requests in flight.
        unloading = [
            event.removeprefix("dismissed ") for event in self.events if event.startswith("dismissed ")
        ]
        answered = [name for name in unloading if f"asked for {name}" in self.events]
        self.events += [f"asked for {name}" for name in unloading if name not in answered]
        return {name: name not in unloading for name in self.models if name not in answered}

    async def dismiss(self, name: str) -> None:
        self.events.append(f"dismissed {name}")


@asynccontextmanager
async def listening(server: Server, *, answers: bool = True) -> AsyncIterator[None]:
    """Let a server listen for HTTP, and note the end of each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answers:
            server.events.append("connected")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reader.read()
        server.events.append("closed")
        writer.close()

    async with await asyncio.start_server(serve, LOOPBACK, 0) as listener:
        server.http = f"{LOOPBACK}:{listener.sockets[0].getsockname()[1]}"
        yield
        while "closed" not in server.events:
            await asyncio.sleep(0)


def deeds(server: Server) -> list[str]:
    return [event for event in server.events if not event.startswith(("counted", "asked"))]


@looped
async def test_models_are_unloaded_while_a_connection_keeps_the_server() -> None:
    """An open connection keeps the server alive while its models are unloaded.

    Without it, Triton would end gRPC before the models are unloaded. Models that call other models are unloaded first.
    """
    server = Server("a", "caller", "b")
    async with listening(server):
        assert await end_in_order(server, server.terminate, {"caller"}, 60.0)
    expected = ["connected", "terminated", "dismissed caller", "dismissed a", "dismissed b", "closed"]
    assert deeds(server) == expected
    assert server.events.index("dismissed a") > server.events.index("asked for caller")


@looped
async def test_clients_with_open_connections_are_served_until_they_are_idle() -> None:
    """Models are not unloaded while requests arrive."""
    server = Server("a", counts=[1, 2, 3, 4, 4, 4])
    async with listening(server):
        assert await end_in_order(server, server.terminate, (), 60.0)
    assert server.events[: server.events.index("dismissed a")].count("counted") == 5


@looped
async def test_clients_that_never_pause_do_not_keep_the_models() -> None:
    """If clients never stop sending requests, models are unloaded after a while.

    The rest of the drain time is left for the requests in flight.
    """
    server = Server("a", counts=range(100_000))
    async with listening(server):
        assert await end_in_order(server, server.terminate, (), 0.05)
    assert "dismissed a" in server.events


@looped
async def test_a_server_that_does_not_unload_ends_by_itself() -> None:
    """If models cannot be unloaded, for example because the repository API is restricted, Triton unloads them when it ends."""
    server = Server("a")
    server.trouble = "this protocol is restricted"
    async with listening(server):
        assert not await end_in_order(server, server.terminate, (), 60.0)
    assert deeds(server) == ["connected", "terminated", "closed"]


@looped
async def test_without_http_the_models_leave_before_the_server_is_told() -> None:
    """Without HTTP, no connection can keep the server alive, so models are unloaded before it is terminated."""
    server = Server("a")
    assert await end_in_order(server, server.terminate, (), 60.0)
    assert deeds(server) == ["dismissed a", "terminated"]


@looped
async def test_a_server_that_is_starting_is_told_at_once() -> None:
    """A server that is starting does not listen and cannot unload models, so it is terminated at once."""
    server = Server("a", http=f"{LOOPBACK}:1")
    server.trouble = "connection refused"
    assert not await end_in_order(server, server.terminate, (), 60.0)
    assert server.events == ["terminated"]


@looped
async def test_a_server_that_hangs_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts connections and sends no answer is terminated at once."""
    monkeypatch.setattr(orderly_end, "_ANSWER_S", 0.01)
    server = Server("a")
    async with listening(server, answers=False):
        assert not await end_in_order(server, server.terminate, (), 60.0)
    assert deeds(server)[0] == "terminated"
    assert "dismissed a" not in server.events
