"""`make bench-aliases`: compare requests by an alias's name with requests by the model's own name.

Run from the project's root: python -m tests.bench.aliases

The benchmark serves two models with the same module and weights. To measure the latency, one client sends requests to the names
in turn. To measure CPU time and throughput, 16 clients send all their requests to one name for two seconds, then to the next
name.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import threading
import time

from tritonclient.utils import InferenceServerException

from rsrv.cli.main import main as rsrv
from tests.bench import models
from tests.bench.figures import Spread
from tests.bench.load import Side, asking, in_turns
from tests.bench.phases import say, served
from tests.bench.places import WORK
from tests.bench.processes import cpu_seconds, server_processes
from tests.bench.report import spread_text, table

#: For the latency: number of requests to each name. For the throughput: number of rounds, seconds of a window, number of clients.
REQUESTS, ROUNDS, WINDOW_S, CLIENTS = 3000, 5, 2.0, 16
OTHER = "other"
SETTINGS = f"""
metrics: {{listen: null}}
aliases:
  one: {models.MLP}
  split: {{{models.MLP}: 95, {OTHER}: 5}}
  halves: {{{models.MLP}: 50, {OTHER}: 50}}
  watched: {{{models.MLP}: 1, {OTHER}: shadow}}
"""
NAMES = (models.MLP, "one", "split", "halves", "watched")
HEADERS = ("by the name", "p50 us, 1 client", f"answers/s, {CLIENTS} clients", "CPU us", "CPU / model's own")


def main() -> int:
    """Measure, and print the figures."""
    WORK.mkdir(parents=True, exist_ok=True)
    mlp = models.ensure_bundle(models.MLP, models._export_mlp)
    other = WORK / "bundles-aliases" / OTHER
    shutil.copytree(mlp, other, dirs_exist_ok=True)
    repository = models.generate("aliases", [mlp, other], SETTINGS)
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    with served("aliases", repository, has_runtime=True, flags=flags) as side:
        # The latency of `watched` is not measured: the shadow's copy of a request still executes when the next request arrives.
        asks = {name: asking(side, name) for name in NAMES if name != "watched"}
        p50_us = {
            name: f"{statistics.median(seconds) * 1e6:.0f}"
            for name, seconds in in_turns(asks, REQUESTS).items()
        }
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
        for number in range(ROUNDS):
            for name in NAMES if number % 2 else reversed(NAMES):
                rates[name].append(under_load(side, name))
        say(table(HEADERS, [row(name, p50_us, rates) for name in NAMES]))
        say(f"changes under load: {changes(side)}")
    return 0


def row(name: str, p50_us: dict[str, str], rates: dict[str, list[tuple[float, float]]]) -> tuple[str, ...]:
    """Return the table's row for one name.

    The last cell is the CPU time per answer, divided by that of the model's own name in the same round.
    """
    rate, cpu = (statistics.median(each) for each in zip(*rates[name], strict=True))
    times = Spread.of(used / own for (_, used), (_, own) in zip(rates[name], rates[models.MLP], strict=True))
    return name, p50_us.get(name, "-"), f"{rate:.0f}", f"{cpu * 1e6:.0f}", spread_text(times)


def under_load(side: Side, name: str) -> tuple[float, float]:
    """Return the answers per second to all clients, and the server's CPU seconds per answer."""
    stop, counts, failures = threading.Event(), [0] * CLIENTS, list[str]()
    threads = load(side, name, stop, counts, failures)
    time.sleep(0.5)
    processes = list(server_processes(side.server.pid, has_runtime=True))
    before, cpu = sum(counts), sum(map(cpu_seconds, processes))
    time.sleep(WINDOW_S)
    done, spent = sum(counts) - before, sum(map(cpu_seconds, processes)) - cpu
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(failures[0])
    return done / WINDOW_S, spent / done


def changes(side: Side) -> str:
    """Move an alias between two models under load. Return a text with the median time and the number of failed requests."""
    stop, counts, failures = threading.Event(), [0] * CLIENTS, list[str]()
    threads = load(side, "one", stop, counts, failures)
    seconds = []
    for number in range(10):
        started = time.monotonic()
        target = OTHER if number % 2 else models.MLP
        with contextlib.redirect_stdout(None):
            rsrv(["alias", "one", target, "--server", str(side.server.http_port)])
        seconds.append(time.monotonic() - started)
    stop.set()
    for thread in threads:
        thread.join()
    return f"{len(seconds)} of {statistics.median(seconds):.2f} s; {len(failures)} of {sum(counts)} requests failed"


def load(
    side: Side, name: str, stop: threading.Event, counts: list[int], failures: list[str]
) -> list[threading.Thread]:
    """Start clients that send requests until `stop` is set, and return their threads.

    Each client counts its answers in its element of `counts`. The errors are appended to `failures`.
    """

    def work(client: int) -> None:
        ask = asking(side, name)
        while not stop.is_set():
            try:
                ask()
                counts[client] += 1
            except InferenceServerException as error:
                failures.append(str(error))

    threads = [threading.Thread(target=work, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    return threads


if __name__ == "__main__":
    sys.exit(main())
