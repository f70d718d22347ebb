"""The command `rsrv replay`. It sends a trace to a real server as clients would, and compares the result with a simulation.

Each request is sent at its time in the trace, even if earlier ones are not answered, and its latency counts from that time.
So if the server or the sender is too slow, the latencies show it.
"""

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from rsrv.command import CommandParser
from rsrv.extras import install_command
from rsrv.progress import steps
from rsrv.scheduler.events import Outcome, Request
from rsrv.sim.record import RequestRecord, SimulationError
from rsrv.sim.scenario import Scenario, ScenarioError, load_scenario, read_trace
from rsrv.sim.schema import RequestKeys, TraceKeys
from rsrv.sim.simulate import simulate_devices
from rsrv.sim.table import aligned
from rsrv.sim.tally import Tally, in_time, percentile, ratio
from rsrv.text import duration, one_line, percent, printable, rate
from rsrv.wire.paths import write_whole

#: Seconds until the first request.
_START_S = 0.1
#: After this many seconds without an answer, a request counts as failed.
_LOST_S = 120.0
#: Seconds between two lines about the progress if the output is not a terminal.
_LINE_S = 10.0
#: Tag in the error of a request whose deadline has passed. Triton has no code for this.
_EXPIRED = "[rsrv:DEADLINE]"
#: Matches the error texts of requests that rsrv or Triton's queue refused. The code of these errors, UNAVAILABLE, does not show a
#: refusal, because gRPC also uses it if there is no server.
_REFUSED = re.compile(r"\[rsrv:|maximum queue size")
_OUTCOMES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.EXPIRED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.REFUSED,
    grpc.StatusCode.CANCELLED: Outcome.CANCELLED,
}


class Unsendable(Exception):
    """Requests of a model cannot be made. The message says why, and what to do."""


class Replayed(NamedTuple):
    """The results of a replay's requests, in the order of their times."""

    requests: Sequence[RequestRecord]
    sent: Sequence[RequestKeys]
    #: By how many seconds each request was sent too late, in ascending order.
    late: Sequence[float]
    #: First error of each model, except for missed deadlines.
    errors: Mapping[str, str]
    #: For each model with requests that cannot be made, the number of these requests, and the reason.
    unsent: Mapping[str, tuple[int, str]]


