"""Compare answers to random inputs with the model's function, before anything is measured."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tritonclient.grpc as triton

from tests.bench.load import BenchFailed
from tests.bench.models import Array, Case

_THREADS = 8
_TOLERANCE = 1e-4


def check(model: str, answer: Array, expected: Array) -> None:
    """Check an answer. Raises BenchFailed."""
    if answer.shape != expected.shape:
        raise BenchFailed(f"{model} answers with shape {answer.shape}, expected {expected.shape}")
    error = float(np.abs(answer - expected).max() / np.abs(expected).max())
    if not error <= _TOLERANCE:
        raise BenchFailed(f"{model} answers wrongly: relative error {error:.2g}")


def verify(grpc_url: str, case: Case, requests: int = 96) -> int:
    """Send varied inputs from several threads, and check the answers. Return their number. Raises BenchFailed."""
    local = threading.local()

    def ask(seed: int) -> None:
        if not hasattr(local, "client"):
            local.client = triton.InferenceServerClient(grpc_url)
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(1, case.most_rows, endpoint=True))
        values = rng.standard_normal((rows, *case.shape)).astype(np.float32)
        tensor = triton.InferInput(case.input, list(values.shape), "FP32")
        tensor.set_data_from_numpy(values)
        answer = local.client.infer(case.name, [tensor]).as_numpy(case.output)
        check(case.name, answer, case.reference(values))

    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(ask, seed) for seed in range(requests)]:
            done.result()
    return requests
