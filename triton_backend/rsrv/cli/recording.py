"""The command `rsrv record`. It writes the requests of a server as a trace, and its models as a scenario for the trace."""

import csv
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import grpc

from rsrv.cli.client import CommandLineError, Server
from rsrv.control.chrome_trace import SpanReader
from rsrv.control.grpc_service import word
from rsrv.control.v1 import control_pb2 as pb
from rsrv.progress import steps

#: Columns of a trace. `rsrv.sim.schema.RequestKeys` has the same names.
COLUMNS = ("t", "model", "rows", "variant", "deadline_s", "priority", "committed")
#: Seconds between two polls of the server, which keeps the latest 32,768 requests of each device.
_POLL_S = 0.5
#: After this many seconds without an answer, the server counts as gone.
_GONE_S = 60.0
#: Seconds between two lines about the progress if the output is not a terminal.
_LINE_S = 10.0
#: The cost of a batch size is the mean duration of its recorded executions if there are at least this many. Otherwise, it is the
#: scheduler's estimate.
_ENOUGH = 10
#: Cost of models whose requests all ended without an execution, in seconds.
_NEVER_EXECUTED_S = 1e-6
#: Values of placement.mode that the simulator also has.
_MODES = ("least_outstanding", "lpt_packing")


class Recording:
    """The requests of one record, read from answers of the server. Each answer continues where the previous answer ended."""

    def __init__(self) -> None:
        self._positions: dict[int, pb.TimelinePosition] = {}
        #: Number of requests by model.
        self.counts: Counter[str] = Counter()
        #: Number of requests that the server forgot before they were read.
        self.lost = 0
        #: Number of times that a runtime was replaced. Some requests shortly before and after each replacement are not known.
        self.replaced = 0
        #: Unix time of the first request, by the server's clock.
        self.began: float | None = None
        #: Seconds from the first request to the last one.
        self.seconds = 0.0

    @property
    def question(self) -> pb.GetArrivalsRequest:
        return pb.GetArrivalsRequest(positions=self._positions.values())

    def begin(self, answer: pb.GetArrivalsResponse) -> bool:
        """Skip the requests in `answer`, which arrived before the recording. Return False if there are more such requests."""
        self._positions = {position.device: position for position in answer.positions}
        return all(position.next >= position.end for position in answer.positions)

    def take(self, answer: pb.GetArrivalsResponse) -> list[tuple[str | int, ...]]:
        """Count the requests of an answer, and return their rows in the trace."""
        for position in answer.positions:
            before = self._positions.get(position.device)
            if before is not None and before.instance == position.instance:
                self.lost += position.first - before.next
            elif before is not None:
                self.replaced += 1
            self._positions[position.device] = position
        requests = sorted(answer.requests, key=lambda request: request.unix_s)
        if self.began is None and requests:
            self.began = requests[0].unix_s
        return [self._row(request) for request in requests]

    def _row(self, request: pb.Arrival) -> tuple[str | int, ...]:
        # A later answer may have a request of another device that arrived before `began`. Set its time to 0.
        t = max(0.0, request.unix_s - (self.began or 0.0))
        self.counts[request.model] += 1
        self.seconds = max(self.seconds, t)
        deadline_s = f"{request.deadline_s:.6f}" if request.HasField("deadline_s") else ""
        call = "true" if request.call else ""
        return f"{t:.6f}", request.model, request.rows, request.variant, deadline_s, request.priority, call


