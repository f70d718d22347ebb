"""The plane that an HAProxy carries, with a real one between clients and fake workers."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import signal
import socket
import ssl
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tritonclient.grpc import service_pb2

from rsrv.control.grpc_server import ListenError
from rsrv_gateway.contract import Routes, Worker
from tests.unit.gateway.proxied import (
    OPTIONS,
    SERVICE,
    Front,
    Wire,
    at,
    crowd,
    everywhere,
    fronted,
    haproxy,
    serving,
    until,
)
from tests.unit.gateway.workers import looped

KB, MB = 1000, 1_000_000


async def spread(front: Front, model: str, *workers: str) -> None:
    """Asks until each of these has answered; none else may."""
    missing = set(workers)
    while missing:
        who = await front.infer(model)
        assert who in workers
        missing.discard(who)


@looped
async def test_messages_of_all_sizes_find_their_worker(tmp_path: Path) -> None:
    """HAProxy holds 16 kB of a message; larger ones go where they belong, too, and arrive as they were sent."""
    async with (
        crowd("x", "y") as (_, workers),
        fronted(tmp_path, workers, {**at("x", "a"), **at("y", "b")}) as front,
    ):
        around = range(15 * KB, 17 * KB, 97)
        for size in (0, 1, KB, *around, 33 * KB, 100 * KB, MB, 8 * MB):
            assert await front.infer("a", size=size) == "x"
            assert await front.infer("b", size=size) == "y"


@looped
async def test_what_haproxy_cannot_tell_goes_to_the_plane_behind(tmp_path: Path) -> None:
    """Models that nobody serves, sequences, compressed messages, and all other calls."""
    async with (
        crowd("x", "y") as (fakes, workers),
        fronted(tmp_path, workers, {**at("x", "a"), "nobody": Routes(ready=())}) as front,
    ):
        assert await front.infer("unknown") == "rest"
        assert await front.infer("nobody") == "rest"
        assert await front.infer("unknown", size=MB) == "rest"
        assert await front.infer("a", parameters={"sequence_id": 3}) == "rest"
        assert await front.infer("a", compression=grpc.Compression.Gzip, size=MB) == "rest"
        for method in ("ServerLive", "ModelMetadata", "RepositoryIndex"):
            assert await front.channel.unary_unary(SERVICE + method)(b"") == b"rest"
        assert fakes["x"].asked == fakes["y"].asked == []
        assert await front.infer("a") == "x"


@looped
async def test_a_stream_is_answered_while_it_is_open(tmp_path: Path) -> None:
    """Nothing waits for its end, nor for its first message."""
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a")) as front:
        call = front.channel.stream_stream(f"{SERVICE}ModelStreamInfer")()
        for _ in range(3):
            await call.write(b"\x0a\x01a")
            assert await call.read() == b"rest"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


@looped
async def test_http_with_the_model_in_the_path(tmp_path: Path) -> None:
    """With and without a version, small and large; all other paths go to the plane behind."""
    async with (
        crowd("x", "y") as (_, workers),
        fronted(tmp_path, workers, {**at("x", "a"), **at("y", "b")}) as front,
    ):
        for path, who in (
            ("/v2/models/a/infer", "x"),
            ("/v2/models/b/versions/3/infer", "y"),
            ("/v2/models/b/generate", "y"),
            ("/v2/models/b/generate_stream", "y"),
            ("/v2/models/unknown/infer", "rest"),
            ("/v2/models/a/ready", "rest"),
            ("/v2/models/a/load", "rest"),
            ("/v2/health/ready", "rest"),
            ("/v2", "rest"),
        ):
            for size in (10, MB):
                found = await front.http(path, bytes(size), {"Inference-Header-Content-Length": "10"})
                assert found == (200, {"who": who, "bytes": size})
        assert await front.http("/v2/models/infer") == (200, {"who": "rest", "bytes": 0})


@pytest.mark.parametrize("size", [10, KB, 7 * KB, 10 * KB, 20 * KB, 100 * KB, 500 * KB])
@looped
async def test_a_sequence_is_named_behind_much_else(tmp_path: Path, size: int) -> None:
    """It goes to the plane behind, however much there is; without a sequence only what HAProxy cannot hold does."""
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a")) as front:
        held = "x" if size < 8 * KB else "rest"
        many = {f"parameter{number:05}": number for number in range(size // 25)}
        for parameters in ({}, many):
            request_id = "" if parameters else "i" * size
            assert await front.infer("a", request_id=request_id, parameters=parameters) == held
            sequence = {**parameters, "sequence_id": 3}
            for tensor in (10, MB):
                got = await front.infer("a", request_id=request_id, parameters=sequence, size=tensor)
                assert got == "rest"


@pytest.mark.parametrize("size", [10, KB, 8 * KB, 14 * KB, 20 * KB, 100 * KB, 500 * KB])
@looped
async def test_a_sequence_is_named_behind_much_else_over_http(tmp_path: Path, size: int) -> None:
    """In the JSON, which may have binary data after it; compressed, nobody knows."""
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a")) as front:
        path, held = "/v2/models/a/infer", "x" if size < 15 * KB else "rest"
        plain = json.dumps({"inputs": [{"data": "0" * size}]}).encode()
        sequence = json.dumps({"inputs": [{"data": "0" * size}], "parameters": {"sequence_id": 1}}).encode()
        for tensor in (0, KB, 500 * KB):
            for said, who in ((plain, held), (sequence, "rest")):
                length = {"Inference-Header-Content-Length": str(len(said))}
                for headers in (length,) if tensor else (length, None):
                    assert (await front.http(path, said + bytes(tensor), headers))[1]["who"] == who
        gzipped = await front.http(path, gzip.compress(plain), {"Content-Encoding": "gzip"})
        assert gzipped[1]["who"] == "rest"


@looped
async def test_odd_messages_over_grpc(tmp_path: Path) -> None:
    """A zero among the parameters ends no search; tensors within the message, instead of after it, may have parameters
    behind what HAProxy reads."""
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a")) as front:
        infer = front.channel.unary_unary(
            f"{SERVICE}ModelInfer", response_deserializer=service_pb2.ModelInferResponse.FromString
        )
        zero, sequence = service_pb2.ModelInferRequest(model_name="a"), service_pb2.ModelInferRequest()
        zero.parameters["priority"].int64_param = 0
        sequence.parameters["sequence_id"].int64_param = 3
        sequence.inputs.add(name="x")
        message = zero.SerializeToString() + sequence.SerializeToString()
        assert (await infer(message, timeout=20)).id == "rest"
        for size, who in ((10, "x"), (7 * KB, "x"), (10 * KB, "rest"), (20 * KB, "rest"), (MB, "rest")):
            request = service_pb2.ModelInferRequest(model_name="a")
            request.inputs.add(name="x").contents.bytes_contents.append(bytes(size))
            assert (await infer(request.SerializeToString(), timeout=20)).id == who


@looped
async def test_a_model_moves(tmp_path: Path) -> None:
    """Requests follow at once, and HAProxy goes on running."""
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a", "b")) as front:
        pid = front.plane.pid
        for worker in ("y", "x", "y"):
            await front.plane.apply(workers, {**at(worker, "a"), **at("x", "b")})
            assert await front.infer("a") == worker
            assert await front.infer("b") == "x"
        await front.plane.apply(workers, at("x", "b"))
        assert await front.infer("a") == "rest"
        assert front.plane.pid == pid


@looped
async def test_thousands_of_models_move(tmp_path: Path) -> None:
    """All of them at once; and the plane behind knows, too."""
    names = [f"model{number}" for number in range(3000)]
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", *names)) as front:
        assert await front.infer(names[-1]) == "x"
        await front.plane.apply(workers, {**at("y", *names[:-1]), names[-1]: Routes(ready=("x", "y"))})
        assert {await front.infer(name) for name in names[:-1:100]} == {"y"}
        await spread(front, names[-1], "x", "y")
        assert len(front.rest.table) == 3000


@looped
async def test_replicas_are_filled_in_turn(tmp_path: Path) -> None:
    """Each gets a quantum of requests, then the next one does; other models do not disturb that."""
    placed = {"a": Routes(ready=("x", "y", "z"), placed=("x", "z"), quantum=3)}
    async with (
        crowd("x", "y", "z") as (_, workers),
        fronted(tmp_path, workers, {**placed, **at("x", "b")}) as front,
    ):
        got = []
        for _ in range(12):
            got.append(await front.infer("a"))
            await front.infer("b")
        # HAProxy counts from one, so the first turn is shorter.
        assert "".join(got) == "xxzzzxxxzzzx"


@looped
async def test_the_worker_with_the_fewest_requests(tmp_path: Path) -> None:
    """A model that is ready everywhere avoids the worker that is busy, whatever keeps it busy."""
    table = {**everywhere("a"), **at("x", "held")}
    async with crowd("x", "y") as (fakes, workers), fronted(tmp_path, workers, table) as front:
        held = front.call("held")
        await fakes["x"].held.wait()
        assert {await front.infer("a") for _ in range(6)} == {"y"}
        fakes["x"].release.set()
        await held
        await spread(front, "a", "x", "y")


@looped
async def test_round_robin_goes_round_for_each_model(tmp_path: Path) -> None:
    """Whatever is under way, and whatever other models do."""
    async with (
        crowd("x", "y") as (_, workers),
        fronted(tmp_path, workers, everywhere("a", "b"), mode="round_robin") as front,
    ):
        got = [(model, await front.infer(model)) for model in "ababbaabbb"]
        for model in "ab":
            turns = [worker for found, worker in got if found == model]
            assert all(one != other for one, other in itertools.pairwise(turns))


@looped
async def test_workers_join_and_leave(tmp_path: Path) -> None:
    """Without a new start. Who has left gets nothing any more, and finishes what it has."""
    async with crowd("x", "y", "z") as (fakes, workers):
        two = {name: workers[name] for name in "xy"}
        async with fronted(tmp_path, two, {**everywhere("a"), **at("x", "held")}) as front:
            pid = front.plane.pid
            await front.plane.apply(workers, everywhere("a", on=("x", "y", "z")))
            await spread(front, "a", "x", "y", "z")
            await front.plane.apply(workers, at("x", "a", "held"))
            held = asyncio.ensure_future(front.infer("held"))
            await fakes["x"].held.wait()
            await front.plane.apply({"z": workers["z"]}, everywhere("a", "held", on=("z",)))
            assert {await front.infer("a") for _ in range(9)} == {"z"}
            fakes["x"].release.set()
            assert await held == "x"
            assert front.plane.pid == pid


@looped
async def test_the_dns_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers' names stay what they were, and models move without waiting for it."""
    asked = asyncio.Event()

    async def silent(*_: Any, **__: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with (
        serving("x", host="localhost") as (_, x),
        serving("y", host="localhost") as (_, y),
        fronted(tmp_path, {"x": x, "y": y}, at("x", "a"), resolve_s=0.1) as front,
    ):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent)
        await asked.wait()
        # Half of what the DNS is given.
        async with asyncio.timeout(5):
            await front.plane.apply({"x": x, "y": y}, at("y", "a"))
        assert await front.infer("a") == "y"


