"""rsrv.control.v1.Control over gRPC: the commands that its calls send to the runtime, and the answers."""

import asyncio
import contextlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.presence import StubPoll
from rsrv.control.reconciler import STARTUP_POLL_S, ReloadError
from rsrv.control.v1 import control_pb2 as pb
from rsrv_gen.config import CHOICE, MARK
from tests.unit.control.peers import FakeRuntime, entry, served, until
from tests.waiting import looped

A = pb.Target(model="a")
ALL = pb.Target(all=True)


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """Return the status code and the text of a failed call."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), failed.value.details() or ""


@looped
async def test_a_cold_model_is_shown_without_a_version(tmp_path: Path) -> None:
    """No runtime knows a cold model, so the status has only its state. A model whose start failed has the reason."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.change("b@1", entry("b", state="failed", error="no room", weights="absent", stubs=[]))
        await until(server.runtimes, lambda: "b@1" in server.link.state.entries)
        server.runtimes.see_stubs(StubPoll({"b", "c"}))

        status = await server.control.GetStatus(pb.GetStatusRequest())
        a, b, c = status.models
        assert [a.versions[0].state, b.versions[0].state] == [pb.STATE_READY, pb.STATE_FAILED]
        assert [*c.versions] == [pb.Version(state=pb.STATE_COLD)]

        (model,) = (await server.control.GetStatus(pb.GetStatusRequest(model="c"))).models
        assert model == c


@looped
async def test_a_model_that_has_yet_to_see_its_runtimes_death_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a runtime's death, a model is starting until its process has connected to the next runtime.

    A process that imports model.py sees the death only after the import. A model with a dead process is not shown.
    """
    monkeypatch.setattr("rsrv.control.service.stub_processes", lambda *_: {"a", "other"})
    async with served(tmp_path, models=["a", "dead"]) as server:
        server.runtime.die()
        await until(server.runtimes, lambda: not server.runtimes.up)
        following = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        await until(server.runtimes, lambda: server.runtimes.up)

        (a,) = (await server.control.GetStatus(pb.GetStatusRequest())).models
        assert (a.name, a.starting) == ("a", "its process reconnects")
        assert [*a.versions] == [pb.Version(state=pb.STATE_LOADING)]

        following.change("a@1", entry("a"))
        await until(server.runtimes, lambda: "a@1" in server.link.state.entries)
        (a,) = (await server.control.GetStatus(pb.GetStatusRequest())).models
        assert (a.starting, a.versions[0].state) == ("", pb.STATE_READY)
        # After its return, the model is unloaded.
        following.change("a@1", None)
        await until(server.runtimes, lambda: not server.link.state.entries)
        assert not (await server.control.GetStatus(pb.GetStatusRequest())).models
        following.die()


@looped
async def test_a_model_is_starting_also_after_the_death_of_the_next_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If several runtimes die one after another before a model's process has connected again, the model is still starting."""
    monkeypatch.setattr("rsrv.control.service.stub_processes", lambda *_: {"a"})
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.die()
        for instance in ("22", "33"):
            await until(server.runtimes, lambda: not server.runtimes.up)
            following = FakeRuntime(tmp_path / "runtime.sock", instance=instance * 8)
            await until(server.runtimes, lambda: server.runtimes.up)

            (a,) = (await server.control.GetStatus(pb.GetStatusRequest())).models
            assert (a.name, a.starting) == ("a", "its process reconnects")
            following.die()


