"""The questions to a worker over gRPC, and the use of the answers."""

import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.contract import Act, ModelView, WeightsView, Worker, WorkerView
from rsrv.settings_fleet import GatewaySection
from rsrv.tokens import TokenError
from rsrv_gateway.connections import ChannelFactory, CredentialsError
from rsrv_gateway.probes import DEAD, ActError, GrpcProber
from tests.unit.gateway.workers import FakeControl, FakeServer, Relay, serving
from tests.waiting import looped

DEVICE = pb.DeviceLoad(
    instance="0123456789abcdef",
    backlog_s=0.5,
    budget_bytes=1000,
    models=[
        pb.ModelLoad(
            name="a",
            queued=1,
            executing=2,
            weights=pb.WEIGHTS_LOADING,
            device_bytes=300,
            cost_s=0.25,
            misses=3,
            device_seconds=4.5,
            useful_rows=6,
            requests=5,
            pinned=True,
            max_rows=8,
            batch_input=pb.BatchInput(name="x", axis=1),
        ),
        pb.ModelLoad(name="b", weights=pb.WEIGHTS_RESIDENT, max_rows=1),
    ],
)
LOAD = pb.GetLoadResponse(
    devices=[DEVICE],
    metas=[pb.MetaLoad(name="chain", models=["a", "b"])],
    aliases={"fraud": "a"},
)


def prober(port: int, *, control: bool = False, timeout: float = 60.0, **settings: object) -> GrpcProber:
    address = f"127.0.0.1:{port}"
    worker = Worker("w", address, control=address if control else None)
    return GrpcProber(worker, ChannelFactory(GatewaySection.model_validate(settings)), timeout)


async def only(grpc_prober: GrpcProber) -> WorkerView:
    """Probe a worker with one device, and return the view of this device."""
    (view,) = await grpc_prober.probe()
    return view


async def probe_until_seen(grpc_prober: GrpcProber, view: WorkerView) -> None:
    """Probe until the worker has this view. On a busy machine, any probe may be too late."""
    while await only(grpc_prober) != view:
        pass


@looped
async def test_a_worker_without_control_tells_what_is_ready() -> None:
    """For a worker without a control service, a probe returns only its ready models."""
    triton = FakeServer()
    triton.index = {"m": "READY", "n": "UNAVAILABLE", "o": "READY"}
    async with serving(triton) as port:
        grpc_prober = prober(port)
        assert await only(grpc_prober) == WorkerView(alive=True, ready=frozenset({"m", "o"}))
        with pytest.raises(ActError, match="no control service"):
            await grpc_prober.act(Act.EVICT, "m", None)
        await grpc_prober.close()


@looped
async def test_a_worker_with_control_tells_all_that_the_planner_needs() -> None:
    """For a worker with a control service, a probe returns models, weights and costs. Some models have no items."""
    control = FakeControl()
    control.load = LOAD
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True)
        assert await only(grpc_prober) == WorkerView(
            alive=True,
            ready=frozenset({"m"}),
            instance="0123456789abcdef",
            budget_bytes=1000,
            backlog_s=0.5,
            models={
                "a": ModelView(300, WeightsView.LOADING, True, 0.25, 1, 2, 5, 6, 4.5, 8, ("x", 1)),
                "b": ModelView(0, WeightsView.RESIDENT),
            },
            calls={"chain": frozenset({"a", "b"})},
            aliases={"fraud": "a"},
        )
        await grpc_prober.close()


@looped
async def test_a_probe_asks_for_what_has_changed() -> None:
    """A probe asks the server for the figures that have changed since the previous probe, and keeps the other figures."""
    control = FakeControl()
    device = pb.DeviceLoad(instance="i", next=3)
    device.models.add(name="a", queued=1)
    device.models.add(name="b", queued=2)
    control.load = pb.GetLoadResponse(devices=[device])
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True)
        while (first := await only(grpc_prober)).instance is None:
            pass
        (known,) = control.load.devices
        del known.models[:]
        known.models.add(name="b", queued=5)
        known.since, known.next = 3, 4
        while (second := await only(grpc_prober)).instance is None or second.measurement == first.measurement:
            pass
        assert control.positions == [(0, "i", 3)]
        assert {name: model.queued for name, model in second.models.items()} == {"a": 1, "b": 5}
        await grpc_prober.close()


