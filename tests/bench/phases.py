"""The three parts of the benchmark: throughput of all sides, memory, and the device's busy share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from local_triton import TritonServer
from tests.bench import models
from tests.bench.figures import Sample
from tests.bench.load import Side, measure
from tests.bench.places import ROOT, WORK, paced
from tests.bench.processes import Memory, memory, server_processes, shared_memory
from tests.bench.verify import verify

RSRV, NATIVE, PLAIN = "rsrv", "native", "plain"
CLIENTS = (1, 16, 64)
BUSY_CLIENTS = 48
EXECUTION_MS = 8.0
#: Values of the setting stub.in_place_ms: the default, all answers after execute(), and all answers inside it.
IN_PLACE_MS: Mapping[str, str | None] = {"default": None, "0": "0", "1000000": "1000000"}
BUSY_SIDES = (*IN_PLACE_MS, NATIVE)


def say(text: str) -> None:
    """Print a line of progress, and flush the output."""
    print(text, flush=True)


@contextlib.contextmanager
def served(
    name: str,
    repository: Path,
    *,
    has_runtime: bool,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Iterator[Side]:
    """Yield a ready server on free ports."""
    log = WORK / f"{name}.log"
    log.unlink(missing_ok=True)
    cache = os.environ.get("RSRV_RUNTIME__COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
    variables = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": cache, **(env or {})}
    with TritonServer(repository, log_path=log, env=variables, extra_args=flags) as server:
        server.wait_ready(timeout=300)
        yield Side(name, server, has_runtime)


def throughput(rounds: int, window_s: float) -> list[Sample]:
    """Measure rsrv with each front and the plain model in turns, with each number of clients."""
    samples = []
    case = models.mlp_case(models.MLP)
    with (
        served(RSRV, models.rsrv_repository(1), has_runtime=True) as rsrv,
        served(NATIVE, models.native_repository(1), has_runtime=True) as native,
        served(PLAIN, models.plain_repository(1), has_runtime=False) as plain,
    ):
        for side in (rsrv, native, plain):
            say(f"{side.name}: {verify(side.server.grpc_url, case)} answers right")
        for number in range(rounds):
            # The order changes from round to round, so that no side is always first or always after the same side.
            order = (rsrv, plain, native) if number % 2 == 0 else (native, plain, rsrv)
            for clients in CLIENTS:
                for side in order:
                    sample = measure(side, models.MLP, clients, number, window_s)
                    samples.append(sample)
                    say(told(sample, rounds))
    return samples


@dataclass(frozen=True)
class Footprint:
    """Memory of a server with `models` models, in MB: by role, in total, and the size of the shared regions."""

    side: str
    models: int
    ready_s: float
    by_role: Mapping[str, Memory]
    total: Memory
    shared: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def footprints(many: int) -> list[Footprint]:
    """Measure the memory of each side with 1, 2 and `many` models. Each model has answered."""
    measured = []
    sides = (
        (RSRV, models.rsrv_repository),
        (NATIVE, models.native_repository),
        (PLAIN, models.plain_repository),
    )
    for side_name, repository in sides:
        for count in (1, 2, many):
            folder = repository(count)
            started = time.monotonic()
            with served(f"{side_name}-{count}", folder, has_runtime=side_name != PLAIN) as side:
                ready = time.monotonic() - started
                for name in models.mlp_names(count):
                    verify(side.server.grpc_url, models.mlp_case(name))
                measured.append(_footprint(side, side_name, count, ready))
            say(f"{side_name} with {count}: ready in {ready:.1f} s, USS {measured[-1].total.uss:.0f} MB")
    return measured


def _footprint(side: Side, name: str, count: int, ready: float) -> Footprint:
    processes = server_processes(side.server.pid, has_runtime=side.has_runtime)
    by_role: dict[str, Memory] = {}
    for pid, role in processes.items():
        by_role[role] = by_role.get(role, Memory()) + memory(pid)
    total = sum(by_role.values(), Memory())
    return Footprint(name, count, ready, by_role, total, shared_memory(iter(processes)))


def busy(rounds: int, window_s: float) -> list[Sample]:
    """Measure how busy the device is with large inputs: in turns, with each value of IN_PLACE_MS and with the native front."""
    samples = []
    with contextlib.ExitStack() as servers:
        sides = []
        for name in BUSY_SIDES:
            repository = models.images_repository("native" if name == NATIVE else "python")
            value = IN_PLACE_MS.get(name)
            own = {} if value is None else {"RSRV_STUB__IN_PLACE_MS": value}
            side = servers.enter_context(
                served(f"busy-{name}", repository, has_runtime=True, env={**paced(EXECUTION_MS), **own})
            )
            count = verify(side.server.grpc_url, models.images_case())
            say(f"{name}: {count} answers right")
            sides.append(Side(name, side.server, has_runtime=True))
        for number in range(rounds):
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                sample = measure(side, models.IMAGES, BUSY_CLIENTS, number, window_s)
                samples.append(sample)
                say(f"{told(sample, rounds)}, device busy {100 * (sample.busy or 0):.0f} %")
    return samples


def told(sample: Sample, rounds: int) -> str:
    """Return a line of progress about a sample."""
    return (
        f"[{sample.round + 1}/{rounds}] {sample.side}, {sample.clients} clients: {sample.infer_per_s:.0f}/s,"
        f" p50 {sample.p50_us:.0f} us, p99 {sample.p99_us:.0f} us"
    )