@looped
async def test_the_status_has_what_the_runtime_and_the_lifecycle_know(tmp_path: Path) -> None:
    """The status has the versions, the failures, the meta models and the broken bundles."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.change("a@2", entry("a", state="loading", weights="loading", stubs=[101]))
        server.runtime.change("b@1", entry("b", state="failed", error="no room", weights="absent", stubs=[]))
        server.runtime.change("m@1", entry("m", kind="meta", weights=None, models=["a@1"]))
        server.runtime.models["m"] = pb.ModelRecord(
            name="m", meta=True, calls_models=["a"], queued=1, executing=2, outcomes={"answered": 3}, calls=9
        )
        server.lifecycle.failures["c"] = BundleFailure("manifest.yaml: not YAML", since=1000.0, tries=2)
        await until(server.runtimes, lambda: "m@1" in server.link.state.entries)

        status = await server.control.GetStatus(pb.GetStatusRequest())

        a, b = status.models
        assert [(version.key, version.state) for version in a.versions] == [
            ("a@1", pb.STATE_READY),
            ("a@2", pb.STATE_LOADING),
        ]
        assert (a.record.residency, a.record.weights, a.record.queued, a.record.executing) == (
            pb.RESIDENCY_SYSTEM,
            pb.WEIGHTS_RESIDENT,
            1,
            2,
        )
        assert (a.record.outcomes["answered"], a.record.misses, a.record.device_bytes) == (7, 3, 1000)
        assert a.record.weights_state == "evicting"
        assert [
            (executable.size, executable.count, executable.cost_s) for executable in a.record.executables
        ] == [
            (1, 0, 0.001),
            (8, 4, 0.002),
            (16, 0, 0.003),
        ]
        assert [
            (executable.precision.f32, executable.precision.pinned) for executable in a.record.executables
        ] == [
            (0, 0),
            (5, 4),
            (0, 0),
        ]
        assert a.policy == pb.Policy(weight=1.0, max_delay_us=0, max_queue_depth=1024)
        assert (b.versions[0].error, b.versions[0].state) == ("no room", pb.STATE_FAILED)
        (m,) = status.metas
        record = m.record
        assert ([*record.calls_models], record.queued, record.executing, record.calls) == (["a"], 1, 2, 9)
        assert (dict(m.record.outcomes), list(m.versions[0].calls)) == ({"answered": 3}, ["a@1"])
        assert status.failures[0] == pb.Failure(
            name="c", text="manifest.yaml: not YAML", since_unix_s=1000.0, tries=2
        )
        (device,) = status.devices
        assert (device.record.instance, device.record.pid) == ("11" * 8, 4711)
        assert (device.record.numerics, device.record.computes) == (pb.NUMERICS_AUTO, "")
        assert device.record.memory.budget_bytes == 5000
        assert not device.record.memory.HasField("limit_bytes")
        assert not device.HasField("card")
        assert not device.HasField("down_since_unix_s")
        assert (status.scheduler.discipline, status.scheduler.depth) == (pb.DISCIPLINE_FAIR, 2)
        assert status.server.mode == pb.MODE_DYNAMIC


@looped
async def test_the_status_of_one_meta_model_has_its_front(tmp_path: Path) -> None:
    """A meta model has a Python front. If rsrv-gen chose the front, the reason is in the status."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.change("m@1", entry("m", kind="meta", weights=None, models=["a@1"]))
        await until(server.runtimes, lambda: "m@1" in server.link.state.entries)
        (server.repository / "m").mkdir()
        (server.repository / "m/config.pbtxt").write_text(f"{MARK}\n{CHOICE}Python front: it calls models\n")
        (meta,) = (await server.control.GetStatus(pb.GetStatusRequest(model="m"))).metas
        assert meta.front == "Python front: it calls models"


@looped
async def test_the_status_of_one_model_has_nothing_of_the_others(tmp_path: Path) -> None:
    """The status of one model has only that model. An unknown model is NOT_FOUND."""
    async with served(tmp_path, models=["a", "b"]) as server:
        status = await server.control.GetStatus(pb.GetStatusRequest(model="b"))
        assert [model.name for model in status.models] == ["b"]

        code, text = await refusal(server.control.GetStatus(pb.GetStatusRequest(model="x")))
        assert (code, text) == (grpc.StatusCode.NOT_FOUND, "there is no model 'x'")


