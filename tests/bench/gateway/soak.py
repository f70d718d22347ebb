"""`make bench-gateway.soak`: workers join, leave, stop and die under load for ten minutes. See docs/gateway.md.

Run from the project's root: python -m tests.bench.gateway.soak
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from local_triton import ServerFailed
from tests.bench.crowd import OK, WRONG, Requests, asking
from tests.bench.gateway import workers
from tests.bench.gateway.stage import Gateway, gateway, write_workers
from tests.bench.gateway.workers import Worker
from tests.bench.load import BenchFailed
from tests.bench.phases import say
from tests.bench.places import WORK
from tests.bench.processes import cpu_seconds, memory
from tests.bench.report import table

RESULT = WORK / "gateway-soak.json"
#: Events of a worker. JOIN: the worker starts, and is added to the workers file when it is ready. LEAVE: the worker is removed
#: from the workers file, and stopped with SIGTERM when it has no more requests. STOP, KILL: the worker is stopped with SIGTERM
#: or SIGKILL while the workers file still lists it.
JOIN, LEAVE, STOP, KILL = "join", "leave", "stop", "kill"
_MODELS = 8
#: Number of models whose weights fit on one worker.
_FITTING = 4
_NAMES = ("ann", "bob", "cat")
#: A policy that repacks so often that models move.
_POLICY = {"rebalance_device_s": 2.0, "first_rebalance_device_s": 0.2, "hysteresis": 0.05}


@dataclass(frozen=True)
class Plan:
    seconds: float = 600.0
    clients: int = 8
    #: Seconds between an answer and the next request of the same client. The pause leaves CPU time for workers that start.
    rest_s: float = 0.01
    #: Seconds between two events.
    pause_s: float = 8.0
    #: Seconds for which one model is the most popular.
    turn_s: float = 20.0
    seed: int = 1


QUICK = Plan(seconds=40.0, pause_s=1.0, turn_s=5.0)


@dataclass(frozen=True)
class Held:
    """Resources that the gateway holds at a moment."""

    at: float
    #: Unique memory (USS) in units of 10^6 bytes.
    megabytes: float
    files: int
    #: CPU seconds that the gateway has used so far.
    cpu_s: float

    @classmethod
    def now(cls, gateway: Gateway) -> Held:
        pid = gateway.process.pid
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(time.monotonic(), memory(pid).uss, files, cpu_seconds(pid))


@dataclass
class Course:
    """The events and the figures of the run."""

    begin: float
    held: list[Held] = field(default_factory=list)
    #: (time, event, worker)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    #: Number of observed moves of a model to another worker.
    moves: int = 0
    repacks: Mapping[str, int] = field(default_factory=dict)
    end: float = 0.0


@dataclass(frozen=True)
class Soak:
    plan: Plan
    course: Course
    requests: Requests


def soak(plan: Plan) -> Soak:
    """Run the soak. Raises BenchFailed or ServerFailed."""
    repository, questions = workers.repository(_MODELS), workers.questions(_MODELS)
    file = WORK / "gateway-soak.yaml"
    env = {"RSRV_RUNTIME__WEIGHT_BUDGET_BYTES": str(_FITTING * workers.MODEL_BYTES)}
    with ExitStack() as stack:
        everyone = [Worker(name, repository, env) for name in _NAMES]
        for worker in everyone:
            stack.enter_context(worker)
        write_workers(file, [worker.entry() for worker in everyone])
        running = stack.enter_context(gateway(file, mode="lpt_packing"))
        running.set_policy(**_POLICY)
        running.wait_alive(set(_NAMES))
        with asking(
            running.url,
            questions,
            clients=plan.clients,
            seconds=plan.seconds,
            turn_s=plan.turn_s,
            pause_s=plan.rest_s,
        ) as load:
            course = _Director(plan, running, everyone, file).run()
        assert load.requests is not None
    return Soak(plan, course, load.requests)


class _Director:
    """Starts and ends workers."""

    def __init__(self, plan: Plan, running: Gateway, everyone: Sequence[Worker], file: Path) -> None:
        self._plan = plan
        self._gateway = running
        self._everyone = everyone
        self._file = file
        self._listed = [worker for worker in everyone if worker.running]
        self._random = random.Random(plan.seed)
        self._placed: dict[str, tuple[str, ...]] = {}
        self._course = Course(time.monotonic())

    def run(self) -> Course:
        """Start and end workers for the planned time, and return the events. The load runs a little longer."""
        course = self._course
        end = course.begin + self._plan.seconds
        self._sample()
        endings = self._endings()
        while time.monotonic() < end - self._plan.pause_s:
            self._watch(min(time.monotonic() + self._plan.pause_s, end))
            gone = [worker for worker in self._everyone if not worker.running]
            if gone:
                self._join(self._random.choice(gone))
            else:
                self._end(next(endings), self._random.choice(self._everyone))
            self._sample()
        course.end = time.monotonic()
        course.repacks = dict(self._gateway.status().repacks.counts)
        return course

    def _endings(self) -> Any:
        """Yield LEAVE, STOP and KILL in random order, then again in another order, without end."""
        while True:
            yield from self._random.sample((LEAVE, STOP, KILL), 3)

    def _join(self, worker: Worker) -> None:
        self._note(JOIN, worker)
        worker.start()
        if worker not in self._listed:
            self._listed.append(worker)
        self._write()
        self._gateway.wait_alive({worker.name for worker in self._listed})

    def _end(self, how: str, worker: Worker) -> None:
        self._note(how, worker)
        if how == LEAVE:
            self._listed.remove(worker)
            self._write()
            self._until_idle(worker)
        if how == KILL:
            worker.kill()
        else:
            worker.terminate()
        self._gateway.wait_alive({other.name for other in self._listed if other.running})

    def _write(self) -> None:
        write_workers(self._file, [worker.entry() for worker in self._listed])

    def _until_idle(self, worker: Worker) -> None:
        """Wait until the gateway has dropped the worker, and then for the runtime's last answers."""
        self._gateway.wait_alive({other.name for other in self._listed})
        time.sleep(1.0)

    def _note(self, what: str, worker: Worker) -> None:
        since = time.monotonic() - self._course.begin
        self._course.events.append((since, what, worker.name))
        say(f"{since:6.1f} s: {what} {worker.name}")

    def _watch(self, until: float) -> None:
        """Count moves until this time."""
        while True:
            self._count_moves()
            remaining = until - time.monotonic()
            if remaining <= 0:
                return
            time.sleep(min(0.5, remaining))

    def _count_moves(self) -> None:
        for model in self._gateway.status().models:
            placed = tuple(model.placed)
            self._course.moves += self._placed.get(model.name, placed) != placed
            self._placed[model.name] = placed

    def _sample(self) -> None:
        self._count_moves()
        self._course.held.append(Held.now(self._gateway))


