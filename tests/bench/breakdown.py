"""`python -m tests.bench profile`: rsrv's CPU time at 1 and at 64 clients, thread by thread."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.bench import models
from tests.bench.load import Side, load
from tests.bench.phases import served
from tests.bench.processes import CLIENT, RUNTIME, SERVER, STUB, ThreadTime, server_processes, threads
from tests.bench.report import table
from tests.bench.status import model_status
from tests.status import read_status

#: Microseconds of CPU time per request. Threads with less CPU time are added up in one line.
_LEAST_US = 4.0
_FUNCTIONS = 20


def show(window_s: float) -> None:
    """Print a table for each number of clients. If py-spy is installed, also print the functions that use most CPU time."""
    with served("profile", models.rsrv_repository(1), has_runtime=True) as side:
        for clients in (1, 64):
            print(f"\n== {clients} clients", flush=True)
            _threads(side, clients, window_s)
            if (spy := _py_spy()) is not None:
                _functions(side, clients, window_s, spy)
        if _py_spy() is None:
            print("\npy-spy is not installed: no functions are shown")


def _threads(side: Side, clients: int, window_s: float) -> None:
    processes = server_processes(side.server.pid, has_runtime=True)
    with load(side, models.MLP, clients, window_s) as running:
        processes[running.process.pid] = CLIENT
        before = {pid: threads(pid) for pid in processes}
        counts = model_status(read_status(side.server.pid), models.MLP)
        time.sleep(2.5 * window_s)
        after = {pid: threads(pid) for pid in processes}
        counts = model_status(read_status(side.server.pid), models.MLP).since(counts)
    requests = max(1, counts.rows)
    rows: list[list[str]] = []
    for role in (CLIENT, SERVER, STUB, RUNTIME):
        for pid in (pid for pid, of in processes.items() if of == role):
            rows += _thread_rows(role, pid, before[pid], after[pid], requests)
    print(table(["process", "thread", "CPU us", "waited for a CPU us", "sleeps"], rows))
    print(
        f"each per request, of {requests} requests; {counts.rows / max(1, counts.dispatches):.1f} rows and"
        f" {counts.device_seconds / max(1, counts.dispatches) * 1e6:.0f} us on the device an execution;"
        f" p50 {running.report['p50 latency']:.0f} us, {running.report['Inferences/Second']:.0f}/s"
    )


def _thread_rows(
    role: str, pid: int, before: Mapping[int, ThreadTime], after: Mapping[int, ThreadTime], requests: int
) -> list[list[str]]:
    """Return a line for all threads together, one for each busy thread, and one for the other threads."""
    busy: list[tuple[_Figures, str]] = []
    total, rest, small = _Figures(), _Figures(), 0
    for tid, end in after.items():
        start = before.get(tid, ThreadTime(end.name, 0.0, 0.0, 0))
        figures = _Figures(
            (end.running - start.running) / requests * 1e6,
            (end.waiting - start.waiting) / requests * 1e6,
            (end.sleeps - start.sleeps) / requests,
        )
        total = total.plus(figures)
        if figures.cpu >= _LEAST_US:
            busy.append((figures, "main thread" if tid == pid else f"{end.name} {tid}"))
        else:
            rest, small = rest.plus(figures), small + 1
    lines = [_cells(role, f"all {len(after)} threads", total)]
    lines += [_cells("", name, figures) for figures, name in sorted(busy, reverse=True)]
    return [*lines, _cells("", f"{small} others", rest)]


class _Figures(NamedTuple):
    """Figures of a request: microseconds on a CPU, microseconds of waiting for a CPU, and number of sleeps."""

    cpu: float = 0.0
    waited: float = 0.0
    sleeps: float = 0.0

    def plus(self, other: _Figures) -> _Figures:
        return _Figures(self.cpu + other.cpu, self.waited + other.waited, self.sleeps + other.sleeps)


def _cells(role: str, name: str, figures: _Figures) -> list[str]:
    return [role, name, f"{figures.cpu:.1f}", f"{figures.waited:.1f}", f"{figures.sleeps:.2f}"]


def _py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _functions(side: Side, clients: int, window_s: float, spy: str) -> None:
    """Sample stub and runtime one after the other, and print the functions that used the CPU."""
    for pid, role in server_processes(side.server.pid, has_runtime=True).items():
        if role not in (STUB, RUNTIME):
            continue
        with tempfile.TemporaryDirectory() as folder, load(side, models.MLP, clients, window_s):
            stacks = Path(folder, "stacks")
            seconds = str(max(1, round(2 * window_s)))
            command = [spy, "record", "--pid", str(pid), "--duration", seconds, "--rate", "500", "--gil"]
            done = subprocess.run(
                [*command, "--format", "raw", "--output", str(stacks)],
                text=True,
                capture_output=True,
                check=False,
            )
            if done.returncode != 0:
                print(f"py-spy on {role}: {done.stderr.strip()}")
                continue
            own, below = _count(stacks.read_text())
        total = max(1, sum(own.values()))
        print(f"\n{role}: functions that held the interpreter, by samples, of {total}")
        rows = [
            [name, f"{n / total:.1%}", f"{below[name] / total:.1%}"]
            for name, n in own.most_common(_FUNCTIONS)
        ]
        print(table(["function", "itself", "with what it calls"], rows))


def _count(stacks: str) -> tuple[Counter[str], Counter[str]]:
    """Count samples by function: with the function at the top of the stack, and with the function anywhere in it."""
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        # A frame is "function (file:line)". Without the line, all samples of a function are counted together.
        names = [frame.rpartition(":")[0] + ")" if ":" in frame else frame for frame in frames.split(";")]
        names = [name or "(the process's own code, not Python)" for name in names]
        own[names[-1]] += int(count)
        for name in set(names):
            below[name] += int(count)
    return own, below
