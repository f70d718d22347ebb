"""The owners of regions, and what a client does without shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rsrv.client import AsyncClient, RequestError
from rsrv.client.retries import Code
from rsrv.client.shared_memory import LEAST_BYTES, Regions, _is_alive, _owner
from rsrv.client.transport import AttemptFailed, InferRequest, InferTensor, RegionPart
from tests.unit.client.fake_server import CONFIG, FakeServer

#: A model whose rows are long enough for shared memory.
LONG = {
    **CONFIG,
    "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [LEAST_BYTES // 8]}],
}
ROWS = np.zeros((1, LEAST_BYTES // 8), np.int64)


class Sharing(FakeServer):
    """A server that knows regions by name. It refuses the first release of a region, as if the region were in use."""

    def __init__(self, known: Sequence[str] = (), refusal: str = "") -> None:
        super().__init__()
        self.known = {*known}
        self.refusal = refusal
        self.in_use = True
        #: Names of the regions that the attempts used.
        self.used: list[str] = []
        #: Failure of each attempt, or None.
        self.failure: AttemptFailed | None = None

    async def infer(self, request: InferRequest, timeout_s: float) -> Sequence[InferTensor]:
        (content,) = (tensor.content for tensor in request.inputs)
        if not isinstance(content, RegionPart):
            return await super().infer(request, timeout_s)
        self.used.append(content.region)
        if content.region not in self.known:
            raise AttemptFailed(
                Code.INVALID_ARGUMENT, f"Unable to find shared memory region: '{content.region}'"
            )
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(0)
        return [InferTensor("y", "INT64", request.inputs[0].shape, b"")]

    async def regions(self, timeout_s: float) -> Sequence[str]:
        return list(self.known)

    async def register(self, region: str, key: str, size: int, timeout_s: float) -> None:
        if self.refusal:
            raise AttemptFailed(Code.OTHER, self.refusal)
        assert Path(f"/dev/shm{key}").stat().st_size == size
        if region in self.known:
            raise AttemptFailed(Code.INVALID_ARGUMENT, f"shared memory region '{region}' already in manager")
        self.known.add(region)

    async def unregister(self, region: str, timeout_s: float) -> None:
        if self.in_use:
            self.in_use = False
            raise AttemptFailed(
                Code.INVALID_ARGUMENT, f"Cannot unregister '{region}', it is currently in use."
            )
        self.known.discard(region)


def test_regions_are_reused_and_all_given_up() -> None:
    """The next request uses a free region again. At the end, a region that is in use is released as soon as it is free."""

    async def scenario() -> None:
        server = Sharing()
        regions = Regions(server)
        assert await regions.take(LEAST_BYTES - 1) is None
        first, second = await regions.take(LEAST_BYTES), await regions.take(3 << 20)
        assert first
        assert second
        assert second.size == 3 << 20
        assert not Path("/dev/shm", first.name).exists()
        regions.give_back(first)
        assert await regions.take(1 << 20) is first
        assert len(server.known) == 2
        await regions.close()
        assert not server.known

    asyncio.run(scenario())


def test_growing_requests_replace_their_regions() -> None:
    """If each request is larger than the request before, regions that are too small are released."""

    async def scenario() -> None:
        server = Sharing()
        server.in_use = False
        regions = Regions(server)
        for size in range(1, 9):
            region = await regions.take(size << 20)
            assert region
            regions.give_back(region)
            assert server.known == {region.name}

    asyncio.run(scenario())


def test_a_request_without_room_costs_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is too large for /dev/shm is sent as bytes. Smaller requests still use their region."""

    async def scenario() -> None:
        server = Sharing()
        regions = Regions(server)
        region = await regions.take(1 << 20)
        assert region
        regions.give_back(region)
        monkeypatch.setattr("rsrv.client.shared_memory.SHARE", 0)
        assert await regions.take(2 << 20) is None
        assert await regions.take(1 << 20) is region

    asyncio.run(scenario())


def test_two_clients_of_a_process_share_no_region() -> None:
    """The server knows regions by name, so two clients of one process use different names."""

    async def scenario() -> None:
        server = Sharing()
        first, second = (
            await Regions(server).take(LEAST_BYTES),
            await Regions(server).take(LEAST_BYTES),
        )
        assert first
        assert second
        assert server.known == {first.name, second.name}

    asyncio.run(scenario())


