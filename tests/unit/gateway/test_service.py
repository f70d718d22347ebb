"""The gateway's control service over gRPC, and the commands that use it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rsrv.cli import main as cli
from rsrv.control.grpc_server import ListenError, listen, listen_locally
from rsrv.placement.contract import ModelView, WeightsView, WorkerView
from rsrv.settings import ControlSection
from rsrv_gateway.service import GATEWAY, GatewayHealth, GatewayService
from rsrv_gateway.traffic import TrafficCounts
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc
from tests.unit.gateway.worlds import World
from tests.waiting import looped

PACKED = {"mode": "lpt_packing"}


def worker(*models: str, budget: int = 1000) -> WorkerView:
    """Return the view of a worker that has these models on its device, with 400 bytes each."""
    view = ModelView(400, WeightsView.RESIDENT, max_items=8, item_s=0.01, batch_input=("x", 0))
    return WorkerView(True, frozenset(models), "1", budget, models=dict.fromkeys(models, view))


class Served:
    def __init__(self, world: World, path: Path, channel: Any) -> None:
        self.world = world
        self.path = path
        self.channel = channel
        self.stub: Any = gateway_pb2_grpc.GatewayStub(channel)

    async def refused(self, call: str, request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await getattr(self.stub, call)(request)
        return failed.value.code(), failed.value.details() or ""

    async def status(self) -> pb.GetStatusResponse:
        response: pb.GetStatusResponse = await self.stub.GetStatus(pb.GetStatusRequest())
        return response


@asynccontextmanager
async def served(
    tmp_path: Path, settings: Mapping[str, Any] | None = None, **ready: str | WorkerView
) -> AsyncIterator[Served]:
    """Serve on a Unix socket. The workers are known, and models are packed if the mode is lpt_packing."""
    world = World(settings, **ready)
    path = tmp_path / "control.sock"
    async with world.running():
        service = GatewayService(world.gateway)
        server = await listen_locally(path, service, GatewayHealth(world.gateway), GATEWAY)
        try:
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                yield Served(world, path, channel)
        finally:
            await server.stop(0)


@looped
async def test_the_status_has_workers_models_and_what_moves_them(tmp_path: Path) -> None:
    """The status has all workers, including dead ones, the policy, the last repack, and all models or one model."""
    async with served(tmp_path, PACKED, a=worker("m", "n"), b=worker("m", "n"), c=worker()) as gateway:
        del gateway.world.ready["c"]
        gateway.world.gateway.failed("c:8001")
        gateway.world.proxy.counted = TrafficCounts(outstanding={("m", "a:8001"): 2, ("n", "a:8001"): 3})
        while (status := await gateway.status()).workers[2].alive:
            pass

        assert (status.mode, status.policy.replicas.count) == (pb.MODE_LPT_PACKING, 1)
        assert not status.policy.HasField("halflife_device_s")
        assert [model.name for model in status.models] == ["m", "n"]
        assert sorted(place for model in status.models for place in model.placed) == ["a:8001", "b:8001"]
        assert [(entry.name, entry.alive, entry.outstanding) for entry in status.workers] == [
            ("a:8001", True, 5),
            ("b:8001", True, 0),
            ("c:8001", False, 0),
        ]
        assert (status.workers[0].bytes, status.workers[0].budget_bytes) == (400, 1000)
        assert (status.repacks.last, status.repacks.packed) == ("start", 2)
        (only,) = (await gateway.stub.GetStatus(pb.GetStatusRequest(model="n"))).models
        assert (only.name, list(only.ready), only.bytes) == ("n", ["a:8001", "b:8001"], 400)
        code, text = await gateway.refused("GetStatus", pb.GetStatusRequest(model="x"))
        assert (code, text) == (grpc.StatusCode.NOT_FOUND, "there is no model 'x'")


@looped
async def test_a_policy_changes_as_the_mask_says(tmp_path: Path) -> None:
    """SetPolicy changes the fields of its mask. A field in the mask without a value returns to rsrv.yaml's value."""
    async with served(tmp_path, {**PACKED, "hysteresis": 0.3}, a=worker("m"), b=worker("m")) as gateway:
        requested = pb.Policy(hysteresis=0.5, fill=pb.FILL_RR, replicas=pb.Replicas(all=True), fill_factor=9)
        changed = await gateway.stub.SetPolicy(
            pb.SetPolicyRequest(
                policy=requested, update_mask=FieldMask(paths=["hysteresis", "replicas", "fill"])
            )
        )
        policy = changed.policy
        assert (policy.hysteresis, policy.replicas.all, policy.fill) == (0.5, True, pb.FILL_RR)
        assert policy.fill_factor == 1.0
        assert any("from the next repack on" in text for text in changed.warnings)
        assert (await gateway.status()).generation == 1

        repacked = await gateway.stub.Repack(pb.RepackRequest(wait=True))
        assert repacked.repacks.counts["operator"] == 1
        (model,) = (await gateway.status()).models
        assert list(model.placed or model.moving_to) == ["a:8001", "b:8001"]

        back = await gateway.stub.SetPolicy(
            pb.SetPolicyRequest(update_mask=FieldMask(paths=["hysteresis", "replicas"]))
        )
        assert (back.policy.hysteresis, back.policy.replicas.count, back.policy.fill) == (0.3, 1, pb.FILL_RR)