@looped
async def test_the_policy_shows_what_was_set(tmp_path: Path) -> None:
    """In the policy, an operator's setting takes precedence over that of rsrv.yaml."""
    settings = "models: {a: {weight: 3, max_queue_depth: 9}}"
    async with served(tmp_path, models=["a"], settings=settings) as server:
        await server.control.SetPolicy(pb.SetPolicyRequest(model="a", policy=pb.Policy(weight=5)))

        status = await server.control.GetStatus(pb.GetStatusRequest(model="a"))

        assert status.models[0].policy == pb.Policy(weight=5, max_delay_us=0, max_queue_depth=9)


@pytest.mark.parametrize(
    ("call", "request_", "text"),
    [
        (
            "SetResidency",
            pb.SetResidencyRequest(model="a"),
            "residency must be one of unpinned, system, device",
        ),
        ("SetResidency", pb.SetResidencyRequest(model="a", residency=99), "residency must be one of"),  # type: ignore[arg-type]
        ("SetResidency", pb.SetResidencyRequest(residency=pb.RESIDENCY_SYSTEM), "model is empty"),
        (
            "SetResidency",
            pb.SetResidencyRequest(model="a", residency=pb.RESIDENCY_SYSTEM, wait=True),
            "wait needs the residency device",
        ),
        ("SetPolicy", pb.SetPolicyRequest(model="a"), "at least one of weight"),
        ("Evict", pb.EvictRequest(), "target must be a model, or all"),
        ("Evict", pb.EvictRequest(target=pb.Target(all=False)), "target must be a model, or all"),
        ("Pause", pb.PauseRequest(target=A), "mode must be one of drain, hold, reject"),
        ("Pause", pb.PauseRequest(mode=pb.PAUSE_HOLD), "target must be a model, or all"),
        ("Continue", pb.ContinueRequest(target=pb.Target(model="")), "model is empty"),
        ("Abort", pb.AbortRequest(), "request_id is empty"),
        ("Prefetch", pb.PrefetchRequest(), "model is empty"),
        ("GetHistory", pb.GetHistoryRequest(model="a" * 200_000), "exceeds a frame"),
        ("GetHistory", pb.GetHistoryRequest(), "model is empty"),
        ("GetRequests", pb.GetRequestsRequest(), "name either a model or a request"),
        ("GetRequests", pb.GetRequestsRequest(model="a", request="r"), "name either a model or a request"),
        ("ReloadWeights", pb.ReloadWeightsRequest(), "model is empty"),
        (
            "SetAlias",
            pb.SetAliasRequest(alias=pb.Alias(targets=[pb.AliasTarget(model="a")])),
            "model is empty",
        ),
        (
            "SetAlias",
            pb.SetAliasRequest(alias=pb.Alias(name="n", targets=[pb.AliasTarget(model="a", weight=0)])),
            "of which one is positive",
        ),
        (
            "SetAlias",
            pb.SetAliasRequest(
                alias=pb.Alias(
                    name="n", targets=[pb.AliasTarget(model="a", weight=weight) for weight in (1, 2)]
                )
            ),
            "a model is named twice in the alias",
        ),
        (
            "SetScheduler",
            pb.SetSchedulerRequest(scheduler=pb.Scheduler(max_queue_depth=3)),
            "max_queue_depth cannot be changed while the server runs",
        ),
        (
            "SetScheduler",
            pb.SetSchedulerRequest(scheduler=pb.Scheduler(discipline=pb.DISCIPLINE_UNSPECIFIED)),
            "discipline must be one of fair, fifo, edf",
        ),
    ],
)
@looped
async def test_a_wrong_request_sends_no_command(
    tmp_path: Path, call: str, request_: Message, text: str
) -> None:
    """A wrong request is INVALID_ARGUMENT with the valid values. No command is sent."""
    async with served(tmp_path) as server:
        code, message = await refusal(getattr(server.control, call)(request_))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text in message
        assert not server.runtime.commands


