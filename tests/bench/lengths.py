"""Requests of many lengths for an encoder: a padded axis, beside variants whose clients pad to the next compiled length.

    python -m tests.bench.lengths          # takes the weights of `make bundles`

64 clients send texts as long as those of docs/scenarios/lengths.csv, in turns to the bundle with the padded axis and to the one
without. The padded share counts tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file
from tritonclient.grpc import InferInput, aio

import example_bundles
from examples import minilm_encoder, minilm_pool
from rsrv_bundle.export import export_bundle
from tests.bench.report import table
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.status import read_status

LENGTHS = (32, 64, 128, 256, 512)
PAD = "t=0,mask=attention_mask"
MODELS = {"padded": PAD, "apart": ""}
CLIENTS = 64
RECORDED = Path(__file__).parents[2] / "docs" / "scenarios" / "lengths.csv"


def embed(params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> dict[str, jax.Array]:
    """input_ids, attention_mask: [n, t] -> embedding: [n, 384], of length 1."""
    hidden = minilm_encoder.apply(params, input_ids, attention_mask)["hidden"]
    return minilm_pool.apply({}, hidden, attention_mask)


def export_embedder(encoder: Path, out_dir: Path, *, pad: str) -> None:
    """Write the bundle `out_dir` with the weights of the bundle `encoder`; `pad` is the exporter's."""
    tokens = np.arange(1000, 1032, dtype=np.int32)[None]
    export_bundle(
        embed,
        load_file(encoder / "weights.safetensors"),
        {"input_ids": tokens, "attention_mask": np.ones_like(tokens)},
        batch_sizes=(1, 8),
        axes={"input_ids": "nt", "attention_mask": "nt"},
        input_shapes=[{"t": length} for length in LENGTHS],
        pad=pad,
        out_dir=out_dir,
    )


async def load(url: str, model: str, lengths: list[int], seconds: float) -> list[tuple[int, float]]:
    """Return length and latency of each request that ended."""
    numbers, ended = count(), list[tuple[int, float]]()
    until = time.perf_counter() + seconds

    async def client() -> None:
        async with aio.InferenceServerClient(url) as server:
            while (begun := time.perf_counter()) < until:
                length = lengths[next(numbers) % len(lengths)]
                sent = length if MODELS[model] else min(one for one in LENGTHS if one >= length)
                mask = (np.arange(sent) < length).astype(np.int32)[None]
                inputs = []
                for name, array in (("input_ids", 1000 * mask), ("attention_mask", mask)):
                    inputs.append(InferInput(name, [*array.shape], "INT32"))
                    inputs[-1].set_data_from_numpy(array)
                await server.infer(model, inputs)
                ended.append((length, time.perf_counter() - begun))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return ended


def executed(server: RunningTriton, model: str) -> dict[str, int]:
    """Return the number of executions by `variant/size`."""
    sizes: dict[str, int] = read_status(server.pid)["models"][model]["sizes"]
    return sizes


def measure(server: RunningTriton, model: str, lengths: list[int], seconds: float) -> list[str]:
    """Return a row of the table."""
    before = executed(server, model)
    ended = asyncio.run(load(server.server.grpc_url, model, lengths, seconds))
    runs = {key: number - before.get(key, 0) for key, number in executed(server, model).items()}
    tokens = sum(
        number * LENGTHS[int(variant)] * int(size)
        for key, number in runs.items()
        for variant, _, size in [key.partition("/")]
    )
    latencies = sorted(latency for _, latency in ended)
    return [
        model,
        str(sum(runs.values())),
        f"{len(ended) / sum(runs.values()):.2f}",
        f"{1 - sum(length for length, _ in ended) / tokens:.1%}",
        f"{len(ended) / seconds:.1f}",
        *(f"{1e3 * latencies[int(share * (len(latencies) - 1))]:.0f}" for share in (0.5, 0.99)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    encoder = example_bundles.ensure(("minilm_encoder",)) / "minilm_encoder"
    with RECORDED.open() as lines:
        lengths = [int(row["length"]) for row in csv.DictReader(lines)]
    with tempfile.TemporaryDirectory() as folder:
        for model, pad in MODELS.items():
            export_embedder(encoder, Path(folder, "bundles", model), pad=pad)
        repository = make_repository(Path(folder))
        with running_triton(repository, Path(folder, "server.log"), expected=None) as server:
            for model in MODELS:
                asyncio.run(load(server.server.grpc_url, model, lengths, 5.0))
            rows = [
                measure(server, model, lengths, options.seconds)
                for _ in range(options.rounds)
                for model in MODELS
            ]
    head = ["bundle", "executions", "requests each", "padding", "requests/s", "p50 ms", "p99 ms"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
