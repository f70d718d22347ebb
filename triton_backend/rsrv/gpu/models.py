"""Part `models`: real networks, executed by rsrv and, if PyTorch has CUDA, by PyTorch."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO

from rsrv.gpu.report import Finding, PartInput, Tell
from rsrv.runtime.cuda import MemoryShare
from rsrv.runtime.device import run
from rsrv.runtime.jax_device import JaxDevice
from rsrv.text import duration, rate
from rsrv_bundle import read_bundle
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.modules import check_signatures, read_module, signature_of
from rsrv_bundle.weights import load_weights

#: Bundles of the examples. If a bundle has several input shapes, the last one is measured.
_NAMES = ("resnet18", "vit_tiny", "minilm_encoder")
_TORCH = Path(__file__).with_name("torch_models.py")
#: Number of executions before the measured executions.
_WARM = 3
#: Share of the part's time for each of 18 measurements: rsrv and PyTorch in two modes, each with two sizes of three models.
_MEASURING = 0.02
#: Longest time that `torch.compile` takes, in seconds. If less time is left, `torch.compile` is not called.
_COMPILE_S = 40.0
#: Executions per second, and the median duration of an execution in seconds.
_Rate = tuple[float, float]
#: Measures a model. Its arguments are the name, eager or compiled, the rows, and the seconds.
_Torch = Callable[[str, str, int, float], _Rate]


def models(part_input: PartInput, tell: Tell) -> None:
    """Measure executions of one row and of several rows, one at a time, with the copies to the device and back."""
    folder = part_input.models
    there = [name for name in _NAMES if folder is not None and (folder / name / "manifest.yaml").is_file()]
    if missing := [name for name in _NAMES if name not in there]:
        reason = (
            f"no folder of --models has {', '.join(missing)}: `make bundles` builds them into build/bundles"
        )
        tell(Finding(", ".join(missing), "NOT RUN", reason=reason))
    if folder is None or not there:
        return
    device = JaxDevice(part_input.device.platform, memory=MemoryShare(0.4, preallocate=False))
    with _torch(part_input) as (version, torch):
        for name in there:
            for rows, measured in _of_rsrv(part_input, device, folder / name):
                rates = {"rsrv": measured}
                tell(_finding(name, rows, rates, version))
                if torch is None:
                    continue
                for how in ("eager", "compiled"):
                    if how == "compiled" and part_input.left() < _COMPILE_S:
                        continue
                    try:
                        rates[f"torch {how}"] = torch(name, how, rows, part_input.window(3.0, _MEASURING))
                    except (ValueError, OSError):
                        version, torch = f"{version}, which failed: its output on stderr has the reason", None
                    tell(_finding(name, rows, rates, version))
                    if torch is None:
                        break


def _of_rsrv(part_input: PartInput, device: JaxDevice, path: Path) -> Iterator[tuple[int, _Rate]]:
    """Yield the rows and the rate of a small and of a larger batch size, executed on a device of this process."""
    bundle = read_bundle(path)
    signatures = check_signatures(bundle, signature_of)
    variant = max(variant for variant, _ in signatures)
    weights = device.upload(load_weights(bundle))
    for rows in sorted(rows for at, rows in signatures if at == variant)[:2]:
        signature = signatures[variant, rows]
        executable = device.compile(read_module(bundle, (variant, rows), signature), signature)
        inputs = random_inputs(bundle, variant, rows)
        for _ in range(_WARM):
            run(device, executable, weights, inputs)
        took: list[float] = []
        end = time.perf_counter() + part_input.window(3.0, _MEASURING)
        while (started := time.perf_counter()) < end or not took:
            run(device, executable, weights, inputs)
            took.append(time.perf_counter() - started)
        yield rows, (len(took) / sum(took), median(took))
    device.free(weights)


def _finding(name: str, rows: int, rates: dict[str, _Rate], torch: str) -> Finding:
    value = "; ".join(f"{how} {rate(per_s)}, p50 {duration(p50)}" for how, (per_s, p50) in rates.items())
    figures = {
        f"{how.replace(' ', '_')}_{key}": figure
        for how, both in rates.items()
        for key, figure in zip(("per_s", "p50_s"), both, strict=True)
    }
    title = f"{name}, {rows} rows" if rows > 1 else f"{name}, 1 row"
    return Finding(
        title, "MEASURED", value, f"executions and copies in one process, no server; {torch}", figures
    )


@contextmanager
def _torch(part_input: PartInput) -> Iterator[tuple[str, _Torch | None]]:
    """Run PyTorch until the block ends. Yield its version and, if it has the device, a function that measures.

    If this Python has no such PyTorch, try the Python that RSRV_TORCH_PYTHON names.
    """
    other = part_input.environment.get("RSRV_TORCH_PYTHON")
    for python in (sys.executable, other) if other else (sys.executable,):
        process = subprocess.Popen(
            # With -P, torch.compile imports the package triton, and not rsrv's triton.py in the folder of the script.
            [python, "-P", str(_TORCH), part_input.device.platform],
            env=part_input.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            if version := process.stdout.readline().strip():
                yield f"torch {version}", partial(_measure, process.stdin, process.stdout)
                return
    yield "no torch with CUDA is installed", None


def _measure(put: IO[str], lines: IO[str], name: str, how: str, rows: int, seconds: float) -> _Rate:
    """Let PyTorch measure a network. Raises ValueError or OSError if PyTorch fails."""
    put.write(f"{name} {how} {rows} {seconds}\n")
    put.flush()
    per_s, p50 = map(float, lines.readline().split())
    return per_s, p50
