"""Measure loads of weights during executions on the fake card: bytes per second of the loads, and periods of the executions.

    .venv/bin/python -m tests.gpu.measure_loads

Several loads of a model follow one another. A thread keeps the card busy as the runtime does: with a depth of 2, it launches an
execution shortly before the end of the previous one. Large copies move nothing, so the link limits them, and not the machine.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from rsrv.runtime.allocation import aligned
from rsrv.runtime.device import Array
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.models import CompiledModel
from rsrv_bundle.export import export_bundle
from tests.gpu.fake_gpu import FakeGpu, settings_here
from tests.unit.runtime.conftest import build_here
from tests.waiting import wait_until

#: Bytes of the model that is loaded.
MODEL_BYTES = 800_000_000
#: Bytes of each of the model's tensors.
TENSORS = {"4 MB": 4_000_000, "100 MB": 100_000_000}
#: Number of f32 columns of the requests' input.
INPUTS = {"4 kB": 1_000, "1 MB": 250_000}
DEPTHS = (1, 2)
#: Number of loads one after the other.
LOADS = 4
#: Speed of the link, which is similar to PCIe 4.0 with 16 lanes.
LINK_BYTES_PER_S = 25_000_000_000
KERNEL_S, LAUNCH_AHEAD_S = 0.02, 0.002
#: Copies above this size move nothing. Inputs move their bytes, and weights do not.
MOVED_BYTES_MAX = 2_000_000


class Case(NamedTuple):
    tensor: str
    input: str
    depth: int


class Loaded(NamedTuple):
    """Start and end of the loads, on the clock of the card's record."""

    case: Case
    start: float
    end: float


class Figures(NamedTuple):
    """Bytes per second of the loads, and seconds between the starts of successive executions during the loads."""

    rate: float
    periods: list[float]


@contextmanager
def executing(device: JaxDevice, model: CompiledModel, x: Array, depth: int) -> Iterator[None]:
    """Keep the device busy during the block with executions of a model's only size."""
    stop, busy = threading.Event(), threading.Event()
    (executable,) = model.executables.values()

    def execute() -> None:
        launched = []
        while not stop.is_set():
            launched.append(device.launch(executable, model.weights or (), [x]))
            if len(launched) == depth:
                device.read(launched.pop(0))
                busy.set()
            if launched:
                time.sleep(KERNEL_S - LAUNCH_AHEAD_S)
        for execution in launched:
            device.read(execution)

    thread = threading.Thread(target=execute)
    thread.start()
    try:
        wait_until(busy.is_set)
        yield
    finally:
        stop.set()
        thread.join()


def load_beside_executions(bundles: dict[str, Path]) -> list[Loaded]:
    device = JaxDevice("cuda")
    settings = settings_here()
    memory = aligned(MODEL_BYTES)
    device.page_lock(memory.ctypes.data, memory.nbytes)
    models = {name: build_here(path, device) for name, path in bundles.items()}
    inputs = {name: aligned(4 * columns).view(np.float32).reshape(1, -1) for name, columns in INPUTS.items()}
    for x in inputs.values():
        device.page_lock(x.ctypes.data, x.nbytes)

    def load(nbytes: int) -> None:
        device.free(device.upload([memory[i : i + nbytes] for i in range(0, MODEL_BYTES, nbytes)]))

    settings.moved_bytes_max = MOVED_BYTES_MAX
    for nbytes in TENSORS.values():
        load(nbytes)  # The first load of some shapes compiles a program that allocates.
    settings.pinned_bytes_per_s = LINK_BYTES_PER_S
    settings.kernel_ns = int(KERNEL_S * 1e9)
    loaded = []
    for case in itertools.starmap(Case, itertools.product(TENSORS, INPUTS, DEPTHS)):
        with executing(device, models[case.input], inputs[case.input], case.depth):
            start = time.monotonic()
            for _ in range(LOADS):
                load(TENSORS[case.tensor])
            loaded.append(Loaded(case, start, time.monotonic()))
    return loaded


def measure(folder: Path, bundles: dict[str, Path]) -> dict[Case, Figures]:
    """Measure each case once. `folder` is for the card's files."""
    gpu = FakeGpu(folder)
    figures = {}
    for case, start, end in gpu.run(load_beside_executions, bundles):
        starts = [call.start for call in gpu.calls("kernel", "graph") if start <= call.start <= end]
        periods = [after - before for before, after in itertools.pairwise(starts)]
        figures[case] = Figures(LOADS * MODEL_BYTES / (end - start), periods)
    return figures


def export_bundles(folder: Path) -> dict[str, Path]:
    """Write a bundle for each of `INPUTS`. Its execution is one kernel."""
    bundles = {name: folder / name.replace(" ", "") for name in INPUTS}
    for name, path in bundles.items():
        export_bundle(
            lambda params, x: {"y": x[:, :3] + params["w"]},
            {"w": np.ones((3,), np.float32)},
            {"x": np.zeros((1, INPUTS[name]), np.float32)},
            batch_sizes=[1],
            out_dir=path,
        )
    return bundles


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        bundles = export_bundles(Path(name))
        for number in range(parser.parse_args().rounds):
            folder = Path(name, str(number))
            folder.mkdir()
            rounds.append(measure(folder, bundles))
    print(
        "| tensors | input | depth | load, GB/s: median, slowest | period, ms: median, longest |\n|---|---|---|---|---|"
    )
    for case in rounds[0]:
        rates = [figures[case].rate / 1e9 for figures in rounds]
        periods = [1e3 * period for figures in rounds for period in figures[case].periods]
        print(
            f"| {case.tensor} | {case.input} | {case.depth} | {median(rates):.1f}, {min(rates):.1f} "
            f"| {median(periods):.1f}, {max(periods):.1f} |"
        )


if __name__ == "__main__":
    from tests.gpu import measure_loads  # `FakeGpu.run` imports a function by its module's name.

    measure_loads.main()
