"""The command line: measure, print tables, write everything as JSON, and fail on errors."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from rsrv.runtime.jax_device import JaxDevice
from tests.bench.figures import Target
from tests.bench.gpu import numerics, transfer
from tests.bench.gpu.models import Shape
from tests.bench.gpu.report import cold_table, products_table, rates_table, traffic_table, turns_table
from tests.bench.gpu.serving import (
    Cold,
    Traffic,
    Turns,
    measure_cold,
    measure_traffic,
    measure_turns,
    steps_for,
)
from tests.bench.gpu.transfer import BUSY, LIMIT, LIMIT_BUSY, LOCKED, Rate, Scratch
from tests.bench.report import targets_table

PARTS = ("transfer", "numerics", "cold", "turns", "traffic")


@dataclass(frozen=True)
class Plan:
    """The amounts to measure. Sizes in bytes, times in seconds."""

    # Below 1 GiB, above which XLA never stages.
    transfer_bytes: int = 1_000_000_000
    tensors: Sequence[int] = (1, 300)
    rounds: int = 5
    scratch_elements: int = 64 << 20
    cold_bytes: Sequence[int] = (10_000_000, 100_000_000, 1_000_000_000, 5_000_000_000)
    turns_bytes: int = 1_000_000_000
    turns_seconds: float = 10.0
    matrix: int = 2048
    traffic_models: int = 200
    traffic_bytes: int = 256_000_000
    #: The share of all the models' bytes.
    traffic_budget: float = 0.25
    traffic_seconds: float = 30.0
    traffic_clients: int = 16


#: For a machine without a GPU: whether everything works.
SMALL = Plan(
    transfer_bytes=4 << 20,
    tensors=(1, 16),
    rounds=3,
    scratch_elements=1 << 18,
    cold_bytes=(1 << 20, 8 << 20),
    turns_bytes=4 << 20,
    turns_seconds=0.5,
    matrix=64,
    traffic_models=10,
    traffic_bytes=1 << 20,
    traffic_budget=0.35,
    traffic_seconds=0.5,
    traffic_clients=4,
)


@dataclass
class Results:
    machine: dict[str, str]
    rates: list[Rate] = field(default_factory=list)
    scratch: Scratch | None = None
    products: list[numerics.Product] = field(default_factory=list)
    cold: list[Cold] = field(default_factory=list)
    turns: list[Turns] = field(default_factory=list)
    traffic: Traffic | None = None
    #: The violations of what must hold on any machine.
    wrong: list[str] = field(default_factory=list)

    def rate(self, way: str, tensors: int) -> float:
        return next(r.median for r in self.rates if (r.way, r.tensors) == (way, tensors))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}; default: all")
    parser.add_argument(
        "--small", action="store_true", help="only see whether it works; always so without a GPU"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench/gpu.json"))
    parser.add_argument("--directory", type=Path, help="for bundles: files with holes; default: temporary")
    parser.add_argument(
        "--numerics", choices=("auto", "f32", "tf32"), default="auto", help="as runtime.numerics"
    )
    parser.add_argument("--traffic-models", type=int)
    parser.add_argument("--traffic-bytes", type=int)
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")

    # As in the runtime's own process.
    sys.setswitchinterval(0.0005)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rsrv-gpu-", dir=options.directory) as directory:
        os.environ["RSRV_RUNTIME_DIR"] = str(Path(directory, "runtime"))
        device = JaxDevice(
            cache_dir=Path(directory, "cache"),
            numerics=options.numerics,
        )
        on_gpu = jax.devices()[0].platform != "cpu"
        plan = Plan() if on_gpu and not options.small else SMALL
        chosen = {key: getattr(options, key) for key in ("traffic_models", "traffic_bytes")}
        plan = replace(plan, **{key: value for key, value in chosen.items() if value is not None})
        results = Results(transfer.describe() | {"numerics": options.numerics})
        measure(device, plan, parts, Path(directory), results)
        if results.products:
            results.wrong += numerics.check(device, options.numerics, results.products)
    check(results, device, on_gpu)
    targets = make_targets(results, plan) if on_gpu else []

    print(f"\n{results.machine}, {time.perf_counter() - started:.0f} s")
    if targets:
        print("\n" + targets_table(targets))
    for line in results.wrong:
        print(f"WRONG: {line}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "plan": asdict(plan),
        **asdict(results),
        "targets": [asdict(t) | {"reached": t.reached} for t in targets],
    }
    options.out.write_text(json.dumps(document, indent=1))
    return 1 if results.wrong else 0


def measure(device: JaxDevice, plan: Plan, parts: Sequence[str], directory: Path, results: Results) -> None:
    """Fill in the results, and print each table when it is complete."""
    # First of all, because the allocator's peak never falls.
    results.scratch = transfer.measure_scratch(device, plan.scratch_elements)
    print(f"one execution's scratch: {results.scratch.said} bytes by analysis, {results.scratch.seen} seen\n")
    for tensors in plan.tensors:
        results.rates += transfer.measure(device, plan.transfer_bytes, tensors, plan.rounds)
    print(rates_table(results.rates), "\n", flush=True)
    limit = results.rate(LIMIT, plan.tensors[0])
    if "numerics" in parts:
        results.products = numerics.measure(device)
        print(products_table(results.products), "\n", flush=True)
    if "cold" in parts:
        results.cold = measure_cold(device, directory, plan.cold_bytes, plan.rounds, limit)
        print(cold_table(results.cold), "\n", flush=True)
    if "turns" in parts:
        transfer_s = plan.turns_bytes / limit
        shape = Shape(plan.turns_bytes, steps=steps_for(transfer_s, plan.matrix), matrix=plan.matrix)
        for models, fit in ((2, 1), (3, 2)):
            results.turns.append(
                measure_turns(device, directory, shape, models, fit, plan.turns_seconds, limit)
            )
        print(turns_table(results.turns), "\n", flush=True)
    if "traffic" in parts:
        results.traffic = measure_traffic(
            device,
            directory,
            Shape(plan.traffic_bytes),
            plan.traffic_models,
            int(plan.traffic_models * plan.traffic_bytes * plan.traffic_budget),
            plan.traffic_seconds,
            plan.traffic_clients,
        )
        print(traffic_table(results.traffic), "\n", flush=True)


def check(results: Results, device: JaxDevice, on_gpu: bool) -> None:
    """Check what must hold on any machine. The measurements themselves have checked the answers."""
    wrong = results.wrong
    if left := [array.shape for array in jax.live_arrays() if array.size > 1024]:
        wrong.append(f"arrays are left on the device: {left[:5]}")
    if on_gpu:
        for tensors in sorted({rate.tensors for rate in results.rates}):
            locked, limit = results.rate(LOCKED, tensors), results.rate(LIMIT, tensors)
            if locked < limit / 2:
                wrong.append(
                    f"page-locked memory in {tensors} tensors moves at {locked / 1e9:.1f} of {limit / 1e9:.1f} GB/s: "
                    "somebody copies it on the way"
                )
        if device.memory_limit is None:
            wrong.append("the device does not say how much memory it has")
    scratch = results.scratch
    if scratch is not None and scratch.seen is not None:
        low, high = 0.5 * scratch.said, 1.1 * scratch.said + (4 << 20)
        if not low <= scratch.seen <= high:
            wrong.append(
                f"an execution took {scratch.seen} bytes beside its weights, the analysis says {scratch.said}"
            )
    for cold in results.cold:
        if cold.nbytes >= 100_000_000 and cold.cold_s < cold.warm_s:
            wrong.append(f"{cold.nbytes} bytes: evicted weights answer faster than present ones")
    traffic = results.traffic
    if traffic is not None and not 0 < traffic.hit_rate < 1:
        wrong.append(f"a hit rate of {traffic.hit_rate}: nothing was loaded, or everything always")


def make_targets(results: Results, plan: Plan) -> list[Target]:
    """Return the targets for a GPU, which are reported and not required."""
    targets = []
    for tensors in plan.tensors:
        limit = results.rate(LIMIT, tensors)
        for way in (LOCKED, BUSY, LIMIT_BUSY):
            share = results.rate(way, tensors) / limit
            targets.append(Target(f"{way}, {tensors} tensors / limit", share, 0.9, at_least=True))
    targets += [
        Target(f"cold, {c.nbytes / 1e9:g} GB: floor / added", c.efficiency, 0.85, at_least=True)
        for c in results.cold
    ]
    targets += [
        Target(
            f"turns of {t.models}, {t.fit} fit / {'overlapped' if t.fit > 1 else 'serial'}",
            t.calls_per_s / (t.overlapped if t.fit > 1 else t.serial),
            0.9,
            at_least=True,
        )
        for t in results.turns
    ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