@pytest.mark.parametrize(
    ("policy", "paths", "problem"),
    [
        (pb.Policy(), [], "names nothing"),
        (pb.Policy(), ["mode"], "'mode' is not a field of the policy"),
        (pb.Policy(hysteresis=0.5), ["hysteresis", "histeresis"], "did you mean 'hysteresis'?"),
        (pb.Policy(hysteresis=0.5, fill_factor=-1), ["hysteresis", "fill_factor"], "fill_factor: "),
        (pb.Policy(hysteresis=float("nan")), ["hysteresis"], "hysteresis: "),
        (pb.Policy(replicas=pb.Replicas(count=0)), ["replicas"], "replicas"),
        (pb.Policy(replicas=pb.Replicas(all=False)), ["replicas"], "a count, auto or all"),
        (pb.Policy(fill=7), ["fill"], "must be one of least, rr"),  # type: ignore[arg-type]
    ],
)
@looped
async def test_a_policy_that_is_wrong_anywhere_changes_nothing(
    tmp_path: Path, policy: pb.Policy, paths: list[str], problem: str
) -> None:
    """A policy with a wrong field changes nothing, and the message names the field."""
    async with served(tmp_path, PACKED, a=worker("m")) as gateway:
        before = await gateway.status()
        request = pb.SetPolicyRequest(policy=policy, update_mask=FieldMask(paths=paths))
        code, text = await gateway.refused("SetPolicy", request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert problem in text
        after = await gateway.status()
        assert (after.policy, after.generation) == (before.policy, before.generation)


@looped
async def test_what_packs_is_refused_where_nothing_is_packed(tmp_path: Path) -> None:
    """In modes other than lpt_packing, packing commands are refused. The basis of work can still be set."""
    async with served(tmp_path, {"mode": "least_outstanding"}, a="m") as gateway:
        for call, request in (
            ("Repack", pb.RepackRequest()),
            ("SetPlacement", pb.SetPlacementRequest(model="m")),
            ("SetPolicy", pb.SetPolicyRequest(update_mask=FieldMask(paths=["hysteresis"]))),
        ):
            code, text = await gateway.refused(call, request)
            assert (code, "not lpt_packing" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        request = pb.SetPolicyRequest(
            policy=pb.Policy(work_basis=pb.WORK_BASIS_REQUESTS), update_mask=FieldMask(paths=["work_basis"])
        )
        assert (await gateway.stub.SetPolicy(request)).policy.work_basis == pb.WORK_BASIS_REQUESTS
        assert not gateway.world.gateway.table["m"].per_item


@looped
async def test_a_model_has_its_own_placement(tmp_path: Path) -> None:
    """A model's own placement settings apply until they are replaced. The answer warns if they cannot be fulfilled."""
    async with served(tmp_path, PACKED, a=worker("m", "n"), b=worker("m", "n")) as gateway:
        answer = await gateway.stub.SetPlacement(
            pb.SetPlacementRequest(model="m", replicas=pb.Replicas(count=5), fill=pb.FILL_RR)
        )
        assert any("only 2 workers" in text for text in answer.warnings)
        await gateway.stub.Repack(pb.RepackRequest(wait=True))
        first, second = (await gateway.status()).models
        assert (first.replicas.count, first.effective_replicas, first.fill) == (5, 2, pb.FILL_RR)
        assert (second.replicas.count, second.fill) == (1, pb.FILL_LEAST)

        await gateway.stub.SetPlacement(pb.SetPlacementRequest(model="m"))
        assert (await gateway.status()).models[0].replicas.count == 1
        code, _ = await gateway.refused("SetPlacement", pb.SetPlacementRequest(model="x"))
        assert code is grpc.StatusCode.NOT_FOUND
        await gateway.stub.SetPlacement(pb.SetPlacementRequest(model="x", allow_unknown=True))
        assert any("no worker serves x" in text for text in (await gateway.status()).warnings)
        code, _ = await gateway.refused("SetPlacement", pb.SetPlacementRequest())
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@looped
async def test_without_workers_nothing_is_packed(tmp_path: Path) -> None:
    """Without workers, a repack is refused at once."""
    async with served(tmp_path, PACKED, a=worker("m")) as gateway:
        gateway.world.ready.clear()
        await gateway.world.gateway.probes.probe()
        code, text = await gateway.refused("Repack", pb.RepackRequest(wait=True))
        assert (code, "no worker answers" in text) == (grpc.StatusCode.UNAVAILABLE, True)


@looped
async def test_a_client_is_told_which_workers_to_ask(tmp_path: Path) -> None:
    """Locate returns placed workers before other workers, and less busy placed workers before busier ones.

    If the model is unknown, Locate starts a probe.
    """
    ready = {name: worker("m", "n") for name in "abc"}
    async with served(tmp_path, {**PACKED, "replicas": 2}, **ready) as gateway:
        placed = (await gateway.status()).models[0].placed
        gateway.world.proxy.counted = TrafficCounts(load={placed[0]: 2.0, placed[1]: 1.0})
        workers = (await gateway.stub.Locate(pb.LocateRequest(model="m"))).workers
        assert [(entry.worker, entry.placed) for entry in workers[:2]] == [
            (placed[1], True),
            (placed[0], True),
        ]
        assert (len(workers), workers[2].placed) == (3, False)
        assert (workers[0].grpc, workers[0].http) == (placed[1], placed[1].replace("8001", "8000"))

        gateway.world.ready["a"] = worker("m", "n", "new")
        (only,) = (await gateway.stub.Locate(pb.LocateRequest(model="new"))).workers
        assert only.worker == "a:8001"
        code, _ = await gateway.refused("Locate", pb.LocateRequest(model="x"))
        assert code is grpc.StatusCode.NOT_FOUND
        del gateway.world.ready["a"]
        await gateway.world.gateway.probes.probe()
        await gateway.world.gateway.round()
        code, _ = await gateway.refused("Locate", pb.LocateRequest(model="new"))
        assert code is grpc.StatusCode.UNAVAILABLE


@looped
async def test_health_is_that_of_the_gateway_and_of_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The health service reports the gateway's health and each model's, and watchers get each change.

    `rsrv gateway health --json` prints the health as JSON.
    """
    async with served(tmp_path, a="m") as gateway:
        stub: Any = health_pb2_grpc.HealthStub(gateway.channel)
        serving, not_serving = 1, 2
        for name in ("", "m"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == serving
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Check(health_pb2.HealthCheckRequest(service="x"))
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        watched = stub.Watch(health_pb2.HealthCheckRequest(service="m"))
        assert (await watched.read()).status == serving
        gateway.world.ready.clear()
        assert (await watched.read()).status == not_serving
        watched.cancel()
        command = ["gateway", "health", "m", "--json", "--server", f"unix:{gateway.path}"]
        assert await asyncio.to_thread(cli.main, command) == 1
        assert json.loads(capsys.readouterr().out) == {"status": "NOT_SERVING"}


@looped
async def test_it_listens_where_the_settings_say_and_names_them(tmp_path: Path) -> None:
    """The service listens at the configured address and requires the token.

    If the address is taken, the error names the setting.
    """
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    async with served(tmp_path, a="m") as gateway:
        world = gateway.world
        service, health = GatewayService(world.gateway), GatewayHealth(world.gateway)
        section = ControlSection(listen="127.0.0.1:0", token_file=token)
        server, port = await listen(section, service, health, GATEWAY)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = gateway_pb2_grpc.GatewayStub(channel)
            headers = (("authorization", "Bearer secret"),)
            assert (await stub.GetStatus(pb.GetStatusRequest(), metadata=headers)).models
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.GetStatus(pb.GetStatusRequest())
            assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await server.stop(0)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            section = ControlSection(listen=f"127.0.0.1:{taken.getsockname()[1]}", token_file=token)
            with pytest.raises(ListenError, match=r"gateway\.control_listen: cannot listen"):
                await listen(section, service, health, GATEWAY)


@looped
async def test_the_command_shows_and_steers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The subcommands of `rsrv gateway` show and change the gateway. With --json, the output is JSON."""
    async with served(tmp_path, PACKED, a=worker("m"), b=worker("m")) as gateway:

        async def say(*words: str, status: int = 0) -> str:
            where = ["--server", f"unix:{gateway.path}"]
            assert await asyncio.to_thread(cli.main, ["gateway", *words, *where]) == status
            out, err = capsys.readouterr()
            return out + err

        text = await say("status")
        assert "lpt_packing" in text
        assert [line.split()[0] for line in text.splitlines() if line.startswith(("a:", "b:", "m "))] == [
            "a:8001",
            "b:8001",
            "m",
        ]
        assert json.loads(await say("status", "m", "--json"))["models"][0]["name"] == "m"
        assert "hysteresis  0.1" in await say("policy")
        text = await say("policy", "hysteresis=0.4", "replicas=all", "forbid_memory_oversubscription=false")
        assert "hysteresis  0.4" in text
        assert "replicas  all" in text
        assert "forbid_memory_oversubscription  false" in text
        assert "hysteresis  0.1" in await say("policy", "hysteresis=default")
        assert "only 2 workers" in await say("place", "m", "--replicas", "3")
        assert "packed" in await say("repack")
        assert "a:8001" in await say("locate", "m")
        assert (await say("health"), await say("health", "m")) == ("serving\n", "serving\n")
        assert json.loads(await say("health", "--json")) == {"status": "SERVING"}
        assert "there is no model" in await say("locate", "x", status=1)
        assert "hysteresis cannot be 'much'" in await say("policy", "hysteresis=much", status=2)
        assert "unknown key 'mode'; known are " in await say("policy", "mode=round_robin", status=2)
