"""The health service: whether the server and each model can serve now."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.presence import StubPoll
from tests.unit.control.peers import (
    FakeRuntime,
    Served,
    add_model,
    entry,
    served,
    until,
)
from tests.waiting import looped

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def check(server: Served, service: str = "") -> Any:
    return (await server.health_stub.Check(HealthCheckRequest(service=service))).status


def watch(server: Served, service: str = "") -> Any:
    return server.health_stub.Watch(HealthCheckRequest(service=service))


async def settled(server: Served, revision: int) -> None:
    await until(server.runtimes, lambda: server.link.state.revision == revision)


@looped
async def test_all_is_well(tmp_path: Path) -> None:
    """The server and its models are SERVING if the models are ready, including a model that the runtime keeps without a stub."""
    async with served(tmp_path, models=["a", "b"]) as server:
        server.runtime.change("a@1", entry("a", stubs=[]))
        await settled(server, 6)
        assert [await check(server, service) for service in ("", "a", "b")] == [SERVING] * 3


@looped
async def test_an_alias_serves_if_a_model_that_answers_for_it_does(tmp_path: Path) -> None:
    """An alias serves if one of its answering models serves. A shadow does not answer, so it is not enough."""
    async with served(tmp_path, models=["a", "b"]) as server:
        server.lifecycle.aliases = {"both": {"a": 1.0, "b": 1.0}, "watched": {"a": 1.0, "b": "shadow"}}
        for alias in server.lifecycle.aliases:
            for target in "ab":
                (server.repository / alias / "1" / "calls" / target).mkdir(parents=True)
        assert [await check(server, name) for name in ("both", "watched")] == [SERVING, SERVING]

        server.runtime.change("a@1", entry("a", state="failed", error="why"))
        await settled(server, 6)
        assert [await check(server, name) for name in ("both", "watched")] == [SERVING, NOT_SERVING]


@looped
async def test_a_model_that_failed_is_known(tmp_path: Path) -> None:
    """A model whose first bundle cannot be loaded is in no repository. It is NOT_SERVING, and not unknown."""
    async with served(tmp_path, models=["a"]) as server:
        server.lifecycle.failures["b"] = BundleFailure("no manifest", since=1.0)
        assert await check(server, "b") == NOT_SERVING


@looped
async def test_a_dead_stub_is_seen_and_its_return_too(tmp_path: Path) -> None:
    """Watchers see NOT_SERVING when a model's only stub dies, and SERVING when it is back."""
    async with served(tmp_path, models=["a"]) as server:
        whole, model = watch(server), watch(server, "a")
        assert ((await whole.read()).status, (await model.read()).status) == (SERVING, SERVING)

        server.runtime.change("a@1", None)
        assert ((await whole.read()).status, (await model.read()).status) == (NOT_SERVING, NOT_SERVING)

        server.runtime.change("a@1", entry("a"))
        assert ((await whole.read()).status, (await model.read()).status) == (SERVING, SERVING)


@looped
async def test_a_mended_model_serves_when_triton_has_loaded_it(tmp_path: Path) -> None:
    """After a stub is replaced, its model serves when Triton has loaded the model. A ready stub is not enough."""
    async with served(tmp_path, models=["a"]) as server:
        model = watch(server, "a")
        assert (await model.read()).status == SERVING
        server.runtime.change("a@1", None)
        assert (await model.read()).status == NOT_SERVING

        server.lifecycle.loading.add("a")
        server.runtime.change("a@1", entry("a", stubs=[101]))
        await settled(server, 7)
        assert (await check(server), await check(server, "a")) == (NOT_SERVING, NOT_SERVING)

        server.lifecycle.loading.clear()
        assert (await model.read()).status == SERVING


@looped
async def test_a_model_serves_while_it_is_reloaded(tmp_path: Path) -> None:
    """While Triton loads the next version of a model, the model serves its earlier version."""
    async with served(tmp_path, models=["a"]) as server:
        server.lifecycle.loading.add("a")
        server.runtime.change("a@2", entry("a", stubs=[101]))
        server.runtime.change("a@1", None)
        await settled(server, 7)

        assert (await check(server), await check(server, "a")) == (SERVING, SERVING)


@looped
async def test_a_dead_runtime_serves_nothing(tmp_path: Path) -> None:
    """After the runtime dies, each model serves when the next runtime has it."""
    async with served(tmp_path, models=["a", "b"]) as server:
        whole = watch(server)
        assert (await whole.read()).status == SERVING

        server.runtime.die()
        assert (await whole.read()).status == NOT_SERVING
        assert await check(server, "a") == NOT_SERVING

        second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        second.entries = {"a@1": entry("a"), "b@1": entry("b", state="loading")}
        await until(server.runtimes, lambda: server.link.up)
        assert [await check(server, service) for service in ("", "a", "b")] == [
            NOT_SERVING,
            SERVING,
            NOT_SERVING,
        ]
        second.change("b@1", entry("b"))
        assert (await whole.read()).status == SERVING
        second.die()