def run(options: argparse.Namespace) -> int:
    """Replay a trace, print the report, and return the exit status."""
    parser: CommandParser = options.parser
    path: Path = options.trace
    problems: list[str] = []
    keys = TraceKeys(path=path.name, scale=1 / options.speed)
    trace = sorted(read_trace(keys, path.parent, problems), key=lambda request: request.t)
    if not problems and not trace:
        problems.append(f"{path} has no requests: record while clients send some")
    if problems:
        print(f"{parser.prog}: {problems[0]}", file=sys.stderr)
        return 1
    beside = path.with_suffix(".yaml")
    if options.fit and not beside.exists():
        print(
            f"{parser.prog}: --fit: there is no {beside}, the scenario that `rsrv record` writes",
            file=sys.stderr,
        )
        return 1
    try:
        # Read these files first, so that an error in the options does not cost a replay.
        draw = None if options.out is None else _drawing(options.out)
        scenario = load_scenario(beside) if beside.exists() else None
        inputs = {model: _rows(file) for model, file in options.inputs}
        replayed = asyncio.run(replay(options.url, trace, inputs))
        expected = _expected(scenario, replayed.sent)
        if options.fit and scenario is not None and expected is not None:
            _note_front(beside, scenario.front_s + front_seconds(replayed.requests, expected))
    except grpc.aio.AioRpcError as error:
        print(
            f"{parser.prog}: {options.url}: {one_line(error.details() or error.code().name)}", file=sys.stderr
        )
        return 1
    except (OSError, ScenarioError, SimulationError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    for model, (count, why) in replayed.unsent.items():
        print(f"{printable(model)}: {count} requests were not sent: {why}", file=sys.stderr)
    for model, why in replayed.errors.items():
        print(f"{printable(model)}: the first error: {why}", file=sys.stderr)
    print(json.dumps(report(replayed, expected), indent=2) if options.json else page(replayed, expected))
    if draw is not None:
        try:
            draw(replayed.requests, expected, options.out)
        except OSError as error:
            print(f"{parser.prog}: cannot write: --out: {error}", file=sys.stderr)
            return 1
    return 0 if replayed.requests else 1


def _drawing(out: Path) -> Callable[..., Path]:
    """Make the folder, and return the function that draws. Raises OSError, or ValueError if matplotlib is missing."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        # Only pictures need matplotlib, which takes a second to import.
        from rsrv.sim.plots import write_replay_plot
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ValueError(f"--out needs matplotlib: {install_command('sim')}") from None
    return write_replay_plot


def _rows(file: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the row of each input in a file. Raises ValueError if the file has no arrays."""
    try:
        with open(file, "rb") as content, np.load(content, allow_pickle=False) as arrays:
            return dict(arrays)
    except (TypeError, ValueError, EOFError, BadZipFile):
        raise ValueError(f"--inputs: {file} is not a file of np.savez(FILE, INPUT=row, ...)") from None


# --- sending ---------------------------------------------------------------------------------------------


async def replay(
    url: str, trace: Sequence[RequestKeys], inputs: Mapping[str, Mapping[str, np.ndarray[Any, Any]]]
) -> Replayed:
    """Send a trace, ordered by time, until its end or Ctrl-C. Raises AioRpcError if the server does not answer."""
    async with grpc.aio.insecure_channel(url, [("grpc.max_receive_message_length", -1)]) as channel:
        triton = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages: dict[tuple[str, int], Any] = {}
        unsent: dict[str, tuple[int, str]] = {}
        counts = Counter((request.model, request.rows) for request in trace)
        configs: dict[str, Any] = {}
        for (model, rows), count in counts.items():
            try:
                if model not in configs:
                    configs[model] = await _config(triton, model)
                messages[model, rows] = infer_request(configs[model], rows, inputs.get(model))
            except Unsendable as why:
                unsent[model] = unsent.get(model, (0, ""))[0] + count, str(why)
        sendable = [request for request in trace if (request.model, request.rows) in messages]
        return await _send(triton, sendable, messages, unsent)


async def _config(triton: Any, model: str) -> Any:
    try:
        config_request = service_pb2.ModelConfigRequest(name=model)
        return (await triton.ModelConfig(config_request, timeout=_LOST_S, wait_for_ready=False)).config
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and "unknown model" not in str(error.details()):
            raise
        raise Unsendable(one_line(error.details() or error.code().name)) from None


def infer_request(config: Any, rows: int, arrays: Mapping[str, np.ndarray[Any, Any]] | None) -> Any:
    """Return a request with `rows` rows. Raises Unsendable.

    Each row of an input is a copy of the first row of its array in `arrays`. Without `arrays`, all inputs are zeros.
    """
    if config.HasField("sequence_batching") or config.model_transaction_policy.decoupled:
        raise Unsendable("its requests depend on each other; only models without state are replayed")
    if config.max_batch_size and not 0 < rows <= config.max_batch_size:
        raise Unsendable(f"a request to this model has 1 to {config.max_batch_size} rows, not {rows}")
    message = service_pb2.ModelInferRequest(model_name=config.name)
    for tensor in config.input:
        datatype = (
            model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
        )
        if arrays is not None:
            array = arrays.get(tensor.name)
            if array is None:
                raise Unsendable(f"the model's file in --inputs has no array {tensor.name!r}")
            if config.max_batch_size and not (array.shape and len(array)):
                raise Unsendable(f"{tensor.name} has no row in the model's file in --inputs")
            if np_to_triton_dtype(array.dtype) != datatype:
                raise Unsendable(
                    f"{tensor.name} is {array.dtype} in the model's file in --inputs, but must be {datatype}"
                )
        elif datatype == "BYTES" or min(tensor.dims, default=1) < 0:
            raise Unsendable(
                f"the shape or the text of its input {tensor.name} cannot be guessed; give one row of this input: --inputs {config.name}=FILE.npz"
            )
        else:
            shape = [1, *tensor.dims] if config.max_batch_size else list(tensor.dims)
            # numpy lacks BF16. A uint16 has as many bits.
            array = np.zeros(shape, triton_to_np_dtype(datatype) or np.uint16)
        if config.max_batch_size:
            array = np.repeat(array[:1], rows, axis=0)
        message.inputs.add(name=tensor.name, datatype=datatype, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        message.raw_input_contents.append(raw)
    return message


async def _send(
    triton: Any,
    trace: Sequence[RequestKeys],
    messages: Mapping[tuple[str, int], Any],
    unsent: Mapping[str, tuple[int, str]],
) -> Replayed:
    loop = asyncio.get_running_loop()
    requests: list[RequestRecord] = []
    late: list[float] = []
    errors: dict[str, str] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def ask(record: RequestRecord, message: Any) -> None:
        try:
            await triton.ModelInfer(message, timeout=_LOST_S)
            record.outcome = Outcome.ANSWERED
        except grpc.aio.AioRpcError as error:
            why = one_line(error.details() or error.code().name)
            record.outcome = _outcome(error.code(), why)
            if record.outcome is not Outcome.EXPIRED:
                errors.setdefault(record.request.model, why)
        record.ended = loop.time() - began

    began = loop.time() + _START_S
    with steps("requests sent", len(trace), every=_LINE_S) as progress:
        try:
            for number, sent in enumerate(trace, 1):
                # Sleep even if the request is late, so that the earlier requests are sent first.
                await asyncio.sleep(max(0.0, began + sent.t - loop.time()))
                late.append(loop.time() - began - sent.t)
                deadline = None if sent.deadline_s is None else sent.t + sent.deadline_s
                request = Request(number, sent.model, sent.variant, sent.rows, deadline, sent.priority)
                record = RequestRecord(request, sent.t, hit=False, started=sent.t, outcome=Outcome.CANCELLED)
                requests.append(record)
                task = loop.create_task(ask(record, _dated(messages[sent.model, sent.rows], sent)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                progress.step(sent.model)
        except asyncio.CancelledError:
            pass  # After Ctrl-C, report the requests so far. Unanswered ones are cancelled.
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    return Replayed(requests, trace[: len(requests)], sorted(late), errors, unsent)


def _outcome(code: grpc.StatusCode, why: str) -> Outcome:
    if _EXPIRED in why:
        return Outcome.EXPIRED
    if code is grpc.StatusCode.UNAVAILABLE and _REFUSED.search(why):
        return Outcome.REFUSED
    return _OUTCOMES.get(code, Outcome.FAILED)


def _dated(message: Any, request: RequestKeys) -> Any:
    """Return a message with the deadline and the priority of a request, which Triton takes as parameters."""
    if request.deadline_s is None and not request.priority:
        return message
    dated = service_pb2.ModelInferRequest()
    dated.CopyFrom(message)
    if request.deadline_s is not None:
        dated.parameters["timeout"].int64_param = max(1, round(request.deadline_s * 1e6))
    if request.priority:
        dated.parameters["priority"].uint64_param = request.priority
    return dated


# --- the report ------------------------------------------------------------------------------------------


def _expected(scenario: Scenario | None, sent: Sequence[RequestKeys]) -> Sequence[RequestRecord] | None:
    """Return the simulated results of the requests that were sent, or None without a scenario."""
    if scenario is None or not sent:
        return None
    records = simulate_devices(replace(scenario, requests=(), recorded=[sent], duration=sent[-1].t + 1e-3))
    return records[0].requests


def front_seconds(records: Sequence[RequestRecord], expected: Sequence[RequestRecord]) -> float:
    """Return the median of real minus simulated latencies in seconds. It is negative if real answers came sooner."""
    late = sorted(
        (real.ended - real.arrived) - (simulated.ended - simulated.arrived)
        for real, simulated in zip(records, expected, strict=True)
        if real.outcome is simulated.outcome is Outcome.ANSWERED
    )
    return percentile(late, 0.5) or 0.0


def _note_front(path: Path, seconds: float) -> None:
    """Write into a scenario the seconds that requests spend outside the runtime, for further simulations.

    Raises OSError.
    """
    # Import this only here, because other commands need no YAML.
    from rsrv_bundle import yaml12

    text = path.read_text(encoding="utf-8")
    keys = {**yaml12.load(text.encode()), "front_s": round(max(0.0, seconds), 6)}
    first = text.partition("\n")[0]
    comment = f"{first}\n" if first.startswith("#") else ""
    write_whole(path, comment + yaml12.dump(keys))
    print(f"{path}: front_s: {keys['front_s']:g}", file=sys.stderr)


def figures(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the figures of some requests. Times are in seconds."""
    tally = Tally()
    for request in requests:
        tally.add(request)
    good = sum(in_time(request, inf) for request in requests)
    # Measure until the last answer: if a server falls behind, its goodput is smaller than the trace's rate.
    window = max(
        (request.arrived if request.ended == inf else request.ended for request in requests), default=0.0
    )
    times = {key: value for key, value in tally.times().items() if key.startswith("latency")}
    sums = {"requests": tally.arrived, **tally.ended(), "missed": tally.arrived - good}
    return {**sums, "goodput": ratio(good, window), "goodput_ratio": ratio(good, tally.arrived), **times}


def report(replayed: Replayed, expected: Sequence[RequestRecord] | None) -> dict[str, Any]:
    """Return the figures in total and by model. If there is a simulation, also return its figures."""
    figures_of: dict[str, Any] = {"replayed": _by_model(replayed.requests)}
    figures_of["replayed"]["late_p99_s"] = percentile(replayed.late, 0.99)
    if expected is None:
        return figures_of
    return {
        **figures_of,
        "simulated": _by_model(expected),
        "late_p50_s": front_seconds(replayed.requests, expected),
    }


def _by_model(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    by_model: dict[str, list[RequestRecord]] = {}
    for request in requests:
        by_model.setdefault(request.request.model, []).append(request)
    return {
        "total": figures(requests),
        "models": {name: figures(mine) for name, mine in sorted(by_model.items())},
    }


def page(replayed: Replayed, expected: Sequence[RequestRecord] | None) -> str:
    """Return the report as a table. It has a line for each model, with the most requests first, and a line for all models."""
    both = report(replayed, expected)
    real, beside = both["replayed"], both.get("simulated")
    total = real["total"]
    ends = ", ".join(
        f"{total[end]} {end}" for end in ("served", "expired", "refused", "cancelled", "failed") if total[end]
    )
    head = ["model", "requests", "in time", "p50", "p99"]
    head += [] if beside is None else ["simulated: in time", "p50", "p99"]
    names = sorted(real["models"], key=lambda name: (-real["models"][name]["requests"], name))
    rows = [
        [name, str(cells["requests"]), *_cells(cells), *([] if beside is None else _cells(simulated))]
        for name, cells, simulated in (
            *((name, real["models"][name], (beside or real)["models"].get(name)) for name in names),
            ("all", total, (beside or real)["total"]),
        )
    ]
    goodput, late = rate(total["goodput"]), duration(real["late_p99_s"])
    first = f"{total['requests']} requests: {ends or 'none'}; goodput {goodput}; sent late by {late} at p99"
    table = f"{first}\n\n{aligned([head, *rows])}"
    if beside is None:
        return table
    slower = both["late_p50_s"]
    direction = "sooner" if slower < 0 else "later"
    return f"{table}\n\nhalf of the answers came at least {duration(abs(slower))} {direction} than simulated"


def _cells(of: Mapping[str, Any] | None) -> tuple[str, ...]:
    if of is None:
        return ("-", "-", "-")
    return percent(of["goodput_ratio"]), duration(of["latency_p50_s"]), duration(of["latency_p99_s"])
