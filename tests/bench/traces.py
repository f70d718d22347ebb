"""`python -m tests.bench.traces`: the CPU cost of traces: off, unused, and of all requests.

Two servers side by side are loaded in turns, so that disturbances of the machine affect both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import psutil

from tests.bench import models
from tests.bench.load import Side, measure
from tests.bench.phases import served
from tests.bench.places import WORK
from tests.bench.processes import RUNTIME, SERVER, STUB, cpu_seconds
from tests.bench.report import table
from tests.e2e.collector import Collector, collecting

_CONTROL = "control"
_ROLES = (SERVER, STUB, RUNTIME, _CONTROL)
#: `NAME:VALUE` of a header by which a request is traced.
_SAMPLED = "traceparent:00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.traces", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (%(default)s)")
    parser.add_argument(
        "--window", type=float, default=0.5, help="seconds; a sample takes three windows (%(default)s)"
    )
    parser.add_argument("--clients", type=int, default=16, help="requests at a time (%(default)s)")
    options = parser.parse_args(argv)
    WORK.mkdir(parents=True, exist_ok=True)
    repository = models.rsrv_repository(1)
    flags = ["--grpc-header-forward-pattern=traceparent"]
    with (
        collecting() as collector,
        served("untraced", repository, has_runtime=True, flags=flags) as off,
        served(
            "traced", repository, has_runtime=True, env={"RSRV_TRACES__ENDPOINT": collector.url}, flags=flags
        ) as on,
    ):
        ways = {
            "off": (off, None),
            "off, the header comes": (off, _SAMPLED),
            "on, no request is traced": (on, None),
            "on, all are": (on, _SAMPLED),
        }
        found: dict[str, list[list[float]]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                side, header = ways[way]
                found[way].append(_cpu(side, header, options, number, collector))
    rows = [
        [way, *(f"{statistics.median(column):.1f}" for column in zip(*samples, strict=True))]
        for way, samples in found.items()
    ]
    print(table(["CPU us per request", *_ROLES, "of these together"], rows))
    print(f"medians of {options.rounds}; {len(collector.spans)} spans came to the collector")
    return 0


def _cpu(
    side: Side, header: str | None, options: argparse.Namespace, number: int, collector: Collector
) -> list[float]:
    """Return microseconds per request, by role, and in total."""
    control, seen = _control(side.server.pid), len(collector.spans)
    before = cpu_seconds(control)
    sample = measure(side, models.MLP, options.clients, number, options.window, header=header)
    # Spans are sent later, also of requests beyond the window.
    _settle(collector)
    requests = sum(span.name == "execute" for span in collector.spans[seen:]) or sample.requests
    used = (cpu_seconds(control) - before) / requests * 1e6
    each = [sample.cpu_us[SERVER], sample.cpu_us[STUB], sample.cpu_us[RUNTIME], used]
    return [*each, sum(each)]


def _settle(collector: Collector) -> None:
    """Wait until no more spans come."""
    count = -1
    while count != len(collector.spans):
        count = len(collector.spans)
        time.sleep(2.5)


def _control(server_pid: int) -> int:
    """Return the control process of a server, which is no child of it."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "rsrv.control" in line and str(server_pid) in line:
            return int(process.pid)
    raise RuntimeError(f"tritonserver {server_pid} has no control process")


if __name__ == "__main__":
    sys.exit(main())
