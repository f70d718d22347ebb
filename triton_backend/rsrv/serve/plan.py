"""Plan of a node: its processes, and the files that they read. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsrv.address import LOOPBACK, Address, parse_address
from rsrv.serve.cores import CoreShare
from rsrv.serve.devices import WorkerDevice
from rsrv.serve.errors import NodeError
from rsrv.settings import Settings, dump_settings

GATEWAY = "gateway"
#: in the node's directory: the gateway's list of workers, and its settings
WORKERS_FILE = "workers.yaml"
GATEWAY_FILE = "rsrv.yaml"
#: in a worker's directory
REPOSITORY = "models"

_PORTS_EACH = 10
#: Threads of tritonserver for each model, which carry late answers and calls through Triton. By default there are 32, most
#: of a server's threads. With 2, late answers came as fast; calls of a meta model came slower (0.69 times as many with 8
#: clients), because each holds a thread and one must stay for answers.
_THREADS_PER_MODEL = 2
#: one more than the calls that a stub has in flight (`rsrv.stub.bls.MAX_CALLS`)
CALLING_THREADS = 9
#: thread counts of libraries that otherwise start a thread for each core of the machine
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one tritonserver."""

    http: Address
    grpc: Address
    metrics: Address

    def __str__(self) -> str:
        return f"HTTP {self.http}, gRPC {self.grpc}, metrics {self.metrics}"

    def each(self) -> list[tuple[str, Address]]:
        """Return the addresses, each with the word that Triton's flags have for it."""
        return [("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process that the node keeps running."""

    name: str
    argv: tuple[str, ...]
    #: additions to the node's environment
    environment: Mapping[str, str]
    #: the only cores that it runs on; empty: all
    cores: tuple[int, ...] = ()
    #: seconds to drain before it is killed
    drain_s: float = 0.0
    #: address and path that it always answers over HTTP; None: none
    pulse: tuple[Address, str] | None = None


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A tritonserver with a device to itself."""

    child: ChildSpec
    device: WorkerDevice
    ports: Ports
    #: its model repository
    repository: Path


@dataclass(frozen=True, slots=True)
class NodePlan:
    """All processes of a node."""

    workers: tuple[NodeWorker, ...]
    gateway: ChildSpec | None
    #: files for the gateway, beside the list of workers
    files: Mapping[Path, str]
    #: notes for the operator
    notes: tuple[str, ...]
    #: addresses of live pages
    pages: tuple[str, ...] = ()


def plan(
    settings: Settings,
    devices: Sequence[WorkerDevice],
    shares: Sequence[CoreShare],
    environment: Mapping[str, str],
    *,
    tritonserver: str,
    python: str,
    calling: bool = False,
) -> NodePlan:
    """Return the processes for these devices. Raises NodeError.

    Args:
        settings: all of rsrv.yaml; `node.directory` is absolute.
        devices: one for each worker.
        shares: cores for each device.
        environment: the node's own.
        tritonserver: path of the server.
        python: path of the gateway's interpreter.
        calling: True if a bundle calls models through Triton.
    """
    node, directory = settings.node, settings.node.directory
    _check_platform(settings, devices)
    fronted = needs_gateway(settings, len(devices))
    workers = []
    for number, (device, share) in enumerate(zip(devices, shares, strict=True)):
        name = f"worker{number}"
        repository = directory / name / REPOSITORY
        ports = _private(node.first_port, number) if fronted or not _public(settings) else _only(settings)
        child = ChildSpec(
            name,
            (tritonserver, *_flags(repository, ports, node.drain_s, calling=calling), *node.arguments),
            _environment(settings, device, share, number, environment, fronted=fronted),
            share.cores,
            node.drain_s,
            (ports.http, "/v2/health/live"),
        )
        workers.append(NodeWorker(child, device, ports, repository))
    if not fronted:
        return NodePlan(
            tuple(workers), None, {}, tuple(_notes(settings, workers)), _pages(settings, len(workers))
        )
    _check_ports(settings, workers)
    file, admin = directory / GATEWAY_FILE, settings.gateway.admin
    gateway = ChildSpec(
        GATEWAY,
        (python, "-P", "-m", "rsrv_gateway", "--config", str(file)),
        {},
        drain_s=settings.gateway.drain_s,
        pulse=None if admin is None else (_address("gateway.admin", admin), "/healthz"),
    )
    return NodePlan(
        tuple(workers),
        gateway,
        {file: _gateway_settings(settings)},
        tuple(_notes(settings, workers)),
        () if admin is None else (_page(_address("gateway.admin", admin)),),
    )


def needs_gateway(settings: Settings, workers: int) -> bool:
    """Return true if a gateway is needed: for several servers, or for TLS or a token, which Triton lacks."""
    gateway = settings.gateway
    others = gateway.workers or gateway.workers_dns or gateway.workers_file
    guarded = gateway.tls_certificate or gateway.token_file
    return _public(settings) and (workers > 1 or bool(others) or bool(guarded))


def workers_file(plan: NodePlan, controls: Mapping[str, str], gone: Container[str] = ()) -> str:
    """Return the text of `gateway.workers_file`: all workers except `gone`, with the control services in `controls`."""
    entries = [
        {
            "name": worker.child.name,
            "host": worker.ports.grpc.local,
            "grpc_port": worker.ports.grpc.port,
            "http_port": worker.ports.http.port,
            "metrics_port": worker.ports.metrics.port,
            "control": controls.get(worker.child.name),
        }
        for worker in plan.workers
        if worker.child.name not in gone
    ]
    # JSON is YAML. An empty file would mean one that is being written.
    return "".join(f"- {json.dumps(entry)}\n" for entry in entries) or "[]\n"


def describe(plan: NodePlan) -> str:
    """Return the plan as text, with commands for a shell."""
    lines = []
    for worker in plan.workers:
        lines += [
            f"{worker.child.name} on {worker.device.name}: {worker.ports}",
            f"  {_command(worker.child)}",
        ]
    if plan.gateway is not None:
        lines += ["gateway", f"  {_command(plan.gateway)}"]
    lines += [f"live page: {page}" for page in plan.pages]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)]) + "\n"


def _command(child: ChildSpec) -> str:
    words = ["env", *(f"{key}={value}" for key, value in sorted(child.environment.items()))]
    if child.cores:
        words += ["taskset", "-c", ",".join(map(str, child.cores))]
    return shlex.join([*(words if len(words) > 1 else ()), *child.argv])


def _public(settings: Settings) -> bool:
    """Return true if clients are served here; otherwise the workers are for a gateway elsewhere."""
    return settings.gateway.grpc is not None or settings.gateway.http is not None


def _private(first_port: int, number: int) -> Ports:
    start = first_port + _PORTS_EACH * number
    if start + 2 > 65535:
        raise NodeError(f"node.first_port: {first_port} leaves no ports for worker {number}; set a lower one")
    http, grpc, metrics = (Address(LOOPBACK, start + step) for step in range(3))
    return Ports(http, grpc, metrics)


def _only(settings: Settings) -> Ports:
    """Return the ports of a single worker: the gateway's, and private ones for those that are off."""
    private = _private(settings.node.first_port, 0)
    gateway = settings.gateway
    return Ports(
        _address("gateway.http", gateway.http) if gateway.http else private.http,
        _address("gateway.grpc", gateway.grpc) if gateway.grpc else private.grpc,
        _address("gateway.admin", gateway.admin) if gateway.admin else private.metrics,
    )


def _address(key: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise NodeError(f"{key}: {error}") from None


def _flags(repository: Path, ports: Ports, drain_s: float, *, calling: bool) -> list[str]:
    return [
        f"--model-repository={repository}",
        # The control process needs these two to exchange models.
        "--model-control-mode=explicit",
        "--load-model=*",
        # A failed model must not stop the others, nor must a loading one.
        "--exit-on-error=false",
        "--strict-readiness=false",
        # The generated configurations are complete; completing them costs an extra stub and 1 s a model.
        "--disable-auto-complete-config",
        "--model-load-thread-count=32",
        "--backend-config=python,shm-default-byte-size=1048576",
        f"--backend-config=python,thread-pool-size={CALLING_THREADS if calling else _THREADS_PER_MODEL}",
        f"--exit-timeout-secs={max(1, round(drain_s))}",
        *(f"--{kind}-address={address.host}" for kind, address in ports.each()),
        *(f"--{kind}-port={address.port}" for kind, address in ports.each()),
    ]


def _environment(
    settings: Settings,
    device: WorkerDevice,
    share: CoreShare,
    number: int,
    environment: Mapping[str, str],
    *,
    fronted: bool,
) -> dict[str, str]:
    """Return the additions to the node's environment; thread counts set there stay."""
    own = {name: str(share.threads) for name in _THREADS if name not in environment}
    own["CUDA_VISIBLE_DEVICES"] = device.selector
    # nvidia-smi's numbering; CUDA's own order is by speed.
    own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    own["RSRV_RUNTIME__PLATFORM"] = "cuda" if device.selector else "cpu"
    if settings.control.listen is not None:
        first = _address("control.listen", settings.control.listen)
        own["RSRV_CONTROL__LISTEN"] = str(Address(first.host, first.port + number))
    if fronted:
        # The gateway serves all workers' metrics.
        own["RSRV_METRICS__LISTEN"] = "null"
    elif settings.metrics.listen is not None:
        own["RSRV_METRICS__LISTEN"] = str(_metrics(settings.metrics.listen, number))
    return own


def _metrics(listen: str, number: int) -> Address:
    first = _address("metrics.listen", listen)
    return Address(first.host, first.port + number)


def _pages(settings: Settings, workers: int) -> tuple[str, ...]:
    """Return the live pages of workers without a gateway."""
    listen = settings.metrics.listen if settings.control.enabled else None
    return () if listen is None else tuple(_page(_metrics(listen, number)) for number in range(workers))


def _page(address: Address) -> str:
    return f"http://{Address(address.local, address.port)}/"


def _check_platform(settings: Settings, devices: Sequence[WorkerDevice]) -> None:
    platform, on_gpu = settings.runtime.platform, bool(devices[0].selector)
    own = settings.runtime.devices
    if own != "all" and (on_gpu or set(own) != {"cpu"}):
        raise NodeError(
            "runtime.devices names the devices of one server, and here each GPU gets a server of its own: leave it out and "
            "choose GPUs with node.gpus (--gpus), or start one tritonserver yourself"
        )
    if platform != "auto" and (platform == "cuda") != on_gpu:
        what = "GPUs" if on_gpu else "the CPU"
        raise NodeError(
            f"runtime.platform is {platform}, and the workers are to run on {what}: "
            "leave it at auto, or set node.gpus or node.cpu_workers"
        )


def _check_ports(settings: Settings, workers: Sequence[NodeWorker]) -> None:
    """Check that no worker has a port of the gateway."""
    taken = {address.port: (worker, kind) for worker in workers for kind, address in worker.ports.each()}
    gateway = settings.gateway
    for key, text in (("grpc", gateway.grpc), ("http", gateway.http), ("admin", gateway.admin)):
        if text is not None and (port := _address(f"gateway.{key}", text).port) in taken:
            worker, kind = taken[port]
            raise NodeError(
                f"gateway.{key} and {worker.child.name}'s {kind} are both to have port {port}: "
                "set another node.first_port"
            )


def _gateway_settings(settings: Settings) -> str:
    if settings.gateway.workers_file is not None:
        raise NodeError(
            "gateway.workers_file: a node writes its own; list other machines' servers in gateway.workers, or "
            "start the gateway by itself"
        )
    update: dict[str, object] = {"workers_file": settings.node.directory / WORKERS_FILE}
    if settings.control.enabled and "mode" not in settings.gateway.model_fields_set:
        # The workers' control services report the costs and places that packing needs.
        update["mode"] = "lpt_packing"
    gateway = settings.gateway.model_copy(update=update)
    return dump_settings(settings.model_copy(update={"gateway": gateway}))


def _notes(settings: Settings, workers: Sequence[NodeWorker]) -> list[str]:
    notes = []
    if len(workers) > 1 and not settings.runtime.shared_host_weights:
        notes.append(
            f"each of the {len(workers)} workers keeps a copy of all weights in host memory; with "
            "runtime.shared_host_weights they keep one, in /dev/shm, which must hold it"
        )
    used = [core for worker in workers for core in worker.child.cores]
    if len(used) > len(set(used)):
        notes.append(f"{len(workers)} workers share {len(set(used))} cores: some cores have several workers")
    return notes