@pytest.mark.parametrize(
    ("runtime_code", "code"),
    [
        ("NOT_FOUND", grpc.StatusCode.NOT_FOUND),
        ("FAILED_PRECONDITION", grpc.StatusCode.FAILED_PRECONDITION),
        ("WHAT", grpc.StatusCode.INTERNAL),
        ("mro", grpc.StatusCode.INTERNAL),
    ],
)
@looped
async def test_the_runtimes_refusal_is_the_calls(
    tmp_path: Path, runtime_code: str, code: grpc.StatusCode
) -> None:
    """A call that the runtime refuses fails with the runtime's code. An unknown code becomes INTERNAL."""
    async with served(tmp_path) as server:
        server.runtime.answers = lambda command: {"error": "because", "code": runtime_code}
        assert await refusal(server.control.Compact(pb.CompactRequest())) == (code, "because")


@looped
async def test_without_a_runtime_calls_say_so(tmp_path: Path) -> None:
    """Without a runtime, each call fails with UNAVAILABLE."""
    async with served(tmp_path) as server:
        server.runtime.die()
        await until(server.runtimes, lambda: not server.link.up)

        for call, request in (
            ("GetStatus", pb.GetStatusRequest()),
            ("Compact", pb.CompactRequest()),
            ("StopProfile", pb.StopProfileRequest()),
        ):
            code, text = await refusal(getattr(server.control, call)(request))
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "the runtime does not answer" in text


@looped
async def test_a_prefetch_that_waits_returns_when_the_weights_are_there(tmp_path: Path) -> None:
    """A waiting Prefetch returns when the weights are resident: those of the model, or those of a meta model's callees."""
    async with served(tmp_path, models=["a", "b"]) as server:
        server.runtime.change("a@1", entry("a", weights="absent"))
        server.runtime.change("m@1", entry("m", kind="meta", weights=None, models=["a@1", "b@1"]))
        await until(server.runtimes, lambda: "m@1" in server.link.state.entries)
        call = asyncio.ensure_future(server.control.Prefetch(pb.PrefetchRequest(model="m", wait=True)))
        await server.runtime.came(lambda: bool(server.runtime.commands))

        server.runtime.change("a@1", entry("a", weights="loading"))
        await until(server.runtimes, lambda: server.link.state.entries["a@1"]["weights"] == "loading")
        assert not call.done()
        server.runtime.change("a@1", entry("a", weights="resident"))

        await call


@looped
async def test_a_prefetch_whose_load_fails_says_so(tmp_path: Path) -> None:
    """A waiting Prefetch fails with ABORTED if the load fails."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.change("a@1", entry("a", weights="absent"))
        call = asyncio.ensure_future(server.control.Prefetch(pb.PrefetchRequest(model="a", wait=True)))
        await server.runtime.came(lambda: bool(server.runtime.commands))
        server.runtime.change("a@1", entry("a", weights="loading"))
        server.runtime.change("a@1", entry("a", weights="absent"))

        code, text = await refusal(call)

        assert code is grpc.StatusCode.ABORTED
        assert "failed, or the weights were evicted" in text


@looped
async def test_a_pin_that_waits_ends_with_the_runtime(tmp_path: Path) -> None:
    """A waiting pin fails with UNAVAILABLE if the runtime dies."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.change("a@1", entry("a", weights="loading"))
        request = pb.SetResidencyRequest(model="a", residency=pb.RESIDENCY_DEVICE, wait=True)
        call = asyncio.ensure_future(server.control.SetResidency(request))
        await server.runtime.came(lambda: bool(server.runtime.commands))
        await server.link.record()
        server.runtime.die()

        assert (await refusal(call))[0] is grpc.StatusCode.UNAVAILABLE


