"""The cost of passing a request on through a minimal proxy in Python, the gateway, or Envoy with a picker, compared with no proxy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from local_triton import TritonServer
from rsrv_gateway.connections import SERVICE
from tests.bench import models
from tests.bench.figures import Rounds, Sample, Spread, Target
from tests.bench.gateway.stage import (
    BARE,
    DIRECT,
    ENVOY,
    GATEWAY,
    PASSING,
    PICKER,
    WORKERS,
    Way,
    bare,
    entry,
    envoy,
    gateway,
    write_workers,
)
from tests.bench.load import WINDOWS, BenchFailed, Side, load, server_statistics
from tests.bench.phases import say, served, told
from tests.bench.places import WORK
from tests.bench.processes import CLIENT, Machine, cpu_seconds, server_processes
from tests.bench.report import rounds_line, spread_text, table
from tests.bench.verify import verify

WAYS = (DIRECT, BARE, GATEWAY, ENVOY)
CLIENTS = (1, 16)
#: Models by the size of their requests.
SIZES: Mapping[str, str] = {"1 kB": models.MLP, "602 kB": models.IMAGES}
SMALL = "1 kB"
#: Seconds for which the idle gateway is measured.
_IDLE_S = 4.0

Part = tuple[list[str], list[Target], dict[str, Any]]


@dataclass(frozen=True)
class _Reading:
    """All counters at one moment. The workers' counters are added up."""

    at: float
    cpu: Mapping[int, float]
    machine: Machine
    requests: int
    executions: int

    @classmethod
    def now(cls, workers: Sequence[Side], model: str, processes: Mapping[int, str]) -> _Reading:
        statistics = [server_statistics(worker, f"/{model}")[0] for worker in workers]
        requests, executions = (
            sum(int(counts[key]) for counts in statistics) for key in ("inference_count", "execution_count")
        )
        cpu = {pid: cpu_seconds(pid) for pid in processes}
        return cls(time.monotonic(), cpu, Machine.now(), requests, executions)


def part(rounds: int, window_s: float) -> Part:
    """Measure. Return lines of text, targets, and the samples."""
    repository = models.gateway_repository()
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(served(f"gateway-{name}", repository, has_runtime=True))
            for name in ("one", "two")
        ]
        ways = _ways(stack, [worker.server for worker in workers])
        idle = _idle(ways)
        for way in ways:
            count = sum(verify(way.url, case) for case in (models.mlp_case(models.MLP), models.images_case()))
            say(f"{way.name}: {count} answers right")
        samples = {size: _in_turns(ways, workers, size, rounds, window_s) for size in SIZES}
    by_size = {size: Rounds.of(group) for size, group in samples.items()}
    lines, targets, ratios = _summary(by_size)
    lines.append(f"without requests: {100 * idle:.1f} % of a core")
    raw = {size: [asdict(sample) for sample in group] for size, group in samples.items()}
    return lines, targets, {"samples": raw, "ratios": ratios, "idle_cpus": idle}