@looped
async def test_a_server_with_several_devices_has_a_view_of_each() -> None:
    """A device without its runtime gets no models, and a device on which a model failed does not get this model.

    If no device has a runtime, the server is treated as one worker.
    """
    control = FakeControl()
    control.load = pb.GetLoadResponse(
        devices=[
            pb.DeviceLoad(number=0, instance="1", backlog_s=0.5, free_bytes=7),
            pb.DeviceLoad(number=1),
        ],
        placement_mode="external",
    )
    ready = frozenset({"m"})
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True)
        assert await grpc_prober.probe() == (
            WorkerView(True, ready, "1", backlog_s=0.5, free_bytes=7),
            WorkerView(False, ready, device=1),
        )
        await grpc_prober.act(Act.PREFETCH, "a", 1)
        assert control.devices == [1]
        await grpc_prober.place({"n": (0, 1), "m": (1,)})
        assert control.placed == {"m": [1], "n": [0, 1]}
        control.load.devices[0].models.add(name="m")
        control.load.devices[1].instance = "2"
        assert [view.ready for view in await grpc_prober.probe()] == [ready, frozenset()]
        control.load.devices[0].instance = control.load.devices[1].instance = ""
        assert await grpc_prober.probe() == (WorkerView(True, ready),)
        await grpc_prober.close()


@looped
async def test_a_server_that_places_models_itself_is_one_worker() -> None:
    """The gateway chooses among the devices of a server only if placement.mode is external."""
    control = FakeControl()
    control.load = pb.GetLoadResponse(
        devices=[
            pb.DeviceLoad(
                number=0,
                instance="1",
                backlog_s=0.5,
                free_bytes=7,
                budget_bytes=300,
                models=[
                    pb.ModelLoad(name="m", device_bytes=100, device_seconds=1.0, weights=pb.WEIGHTS_ABSENT)
                ],
            ),
            pb.DeviceLoad(
                number=1,
                instance="2",
                backlog_s=0.25,
                budget_bytes=300,
                models=[
                    pb.ModelLoad(
                        name="m",
                        device_bytes=100,
                        device_seconds=2.0,
                        cost_s=0.5,
                        weights=pb.WEIGHTS_RESIDENT,
                    )
                ],
            ),
            pb.DeviceLoad(number=2),
        ],
        placement_mode="lpt_packing",
    )
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True)
        assert await only(grpc_prober) == WorkerView(
            True,
            frozenset({"m"}),
            "1 2",
            budget_bytes=600,
            backlog_s=0.75,
            models={"m": ModelView(100, WeightsView.RESIDENT, item_s=0.5, device_seconds=3.0)},
            devices=2,
        )
        await grpc_prober.close()


@looped
async def test_metrics_of_a_control_service_are_there_or_not() -> None:
    """A probe handles a control service with metrics, an older one without metrics, and a worker without a control service."""
    control = FakeControl()
    async with serving(FakeServer(), control) as port:
        grpc_prober, bare = prober(port, control=True), prober(port)
        assert await grpc_prober.metrics() is None
        control.metrics = "rsrv_runtime_up 1\n"
        assert await grpc_prober.metrics() == "rsrv_runtime_up 1\n"
        assert await bare.metrics() is None
    assert await grpc_prober.metrics() is None
    await grpc_prober.close()
    await bare.close()


@looped
async def test_a_worker_whose_runtime_is_gone_is_alive() -> None:
    """A worker whose runtime has ended still counts as alive, with the models that Triton reports as ready."""
    control = FakeControl()
    control.load = None
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True)
        assert await only(grpc_prober) == WorkerView(alive=True, ready=frozenset({"m"}))
        await grpc_prober.close()


@looped
async def test_a_worker_that_starts_or_ends_has_nothing_ready() -> None:
    """A worker that starts or ends is alive and has no ready model."""
    triton = FakeServer()
    async with serving(triton) as port:
        grpc_prober = prober(port)
        triton.ready = False
        assert await only(grpc_prober) == WorkerView(alive=True)
        await grpc_prober.close()


