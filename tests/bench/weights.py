"""`make bench-weights`: compare models whose weights do not all fit on the device with the same models when all fit. See docs/benchmark.md.

Run from the project's root: python -m tests.bench.weights
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from local_triton import ServerFailed
from tests.bench import chains, report
from tests.bench.crowd import Questions, asking, popularity
from tests.bench.figures import Rounds, Swapping
from tests.bench.load import BenchFailed, Side, server_statistics
from tests.bench.phases import say, served
from tests.bench.places import ROOT, WORK
from tests.bench.processes import CLIENT, Machine, cpu_seconds, server_processes
from tests.bench.run import environment
from tests.status import read_status

MIB = 2**20
RESULT = WORK / "weights.json"
RESIDENT = "all resident"
#: Number of questions for each model. Clients ask them repeatedly in random order.
_QUESTIONS = 16


@dataclass(frozen=True)
class Plan:
    """How much to measure, and for how long."""

    models: int = 40
    #: Bytes of one model's weights.
    bytes: int = 8 * MIB
    #: Bytes of weights that may be on the device at the same time.
    budget: int = 64 * MIB
    #: Narrower types of weights. For each type, a further server with the same budget is measured.
    narrow: tuple[str, ...] = ()
    #: Exponent of Zipf's law. A larger exponent makes the models' popularity more uneven.
    exponent: float = 1.1
    clients: int = 32
    rounds: int = 7
    #: Seconds of one sample.
    window_s: float = 4.0
    #: Seconds of the warm-up before a sample.
    warm_s: float = 1.5

    @property
    def fitting(self) -> int:
        """Number of models whose weights fit into the budget."""
        return self.budget // self.bytes

    def sides(self) -> dict[str, dict[str, str]]:
        """Return the environment of each side's server, in addition to the common environment."""
        budget = {"RSRV_RUNTIME__WEIGHT_BUDGET_BYTES": str(self.budget)}
        return {RESIDENT: {}, "budget": budget, **dict.fromkeys(self.narrow, budget)}

    def kind(self, side: str) -> str:
        """Return the type of a side's weights."""
        return side if side in self.narrow else chains.WIDE