def pairs(count: int) -> Part:
    """Measure the median latency of one client. It sends each request over each path in turn, so disturbances affect all."""
    repository = models.gateway_repository()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served("gateway-one", repository, has_runtime=True)).server
        message = service_pb2.ModelInferRequest(model_name=models.MLP, raw_input_contents=[bytes(4 * 256)])
        message.inputs.add(name="x", datatype="FP32", shape=[1, 256])
        data = message.SerializeToString()
        calls = {
            way.name: stack.enter_context(grpc.insecure_channel(way.url)).unary_unary(f"{SERVICE}ModelInfer")
            for way in _ways(stack, [server])
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(count):
            for name, call in calls.items():
                began = time.perf_counter()
                call(data, timeout=30)
                taken[name].append((time.perf_counter() - began) * 1e6)
    direct = float(np.median(taken[DIRECT]))
    lines = [f"p50 of {count} requests each, in turn, by one client, 1 kB"]
    for name, latencies in taken.items():
        p50 = float(np.median(latencies))
        lines.append(f"{name}: {p50:.0f} us, {p50 / direct:.2f} of direct, {p50 - direct:.0f} us added")
    return [*lines, ""], [], {"taken_us": taken}


def _ways(stack: contextlib.ExitStack, servers: Sequence[TritonServer]) -> list[Way]:
    file = WORK / "gateway-workers.yaml"
    write_workers(file, [entry(f"worker-{n}", server) for n, server in enumerate(servers)])
    ways = [Way(DIRECT, servers[0].grpc_url, {}), stack.enter_context(bare(servers))]
    running = stack.enter_context(gateway(file))
    running.wait_alive({f"worker-{n}" for n in range(len(servers))})
    return [*ways, running.way(), stack.enter_context(envoy(file, servers))]


def _idle(ways: Sequence[Way]) -> float:
    """Return the number of cores that the gateway uses without requests."""
    (process,) = next(way.processes for way in ways if way.name == GATEWAY)
    before = cpu_seconds(process)
    time.sleep(_IDLE_S)
    return (cpu_seconds(process) - before) / _IDLE_S


def _in_turns(
    ways: Sequence[Way], workers: Sequence[Side], size: str, rounds: int, window_s: float
) -> list[Sample]:
    samples = []
    for number in range(rounds):
        first = number % len(ways)
        for clients in CLIENTS:
            for way in (*ways[first:], *ways[:first]):
                samples.append(_measure(way, workers, SIZES[size], clients, number, window_s))
                say(f"{size} {told(samples[-1], rounds)}")
    return samples


def _measure(
    way: Way, workers: Sequence[Side], model: str, clients: int, number: int, window_s: float
) -> Sample:
    processes = dict(way.processes)
    for worker in workers:
        processes.update(dict.fromkeys(server_processes(worker.server.pid, has_runtime=True), WORKERS))
    with load(workers[0], model, clients, window_s, via=way.url) as running:
        everyone = {**processes, running.process.pid: CLIENT}
        first = _Reading.now(workers, model, everyone)
        time.sleep((WINDOWS - 0.5) * window_s)
        second = _Reading.now(workers, model, everyone)
    wall = second.at - first.at
    requests = second.requests - first.requests
    if requests <= 0:
        raise BenchFailed(f"{way.name}/{model}: no request was completed in the window")
    cpu: dict[str, float] = {}
    for pid, role in everyone.items():
        cpu[role] = cpu.get(role, 0.0) + second.cpu[pid] - first.cpu[pid]
    used = second.machine.used - first.machine.used
    return Sample(
        side=way.name,
        clients=clients,
        round=number,
        infer_per_s=running.report["Inferences/Second"],
        p50_us=running.report["p50 latency"],
        p99_us=running.report["p99 latency"],
        requests=requests,
        cpu_us={role: seconds / requests * 1e6 for role, seconds in cpu.items()},
        triton_batch=requests / max(1, second.executions - first.executions),
        device_batch=None,
        sizes={},
        busy=None,
        steal_cpus=(second.machine.stolen - first.machine.stolen) / wall,
        other_cpus=max(0.0, used - sum(cpu.values())) / wall,
    )


# --- figures --------------------------------------------------------------------------------------------------------


def passing_us(sample: Sample) -> float:
    """Return the CPU microseconds per request of the picker, and of all processes that pass requests on."""
    return sample.cpu_us.get(PASSING, 0.0) + sample.cpu_us.get(PICKER, 0.0)


def added(rounds: Rounds, way: str, clients: int, value: Callable[[Sample], float]) -> Spread:
    """Return the spread of the cost that a path adds to the direct path. The difference is taken within each round."""
    direct = {sample.round: value(sample) for sample in rounds.of_side(DIRECT, clients)}
    return Spread.of(value(sample) - direct[sample.round] for sample in rounds.of_side(way, clients))


def _p50(sample: Sample) -> float:
    return sample.p50_us


def _p99(sample: Sample) -> float:
    return sample.p99_us


def _per_core(sample: Sample) -> float:
    return 1e6 / passing_us(sample)


def _summary(by_size: Mapping[str, Rounds]) -> tuple[list[str], list[Target], dict[str, Any]]:
    lines: list[str] = []
    ratios: dict[str, Any] = {}
    for size, rounds in by_size.items():
        lines += [f"{size} a request; medians of {rounds.kept} rounds", _table(rounds)]
        for clients in CLIENTS:
            spread = rounds.ratio(GATEWAY, BARE, clients, passing_us)
            ratios[f"{size}, {clients} clients, {GATEWAY} / {BARE}"] = asdict(spread)
            lines.append(f"CPU per request at {clients} clients, {GATEWAY} / {BARE}: {spread_text(spread)}")
            picker = rounds.spread(ENVOY, clients, lambda sample: sample.cpu_us[PICKER])
            lines.append(f"CPU per request at {clients} clients, of the picker: {spread_text(picker, 0)} us")
            for way in (GATEWAY, ENVOY):
                spread = rounds.ratio(way, DIRECT, clients, _p50)
                ratios[f"{size}, {clients} clients, p50, {way} / {DIRECT}"] = asdict(spread)
                lines.append(f"p50 at {clients} clients, {way} / {DIRECT}: {spread_text(spread)}")
        lines += [rounds_line(rounds), ""]
    return lines, _targets(by_size[SMALL]), ratios


def _table(rounds: Rounds) -> str:
    headers = ["", "clients", "infer/s", "p50 us", "p99 us", "added p50 us", "added p99 us", "passing us"]
    headers += ["requests/s per core", f"{WORKERS} us", f"{CLIENT} us"]
    rows = []
    for clients in CLIENTS:
        for way in WAYS:
            rows.append(_row(rounds, way, clients))
    return table(headers, rows)


def _row(rounds: Rounds, way: str, clients: int) -> list[str]:
    def middle(value: Callable[[Sample], float]) -> str:
        return f"{rounds.spread(way, clients, value).median:.0f}"

    row = [way, str(clients), middle(lambda s: s.infer_per_s), middle(_p50), middle(_p99)]
    if way == DIRECT:
        row += ["-"] * 4
    else:
        row += [spread_text(added(rounds, way, clients, _p50), 0)]
        row += [f"{added(rounds, way, clients, _p99).median:.0f}"]
        row += [spread_text(rounds.spread(way, clients, passing_us), 0), middle(_per_core)]
    return [*row, middle(lambda s: s.cpu_us[WORKERS]), middle(lambda s: s.cpu_us[CLIENT])]


def _targets(rounds: Rounds) -> list[Target]:
    """Return the targets, which apply to small requests."""
    many = max(CLIENTS)
    rows = (
        ("added p50, us", added(rounds, GATEWAY, 1, _p50), 600.0, False),
        ("requests/s per core", rounds.spread(GATEWAY, many, _per_core), 3000.0, True),
        (f"CPU per request / {BARE}", rounds.ratio(GATEWAY, BARE, many, passing_us), 1.3, False),
    )
    return [Target(name, spread.median, limit, at_least) for name, spread, limit, at_least in rows]