@looped
async def test_a_triton_that_is_slow_to_list_its_models_serves_what_it_did() -> None:
    """If a Triton is too slow to list its models, the worker keeps its last view."""
    triton = FakeServer()
    async with serving(triton) as port:
        grpc_prober = prober(port, timeout=0.3)
        seen = WorkerView(alive=True, ready=frozenset({"m"}))
        await probe_until_seen(grpc_prober, seen)
        triton.index_hangs = True
        await probe_until_seen(grpc_prober, seen)
        await grpc_prober.close()


@looped
async def test_a_worker_that_ends_is_dead_at_once_and_alive_when_it_is_back() -> None:
    """A worker is dead as soon as it ends, and alive when its port answers again."""
    triton = FakeServer()
    async with serving(triton) as port:
        grpc_prober = prober(port)
        assert (await only(grpc_prober)).alive
    assert await grpc_prober.probe() == DEAD
    async with serving(triton, port=port):
        await probe_until_seen(grpc_prober, WorkerView(alive=True, ready=frozenset({"m"})))
    await grpc_prober.close()


@looped
async def test_a_connection_that_is_open_on_one_side_only_is_replaced() -> None:
    """On a half-open connection, one probe times out, so the worker is dead. The next probe uses a new connection."""
    control = FakeControl()
    async with serving(FakeServer(), control) as port, Relay(port).running() as relay:
        grpc_prober = prober(relay.port, control=True, timeout=0.5)
        seen = WorkerView(alive=True, ready=frozenset({"m"}), instance="1")
        await probe_until_seen(grpc_prober, seen)
        relay.stick()
        assert await grpc_prober.probe() == DEAD
        await probe_until_seen(grpc_prober, seen)
        await grpc_prober.close()


@looped
async def test_steps_go_to_the_control_service() -> None:
    """Steps are sent to the control service. Its refusal is an error with the reason."""
    control = FakeControl()
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True)
        await grpc_prober.act(Act.PREFETCH, "a", None)
        await grpc_prober.act(Act.EVICT, "b", None)
        assert control.steps == [("prefetch", "a"), ("evict", "b")]
        with pytest.raises(ActError, match="NOT_FOUND: there is no model"):
            await grpc_prober.act(Act.EVICT, "unknown", None)
        await grpc_prober.close()


@looped
async def test_the_token_of_the_workers_goes_with_each_question(tmp_path: Path) -> None:
    """Each question to the control service has the workers' token."""
    (tmp_path / "token").write_text("secret\n")
    control = FakeControl()
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True, worker_token_file=tmp_path / "token")
        await grpc_prober.probe()
        assert control.token == "Bearer secret"
        await grpc_prober.close()


@pytest.fixture
def value(tmp_path: Path) -> Path:
    """Return a file with the value of a restriction's key."""
    path = tmp_path / "value"
    path.write_text("sesame=1\n")
    path.chmod(0o600)
    return path


@looped
async def test_a_restricted_repository_is_opened_with_its_key(value: Path) -> None:
    """The restricted repository API is opened with the configured key and value."""
    triton = FakeServer()
    triton.restricted = ("admin-key", "sesame=1")
    async with serving(triton) as port:
        grpc_prober = prober(port, worker_repository_key="admin-key", worker_repository_value_file=value)
        assert await only(grpc_prober) == WorkerView(alive=True, ready=frozenset({"m"}))
        await grpc_prober.close()


@looped
async def test_a_repository_that_stays_closed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A closed repository API is logged once, with the setting. It is logged again only if it was open in between."""
    triton = FakeServer()
    triton.restricted = ("admin-key", "sesame")
    async with serving(triton) as port:
        grpc_prober = prober(port)
        for _ in range(2):
            assert await only(grpc_prober) == WorkerView(alive=True)
        (line,) = caplog.messages
        assert line.startswith("worker w answers but does not list its ready models")
        assert "set gateway.worker_repository_key to admin-key" in line
        assert "sesame" not in line
        triton.restricted = None
        assert (await only(grpc_prober)).ready
        triton.restricted = ("admin-key", "sesame")
        await grpc_prober.probe()
        assert len(caplog.messages) == 2
        await grpc_prober.close()


@looped
async def test_a_server_that_starts_has_refused_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is starting causes no line of the log, although it does not list its models."""
    triton = FakeServer()
    triton.ready = False
    async with serving(triton) as port:
        grpc_prober = prober(port)
        assert await only(grpc_prober) == WorkerView(alive=True)
        assert caplog.messages == []
        await grpc_prober.close()


