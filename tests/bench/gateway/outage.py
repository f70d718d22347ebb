"""The death of one of two workers under load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.crowd import OK, Requests, asking
from tests.bench.figures import Target
from tests.bench.gateway import workers
from tests.bench.gateway.stage import Gateway, gateway, write_workers
from tests.bench.gateway.workers import Worker
from tests.bench.load import BenchFailed
from tests.bench.phases import say
from tests.bench.places import WORK
from tests.bench.report import table

CLIENTS = 16
_MODELS = 4
#: Seconds of load before the worker's death, and after it.
BEFORE_S, AFTER_S = 2.0, 4.0
#: A request is harmed by the death if it takes longer than this multiple of the 99th percentile before the death.
_HARMED = 3

Part = tuple[list[str], list[Target], dict[str, Any]]


@dataclass(frozen=True)
class Outage:
    """The outcomes of the requests around a worker's death."""

    round: int
    #: Number of requests in flight when the worker died, on the two workers together.
    under_way: int
    #: Number of failed requests that began before the death. They may have been on the dead worker.
    failed: int
    #: Number of failed requests that began after the death. They cannot have been on the dead worker.
    failed_later: int
    wrong: int
    #: Answers per second before the death.
    before_per_s: float
    #: Answers per second after the death.
    after_per_s: float
    #: 99th percentile of the latency before the death.
    before_p99_ms: float
    #: 99th percentile of the latency after the death.
    after_p99_ms: float
    #: Milliseconds from the kill to the end of the last failed or harmed request.
    harm_ms: float


def judge(number: int, requests: Requests, killing: float, killed: float, end: float) -> Outage:
    """Judge the outage.

    Times: `killing` is just before the kill, `killed` is after the worker's death, and `end` is the end of the load.
    """
    before = requests.between(killing - BEFORE_S, killing)
    after = requests.between(killed, end)
    bad = requests.code != OK
    harmed = (requests.ended - requests.began) * 1e3 > _HARMED * before.p99_ms()
    late = requests.ended[(bad | harmed) & (requests.ended > killing)]
    return Outage(
        round=number,
        under_way=int(((requests.began <= killed) & (requests.ended >= killing)).sum()),
        failed=int((bad & (requests.began <= killed)).sum()),
        failed_later=int((bad & (requests.began > killed)).sum()),
        wrong=requests.wrong,
        before_per_s=len(before.code) / BEFORE_S,
        after_per_s=len(after.code) / (end - killed),
        before_p99_ms=before.p99_ms(),
        after_p99_ms=after.p99_ms(),
        harm_ms=max(0.0, float(late.max() - killing) * 1e3) if late.size else 0.0,
    )


def part(rounds: int) -> Part:
    """Measure. Return lines of text, targets, and all figures."""
    repository, questions = workers.repository(_MODELS), workers.questions(_MODELS)
    file = WORK / "gateway-outage.yaml"
    outages = []
    with ExitStack() as stack:
        pair = [stack.enter_context(Worker(name, repository)) for name in ("left", "right")]
        for number in range(rounds):
            # A worker that was started again has a new address of its control service.
            write_workers(file, [worker.entry() for worker in pair])
            with gateway(file) as running:
                running.wait_alive({worker.name for worker in pair})
                outages.append(strike(running, pair[number % 2], questions, number))
            say(_told(outages[-1]))
            pair[number % 2].start()
    return _lines(outages), _targets(outages), {"outages": [asdict(outage) for outage in outages]}


def strike(running: Gateway, victim: Worker, questions: Path, number: int) -> Outage:
    """Kill a worker under load, and judge the outage. Raises BenchFailed if an answer was wrong."""
    seconds = BEFORE_S + AFTER_S
    with asking(running.url, questions, clients=CLIENTS, seconds=seconds, turn_s=seconds) as load:
        time.sleep(BEFORE_S)
        killing = time.monotonic()
        victim.kill()
        killed = time.monotonic()
    assert load.requests is not None
    outage = judge(number, load.requests, killing, killed, killed + AFTER_S)
    if outage.wrong:
        raise BenchFailed(f"{outage.wrong} answers were wrong")
    return outage


def _told(outage: Outage) -> str:
    return (
        f"{outage.under_way} under way, {outage.failed} of them failed, {outage.failed_later} later ones;"
        f" {outage.wrong} wrong; harmed for {outage.harm_ms:.0f} ms"
    )


def _lines(outages: Sequence[Outage]) -> list[str]:
    headers = ["round", "under way", "failed", "failed later", "wrong", "harmed ms"]
    headers += ["answers/s before", "after", "p99 ms before", "after"]
    rows = []
    for outage in outages:
        row = [outage.round + 1, outage.under_way, outage.failed, outage.failed_later, outage.wrong]
        rest = [
            outage.harm_ms,
            outage.before_per_s,
            outage.after_per_s,
            outage.before_p99_ms,
            outage.after_p99_ms,
        ]
        rows.append([str(cell) for cell in row] + [f"{cell:.0f}" for cell in rest])
    return [f"one of two workers is killed, {CLIENTS} clients", table(headers, rows), ""]


def _targets(outages: Sequence[Outage]) -> list[Target]:
    failed = max((outage.failed + outage.failed_later) / outage.under_way for outage in outages)
    return [Target("failed of those under way, at most", failed, 1.0, at_least=False)]