@looped
async def test_a_new_model_counts_once_it_is_ready(tmp_path: Path) -> None:
    """A new model affects the server's health only after its first version was ready."""
    async with served(tmp_path, models=["a"]) as server:
        add_model(server.repository, "b")
        server.runtime.change("b@1", entry("b", state="loading"))
        await settled(server, 6)
        assert (await check(server), await check(server, "b")) == (SERVING, NOT_SERVING)

        server.runtime.change("b@1", entry("b"))
        await settled(server, 7)
        assert (await check(server), await check(server, "b")) == (SERVING, SERVING)

        server.runtime.change("b@1", None)
        await settled(server, 8)
        assert (await check(server), await check(server, "b")) == (NOT_SERVING, NOT_SERVING)


@looped
async def test_a_model_that_is_removed_is_not_missed(tmp_path: Path) -> None:
    """A removed model does not make the server unhealthy, and is NOT_FOUND after Triton unloads it."""
    async with served(tmp_path, models=["a", "b"]) as server:
        (server.repository / "b").rename(tmp_path / "b")
        server.runtime.change("b@1", None)
        await settled(server, 6)

        assert await check(server) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await check(server, "b")
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND


@looped
async def test_a_model_that_is_not_wanted_is_not_missed_until_it_has_served_again(tmp_path: Path) -> None:
    """An unwanted model does not make the server unhealthy until it was loaded and has served again."""
    async with served(tmp_path, models=["a", "b"]) as server:
        whole = watch(server)
        server.lifecycle.unwanted.add("b")
        server.runtime.change("b@1", None)
        await settled(server, 6)
        assert (await check(server), await check(server, "b")) == (SERVING, NOT_SERVING)

        server.runtime.change("b@1", entry("b", state="loading"))
        server.lifecycle.unwanted.clear()
        await settled(server, 7)
        assert (await check(server), await check(server, "b")) == (SERVING, NOT_SERVING)

        server.runtime.change("b@1", entry("b"))
        await settled(server, 8)
        assert (await check(server), await check(server, "b")) == (SERVING, SERVING)
        assert (await whole.read()).status == SERVING

        server.runtime.change("b@1", None)
        assert (await whole.read()).status == NOT_SERVING


@looped
async def test_a_model_that_fails_from_the_start_is_missed_until_it_is_removed(tmp_path: Path) -> None:
    """A model that never gets ready makes the server unhealthy until it leaves the repository."""
    async with served(tmp_path, models=["a", "b"]) as server:
        server.runtime.change("b@1", entry("b", state="failed", error="why", stubs=[]))
        await settled(server, 6)
        whole = watch(server)
        assert (await whole.read()).status == NOT_SERVING

        (server.repository / "b").rename(tmp_path / "b")

        assert (await whole.read()).status == SERVING


@looped
async def test_a_model_that_only_meta_models_call_serves_as_they_do(tmp_path: Path) -> None:
    """A callee without its own stub serves while the stub of its meta model is alive."""
    async with served(tmp_path, models=["m"]) as server:
        server.runtime.change("inner@1", entry("inner", stubs=[]))
        server.runtime.change(
            "m@1", entry("m", kind="meta", weights=None, residency=None, models=["inner@1"])
        )
        await settled(server, 7)
        assert [await check(server, service) for service in ("", "m", "inner")] == [SERVING] * 3

        server.runtime.change("m@1", None)
        server.runtime.change("inner@1", entry("inner", state="leaving", stubs=[]))
        await settled(server, 9)
        assert [await check(server, service) for service in ("", "m", "inner")] == [NOT_SERVING] * 3


@looped
async def test_in_explicit_mode_only_the_runtime_is_needed(tmp_path: Path) -> None:
    """In explicit mode, a model that the external control plane unloads does not make the server unhealthy."""
    async with served(tmp_path, models=["a"], decides=False) as server:
        server.runtime.change("a@1", None)
        await settled(server, 6)

        assert (await check(server), await check(server, "a")) == (SERVING, NOT_SERVING)


@pytest.mark.parametrize("name", ["nobody", "../repository/a", "a/1", "/", ".."])
@looped
async def test_an_unknown_model_is_not_found(tmp_path: Path, name: str) -> None:
    """Check answers NOT_FOUND and Watch SERVICE_UNKNOWN for names that are not models."""
    async with served(tmp_path, models=["a"]) as server:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await check(server, name)
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await watch(server, name).read()).status == HealthCheckResponse.SERVICE_UNKNOWN


@looped
async def test_a_model_that_falls_back_to_cold_serves_all_the_time(tmp_path: Path) -> None:
    """A model serves before, during and after its fall to cold, and while it starts again, because its stub accepts requests."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.change("a@1", entry("a", state="cold", stubs=[]))
        await settled(server, 6)
        assert await check(server) == SERVING
        server.runtime.change("a@1", None)
        await settled(server, 7)
        assert (await check(server), await check(server, "a")) == (SERVING, SERVING)
        assert server.runtimes.cold == {"a"}

        server.runtimes.see_stubs(StubPoll({"a"}))
        server.runtime.change("a@1", entry("a", state="loading"))
        await settled(server, 8)
        assert await check(server, "a") == SERVING

        server.runtime.change("a@1", entry("a"))
        await settled(server, 9)
        assert await check(server, "a") == SERVING
        assert server.runtimes.cold == set()
