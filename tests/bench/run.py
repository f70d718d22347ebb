"""The command line: measure, print the results, and write build/bench/result.json."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from local_triton import ServerFailed
from rsrv.triton_install import InstallError
from tests.bench import breakdown, decisions, metas, phases, report
from tests.bench.figures import Rounds, Target, per_added_model
from tests.bench.load import BenchFailed
from tests.bench.phases import BUSY_CLIENTS, BUSY_SIDES, CLIENTS, NATIVE, PLAIN, RSRV, Footprint, say
from tests.bench.places import RESULT, ROOT, WORK

#: Parts that take seven minutes together.
USUAL = ("memory", "throughput", "busy", "decisions")
PARTS = (*USUAL, "metas")


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rounds: int
    #: Seconds of a window. A sample takes three windows.
    window_s: float
    #: Number of models on the larger server whose memory is measured.
    models: int = 32


QUICK = Plan(rounds=1, window_s=0.3, models=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status, which is 0 if everything could be measured, even if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("verb", nargs="?", choices=("run", "profile"), default="run")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (%(default)s)")
    parser.add_argument(
        "--window",
        type=float,
        default=1.0,
        help="seconds of one of the three windows of a sample (%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of short windows, only to see that everything works"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=USUAL, help="default: all but metas")
    options = parser.parse_args(argv)
    WORK.mkdir(parents=True, exist_ok=True)
    plan = QUICK if options.quick else Plan(options.rounds, options.window)
    try:
        if options.verb == "profile":
            breakdown.show(plan.window_s)
        else:
            run(plan, options.parts)
    except (BenchFailed, ServerFailed, InstallError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def run(plan: Plan, parts: Sequence[str]) -> None:
    """Measure the parts, print the results, and write them to the file."""
    started = time.monotonic()
    result: dict[str, Any] = {"environment": environment(), "plan": asdict(plan)}
    text: list[str] = []
    targets: list[Target] = []
    for part, measure in (
        ("memory", _memory),
        ("throughput", _throughput),
        ("busy", _busy),
        ("decisions", _decisions),
        ("metas", _metas),
    ):
        if part in parts:
            say(f"== {part}")
            lines, part_targets, raw = measure(plan)
            text += [f"\n== {part}", *lines]
            targets += part_targets
            result[part] = raw
    result["targets"] = [{**asdict(t), "reached": t.reached, "verdict": t.verdict()} for t in targets]
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(text), f"\n== targets\n{report.targets_table(targets)}", sep="\n")
    if result.keys() >= {"memory", "throughput"} and plan is not QUICK:
        print("\n== figures of README.md", readme_table(result["memory"], result["throughput"]), sep="\n")
    print(f"\n{time.monotonic() - started:.0f} s; all samples are in {RESULT.relative_to(ROOT)}")


def readme_table(memory: Mapping[str, Any], throughput: Mapping[str, Any]) -> str:
    """Return README.md's table of this benchmark, from the results of two parts."""
    sides = {PLAIN: "Python backend", RSRV: "rsrv", NATIVE: "rsrv, native front"}
    rows = [
        [
            "host memory of one more tiny model, MB",
            *(f"{memory['added_mb'][side]['uss']:.1f}" for side in sides),
        ]
    ]
    for clients in CLIENTS:
        medians = (throughput[key][clients]["infer_per_s"]["median"] for key in ("ratios", "native"))
        rows.append(
            [
                f"requests/s, ratio, number of clients: {clients}",
                "1",
                *(f"{median:.2f}" for median in medians),
            ]
        )
    return report.table(["", *sides.values()], rows)


Part = tuple[list[str], list[Target], dict[str, Any]]


def _throughput(plan: Plan) -> Part:
    samples = phases.throughput(plan.rounds, plan.window_s)
    rounds = Rounds.of(samples)
    cases = [(side, clients) for clients in CLIENTS for side in (RSRV, NATIVE, PLAIN)]
    lines = [report.load_table(rounds, cases), report.sizes_lines(rounds, cases)]
    by_side: dict[str, dict[int, Any]] = {RSRV: {}, NATIVE: {}}
    for clients, side in itertools.product(CLIENTS, by_side):
        rate = rounds.ratio(side, PLAIN, clients, lambda sample: sample.infer_per_s)
        p50 = rounds.ratio(side, PLAIN, clients, lambda sample: sample.p50_us)
        p99 = rounds.ratio(side, PLAIN, clients, lambda sample: sample.p99_us)
        by_side[side][clients] = {"infer_per_s": asdict(rate), "p50": asdict(p50), "p99": asdict(p99)}
        lines.append(
            f"{side} / plain at {clients} clients: infer/s {report.spread_text(rate)},"
            f" p50 {report.spread_text(p50)}, p99 {report.spread_text(p99)}"
        )
    ratios = by_side[RSRV]
    lines.append(report.rounds_line(rounds))
    targets = [
        Target(
            "infer/s at 64 clients, rsrv / plain", ratios[64]["infer_per_s"]["median"], 0.9, at_least=True
        ),
        Target("p50 at 1 client, rsrv / plain", ratios[1]["p50"]["median"], 1.6, at_least=False),
    ]
    return (
        lines,
        targets,
        {"samples": [asdict(sample) for sample in samples], "ratios": ratios, "native": by_side[NATIVE]},
    )


