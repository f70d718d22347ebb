"""Generations in a runtime, over its socket and without Triton: tokens per second, shared executions, and the effect on another model.

    make bench-generations

A server process has the real loop and the device. The client process only reads tokens.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv.stub.connection import RuntimeConnection, greet
from rsrv.wire.frames import Status
from rsrv.wire.generation import Generate, pack_generate
from rsrv.wire.socket import connect, send
from rsrv_bundle.export import export_bundle
from rsrv_bundle.stateful import export_generative
from tests.bench.bare_runtime import bare_runtime
from tests.bench.places import WORK
from tests.sequence_client import SequenceClient
from tests.status import read_status

_WIDTH, _VOCABULARY, _SIZES = 256, 512, (1, 2, 4, 8, 16)
_PROMPT, _TOKENS, _ROUNDS = 32, 128, 5
#: Width and number of layers of the other model, whose execution takes 4 to 5 ms, and number of requests to it.
_IMAGE, _LAYERS, _REQUESTS = 1024, 80, 300


def main() -> int:
    """Measure, and print the figures."""
    bundles = WORK / "generations"
    if not bundles.exists():
        _export_language_model(bundles / "gru")
        _export_neighbour(bundles / "image")
    with bare_runtime() as (path, _):
        _measure(path, bundles)
    return 0


def _measure(path: Path, bundles: Path) -> None:
    stub = Generator(path, bundles / "gru")
    image = SequenceClient(greet(connect(path)), bundles / "image")
    stub.run(1, 2)
    alone = 0.0
    for clients in (1, 8, 16):
        rows, executions = _work("gru")
        started = time.perf_counter()
        stub.run(clients, clients * _ROUNDS)
        seconds = time.perf_counter() - started
        more_rows, more_executions = _work("gru")
        tokens = clients * _ROUNDS * _TOKENS
        alone = alone or tokens / seconds
        print(
            f"{clients:2} clients: {tokens / seconds:6.0f} tokens/s, {tokens / seconds / alone:.1f} times one client; "
            f"{(more_rows - rows) / (more_executions - executions):.1f} rows an execution, "
            f"{1e3 * seconds / _ROUNDS / _TOKENS:.3f} ms from token to token, of which the step takes {stub.step_ms(clients):.3f}"
        )
    quiet = _measure_requests(image)
    stop = threading.Event()
    beside = threading.Thread(target=stub.run, args=(4, 4), kwargs={"stop": stop})
    beside.start()
    busy = _measure_requests(image)
    stop.set()
    beside.join()
    # Both models have the same weight, and their clients do not pause. So the fair share of each is half of the device's time.
    for name, at in (("p50", 0.5), ("p99", 0.99)):
        alone, loaded = (took[int(at * len(took))] for took in (quiet, busy))
        print(
            f"a model beside 4 generations: {name} {loaded:.1f} ms, alone {alone:.1f} ms; "
            f"{loaded / alone / 2:.2f} times its fair share, twice the time alone"
        )


def _work(model: str) -> tuple[int, int]:
    """Return the numbers of rows and executions of a model so far."""
    status = read_status(os.getpid())["models"][model]
    return status["useful_rows"], status["dispatches"]


class Generator:
    """A stub's connection that keeps one generation running for each client."""

    def __init__(self, path: Path, bundle: Path) -> None:
        self._connection = RuntimeConnection(greet(connect(path)))
        body = self._connection.register({"model": bundle.name, "bundle": str(bundle)})
        self._sizes = dict(zip(_SIZES, body["models"][0]["costs_ns"][0], strict=True))
        self._random = np.random.default_rng(7)

    def step_ms(self, rows: int) -> float:
        """Return the milliseconds of a step with `rows` rows, measured in the warm-up."""
        return float(self._sizes[rows]) / 1e6

    def run(self, clients: int, generations: int, stop: threading.Event | None = None) -> None:
        """Generate `generations` answers. With `stop`, also continue until it is set."""
        live = set[int]()
        started = received = 0
        while live or started < generations or (stop is not None and not stop.is_set()):
            while len(live) < clients and (started < generations or (stop is not None and not stop.is_set())):
                (number,) = self._connection.next_ids(1)
                prompt = self._random.integers(0, _VOCABULARY, _PROMPT).tolist()
                send(self._connection.sock, pack_generate(Generate(number, prompt, _TOKENS, stop=[])))
                live.add(number)
                started += 1
            for done in self._connection.receive(60):
                assert done.status is Status.OK, done.text
                live.remove(done.request)
            received += sum(1 for _ in self._connection.take_tokens())
        assert received == started * _TOKENS, (received, started)


def _measure_requests(client: SequenceClient) -> list[float]:
    """Return sorted milliseconds of requests to the model without state. Each request is sent after the answer to the previous one."""
    took, x = [], np.zeros(_IMAGE, np.float32)
    for _ in range(_REQUESTS):
        began = time.perf_counter()
        client.answer(client.send(0, 0, x))
        took.append(1e3 * (time.perf_counter() - began))
    return sorted(took)


def _export_language_model(path: Path) -> None:
    """Write a recurrent network with random weights, which generates meaningless tokens."""
    random = np.random.default_rng(1)

    def matrix(*shape: int) -> Any:
        return jnp.asarray(random.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    params = {
        "embed": matrix(_VOCABULARY, _WIDTH),
        "gates": matrix(2 * _WIDTH, 2 * _WIDTH),
        "new": matrix(2 * _WIDTH, _WIDTH),
        "out": matrix(_WIDTH, _VOCABULARY),
    }

    def step(params: Any, state: Any, position: Any, tokens: Any, lengths: Any) -> Any:
        def advance(hidden: Any, at: Any) -> Any:
            token, counts = at
            x = params["embed"][token]
            reset, update = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, hidden], 1) @ params["gates"]), 2, 1)
            new = jnp.tanh(jnp.concatenate([x, reset * hidden], 1) @ params["new"])
            return jnp.where(counts[:, None], update * hidden + (1 - update) * new, hidden), None

        counted = jnp.arange(tokens.shape[1])[:, None] < lengths
        hidden, _ = jax.lax.scan(advance, state, (tokens.T, counted))
        return hidden @ params["out"], hidden

    export_generative(
        step,
        jax.ShapeDtypeStruct((_WIDTH,), np.float32),
        params,
        slots=32,
        context=_PROMPT + _TOKENS,
        max_tokens=_TOKENS,
        chunks=(1, 16),
        batch_sizes=_SIZES,
        out_dir=path,
    )


def _export_neighbour(path: Path) -> None:
    weight = jnp.asarray(np.random.default_rng(2).normal(0, _IMAGE**-0.5, (_IMAGE, _IMAGE)), jnp.float32)

    def apply(params: Any, x: Any) -> Any:
        for _ in range(_LAYERS):
            x = jnp.tanh(x @ params["w"])
        return {"y": x}

    export_bundle(
        apply, {"w": weight}, {"x": np.zeros((1, _IMAGE), np.float32)}, batch_sizes=[1], out_dir=path
    )


if __name__ == "__main__":
    raise SystemExit(main())