@looped
async def test_the_dns_learns_a_worker_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the plane behind serves it."""
    known: list[str] = []

    async def answer(*_: Any, **__: Any) -> list[Any]:
        if not known:
            raise OSError("no such name")
        return [(None, None, None, None, (address, 0)) for address in known]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
    async with serving("x") as (_, x):
        named = replace(x, grpc=x.grpc.replace("127.0.0.1", "gpu1"))
        async with fronted(tmp_path, {"x": named}, at("x", "a"), resolve_s=0.1) as front:
            assert await front.infer("a") == "rest"
            pid = front.plane.pid
            known.append("127.0.0.1")
            while await front.infer("a") != "x":
                pass
            await front.plane.apply({}, {})
            assert await front.infer("a") == "rest"
            assert front.plane.pid == pid


@looped
async def test_a_worker_dies_and_comes_back(tmp_path: Path) -> None:
    """Its traffic notices, and goes to another one; the brain is told; the worker gets its own again when it is back."""
    async with crowd("y") as (_, workers):
        async with serving("x") as (_, x):
            port = int(x.grpc.rpartition(":")[2])
            workers["x"] = x
            stack = fronted(tmp_path, workers, at("x", "a"))
            front = await stack.__aenter__()
            assert await front.infer("a") == "x"
        try:
            for size in (KB, MB):
                assert [await front.infer("a", size=size) for _ in range(5)] == ["y"] * 5
            await front.brain.told.wait()
            assert set(front.brain.failures) == {"x"}
            async with serving("x", port=port):
                while await front.infer("a") != "x":
                    pass
        finally:
            await stack.__aexit__(None, None, None)


@looped
async def test_a_worker_is_dead_and_nobody_has_noticed(tmp_path: Path) -> None:
    """Its requests go to the only other one without the second that HAProxy waits by default."""
    clock = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack, crowd("y") as (_, workers):
        async with serving("x") as (_, x):
            front = await stack.enter_async_context(
                fronted(tmp_path, {"x": x, **workers}, at("x", "a"), probe_s=60)
            )
            assert await front.infer("a") == "x"
        for _ in range(3):
            began = clock()
            assert await front.infer("a") == "y"
            assert await front.http("/v2/models/a/infer", b"{}") == (200, {"who": "y", "bytes": 2})
            assert clock() - began < 0.5


@pytest.mark.parametrize("size", [KB, 14 * KB])
@looped
async def test_a_worker_dies_with_requests(tmp_path: Path, size: int) -> None:
    """Nothing of them was answered, so another one is asked; HAProxy still has what is no larger than its buffer."""
    async with crowd("x", "y") as (fakes, workers):
        fakes["y"].release.set()
        wire = Wire(workers["x"])
        async with wire.running() as x, fronted(tmp_path, {**workers, "x": x}, at("x", "held")) as front:
            calls = [asyncio.ensure_future(front.infer("held", size=size)) for _ in range(5)]
            await until(lambda: len(fakes["x"].asked) == 5)
            wire.cut()
            assert await asyncio.gather(*calls) == ["y"] * 5


@looped
async def test_a_worker_dies_with_a_large_request(tmp_path: Path) -> None:
    """HAProxy does not have it any more: the client is told, and the next one goes to another worker."""
    async with crowd("x", "y") as (fakes, workers):
        fakes["y"].release.set()
        wire = Wire(workers["x"])
        async with wire.running() as x, fronted(tmp_path, {**workers, "x": x}, at("x", "held")) as front:
            call = asyncio.ensure_future(front.refusal("held", contents=bytes(MB)))
            await fakes["x"].held.wait()
            wire.cut()
            assert (await call)[0] == "UNAVAILABLE"
            assert await front.infer("held", size=MB) == "y"


@looped
async def test_a_request_that_kills_whoever_gets_it(tmp_path: Path) -> None:
    """It is tried once more after the first worker has died, and not on all."""
    async with crowd("x", "y", "z") as (fakes, workers), AsyncExitStack() as wires:
        behind_wires = {}
        for name, worker in workers.items():
            wire = Wire(worker)
            behind_wires[name] = await wires.enter_async_context(wire.running())
            fakes[name].dies = wire.cut
        async with fronted(
            tmp_path, behind_wires, {"held": Routes(ready=("x", "y", "z"), placed=("x",))}
        ) as front:
            assert (await front.refusal("held"))[0] == "UNAVAILABLE"
        assert sum("held" in fake.asked for fake in fakes.values()) == 2


@looped
async def test_all_workers_are_gone(tmp_path: Path) -> None:
    """Clients are told so in their own protocol."""
    closed = Worker("x", grpc="127.0.0.1:9", http="127.0.0.1:9")
    async with fronted(tmp_path, {"x": closed}, {"a": Routes(ready=("x",))}) as front:
        code, message = await front.refusal("a")
        assert code == "UNAVAILABLE"
        assert message.startswith("no worker of this model can be reached")
        status, answer = await front.http("/v2/models/a/infer", b"{}")
        assert status == 503
        assert answer["error"] == message


@pytest.mark.parametrize(
    ("said", "message", "meant"),
    [
        ("UNAVAILABLE", "[rsrv:QUEUE_FULL] 3 wait, retry in 5 ms", "RESOURCE_EXHAUSTED"),
        ("UNAVAILABLE", "[rsrv:DEADLINE] too late", "DEADLINE_EXCEEDED"),
        ("UNAVAILABLE", "in ensemble 'e': [rsrv:NOT_RESIDENT] load it", "FAILED_PRECONDITION"),
        ("UNAVAILABLE", "[rsrv:RUNTIME_DOWN] it restarts", "UNAVAILABLE"),
        ("UNAVAILABLE", "wörse", "UNAVAILABLE"),
        ("INTERNAL", "[rsrv:QUEUE_FULL] is not what it means", "INTERNAL"),
        ("INVALID_ARGUMENT", "100 % wrong", "INVALID_ARGUMENT"),
        ("NOT_FOUND", "Request for unknown model: 'a' is not found", "NOT_FOUND"),
    ],
)
@looped
async def test_a_worker_refuses(tmp_path: Path, said: str, message: str, meant: str) -> None:
    """The client gets the code that the worker has none for, and every other one as it is; nobody else is asked."""
    async with crowd("x", "y") as (fakes, workers):
        fakes["x"].refusals["a"] = (grpc.StatusCode[said], message)
        async with fronted(tmp_path, workers, at("x", "a")) as front:
            assert await front.refusal("a") == (meant, message)
            await until(lambda: front.plane.counts().requests.get(("a", "x", meant)) == 1)
        assert (fakes["x"].asked, fakes["y"].asked) == (["a"], [])


@pytest.mark.parametrize(
    ("tag", "status"), [("QUEUE_FULL", 429), ("DEADLINE", 504), ("NOT_RESIDENT", 412), ("RUNTIME_DOWN", 503)]
)
@looped
async def test_a_worker_refuses_over_http(tmp_path: Path, tag: str, status: int) -> None:
    """The status says what the message means."""
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a")) as front:
        found = await front.http("/v2/models/a/infer", tag.encode())
    assert found == (status, {"error": f"[rsrv:{tag}] no"})


@looped
async def test_a_worker_unloads_its_models(tmp_path: Path) -> None:
    """As one does that ends: the gateway looks at it, and over HTTP another one is asked already."""
    async with crowd("x", "y") as (fakes, workers):
        fakes["x"].refusals["a"] = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'a' is not found")
        async with fronted(tmp_path, workers, at("x", "a")) as front:
            assert (await front.http("/v2/models/a/infer", b"UNKNOWN"))[1]["who"] == "y"
            assert front.brain.failures == []
            assert (await front.refusal("a"))[0] == "NOT_FOUND"
            await front.brain.told.wait()
            assert set(front.brain.failures) == {"x"}


@looped
async def test_a_client_does_not_wait_any_longer(tmp_path: Path) -> None:
    """The worker learns of it, whether the client has cancelled or its deadline has passed; and it knew the deadline."""
    async with crowd("x", "y") as (fakes, workers), fronted(tmp_path, workers, at("x", "held", "a")) as front:
        x = fakes["x"]
        call = front.call("held")
        await x.held.wait()
        assert x.time_remaining is None
        call.cancel()
        await x.cancelled.wait()
        x.cancelled.clear()
        x.held.clear()
        deadline = 0.2
        while not x.held.is_set():  # On a busy machine it may pass before the request gets there.
            deadline *= 2
            assert (await front.refusal("held", timeout=deadline))[0] == "DEADLINE_EXCEEDED"
        await x.cancelled.wait()
        # It is told in whole milliseconds, rounded up.
        assert x.time_remaining == pytest.approx(deadline / 2, abs=deadline / 2 + 0.01)

        def counted(*codes: str) -> int:
            requests = front.plane.counts().requests
            return sum(requests.get(("held", "x", code), 0) for code in codes)

        # The worker's clock may tell it so before the client does.
        await until(lambda: counted("CANCELLED") >= 1 and counted("CANCELLED", "DEADLINE_EXCEEDED") >= 2)


@looped
async def test_a_worker_does_not_answer(tmp_path: Path) -> None:
    """A client without a deadline gets gateway.request_timeout_s; one with a deadline gets that."""
    async with (
        crowd("x", "y") as (fakes, workers),
        fronted(tmp_path, workers, at("x", "held"), request_timeout_s=0.2) as front,
    ):
        code, message = await front.refusal("held", timeout=None)
        assert code == "DEADLINE_EXCEEDED"
        assert message == "no answer within 0.2 s"
        await fakes["x"].cancelled.wait()
        fakes["x"].held.clear()
        patient = asyncio.ensure_future(front.infer("held", timeout=20))
        await fakes["x"].held.wait()
        impatient = await front.refusal("held", timeout=None)
        assert impatient[0] == "DEADLINE_EXCEEDED"
        fakes["x"].release.set()
        assert await patient == "x"


@looped
async def test_haproxy_dies(tmp_path: Path) -> None:
    """It is started again, and knows where everything is, also what it was told while it did not run."""
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a")) as front:
        pid = front.plane.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await front.plane.apply(workers, at("y", "a"))
        await until(lambda: front.plane.pid != pid)
        assert await front.infer("a", wait_for_ready=True) == "y"
        await front.plane.apply(workers, at("x", "a"))
        assert await front.infer("a") == "x"


@looped
async def test_the_plane_is_drained(tmp_path: Path) -> None:
    """What is under way ends, nobody new is let in, and then HAProxy has ended."""
    async with crowd("x", "y") as (fakes, workers), fronted(tmp_path, workers, at("x", "held", "a")) as front:
        held = asyncio.ensure_future(front.infer("held"))
        await fakes["x"].held.wait()
        async with grpc.aio.insecure_channel(front.grpc_address, OPTIONS) as late:
            assert await _lets_in(front, late)
            drained = asyncio.ensure_future(front.plane.drain(20))
            while await _lets_in(front, late):
                pass
        assert front.rest.drained
        assert not drained.done()
        fakes["x"].release.set()
        assert await held == "x"
        await front.channel.close()
        await drained
        assert not front.plane.listens


async def _lets_in(front: Any, channel: Any) -> bool:
    try:
        await front.infer("a", channel=channel)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True


@looped
async def test_the_drain_takes_too_long(tmp_path: Path) -> None:
    """It returns all the same, and what is left ends with the plane."""
    async with crowd("x", "y") as (fakes, workers), fronted(tmp_path, workers, at("x", "held")) as front:
        held = front.call("held")
        await fakes["x"].held.wait()
        await front.plane.drain(0.1)
        await front.plane.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await held


@looped
async def test_requests_are_counted(tmp_path: Path) -> None:
    """Those that HAProxy has passed, those of the plane behind, and what is under way."""
    async with crowd("x", "y") as (fakes, workers), fronted(tmp_path, workers, at("x", "m", "held")) as front:
        for _ in range(3):
            await front.infer("m")
        await front.http("/v2/models/m/infer", b"{}")
        held = front.call("held")
        await fakes["x"].held.wait()
        await until(lambda: front.plane.counts().load.get("x") == 1)
        await until(lambda: front.plane.counts().requests.get(("m", "x", "OK")) == 4)
        counts = front.plane.counts()
        assert counts.requests == {("m", "x", "OK"): 4, ("m", "", "NOT_FOUND"): 1}
        assert sum(counts.durations["m"].counts) == 4
        assert 0 < counts.durations["m"].sum < 20
        held.cancel()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def pems(folder: Path, authority: trustme.CA, *names: str) -> tuple[Path, Path]:
    """A certificate and its key."""
    pair = authority.issue_cert(*names)
    certificate, key = folder / f"{names[0]}.pem", folder / f"{names[0]}.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    key.write_bytes(pair.private_key_pem.bytes())
    return certificate, key


@looped
async def test_clients_use_tls(tmp_path: Path, authority: trustme.CA) -> None:
    """Those with a certificate are let in; those without, and those that speak plain text, are not."""
    certificate, key = pems(tmp_path, authority, "gateway")
    mine, my_key = pems(tmp_path, authority, "client")
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    tls = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": ca}
    name = [*OPTIONS, ("grpc.ssl_target_name_override", "gateway")]
    with_mine = grpc.ssl_channel_credentials(ca.read_bytes(), my_key.read_bytes(), mine.read_bytes())
    without = grpc.ssl_channel_credentials(ca.read_bytes())
    async with crowd("x", "y") as (_, workers), fronted(tmp_path, workers, at("x", "a"), **tls) as front:
        for size in (KB, MB):
            async with grpc.aio.secure_channel(front.grpc_address, with_mine, name) as channel:
                assert await front.infer("a", channel=channel, size=size) == "x"
                assert await front.infer("unknown", channel=channel, size=size) == "rest"
        async with grpc.aio.secure_channel(front.grpc_address, without, name) as channel:
            assert (await front.refusal("a", channel=channel))[0] == "UNAVAILABLE"
        assert (await front.refusal("a"))[0] == "UNAVAILABLE"


@looped
async def test_clients_have_a_token(tmp_path: Path) -> None:
    """Without it they meet the plane behind, which refuses them. Workers do not get to see it."""
    token = tmp_path / "token"
    token.write_text('cor"rect-(horse)\\\n')
    token.chmod(0o600)
    right = (("authorization", 'Bearer cor"rect-(horse)\\'),)
    small = (("authorization", 'bearer cor"rect-(horse)\\'),)
    other = (("authorization", 'Basic: cor"rect-(horse)\\'),)
    wrong = (("authorization", "Bearer correct"),)
    async with (
        crowd("x", "y") as (fakes, workers),
        fronted(tmp_path, workers, at("x", "a"), token_file=token) as front,
    ):
        assert await front.infer("a", metadata=right) == "x"
        assert await front.infer("a", metadata=small) == "x"
        assert "authorization" not in fakes["x"].metadata
        assert await front.infer("a", metadata=other) == "rest"
        assert await front.infer("a", metadata=wrong) == "rest"
        assert front.rest.fake.metadata["authorization"] == "Bearer correct"
        assert await front.infer("a") == "rest"
        assert (await front.http("/v2/models/a/infer", b"{}"))[1]["who"] == "rest"


@looped
async def test_workers_use_tls(tmp_path: Path, authority: trustme.CA) -> None:
    """HAProxy shows its certificate, and requests only go to a worker whose certificate bears its name."""
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    mine, my_key = pems(tmp_path, authority, "gateway")
    tls = {"worker_ca": ca, "worker_certificate": mine, "worker_key": my_key}

    def credentials(name: str) -> Any:
        certificate, key = pems(tmp_path, authority, name)
        pair = (key.read_bytes(), certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], ca.read_bytes(), require_client_auth=True)

    async with (
        serving("x", host="localhost", credentials=credentials("localhost")) as (_, x),
        serving("y", host="localhost", credentials=credentials("somebody")) as (_, y),
        serving("z", host="127.0.0.1", credentials=credentials("whoever")) as (_, z),
        fronted(tmp_path, {"x": x, "y": y, "z": z}, {}, **tls) as front,
    ):
        await front.plane.apply({"x": x}, {"a": Routes(ready=("x",))})
        for size in (KB, MB):
            assert await reached(front, "a", size=size) == "x"
        await front.plane.apply({"y": y}, {"a": Routes(ready=("y",))})
        assert (await front.refusal("a"))[0] == "UNAVAILABLE"
        # Known by its address only.
        await front.plane.apply({"z": z}, {"a": Routes(ready=("z",))})
        assert await reached(front, "a") == "z"


async def reached(front: Front, model: str, **how: Any) -> str:
    """Who answers, as soon as one does: on a busy machine a handshake may take longer than HAProxy waits."""
    while True:
        try:
            return await front.infer(model, **how)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


@looped
async def test_workers_use_https(tmp_path: Path, authority: trustme.CA) -> None:
    """Where workers have TLS, requests over HTTP go to those that have it there, too, and to no other."""
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    certificate, key = pems(tmp_path, authority, "localhost")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    https = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    https.load_cert_chain(certificate, key)

    async with (
        serving("x", credentials=credentials, https=https) as (_, x),
        serving("y", credentials=credentials) as (plain, y),
        fronted(tmp_path, {"x": x, "y": y}, at("x", "a"), worker_ca=ca) as front,
    ):
        assert (await front.http("/v2/models/a/infer", b"{}"))[1]["who"] == "x"
        await front.plane.apply({"y": y}, {"a": Routes(ready=("y",))})
        assert (await front.http("/v2/models/a/infer", b"{}"))[0] == 503
        assert plain.asked == []


@looped
async def test_the_port_is_taken(tmp_path: Path) -> None:
    """The plane does not start, and says what is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=r"gateway.grpc.*|.*Address already in use"):
            async with fronted(tmp_path, {}, {}, grpc=address):
                pass


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "No such file"),
        ("#!/bin/sh\necho HA-Proxy version 2.2.9-2 2021\n", "is 2.2.9-2"),
        ("#!/bin/sh\necho hello\n", "does not say its version"),
    ],
)
@looped
async def test_no_haproxy_that_can_be_used(tmp_path: Path, script: str | None, message: str) -> None:
    """The message says what is there, what is needed, and what can be done."""
    program = tmp_path / "haproxy"
    if script is not None:
        program.write_text(script)
        program.chmod(0o755)
    with pytest.raises(ListenError, match=f"needs HAProxy 2.4 or later: .*{message}.*data_plane: python"):
        async with fronted(tmp_path, {}, {}, haproxy=program):
            pass


@looped
async def test_the_gateway_is_killed(tmp_path: Path) -> None:
    """HAProxy ends with it: it would send requests to where models were."""
    code = f"""
import asyncio, os, signal, sys
from pathlib import Path
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.haproxy.config import configuration
from rsrv_gateway.haproxy.files import Files
from rsrv_gateway.haproxy.process import Process
from rsrv_gateway.haproxy.state import State, write_maps
async def main():
    files = Files(Path({str(tmp_path)!r}))
    section = GatewaySection(grpc="unix:{tmp_path}/grpc.sock", http=None)
    files.configuration.write_text(configuration(section, files, ["w1"], {{}}))
    write_maps(State(), files)
    process = await Process.start(Path({str(haproxy())!r}), files)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    said, _ = await gateway.communicate()
    pid = int(said)
    await until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