def run_record(server: Server) -> int:
    """Write the server's requests to the trace until Ctrl-C or SIGTERM, or for `--seconds`. Then write the scenario."""
    path: Path = server.options.output
    scenario = path.with_suffix(".yaml")
    if path.suffix != ".csv":
        raise CommandLineError(f"{path} must end in .csv; the scenario is written to the same folder")
    for output in (path, scenario):
        if output.exists():
            raise CommandLineError(f"{output} already exists: name another file, or remove it")
    before, recording = _read_state(server), Recording()
    while not recording.begin(server.ask("GetArrivals", recording.question)):
        pass
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        with suppress(KeyboardInterrupt), steps(f"recording {path}, polls", every=_LINE_S) as progress:
            for answer in _answers(server, recording, server.options.seconds):
                writer.writerows(recording.take(answer))
                file.flush()
                progress.step(f"{recording.counts.total()} requests")
    try:
        served = _read_state(server)
    except grpc.RpcError:
        print(
            "the server does not answer any more: the scenario has its figures from the start of the recording",
            file=sys.stderr,
        )
        served = before
    # Add the models that were removed during the record, because they have requests in the trace.
    names = {model.name for model in served.status.models}
    served.status.models.extend([model for model in before.status.models if model.name not in names])
    # Import this only here, because other commands need no YAML.
    from rsrv_bundle import yaml12

    text = yaml12.dump(scenario_of(path.name, recording, served))
    scenario.write_text(f"# Recorded by `rsrv record`.\n{text}", encoding="utf-8")
    print(
        f"{path}: {recording.counts.total()} requests in {recording.seconds:.0f} s; {scenario}: their models"
    )
    if recording.lost:
        print(
            f"{recording.lost} requests are missing: they arrived faster than `rsrv record` read them",
            file=sys.stderr,
        )
    if recording.replaced:
        print(
            f"requests of about {recording.replaced * 2 * _POLL_S:g} s are missing, because runtimes were replaced {recording.replaced} times",
            file=sys.stderr,
        )
    return 0


def _read_state(server: Server) -> "ServedState":
    return ServedState(
        server.ask("GetStatus", pb.GetStatusRequest()),
        server.ask("GetMemory", pb.GetMemoryRequest()),
        server.ask("GetPlacement", pb.GetPlacementRequest()).mode,
        read_spans(server),
    )


def _answers(server: Server, recording: Recording, seconds: float | None) -> Iterator[pb.GetArrivalsResponse]:
    """Yield answers until the time is over or the server is gone. If a runtime ends, wait for the next one."""
    answered = time.monotonic()
    end = None if seconds is None else answered + seconds
    while True:
        over = end is not None and time.monotonic() >= end
        try:
            answer = server.ask("GetArrivals", recording.question)
            answered = time.monotonic()
            yield answer
            if any(position.next < position.end for position in answer.positions):
                continue
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            over = over or time.monotonic() >= answered + _GONE_S
        if over:
            return
        try:
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            end = answered  # Check once more, for the requests since the last check.


def read_spans(server: Server) -> list[pb.Span]:
    """Return all spans that the runtimes keep."""
    reader = SpanReader()
    while reader.take(server.ask("GetTimeline", reader.question)):
        pass
    return reader.spans


# --- the scenario ----------------------------------------------------------------------------------------


class ServedState(NamedTuple):
    """Figures of a server at one moment."""

    status: pb.GetStatusResponse
    memory: pb.GetMemoryResponse
    #: The setting placement.mode.
    mode: str
    #: The latest work of the devices, as far as the runtimes keep it.
    spans: Sequence[pb.Span]


def scenario_of(trace: str, recording: Recording, served: ServedState) -> dict[str, Any]:
    """Return the scenario for a recorded trace. It has the measured costs and bytes of models."""
    status, counts = served.status, recording.counts
    shares = _shares(served.memory)
    costs = _measured(span for span in served.spans if span.start_unix_s >= (recording.began or 0.0))
    # Sort the models, because the simulator first loads weights in the order of the scenario.
    listed = sorted(
        status.models,
        key=lambda model: (model.record.weights != pb.WEIGHTS_RESIDENT, -counts[model.name], model.name),
    )
    models = {
        model.name: keys for model in listed if (keys := _model(model, shares.get(model.name, {}), costs))
    }
    # Add models that never executed, because a trace can be simulated only if all of its models are in the scenario.
    models |= {name: {"cost": {1: _NEVER_EXECUTED_S}} for name in counts if name not in models}
    usual = {"weight": 1.0, "max_delay_us": 0, "max_queue_depth": status.scheduler.max_queue_depth}
    for model in listed:
        policy = {
            field.name: value for field, value in model.policy.ListFields() if value != usual[field.name]
        }
        models.get(model.name, {}).update(policy)
    document: dict[str, Any] = {
        "duration": max(1, ceil(recording.seconds)),
        "device": _device(status),
        "settings": _settings(status.scheduler),
        "models": models,
        "arrivals": {"trace": trace},
    }
    if len(status.devices) > 1:
        document |= {"devices": len(status.devices), "servers": 1}
        document["gateway"] = {"mode": served.mode if served.mode in _MODES else _MODES[0]}
    return document