def test_a_key_needs_its_value(value: Path) -> None:
    """A key other than that of `rsrv serve` needs a file with its value. The file must be private."""
    with pytest.raises(ValueError, match="pattern"):
        GatewaySection(worker_repository_key="Admin-Key", worker_repository_value_file=value)
    with pytest.raises(ValueError, match="worker_repository_key needs worker_repository_value_file"):
        GatewaySection(worker_repository_key="k")
    value.chmod(0o644)
    section = GatewaySection(worker_repository_key="k", worker_repository_value_file=value)
    with pytest.raises(TokenError, match=r"gateway\.worker_repository_value_file: every user can read"):
        ChannelFactory(section)


@pytest.mark.parametrize("key", ["worker_ca", "worker_token_file"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, key: str) -> None:
    """If a file is missing, the error names the setting."""
    with pytest.raises(CredentialsError, match=rf"gateway\.{key}: .*missing"):
        ChannelFactory(GatewaySection.model_validate({key: tmp_path / "missing"}))


@pytest.mark.parametrize("contents", ["", "not a PEM"])
def test_authorities_that_are_none(tmp_path: Path, contents: str) -> None:
    """An invalid or empty file of authorities is refused, because public authorities must not be used for workers."""
    (tmp_path / "ca").write_text(contents)
    with pytest.raises(CredentialsError, match=r"gateway\.worker_ca"):
        ChannelFactory(GatewaySection(worker_ca=tmp_path / "ca"))


def test_a_certificate_is_not_shown_without_tls(tmp_path: Path) -> None:
    """A client certificate without the workers' authorities is refused, because it needs TLS."""
    with pytest.raises(ValueError, match="worker_ca"):
        GatewaySection(worker_certificate=tmp_path / "chain", worker_key=tmp_path / "key")


def test_a_token_is_one_line(tmp_path: Path) -> None:
    """A token of several lines is refused, because gRPC would refuse each call with it."""
    (tmp_path / "token").write_text("two\nlines")
    with pytest.raises(TokenError, match="no token"):
        ChannelFactory(GatewaySection(worker_token_file=tmp_path / "token"))


@looped
async def test_a_worker_that_answers_nonsense() -> None:
    """Unreadable answers are treated as missing ones, and the next probe works."""

    async def nonsense(_: bytes, __: Any) -> bytes:
        return b"\xff" * 40

    server = grpc.aio.server(handlers=[_Everything(nonsense)], options=[("grpc.so_reuseport", 0)])
    grpc_prober = prober(server.add_insecure_port("127.0.0.1:0"), control=True)
    await server.start()
    assert await only(grpc_prober) == WorkerView(alive=True)
    assert await only(grpc_prober) == WorkerView(alive=True)
    await grpc_prober.close()
    await server.stop(None)


@pytest.mark.parametrize(
    "figures",
    [
        {"cost_s": math.nan},
        {"cost_s": math.inf},
        {"device_seconds": math.nan},
        {"device_seconds": -1.0},
        {"cost_s": 1e308},
        {"device_seconds": 1e300},
    ],
)
@looped
async def test_figures_that_are_none_are_not_believed(figures: dict[str, Any]) -> None:
    """A worker with impossible figures is treated as one without a control service."""
    control = FakeControl()
    control.load = pb.GetLoadResponse(
        devices=[pb.DeviceLoad(instance="1", models=[pb.ModelLoad(name="m", **figures)])]
    )
    async with serving(FakeServer(), control) as port:
        grpc_prober = prober(port, control=True)
        assert await only(grpc_prober) == WorkerView(alive=True, ready=frozenset({"m"}))
        await grpc_prober.close()


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers all methods with the same function."""

    def __init__(self, answer: Any) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(answer)

    def service(self, _: Any) -> Any:
        return self._handler