def report(outcome: Soak) -> list[str]:
    """Return lines of text for people."""
    requests, course = outcome.requests, outcome.course
    failed = requests.failed()
    lasted = course.end - course.begin
    first, last = course.held[0], course.held[-1]
    events = Counter(what for _, what, _ in course.events)
    return [
        f"{lasted:.0f} s, {len(requests.code)} requests, {len(requests.code) / lasted:.0f}/s",
        f"failed: {sum(failed.values())}{''.join(f', {code} {n}' for code, n in sorted(failed.items()))}",
        *(f"  after {what}: {code} {n}" for (what, code), n in sorted(blame(requests, course).items())),
        f"wrong: {requests.wrong}",
        "events: " + ", ".join(f"{what} {events[what]}" for what in (JOIN, LEAVE, STOP, KILL)),
        f"moves: {course.moves}; packed: "
        + ", ".join(f"{why} {n}" for why, n in sorted(course.repacks.items())),
        f"held at first: {first.megabytes:.1f} MB, {first.files} open files",
        f"in the end:    {last.megabytes:.1f} MB, {last.files} open files",
        _minutes(requests, course),
    ]


def blame(requests: Requests, course: Course) -> Counter[tuple[str, str]]:
    """Return the number of failures by the kind of the last event before the failure, and by code."""
    starts = [course.begin + since for since, _, _ in course.events]
    blamed: Counter[tuple[str, str]] = Counter()
    for end, code in zip(requests.ended, requests.code, strict=True):
        if code not in (OK, WRONG):
            last = bisect_right(starts, end) - 1
            blamed[course.events[last][1] if last >= 0 else "the start", str(code)] += 1
    return blamed


def _minutes(requests: Requests, course: Course) -> str:
    rows = []
    times = [held.at for held in course.held]
    for minute in range(max(1, round((course.end - course.begin) / 60))):
        begin = course.begin + 60 * minute
        end = min(begin + 60, course.end)
        part = requests.between(begin, end)
        cpu = np.interp([begin, end], times, [held.cpu_s for held in course.held])
        rows.append(
            [
                f"{minute + 1}",
                str(len(part.code)),
                str(sum(part.failed().values())),
                f"{part.p99_ms():.1f}",
                f"{float((part.ended - part.began).max(initial=0.0) * 1e3):.0f}",
                f"{float(cpu[1] - cpu[0]) / max(1, len(part.code)) * 1e6:.0f}",
                f"{np.interp(end, times, [held.megabytes for held in course.held]):.1f}",
            ]
        )
    headers = ["minute", "requests", "failed", "p99 ms", "longest ms", "gateway us", "gateway MB"]
    return table(headers, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak. Return 0 if it completed and no answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, metavar="S", help=f"({Plan().seconds:.0f})")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.seconds:.0f} s")
    options = parser.parse_args(argv)
    usual = QUICK if options.quick else Plan()
    plan = Plan(
        seconds=options.seconds or usual.seconds,
        pause_s=usual.pause_s,
        turn_s=usual.turn_s,
        seed=options.seed,
    )
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        outcome = soak(plan)
    except (BenchFailed, ServerFailed, RuntimeError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    lines = report(outcome)
    failed = dict(outcome.requests.failed())
    result = {"plan": asdict(plan), "course": asdict(outcome.course), "failed": failed}
    RESULT.write_text(
        json.dumps({**result, "requests": len(outcome.requests.code), "report": lines}, indent=1)
    )
    print("", *lines, sep="\n")
    return 1 if outcome.requests.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