@looped
async def test_an_alias_of_an_operator_wins_over_the_file_until_it_fails(tmp_path: Path) -> None:
    """SetAlias takes precedence over the file, also for the next control process. A change that fails is forgotten."""
    async with served(tmp_path, models=["a", "b"]) as server:
        server.lifecycle.aliases = {"of the file": {"a": 1.0}}
        server.lifecycle.refusals["bad"] = ReloadError("FAILED_PRECONDITION", "no bundle")

        def change(name: str, *targets: str) -> Any:
            alias = pb.Alias(
                name=name, targets=[pb.AliasTarget(model=target, weight=2) for target in targets]
            )
            return server.control.SetAlias(pb.SetAliasRequest(alias=alias))

        answer = await change("fraud", "a", "b")
        assert [alias.name for alias in answer.aliases] == ["fraud", "of the file"]
        assert await server.control.SetAlias(pb.SetAliasRequest()) == answer
        server.lifecycle.failures["aliases.fraud"] = BundleFailure("a bundle has this name", 0.0)
        answer = await server.control.SetAlias(pb.SetAliasRequest())
        assert [alias.failure for alias in answer.aliases] == ["a bundle has this name", ""]
        await change("of the file")
        assert (await refusal(change("bad", "a")))[1] == "no bundle"
        assert (await refusal(change("unknown")))[0] is grpc.StatusCode.NOT_FOUND

        desired = server.runtimes.desired
        assert desired.overrides.aliases == {"fraud": {"a": 2.0, "b": 2.0}, "of the file": None}
        assert desired.merged_aliases({"of the file": {"a": 1.0}}) == {"fraud": {"a": 2.0, "b": 2.0}}


@looped
async def test_the_status_has_aliases_with_what_was_asked_by_their_names(tmp_path: Path) -> None:
    """Counts of an alias are sums over the devices. The status of an alias has its models, and that of a model has its aliases."""
    async with served(tmp_path, models=["a", "b", "c"], devices=2) as server:
        server.lifecycle.aliases = {"ab": {"a": 3.0, "b": "shadow"}, "other": {"c": 1.0}}
        for device in server.all:
            device.models["a"].aliases["ab"].counts.update({"ok": 2, "internal": 1})
            device.models["b"].shadows["ab"].counts["same"] = 2

        whole = await server.control.GetStatus(pb.GetStatusRequest())
        assert [alias.name for alias in whole.aliases] == ["ab", "other"]
        a, b = whole.aliases[0].targets
        assert (a.model, a.weight, a.shadow, dict(a.responses)) == ("a", 3, False, {"ok": 4, "internal": 2})
        assert (b.model, b.shadow, dict(b.copies)) == ("b", True, {"same": 4})

        server.lifecycle.failures["aliases.ab"] = BundleFailure("different tensors", 0.0)
        answer = await server.control.GetStatus(pb.GetStatusRequest(model="ab"))
        assert [model.name for model in answer.models] == ["a", "b"]
        assert [(alias.name, alias.failure) for alias in answer.aliases] == [("ab", "different tensors")]
        assert [failure.name for failure in answer.failures] == ["aliases.ab"]
        for name, aliases in (("a", ["ab"]), ("c", ["other"])):
            status = await server.control.GetStatus(pb.GetStatusRequest(model=name))
            assert [model.name for model in status.models] == [name]
            assert [alias.name for alias in status.aliases] == aliases


@looped
async def test_a_change_of_an_alias_that_fails_undoes_no_other_change(tmp_path: Path) -> None:
    """If two operators change aliases at the same time and one change fails, the other change stays."""
    async with served(tmp_path, models=["a"]) as server:
        overlap, target = asyncio.Event(), pb.AliasTarget(model="a", weight=1)

        async def change_alias(name: str, shares: object) -> None:
            if name == "fraud":
                overlap.set()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(overlap.wait(), 0.2)
            raise ReloadError("FAILED_PRECONDITION", "no bundle")

        server.lifecycle.change_alias = change_alias  # type: ignore[method-assign]
        changes = [
            server.control.SetAlias(pb.SetAliasRequest(alias=pb.Alias(name=name, targets=[target])))
            for name in ("bad", "fraud")
        ]
        failed, _ = await asyncio.gather(*changes, return_exceptions=True)

        assert isinstance(failed, Exception)
        assert server.runtimes.desired.overrides.aliases == {"fraud": {"a": 1.0}}