QUICK = Plan(models=6, bytes=MIB, budget=2 * MIB, rounds=1, window_s=1.0, warm_s=0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status, which is 0 if everything could be measured."""
    plan = _parse(argv)
    WORK.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        samples = measure_all(plan)
    except (BenchFailed, ServerFailed, RuntimeError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    lines, ratios = summary(plan, samples)
    result = {
        "environment": environment(),
        "plan": asdict(plan),
        "ratios": ratios,
        "samples": [asdict(sample) for sample in samples],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("", *lines, sep="\n")
    print(f"\n{time.monotonic() - started:.0f} s; all samples are in {RESULT.relative_to(ROOT)}")
    return 0


def _parse(argv: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weights", description=__doc__)

    def option(name: str, default: float, what: str = "") -> None:
        kind = type(default)
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{what} (%(default)s)"
        )

    usual = Plan()
    option("models", usual.models)
    option("bytes", usual.bytes, "bytes of one model's weights")
    option("budget", usual.budget, "bytes that weights may take on the device")
    parser.add_argument(
        "--narrow", metavar="TYPE", nargs="+", default=(), help="also with weights of these types: bf16 i8"
    )
    option("exponent", usual.exponent, "exponent of Zipf's law; 0: all models get equally many requests")
    option("clients", usual.clients)
    option("rounds", usual.rounds, "alternating rounds")
    option("window", usual.window_s, "seconds of one sample")
    parser.add_argument(
        "--quick", action="store_true", help="few, short and small samples, only to see that everything works"
    )
    options = parser.parse_args(argv)
    if options.quick:
        return replace(QUICK, narrow=tuple(options.narrow))
    return Plan(
        models=options.models,
        bytes=options.bytes,
        budget=options.budget,
        narrow=tuple(options.narrow),
        exponent=options.exponent,
        clients=options.clients,
        rounds=options.rounds,
        window_s=options.window,
    )


def measure_all(plan: Plan) -> list[Swapping]:
    """Measure all sides in turns. All servers run all the time, and the others are idle during a measurement."""
    kinds = [plan.kind(name) for name in plan.sides()]
    repositories = {kind: chains.repository(plan.models, plan.bytes, kind) for kind in kinds}
    questions = {kind: _ask_what(plan, kind) for kind in kinds}
    samples = []
    with contextlib.ExitStack() as servers:
        sides = []
        for name, env in plan.sides().items():
            log = f"weights-{name.replace(', ', '-').replace(' ', '-')}"
            side = servers.enter_context(
                served(log, repositories[plan.kind(name)], has_runtime=True, env=env)
            )
            sides.append(Side(name, side.server, has_runtime=True))
            say(f"{name}: {plan.models} models are ready")
        for number in range(plan.rounds):
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                sample = _measure(side, plan, questions[plan.kind(side.name)], number)
                samples.append(sample)
                say(
                    f"[{number + 1}/{plan.rounds}] {side.name}: {sample.infer_per_s:.0f}/s,"
                    f" p50 {sample.p50_us / 1e3:.1f} ms, p99 {sample.p99_us / 1e3:.1f} ms,"
                    f" {sample.loads} loads"
                )
    return samples


def _ask_what(plan: Plan, kind: str) -> Path:
    """Write a file with questions to every model and the right answers for this type of weights. Return its path."""
    rng = np.random.default_rng(1)
    layers = chains.layers_of(plan.bytes)
    names = chains.names(plan.models)
    sent = {name: rng.standard_normal((_QUESTIONS, chains.WIDTH), np.float32) for name in names}
    expected = {name: chains.reference(name, layers, x, kind) for name, x in sent.items()}
    file = WORK / f"questions-{kind}.npz"
    Questions(sent, expected).save(file)
    return file


@dataclass(frozen=True)
class _Reading:
    """All counters at one moment. The counters of all models are added up."""

    at: float
    cpu: Mapping[int, float]
    machine: Machine
    execute_calls: int
    counts: Mapping[str, float]
    sizes: Mapping[int, int]

    @classmethod
    def now(cls, side: Side, processes: Mapping[int, str]) -> _Reading:
        models = read_status(side.server.pid)["models"].values()
        counts = {
            key: sum(model[key] for model in models)
            for key in ("misses", "loads", "evictions", "dispatches", "useful_rows", "device_seconds")
        }
        counts["answered"] = sum(model["outcomes"]["answered"] for model in models)
        sizes: dict[int, int] = {}
        for model in models:
            for key, count in model["sizes"].items():
                size = int(key.partition("/")[2])
                sizes[size] = sizes.get(size, 0) + count
        calls = sum(int(model.get("execution_count", 0)) for model in server_statistics(side))
        cpu = {pid: cpu_seconds(pid) for pid in processes}
        return cls(time.monotonic(), cpu, Machine.now(), calls, counts, sizes)


def _measure(side: Side, plan: Plan, questions: Path, number: int) -> Swapping:
    processes = server_processes(side.server.pid, has_runtime=True)
    with asking(
        side.server.grpc_url,
        questions,
        clients=plan.clients,
        seconds=plan.warm_s + plan.window_s,
        exponent=plan.exponent,
        # In a round, all sides get the same requests.
        seed=number,
    ) as running:
        everyone = {**processes, running.process.pid: CLIENT}
        time.sleep(plan.warm_s)
        first = _Reading.now(side, everyone)
        time.sleep(0.9 * plan.window_s)
        second = _Reading.now(side, everyone)
    assert running.requests is not None
    if running.requests.wrong or running.requests.failed():
        raise BenchFailed(f"{side.name}: {running.requests.wrong} wrong, {running.requests.failed()} failed")
    requests = running.requests.between(first.at, second.at)
    wall = second.at - first.at
    risen = {key: value - first.counts[key] for key, value in second.counts.items()}
    if not risen["answered"]:
        raise BenchFailed(f"{side.name}: no request was answered in {wall:.1f} s")
    cpu: dict[str, float] = {}
    for pid, role in everyone.items():
        cpu[role] = cpu.get(role, 0.0) + second.cpu[pid] - first.cpu[pid]
    p50, p99 = np.percentile((requests.ended - requests.began) * 1e6, (50, 99))
    return Swapping(
        side=side.name,
        clients=plan.clients,
        round=number,
        infer_per_s=len(requests.code) / wall,
        p50_us=float(p50),
        p99_us=float(p99),
        requests=len(requests.code),
        cpu_us={role: seconds / risen["answered"] * 1e6 for role, seconds in cpu.items()},
        triton_batch=risen["answered"] / max(1, second.execute_calls - first.execute_calls),
        device_batch=risen["useful_rows"] / max(1, risen["dispatches"]),
        sizes={size: count - first.sizes.get(size, 0) for size, count in second.sizes.items()},
        busy=risen["device_seconds"] / wall,
        steal_cpus=(second.machine.stolen - first.machine.stolen) / wall,
        other_cpus=max(0.0, second.machine.used - first.machine.used - sum(cpu.values())) / wall,
        seconds=wall,
        answered=int(risen["answered"]),
        misses=int(risen["misses"]),
        loads=int(risen["loads"]),
        evictions=int(risen["evictions"]),
    )


def summary(plan: Plan, samples: Sequence[Swapping]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the results as text, and the ratios of each side to the side with all weights resident."""
    rounds = Rounds.of(samples)
    samples = [sample for sample in samples if sample in rounds.samples]
    names = list(plan.sides())
    top = popularity(plan.models, plan.exponent)[: plan.fitting].sum()
    about = (
        f"{plan.models} models of {plan.bytes / MIB:.1f} MiB, {plan.fitting} fit; {plan.clients} clients;"
        f" the {plan.fitting} most asked for get {top:.0%} of the requests"
    )
    lines = [
        about,
        report.load_table(rounds, [(name, plan.clients) for name in names]),
        report.swapping_table({name: [s for s in samples if s.side == name] for name in names}),
    ]
    ratios: dict[str, dict[str, Any]] = {}
    for name in names[1:]:
        spreads = {
            figure: rounds.ratio(name, RESIDENT, plan.clients, value)
            for figure, value in (
                ("requests/s", lambda sample: sample.infer_per_s),
                ("p50", lambda sample: sample.p50_us),
                ("p99", lambda sample: sample.p99_us),
                ("CPU per request", report.server_cpu),
            )
        }
        ratios[name] = {figure: asdict(spread) for figure, spread in spreads.items()}
        text = ", ".join(f"{figure} {report.spread_text(spread)}" for figure, spread in spreads.items())
        lines.append(f"{name} / {RESIDENT}: {text}")
    lines.append(report.rounds_line(rounds))
    return lines, ratios


if __name__ == "__main__":
    sys.exit(main())
