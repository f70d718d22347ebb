"""`make bench-devices`: compare a server with two devices with a server that has one device.

Run from the project's root: python -m tests.bench.devices

Two CPU devices represent two GPUs. For the latency, one client asks the servers alternately, so that other work on the machine
affects both. For the throughput, 16 clients send requests. An execution has one request, and sleeps until it has lasted 8 ms.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.bench import models
from tests.bench.load import Side, asking, in_turns
from tests.bench.phases import EXECUTION_MS, say, served
from tests.bench.places import WORK, paced
from tests.bench.processes import STUB, memory, server_processes
from tests.bench.verify import verify
from tests.status import read_status

#: For the latency: number of requests to each server. For the throughput: number of rounds, seconds of a window, number of
#: clients.
REQUESTS, ROUNDS, WINDOW_S, CLIENTS = 4000, 5, 3.0, 16
SIDES = {"one": "[cpu]", "two": "[cpu, cpu]"}
CASE = replace(models.mlp_case(models.MLP), most_rows=1)
_SHARED = Path(f"/dev/shm/rsrv-weights-u{os.getuid()}")


def main() -> int:
    """Measure, and print the figures."""
    WORK.mkdir(parents=True, exist_ok=True)
    mlp = models.ensure_bundle(models.MLP, models._export_mlp)
    with both("devices", [mlp], "", {}) as sides:
        times = in_turns({side.name: asking(side, models.MLP) for side in sides}, REQUESTS)
        one, two = (statistics.median(each) * 1e6 for each in times.values())
        say(f"p50, one client: {one:.0f} us with one device, {two:.0f} us with two: {two / one:.3f}")
        for side in sides:
            say(f"{side.name}: {footprint(side)}")
    with both(
        "devices-paced", [mlp], f"models: {{{models.MLP}: {{max_batch_size: 1}}}}\n", paced(EXECUTION_MS)
    ) as sides:
        one, two = (statistics.median(each) for each in throughput(sides))
        say(
            f"executions of {EXECUTION_MS:.0f} ms: {one:.0f}/s with one device, {two:.0f}/s with two: {two / one:.2f}"
        )
    return 0


@contextlib.contextmanager
def both(name: str, bundles: list[Path], settings: str, env: dict[str, str]) -> Iterator[list[Side]]:
    """Start a server with one device and a server with two, and yield both."""
    with contextlib.ExitStack() as servers:
        sides = []
        for side, devices in SIDES.items():
            text = f"{settings}runtime: {{devices: {devices}}}\nmetrics: {{listen: null}}\n"
            repository = models.generate(f"{name}-{side}", bundles, text)
            sides.append(
                servers.enter_context(served(f"{name}-{side}", repository, has_runtime=True, env=env))
            )
            say(f"{side}: {verify(sides[-1].server.grpc_url, CASE)} answers right")
        yield sides


def throughput(sides: list[Side]) -> list[list[float]]:
    """Return each server's answers per second in each round."""
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(ROUNDS):
        for index, side in enumerate(sides):
            rates[index].append(answers_per_s(side))
        say(f"[{number + 1}/{ROUNDS}] " + ", ".join(f"{each[-1]:.0f}/s" for each in rates))
    return rates


def answers_per_s(side: Side) -> float:
    """Return the answers per second to all clients in one window. It begins after a second of warm-up."""
    began = time.monotonic() + 1
    counts = [0] * CLIENTS

    def work(client: int) -> None:
        ask = asking(side, models.MLP)
        while (now := time.monotonic()) < began + WINDOW_S:
            ask()
            counts[client] += now >= began

    threads = [threading.Thread(target=work, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / WINDOW_S


def footprint(side: Side) -> str:
    """Return a line with the number of stubs, their memory, and the bytes of weights on the host."""
    processes = server_processes(side.server.pid, has_runtime=True)
    stubs = [pid for pid, role in processes.items() if role is STUB]
    count = 2 if side.name.endswith("two") else 1
    held = [read_status(side.server.pid, str(device))["host"] for device in range(count)]
    physical = [int(status["physical_bytes"]) for status in held]
    return (
        f"{len(stubs)} stub, {sum(memory(pid).uss for pid in stubs):.0f} MB of its own; weights on the host "
        f"{' + '.join(f'{each / 1e3:.0f}' for each in physical)} kB by runtime, of which {_shared() / 1e3:.0f} kB are one shared copy"
    )


def _shared() -> int:
    return sum(path.stat().st_size for path in _SHARED.iterdir()) if _SHARED.is_dir() else 0


if __name__ == "__main__":
    sys.exit(main())