@looped
async def test_a_reload_is_the_lifecycles(tmp_path: Path) -> None:
    """ReloadWeights returns the served versions, or fails with the reconciler's reason."""
    async with served(tmp_path, models=["a", "b"]) as server:
        server.lifecycle.refusals["b"] = ReloadError("FAILED_PRECONDITION", "the mode is static")

        answer = await server.control.ReloadWeights(pb.ReloadWeightsRequest(model="a"))
        assert server.lifecycle.reloaded == ["a"]
        assert [version.key for version in answer.versions] == ["a@1"]

        assert await refusal(server.control.ReloadWeights(pb.ReloadWeightsRequest(model="b"))) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "the mode is static",
        )


@looped
async def test_a_reload_waits_until_the_bundle_is_whole(tmp_path: Path) -> None:
    """ReloadWeights waits for a complete bundle, at most as long as the first scans take, and then fails."""
    settings = "lifecycle: {poll_s: 0.05}"
    async with served(tmp_path, models=["a", "b"], settings=settings) as server:
        late = ReloadError("UNAVAILABLE", "the bundle is being written")
        server.lifecycle.refusals["a"] = server.lifecycle.refusals["b"] = late
        call = asyncio.ensure_future(server.control.ReloadWeights(pb.ReloadWeightsRequest(model="a")))
        # If the call did not wait for the first scans, it would end after 0.4 s.
        asyncio.get_running_loop().call_later(STARTUP_POLL_S + 0.1, server.lifecycle.refusals.pop, "a")
        await call
        assert server.lifecycle.reloaded == ["a"]

        assert await refusal(server.control.ReloadWeights(pb.ReloadWeightsRequest(model="b"))) == (
            grpc.StatusCode.UNAVAILABLE,
            "the bundle is being written",
        )


