"""Print how many kernels and CUDA graphs the largest modules of examples launch, with several options of XLA.

    python -m tests.gpu.measure_options

The modules run on the fake card, which counts launches and computes nothing. So the script shows what XLA's options change in an
execution, and not how long it takes. `make bundles` builds the examples. The script takes some minutes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rsrv.runtime.device import run
from rsrv.runtime.jax_device import JaxDevice
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.reader import read_bundle
from tests.gpu.fake_gpu import ROOT, FakeGpu
from tests.unit.runtime.conftest import build_here

BUNDLES = ("digits", "mlp", "minilm_encoder")
OPTIONS = {
    "XLA's defaults": "",
    "no CUDA graphs": "--xla_gpu_enable_command_buffer=",
    "deterministic": "--xla_gpu_deterministic_ops=true",
}
#: Number of executions of a module. The first ones record the graphs.
_EXECUTIONS = 4


def execute(path: Path) -> tuple[float, float]:
    """Execute the largest module of a bundle several times. Return the start and the end of the last execution."""
    device, bundle = JaxDevice("cuda"), read_bundle(path)
    model = build_here(path, device)
    key = max(model.executables)
    inputs = random_inputs(bundle, *key, {})
    start = end = 0.0
    for _ in range(_EXECUTIONS):
        start = time.monotonic()
        run(device, model.executables[key], model.weights or (), inputs)
        end = time.monotonic()
    return start, end


def rows() -> Iterator[tuple[str, str, int, int, int]]:
    """Yield a bundle, an option, the number of single kernels, of graphs, and of kernels in graphs."""
    for name in BUNDLES:
        for option, flags in OPTIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                gpu = FakeGpu(Path(folder))
                start, end = gpu.run(execute, ROOT / "build" / "bundles" / name, XLA_FLAGS=flags)
                kernels, graphs = (
                    [call for call in gpu.calls(kind) if start <= call.start <= end]
                    for kind in ("kernel", "graph")
                )
            yield name, option, len(kernels), len(graphs), sum(graph.bytes for graph in graphs)


def main() -> None:
    """Print the table."""
    print("| bundle | options | kernels | graphs | kernels in graphs |\n| --- | --- | --- | --- | --- |")
    for row in rows():
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    # `FakeGpu.run` imports `execute` by the name of its module.
    from tests.gpu import measure_options

    measure_options.main()
