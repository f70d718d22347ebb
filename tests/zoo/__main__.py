"""Export the architectures of the zoo, each in its own process, and write docs/what-exports.md and docs/what-exports.csv.

This runs in the environment of `make zoo`. The results are kept in build/zoo-results.jsonl. An architecture that already has a
result is not run again.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.zoo.models import AGPL, Entry, Made, entries
from tests.zoo.page import page, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "zoo-results.jsonl"
#: File with the largest error of each bundle that `tests.zoo.served` has served.
SERVED = ROOT / "build" / "zoo-served.json"
PAGE = ROOT / "docs" / "what-exports.md"
#: Folder of the small bundles, which `tests.zoo.served` serves.
SMALL_BUNDLES = ROOT / "build" / "zoo-bundles"
#: Limits for one architecture: seconds of CPU time, and seconds of elapsed time.
CPU_SECONDS, SECONDS = 240, 900


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only architectures whose names have this word"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="run at most N architectures")
    parser.add_argument(
        "--minutes", metavar="M", type=float, default=1e9, help="start no architecture after M minutes"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="concurrent architectures")
    parser.add_argument(
        "--eager", action="store_true", help="only make each model and run it in PyTorch, to check the list"
    )
    parser.add_argument("--agpl", action="store_true", help="also models of packages under AGPL")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results so far")
    arguments = parser.parse_args()
    if not arguments.page:
        run(arguments)
    if not arguments.eager:
        served = json.loads(SERVED.read_text()) if SERVED.exists() else {}
        PAGE.write_text(page(entries(), results(), served))
        with PAGE.with_suffix(".csv").open("w", newline="") as output:
            csv.writer(output, lineterminator="\n").writerows(table(entries(), results()))


def run(arguments: argparse.Namespace) -> None:
    """Run the architectures that have no result yet. They are shuffled, so a limited run is not only the start of the list."""
    known = set() if arguments.eager else {result["name"] for result in results()}
    waiting = [
        entry
        for entry in entries()
        if arguments.only in entry.name
        and entry.name not in known
        and (arguments.agpl or entry.package not in AGPL)
    ]
    random.Random(0).shuffle(waiting)
    waiting = waiting[: arguments.limit]
    _preload()
    until = time.monotonic() + 60 * arguments.minutes
    running: dict[int, tuple[Entry, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while running or waiting:
            while waiting and len(running) < arguments.jobs and time.monotonic() < until:
                entry, file = waiting.pop(), Path(folder, f"{time.monotonic_ns()}.json")
                running[_start(entry, file, arguments.eager)] = entry, file, time.monotonic()
            if not running:
                break
            time.sleep(0.2)
            for process, (entry, file, began) in list(running.items()):
                if time.monotonic() > began + SECONDS:
                    os.kill(process, signal.SIGKILL)
                if os.waitpid(process, os.WNOHANG)[0]:
                    del running[process]
                    _report(entry, file, arguments.eager)


def results() -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


#: Modules that many architectures or every export import.
PRELOADED = """
    rsrv_bundle.from_torch rsrv_bundle.torch_programs torch._dynamo torch._inductor.lowering torch._functorch.aot_autograd
    torch.export._trace torchvision torchaudio timm transformers.generation transformers.models.auto.modeling_auto
"""


def _preload() -> None:
    """Import `PRELOADED` before any process is forked. Otherwise, a small model would spend half of its time on imports."""
    import torch

    for name in PRELOADED.split():
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.freeze()


def _start(entry: Entry, file: Path, eager: bool) -> int:
    with warnings.catch_warnings():
        # Python warns that other threads of a forking process may hold locks. This process has only imported modules, so none
        # of its threads holds a lock.
        warnings.simplefilter("ignore")
        process = os.fork()
    if process:
        return process
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        warnings.simplefilter("ignore")
        _run(entry, file, eager)
    finally:
        os._exit(0)


def _run(entry: Entry, file: Path, eager: bool) -> None:
    result: dict[str, Any] = {"name": entry.name, "package": entry.package}

    def write(**fields: Any) -> None:
        result.update(fields)
        file.write_text(json.dumps(result))

    # Write a result first. It stays if the process is killed at a limit.
    write(failed="takes more than the time limit")
    try:
        made = made_of(entry)
    except BaseException as e:  # noqa: BLE001 - a package's own
        write(invalid=_text(e))
        return
    if eager:
        write(failed="")
        return
    facts = metadata.metadata(entry.package)
    licence = facts["License-Expression"] or (facts["License"] or "").partition("\n")[0] or "see its files"
    write(version=facts["Version"], licence=licence)
    write(**_export(entry.name, made))
    if result["failed"] and entry.change is not None:
        first = {"first": result["failed"], "change": entry.change[0]}
        write(**first, **_export(entry.name, entry.change[1]()))


def made_of(entry: Entry) -> Made:
    """Make the model of an entry, and run it in PyTorch. If this raises an error, the entry in the list is wrong."""
    import torch

    torch.manual_seed(0)
    module, examples, options = entry.make()
    with torch.no_grad():
        module(**examples)
    return module, examples, options


def _export(name: str, made: Made) -> dict[str, Any]:
    import torch

    from rsrv_bundle import BundleError
    from rsrv_bundle.from_torch import export_torch

    module, examples, options = made
    began = time.process_time()
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            bundle = export_torch(
                module, examples, out_dir=Path(folder, "m"), **{"batch_sizes": [2], **options}
            )
        except BundleError as e:
            return {"failed": str(e)}
        except BaseException as e:  # noqa: BLE001 - a fault of the exporter
            return {"failed": f"raised {_text(e)}", "trace": traceback.format_exc()[-2000:]}
        size = sum(file.stat().st_size for file in Path(folder).rglob("*"))
        if size < 4e6 and bundle.manifest.batched:
            _keep(name, bundle, made)
    return {
        "failed": "",
        "error": bundle.manifest.numerics["max_rel_error"],
        "cpu_s": time.process_time() - began,
        "bytes": size,
    }


def _keep(name: str, bundle: Any, made: Made) -> None:
    """Copy a small bundle to the folder from which `tests.zoo.served` serves it, with random inputs and PyTorch's answers."""
    import numpy as np

    from rsrv_bundle.from_torch import eager_torch
    from rsrv_bundle.inputs import acceptable, random_inputs

    module, examples, _ = made
    arrays = {key: value.numpy() for key, value in examples.items()}
    names = [spec.name for spec in bundle.manifest.inputs]
    eager = eager_torch(module)
    taken = acceptable(bundle, arrays, lambda values: eager(**dict(zip(names, values, strict=True))))
    inputs = dict(zip(names, random_inputs(bundle, 0, 2, taken, first=4), strict=True))
    results = eager(**inputs)
    outputs = dict(zip(results.names, results.values, strict=True))
    target = SMALL_BUNDLES / re.sub("[^a-z0-9]+", "_", name.lower())
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(bundle.path, target)
    np.savez(
        target.with_suffix(".npz"),
        **{f"in/{key}": value for key, value in inputs.items()},
        **{f"out/{spec.name}": outputs[spec.name] for spec in bundle.manifest.outputs},
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def _report(entry: Entry, file: Path, eager: bool) -> None:
    result = (
        json.loads(file.read_text()) if file.exists() else {"name": entry.name, "invalid": "died at once"}
    )
    line = result.get("invalid") or result["failed"]
    print(f"{entry.name}: {line[:300] or 'ok'}", flush=True)
    if not eager and "invalid" not in result:
        with RESULTS.open("a") as opened:
            opened.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