@looped
async def test_a_profile_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a profile cannot start, StartProfile fails with the reason of the runtime or of the folder."""
    monkeypatch.setattr("rsrv.control.service.PROFILES", tmp_path / "profiles")
    async with served(tmp_path) as server:
        server.runtime.answers = lambda command: {"error": "one runs already", "code": "FAILED_PRECONDITION"}
        assert await refusal(server.control.StartProfile(pb.StartProfileRequest())) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "one runs already",
        )

        (tmp_path / "profiles").rmdir()
        (tmp_path / "profiles").write_text("in the way")
        code, text = await refusal(server.control.StartProfile(pb.StartProfileRequest()))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "profiles" in text
        assert "XDG_CACHE_HOME can name another folder" in text


@looped
async def test_a_profile_that_takes_its_time_does_not_make_the_runtime_look_dead(tmp_path: Path) -> None:
    """A slow answer to StopProfile does not make the runtime look dead."""
    async with served(tmp_path) as server:
        server.runtime.answers = lambda command: None if command["command"] == "profile" else {}
        call = asyncio.ensure_future(server.control.StopProfile(pb.StopProfileRequest()))
        await server.runtime.came(lambda: bool(server.runtime.commands))

        for _ in range(20):
            await server.control.Compact(pb.CompactRequest())

        assert server.link.up
        call.cancel()


@looped
async def test_a_watcher_sees_the_snapshot_the_changes_and_the_next_runtime(tmp_path: Path) -> None:
    """A watcher gets the snapshot, each change, and the snapshot of the next runtime."""
    async with served(tmp_path, models=["a"]) as server:
        updates = server.control.WatchState(pb.WatchStateRequest())
        first = (await updates.read()).snapshot
        assert (first.instance, first.revision) == ("11" * 8, 5)
        assert [(item.name, item.version.key, item.residency) for item in first.entries] == [
            ("a", "a@1", pb.RESIDENCY_SYSTEM)
        ]

        server.runtime.change("a@1", entry("a", weights="absent", paused="hold"))
        server.runtime.change("a@1", None)
        changed, gone = (await updates.read()).change, (await updates.read()).change
        assert (changed.revision, changed.entry.version.weights) == (6, pb.WEIGHTS_ABSENT)
        assert changed.entry.version.paused == pb.PAUSE_HOLD
        assert (gone.revision, gone.key, gone.HasField("entry")) == (7, "a@1", False)

        server.runtime.die()
        assert (await updates.read()).HasField("down")
        again = type(server.runtime)(tmp_path / "runtime.sock", instance="22" * 8)
        assert (await updates.read()).snapshot.instance == "22" * 8
        again.die()


@looped
async def test_a_watcher_sees_failures_of_bundles(tmp_path: Path) -> None:
    """A watcher gets all failures when they change, even while the runtime sends nothing."""
    async with served(tmp_path) as server:
        updates = server.control.WatchState(pb.WatchStateRequest())
        assert (await updates.read()).HasField("snapshot")
        server.lifecycle.failures["c"] = BundleFailure("not YAML", since=1000.0, tries=2)
        failed = pb.Failure(name="c", text="not YAML", since_unix_s=1000.0, tries=2)
        assert (await updates.read()).failures.failures == [failed]
        server.lifecycle.failures.clear()
        assert (await updates.read()) == pb.WatchStateResponse(failures=pb.Failures())


@looped
async def test_the_load_is_complete(tmp_path: Path) -> None:
    """GetLoad returns the load of all models and the budget."""
    figures: dict[str, Any] = {
        "queued": 3,
        "executing": 1,
        "weights": pb.WEIGHTS_LOADING,
        "device_bytes": 10,
        "misses": 2,
        "device_seconds": 0.5,
        "answered": 4,
        "pinned": True,
        "max_rows": 16,
        "sequences": {"idle": 2, "stored": 1},
    }
    async with served(tmp_path) as server:
        axis = pb.BatchInput(name="x", axis=1)
        server.runtime.models = {
            "a": pb.ModelRecord(name="a", cost_s=0.5, useful_rows=8, batch_input=axis, **figures),
            "b": pb.ModelRecord(name="b", **figures),
            "m": pb.ModelRecord(name="m", meta=True, calls_models=["a", "b"]),
        }
        server.runtime.record.backlog_s = 0.25
        server.runtime.record.memory.budget_bytes = 1040

        server.lifecycle.aliases = {"fraud": {"a": 5.0, "b": 95.0, "c": "shadow"}}

        load = await server.control.GetLoad(pb.GetLoadRequest())

        assert load.aliases == {"fraud": "b"}
        (device,) = load.devices
        assert load.placement_mode == "lpt_packing"
        assert (device.number, device.backlog_s, device.free_bytes, device.budget_bytes) == (
            0,
            0.25,
            40,
            1040,
        )
        a, b = device.models
        assert (a.name, a.queued, a.executing, a.weights, a.sequences) == ("a", 3, 1, pb.WEIGHTS_LOADING, 3)
        assert (a.cost_s, a.misses, a.device_seconds, a.useful_rows, a.device_bytes) == (0.5, 2, 0.5, 8, 10)
        assert (a.requests, a.pinned, a.max_rows) == (4, True, 16)
        assert (a.batch_input.name, a.batch_input.axis) == ("x", 1)
        assert not b.HasField("cost_s")
        assert not b.HasField("batch_input")
        (meta,) = load.metas
        assert (device.since, device.next) == (0, 1)
        known = pb.LoadPosition(device=0, instance=server.runtime.instance, next=7)
        old = pb.LoadPosition(device=0, instance="an earlier one", next=7)
        for position in (known, old):
            await server.control.GetLoad(pb.GetLoadRequest(positions=[position]))
        assert server.runtime.asked == [0, 7, 0]
        assert (device.instance, meta.name, list(meta.models)) == ("11" * 8, "m", ["a", "b"])
