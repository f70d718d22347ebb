"""Many tiny models on one server: their cost while one of them works, and while none works.

    python -m tests.bench.many                              # 1,000 models with the native front
    python -m tests.bench.many --models 50 --front python
    python -m tests.bench.many --start lazy                 # models are cold, except for some that are asked

At the end, further models are added to the repository, and the program measures the time until Triton reports each as ready. All
models are copies of one bundle, so only the first run compiles the module, and the weights exist only once. The figures are
rsrv's own state for each model. Memory is unique memory (USS).
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tritonclient.grpc as triton

import native_front
from tests.bench import models
from tests.bench.load import Side, measure
from tests.bench.phases import say, served
from tests.bench.places import WORK
from tests.bench.processes import cpu_seconds, memory, server_processes, threads
from tests.bench.report import table
from tests.bench.verify import verify

#: Number of copies that are verified before one of them is measured.
_VERIFIED = 8
#: Number of copies that are added at the end.
_ADDED = 10
#: With these flags and `lifecycle.mode: static`, this program decides when a model is loaded.
_FLAGS = ("--model-control-mode=explicit", "--load-model=*")


@dataclass(frozen=True)
class Held:
    """Resources of all processes of one role, and their use of a core while there are no requests."""

    processes: int
    uss_mb: float
    threads: int
    descriptors: int
    mappings: int
    idle_cpu: float

    def row(self, role: str) -> list[str]:
        figures = (self.processes, f"{self.uss_mb:.0f}", self.threads, self.descriptors, self.mappings)
        return [role, *map(str, figures), f"{100 * self.idle_cpu:.1f} %"]


def main() -> None:
    """Measure one number of models, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.many", description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--front", choices=("native", "python"), default="native")
    parser.add_argument("--start", choices=("eager", "lazy"), default="eager")
    parser.add_argument("--window", type=float, default=1.0, help="seconds of one of three windows")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds without a request")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    repository = make_repository(options.models + _ADDED, options.front, options.start)
    aside = WORK / "many-aside"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name in models.mlp_names(options.models + _ADDED)[options.models :]:
        (repository / name).rename(aside / name)
    started = time.monotonic()
    with served(f"many-{options.front}", repository, has_runtime=True, flags=_FLAGS) as side:
        say(f"{options.models} models ready in {time.monotonic() - started:.1f} s")
        show(side, options.models, options.window, options.idle)
        seconds = [add(side, path, repository) for path in sorted(aside.iterdir())]
        say(f"an added model is ready after {median(seconds):.3f} s ({min(seconds):.3f}-{max(seconds):.3f})")


def make_repository(count: int, front: str, start: str) -> Path:
    """Make a repository of `count` models with a front. They are links to one bundle. `start`: eager or lazy."""
    if front == "native":
        native_front.ensure()
    bundle = models.ensure_bundle(
        models.MLP, lambda folder: models.export_mlp(folder, models.mlp_weights(models.MLP))
    )
    links = WORK / "many"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir()
    paths = [links / name for name in models.mlp_names(count)]
    for path in paths:
        path.symlink_to(bundle)
    return models.generate(
        f"many-{front}",
        paths,
        f"stub: {{front: {front}}}\nruntime: {{start: {start}}}\nlifecycle: {{mode: static}}",
    )


def add(side: Side, model: Path, repository: Path) -> float:
    """Add a model to the repository, load it, and ask it. Return the seconds until it was ready."""
    model.rename(repository / model.name)
    with triton.InferenceServerClient(side.server.grpc_url) as client:
        started = time.monotonic()
        client.load_model(model.name)
        ready = time.monotonic() - started
    verify(side.server.grpc_url, replace(models.mlp_case(models.MLP), name=model.name), requests=8)
    return ready


def show(side: Side, count: int, window_s: float, idle_s: float) -> None:
    """Print the figures of a server with `count` models."""
    for name in models.mlp_names(min(count, _VERIFIED)):
        verify(side.server.grpc_url, replace(models.mlp_case(models.MLP), name=name))
    held = hold(side, idle_s)
    headers = ["", "processes", "USS MB", "threads", "descriptors", "mappings", "idle CPU"]
    print(table(headers, [resources.row(role) for role, resources in held.items()]))
    sample = measure(side, models.MLP, 1, 0, window_s)
    say(f"one of {count} models, 1 client: p50 {sample.p50_us:.0f} us, p99 {sample.p99_us:.0f} us")


def hold(side: Side, idle_s: float) -> Mapping[str, Held]:
    """Return the resources of the server's processes, by role."""
    roles = server_processes(side.server.pid, has_runtime=True)
    before = {pid: cpu_seconds(pid) for pid in roles}
    begun = time.monotonic()
    time.sleep(idle_s)
    idle = {pid: (cpu_seconds(pid) - cpu) / (time.monotonic() - begun) for pid, cpu in before.items()}
    by_role = {}
    for role in dict.fromkeys(roles.values()):
        pids = [pid for pid, its_role in roles.items() if its_role == role]
        by_role[role] = Held(
            len(pids),
            sum(memory(pid).uss for pid in pids),
            sum(len(threads(pid)) for pid in pids),
            sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            sum(Path(f"/proc/{pid}/maps").read_text().count("\n") for pid in pids),
            sum(idle[pid] for pid in pids),
        )
    return by_role


if __name__ == "__main__":
    main()
