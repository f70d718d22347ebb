"""Compare rsrv with onnxruntime on ONNX files. Both run behind the same tritonserver on the same cores, in turns.

    python -m tests.bench.onnx                          # five minutes, and the time of the first exports
    python -m tests.bench.onnx --backend onnxruntime    # beside Triton's own ONNX Runtime backend

Without an option, the other side is a Python-backend model that calls onnxruntime (plain_onnx.py), because the local tritonserver
has no other backend. NVIDIA's images have the ONNX Runtime backend in /opt/tritonserver/backends/onnxruntime. RSRV_TEST_TRITONSERVER
names their server; or copy the folder to .triton/backends. The other side has a thread for each core, Triton's dynamic batcher, and
the same largest batch. Before the measurement, concurrent requests check that the answers of all sides equal those of onnxruntime in
this process. First, the program measures the memory of added models.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype

from local_triton import ServerFailed
from rsrv.triton_install import InstallError
from rsrv_bundle.from_onnx import eager_onnx, export_onnx
from rsrv_bundle.numerics import difference
from tests.bench import plain_env
from tests.bench.figures import Rounds, Sample, Spread, per_added_model
from tests.bench.load import BenchFailed, Side, measure
from tests.bench.models import Array, ensure_bundle, generate
from tests.bench.phases import NATIVE, RSRV, say, served, told
from tests.bench.places import HERE, ROOT, WORK
from tests.bench.processes import Memory, memory, server_processes
from tests.bench.report import rounds_line, spread_text, table
from tests.e2e.calls import tensors
from tests.zoo.onnx_files import FILES, path_of

Arrays = dict[str, Array]

ONNXRUNTIME = "onnxruntime"
#: Backends of Triton in which the other side can run onnxruntime.
PYTHON_BACKEND = "python"
BACKENDS = (PYTHON_BACKEND, ONNXRUNTIME)
SIDES = (RSRV, NATIVE, ONNXRUNTIME)
CLIENTS = (1, 16)
SIZES = (1, 2, 4, 8)
TOKENS = 32
FOLDER = WORK / "onnx"
#: Number of requests for the comparison of answers, and number of requests at the same time.
_COMPARED, _THREADS = 32, 8
#: Number of different rows that perf_analyzer sends.
_SENT = 16


@dataclass(frozen=True)
class Case:
    """An ONNX file, and requests to its model."""

    name: str
    title: str
    file: Callable[[], Path]
    #: Makes a request from a random number generator and a number of rows.
    inputs: Callable[[np.random.Generator, int], Arrays]
    input_shapes: Sequence[dict[str, int]] = ()
    #: Largest error of an answer, relative to the output's largest magnitude.
    tolerance: float = 1e-4


def _downloaded(name: str) -> Path:
    [file] = [file for file in FILES if file.path.endswith(name)]
    return path_of(file)


def _exported(name: str, make: Callable[[], tuple[Any, Arrays]], seed: int = 0) -> Path:
    """Return an ONNX file that PyTorch's exporter writes for a network with an open batch axis. `seed` determines the weights."""
    import torch

    path = FOLDER / f"{name}.onnx"
    if not path.is_file() or path.stat().st_mtime < Path(__file__).stat().st_mtime:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        network, example = make()
        torch.onnx.export(
            network.eval(),
            tuple(torch.from_numpy(array) for array in example.values()),
            str(path),
            input_names=list(example),
            output_names=["output"],
            dynamic_axes={key: {0: "rows"} for key in (*example, "output")},
            dynamo=False,
        )
    return path


def _mlp() -> tuple[Any, Arrays]:
    from torch import nn

    network = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return network, _features(np.random.default_rng(0), 1)


def _encoder() -> tuple[Any, Arrays]:
    """Return a sentence encoder with MiniLM's architecture. Half of its 22 million weights are embeddings."""
    import torch
    from transformers import BertConfig, BertModel

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weight = attention_mask[:, :, None].to(hidden.dtype)
            return (hidden * weight).sum(1) / weight.sum(1)

    return Encoder(), _texts(np.random.default_rng(0), 1)


def _features(rng: np.random.Generator, rows: int) -> Arrays:
    return {"features": rng.standard_normal((rows, 256), np.float32)}