def _memory(plan: Plan) -> Part:
    footprints = phases.footprints(plan.models)
    by_case = {(each.side, each.models): each for each in footprints}
    headers = ["", "models", "ready s"]
    headers += [f"{role} {kind}" for role in report.ROLES[:3] for kind in ("USS", "PSS")]
    headers += ["all USS", "all PSS", "shared"]
    lines = [
        "MB; stubs together; shared: regions in shared memory",
        report.table(headers, [*map(_row, footprints)]),
    ]
    added = {}
    for side in (RSRV, NATIVE, PLAIN):
        one, two, many = (by_case[side, count] for count in (1, 2, plan.models))
        added[side] = {
            # Compare with two models, not with one. In a server's only stub, the pages of library files are unique and count as
            # USS. With a second stub, the stubs share these pages.
            "uss": per_added_model(two.total.uss, many.total.uss, plan.models - 2),
            "uss from the first": per_added_model(one.total.uss, many.total.uss, plan.models - 1),
            "anonymous": per_added_model(one.total.anonymous, many.total.anonymous, plan.models - 1),
            "pss": per_added_model(one.total.pss, many.total.pss, plan.models - 1),
            "shared": per_added_model(one.shared, many.shared, plan.models - 1),
        }
        figures = ", ".join(f"{name} {value:.1f} MB" for name, value in added[side].items())
        lines.append(f"each added model of {side}: {figures}")
    ratios = {kind: added[RSRV][kind] / added[PLAIN][kind] for kind in added[RSRV]}
    lines.append("rsrv / plain: " + ", ".join(f"{kind} {value:.2f}" for kind, value in ratios.items()))
    targets = [Target("USS per added model, rsrv / plain", ratios["uss"], 0.35, at_least=False)]
    return lines, targets, {"footprints": [each.as_json() for each in footprints], "added_mb": added}


def _row(footprint: Footprint) -> list[str]:
    row = [footprint.side, str(footprint.models), f"{footprint.ready_s:.1f}"]
    for role in report.ROLES[:3]:
        held = footprint.by_role.get(role)
        row += [f"{held.uss:.0f}", f"{held.pss:.0f}"] if held else ["-", "-"]
    return [*row, f"{footprint.total.uss:.0f}", f"{footprint.total.pss:.0f}", f"{footprint.shared:.1f}"]


def _busy(plan: Plan) -> Part:
    samples = phases.busy(plan.rounds, plan.window_s)
    rounds = Rounds.of(samples)
    setting = f"{phases.EXECUTION_MS:.0f} ms an execution, whatever its size; an image of 602 kB a request"
    lines = [
        f"{setting}; {BUSY_CLIENTS} clients",
        report.busy_table(rounds, BUSY_SIDES, BUSY_CLIENTS),
        report.sizes_lines(rounds, [(side, BUSY_CLIENTS) for side in BUSY_SIDES]),
        report.rounds_line(rounds),
    ]
    share = rounds.spread("default", BUSY_CLIENTS, lambda sample: sample.busy or 0.0)
    targets = [Target("busy share of the device", share.median, 0.7, at_least=True)]
    return lines, targets, {"samples": [asdict(sample) for sample in samples]}


def _decisions(plan: Plan) -> Part:
    measured = decisions.measure()
    headers = ["", "models with work", "rows", "median us", "p99 us"]
    rows = [
        [d.discipline, str(d.models), str(d.rows), f"{d.median_us:.1f}", f"{d.p99_us:.1f}"] for d in measured
    ]
    lines = ["an execution ends, its requests are answered, the next is chosen", report.table(headers, rows)]
    targets = [
        Target(
            f"a decision of {d.discipline} among {d.models} models, {d.rows} rows, us",
            d.median_us,
            50.0,
            at_least=False,
        )
        for d in measured
        if d.models == max(decisions.MODELS) and d.rows in (1, max(decisions.ROWS))
    ]
    return lines, targets, {"decisions": [asdict(d) for d in measured]}


def _metas(plan: Plan) -> Part:
    return metas.part(plan.rounds, plan.window_s)


def environment() -> dict[str, object]:
    """Return the conditions of the figures."""
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=False
    ).stdout.strip()
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "numpy": metadata.version("numpy"),
        "revision": revision,
    }