def _device(status: pb.GetStatusResponse) -> dict[str, Any]:
    device: dict[str, Any] = {"warm": True}
    memories = [device.record.memory for device in status.devices]
    budgets = [memory.budget_bytes for memory in memories if memory.HasField("budget_bytes")]
    if budgets:
        device["weight_budget_bytes"] = min(budgets)
    loaded = [model.record for model in status.models if model.record.loads and model.record.load_seconds > 0]
    if nbytes := sum(record.device_bytes for record in loaded):
        device["h2d_bytes_per_s"] = round(nbytes / sum(record.load_seconds for record in loaded))
    return device


def _settings(scheduler: pb.Scheduler) -> dict[str, Any]:
    return {
        "discipline": word(pb.Discipline, scheduler.discipline),
        "max_queue_depth": scheduler.max_queue_depth,
    }


def _model(
    model: pb.ModelStatus, shares: Mapping[str, int], measured: Mapping[tuple[str, int], Sequence[float]]
) -> dict[str, Any] | None:
    """Return the keys of a model in the scenario, or None if the model never executed."""
    variants: dict[int, dict[int, float]] = {}
    single, jitters = len({executable.variant for executable in model.record.executables}) == 1, []
    for executable in model.record.executables:
        # Use the spans only if there is one variant, because they do not name variants.
        taken = measured.get((model.name, executable.size), ()) if single else ()
        if len(taken) >= _ENOUGH:
            cost = fmean(taken)
            jitters.append(pstdev(taken) / cost)
        elif executable.HasField("cost_s"):
            cost = executable.cost_s
        else:
            continue
        variants.setdefault(executable.variant, {})[executable.size] = round(cost, 7)
    if not variants:
        return None
    # A variant that never executed gets the cost of the nearest variant that did.
    filled = [
        variants[min(variants, key=lambda at: (abs(at - index), at))] for index in range(max(variants) + 1)
    ]
    keys: dict[str, Any] = {"cost": filled[0]} if len(filled) == 1 else {"variants": filled}
    keys["weight_bytes"] = max(model.record.device_bytes, sum(shares.values()))
    if jitters:
        keys["cost_jitter"] = round(max(jitters), 3)
    if shares:
        keys["shares"] = dict(shares)
    if model.record.residency == pb.RESIDENCY_DEVICE:
        keys["residency"] = "device"
    return keys


def _shares(memory: pb.GetMemoryResponse) -> dict[str, dict[str, int]]:
    """Return, for each model, the bytes of each group of tensors that it shares with other models. Groups get names."""
    home: dict[str, int] = {}
    for device in memory.devices:
        for name in device.own_bytes:
            home.setdefault(name, device.device)
    shares: dict[str, dict[str, int]] = {}
    for device in memory.devices:
        for number, group in enumerate(device.record.shared):
            names = [name for name in group.models if home.get(name) == device.device]
            for name in names if len(names) > 1 else ():
                shares.setdefault(name, {})[f"{device.device}-{number}"] = group.bytes
    return shares


def _measured(spans: Iterable[pb.Span]) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of successful executions, by model and size."""
    seconds_of: dict[tuple[str, int], list[float]] = {}
    for span in spans:
        if span.kind == pb.SPAN_KIND_EXECUTE and not span.failed:
            seconds_of.setdefault((span.model, span.size), []).append(span.seconds)
    return seconds_of