def test_only_regions_of_dead_processes_are_removed() -> None:
    """A region's name shows its owner. Regions of dead processes are removed. Those of living clients and other containers stay."""
    mine = f"{_owner()}-1000000"
    namespace = mine.split("-")[2]
    dead, elsewhere = f"rsrv-client-{namespace}-{os.getpid()}-1-0", "rsrv-client-1-2-3-0"
    assert [_is_alive(name) for name in (mine, dead, elsewhere, "rsrv-client-theirs")] == [
        True,
        False,
        True,
        True,
    ]

    async def scenario() -> None:
        server = Sharing(["theirs", mine, dead, elsewhere])
        server.in_use = False
        assert await Regions(server).take(LEAST_BYTES)
        assert server.known >= {"theirs", mine, elsewhere}
        assert dead not in server.known

    asyncio.run(scenario())


@pytest.mark.parametrize("full", [True, False])
def test_requests_travel_as_bytes_where_memory_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """If the server refuses shared memory or /dev/shm is full, requests are sent as bytes, and the client reports why."""
    server = Sharing(refusal="not allowed")
    server.configuration = LONG
    monkeypatch.setattr("rsrv.client.client.connect", lambda *_: server)
    if full:
        monkeypatch.setattr("rsrv.client.shared_memory.SHARE", 0)

    async def scenario() -> None:
        async with AsyncClient("localhost:1") as client:
            assert (await client.infer("m", x=ROWS))["y"].shape == ROWS.shape
            reason = (
                "/dev/shm: No space left on device"
                if full
                else "the server refuses shared memory: not allowed"
            )
            assert client.transport == f"bytes ({reason})"

    asyncio.run(scenario())
    assert not list(Path("/dev/shm").glob(f"{_owner()}-*"))


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Sharing:
    server = Sharing()
    server.configuration, server.in_use = LONG, False
    monkeypatch.setattr("rsrv.client.client.connect", lambda *_: server)
    return server


def test_a_restarted_server_gets_new_regions(sharing: Sharing) -> None:
    """After a restart, the server does not know the client's free regions.

    All later requests are still answered, and no region is left in the end.
    """

    async def scenario() -> None:
        async with AsyncClient("localhost:1") as client:
            for _ in range(2):
                await asyncio.gather(*(client.infer("m", x=ROWS) for _ in range(4)))
                sharing.known.clear()
            # The server has refused the step before it did any work, so the step may be sent again.
            await client.infer("m", {"x": ROWS}, parameters={"sequence_id": 1, "sequence_start": True})
            await client.infer("m", x=ROWS)
            assert len(sharing.known) == 1
        assert not sharing.known

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "most"),
    [(Code.INVALID_ARGUMENT, 1), (Code.DEADLINE_EXCEEDED, 3)],
    ids=["answered", "unanswered"],
)
def test_failed_requests_keep_no_memory(sharing: Sharing, code: Code, most: int) -> None:
    """The region of a refused request is used again.

    After a request without an answer, the server may still use the region, so the client unregisters it and uses another one.
    """

    async def scenario() -> None:
        async with AsyncClient("localhost:1") as client:
            sharing.failure = AttemptFailed(code, "failed")
            for _ in range(10):
                with pytest.raises(RequestError):
                    await client.infer("m", x=ROWS)
                assert len(sharing.known) <= most
            assert len({*sharing.used}) == (1 if most == 1 else 10)
        assert not sharing.known

    asyncio.run(scenario())


def test_an_attempt_without_an_answer_shares_no_memory_with_the_next_request(sharing: Sharing) -> None:
    """After a broken connection, the server may still use the region of the broken attempt. So later requests use another region."""

    async def scenario() -> None:
        async with AsyncClient("localhost:1") as client:
            await client.infer("m", x=ROWS)
            sharing.failure = AttemptFailed(Code.CONNECTION, "connection reset")
            asyncio.get_running_loop().call_later(0.01, setattr, sharing, "failure", None)
            await client.infer("m", x=ROWS)
            await client.infer("m", x=ROWS)
        *attempts, next_request = sharing.used
        assert len({*attempts}) == 1
        assert next_request not in attempts

    asyncio.run(scenario())