def _texts(rng: np.random.Generator, rows: int) -> Arrays:
    ids = rng.integers(1000, 30000, (rows, TOKENS))
    mask = (np.arange(TOKENS) < rng.integers(TOKENS // 2, TOKENS, (rows, 1), endpoint=True)).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


def _lines(rng: np.random.Generator, rows: int) -> Arrays:
    return {"x": rng.uniform(-1, 1, (rows, 3, 48, 192)).astype(np.float32)}


CASES = (
    Case(
        "lines",
        "image classifier (MobileNetV3, rapidocr)",
        partial(_downloaded, "cls_mobile.onnx"),
        _lines,
        ({"x_2": 48, "x_3": 192},),
    ),
    Case(
        "texts", f"sentence encoder (MiniLM, {TOKENS} tokens)", partial(_exported, "texts", _encoder), _texts
    ),
    Case("mlp", "MLP (256, 256, 10)", partial(_exported, "mlp", _mlp), _features),
)
#: The model whose copies are measured in memory, and the numbers of copies on the two servers. In a server's only stub, the pages of
#: library files are unique. So the smaller server has two models.
COPIED, COPIES = CASES[-1], (2, 32)


def main() -> int:
    """Run the benchmark. Return 0 if everything could be measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.onnx", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (%(default)s)")
    parser.add_argument("--window", type=float, default=1.0, help="seconds of one window (%(default)s)")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=PYTHON_BACKEND,
        help="backend of Triton that runs onnxruntime on the other side (%(default)s)",
    )
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        added = added_memory(options.backend)
        samples = run(options.rounds, options.window, options.backend)
    except (BenchFailed, ServerFailed, InstallError, RuntimeError) as error:
        print(f"onnx: {error}", file=sys.stderr)
        return 1
    rows = {name: [asdict(sample) for sample in measured] for name, measured in samples.items()}
    document = {"added_mb": added, "samples": rows}
    (WORK / f"onnx-{options.backend}.json").write_text(json.dumps(document, indent=1) + "\n")
    figures = ", ".join(f"{side} {megabytes:.2f} MB" for side, megabytes in added.items())
    print(f"memory of an added {COPIED.title} (USS): {figures}")
    print(_table(samples))
    for name, measured in samples.items():
        print(f"{name}: {rounds_line(Rounds.of(measured))}")
    return 0


def run(rounds: int, window_s: float, backend: str) -> dict[str, list[Sample]]:
    """Measure the sides in turns. Return the samples of each case."""
    data = {case.name: _data(case) for case in CASES}
    samples: dict[str, list[Sample]] = {case.name: [] for case in CASES}
    with (
        served(RSRV, _repository(RSRV, CASES, backend), has_runtime=True) as rsrv,
        served(NATIVE, _repository(NATIVE, CASES, backend), has_runtime=True) as native,
        served(ONNXRUNTIME, _repository(ONNXRUNTIME, CASES, backend), has_runtime=False) as plain,
    ):
        sides = [rsrv, native, plain]
        for side in sides:
            for case in CASES:
                say(f"{side.name}, {case.name}: largest error {_largest_error(side, case):.1e}")
        for number in range(rounds):
            turn = number % len(sides)
            for case in CASES:
                for clients in CLIENTS:
                    for side in sides[turn:] + sides[:turn]:
                        sample = measure(
                            side, case.name, clients, number, window_s, data=str(data[case.name])
                        )
                        samples[case.name].append(sample)
                        say(f"{case.name} {told(sample, rounds)}")
    return samples


def added_memory(backend: str) -> dict[str, float]:
    """Return the memory that one more model takes on each side: the unique memory (USS) of the server's processes, in MB."""
    fewest, most = COPIES
    copies = [COPIED]
    for number in range(1, most):
        name = f"{COPIED.name}_{number}"
        copies.append(replace(COPIED, name=name, file=partial(_exported, name, _mlp, number)))
    added = {}
    for name in SIDES:
        used = []
        for cases in (copies[:fewest], copies):
            with served(
                f"onnx-memory-{name}", _repository(name, cases, backend), has_runtime=name != ONNXRUNTIME
            ) as side:
                for case in cases:
                    _largest_error(side, case)
                processes = server_processes(side.server.pid, has_runtime=side.has_runtime)
                used.append(sum((memory(process) for process in processes), Memory()).uss)
        added[name] = per_added_model(used[0], used[1], most - fewest)
        say(f"{name}: an added {COPIED.name} takes {added[name]:.2f} MB")
    return added


def _repository(side: str, cases: Sequence[Case], backend: str) -> Path:
    """Make a repository in which a side serves these cases."""
    if side == ONNXRUNTIME:
        return _plain_repository(cases, backend)
    settings = "stub: {front: native}" if side == NATIVE else ""
    return generate(f"onnx-{side}", [_bundle(case) for case in cases], settings)


def _bundle(case: Case) -> Path:
    file = case.file()

    def export(folder: Path) -> None:
        export_onnx(file, out_dir=folder, batch_sizes=SIZES, input_shapes=case.input_shapes, overwrite=True)

    makers = [file, Path(__file__), *sorted((ROOT / "bundles" / "rsrv_bundle" / "onnx_import").glob("*.py"))]
    return ensure_bundle(case.name, export, *makers)


def _plain_repository(cases: Sequence[Case], backend: str) -> Path:
    """Make a repository of plain Triton models, which run the cases' files with onnxruntime in this backend."""
    repository = WORK / "onnx-plain"
    environment = plain_env.ensure() if backend == PYTHON_BACKEND else None
    shutil.rmtree(repository, ignore_errors=True)
    for case in cases:
        version = repository / case.name / "1"
        version.mkdir(parents=True)
        shutil.copy(case.file(), version / "model.onnx")
        inputs = case.inputs(np.random.default_rng(0), 1)
        lines = [f'backend: "{backend}"', f"max_batch_size: {SIZES[-1]}", "dynamic_batching { }"]
        lines += [f"input {_tensor(name, array)}" for name, array in inputs.items()]
        lines += [f"output {_tensor(name, array)}" for name, array in _expected(case, inputs).items()]
        lines.append("instance_group [ { kind: KIND_CPU count: 1 } ]")
        if environment is not None:
            shutil.copy(HERE / "plain_onnx.py", version / "model.py")
            lines.append(
                f'parameters [ {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{environment}" }} }} ]'
            )
        (version.parent / "config.pbtxt").write_text("\n".join(lines) + "\n")
    return repository


def _tensor(name: str, array: Array) -> str:
    kind, dims = np_to_triton_dtype(array.dtype), ", ".join(map(str, array.shape[1:]))
    return f'[ {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }} ]'


def _expected(case: Case, inputs: Arrays) -> Arrays:
    results = eager_onnx(case.file())(**inputs)
    return dict(zip(results.names, results.values, strict=True))


def _data(case: Case) -> Path:
    """Write requests of one row for perf_analyzer."""
    rng, path = np.random.default_rng(1), FOLDER / f"{case.name}.json"
    entries = [
        {
            name: {"b64": base64.b64encode(array.tobytes()).decode()}
            for name, array in case.inputs(rng, 1).items()
        }
        for _ in range(_SENT)
    ]
    path.write_text(json.dumps({"data": entries}))
    return path


def _largest_error(side: Side, case: Case) -> float:
    """Send requests of one to four rows, several at the same time. Return the largest error. Raises BenchFailed if it is too large."""
    reference = eager_onnx(case.file())
    rng = np.random.default_rng(2)
    requests = [case.inputs(rng, 1 + number % 4) for number in range(_COMPARED)]
    with tritonclient.grpc.InferenceServerClient(side.server.grpc_url) as client:

        def error(request: Arrays) -> float:
            answer = client.infer(case.name, tensors(tritonclient.grpc, request))
            results = reference(**request)
            return max(
                difference(answer.as_numpy(name), value)[1]
                for name, value in zip(results.names, results.values, strict=True)
            )

        reference(**requests[0])  # The first call starts the session.
        with ThreadPoolExecutor(_THREADS) as pool:
            largest = max(pool.map(error, requests))
    if not largest <= case.tolerance:
        raise BenchFailed(f"{side.name}: {case.name} differs from onnxruntime by {largest:.2g}")
    return largest


def _table(samples: dict[str, list[Sample]]) -> str:
    rows = []
    for case in CASES:
        rounds = Rounds.of(samples[case.name])
        for clients in CLIENTS:
            rows.append([case.title, str(clients), *_row(rounds, clients)])
    head = ["model", "clients", f"{ONNXRUNTIME}, /s", "p50 ms"]
    return table([*head, *(f"{side} / {ONNXRUNTIME}" for side in SIDES[:-1])], rows)


def _row(rounds: Rounds, clients: int) -> list[str]:
    rate = rounds.spread(ONNXRUNTIME, clients, _rate).median
    p50: Spread = rounds.spread(ONNXRUNTIME, clients, lambda sample: sample.p50_us / 1e3)
    ratios = [spread_text(rounds.ratio(side, ONNXRUNTIME, clients, _rate)) for side in SIDES[:-1]]
    return [f"{rate:.0f}", f"{p50.median:.1f}", *ratios]


def _rate(sample: Sample) -> float:
    return sample.infer_per_s


if __name__ == "__main__":
    sys.exit(main())
