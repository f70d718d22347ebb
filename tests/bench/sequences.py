"""Sequences in a runtime, over its socket and without Triton: what a step costs, and how steps share executions.

    make bench-sequences

A process has the real loop and the CPU device. The client's process only executes the module itself, for comparison.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv.gpu.runtimes import private_bytes
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from rsrv.stub.connection import greet
from rsrv.wire.frames import END, START
from rsrv.wire.socket import connect
from rsrv_bundle import read_bundle
from rsrv_bundle.export import export_bundle
from rsrv_bundle.modules import check_signatures, read_module
from rsrv_bundle.stateful import export_stateful
from rsrv_bundle.weights import load_weights
from tests.bench.bare_runtime import bare_runtime
from tests.bench.places import WORK
from tests.sequence_client import SequenceClient

_WIDTH, _SLOTS, _SIZES = 128, 64, (1, 2, 4, 8, 16)
_STEPS, _ROUNDS, _MANY, _SHORT = 2000, 5, 1000, 10_000
_X = np.full(_WIDTH, 0.5, np.float32)


def main() -> int:
    """Measure, and print the figures."""
    bundle, twin = WORK / "sequences" / "gru", WORK / "sequences" / "twin"
    if not twin.exists():
        _export(bundle, twin)
    with bare_runtime() as (path, pid):
        client = SequenceClient(greet(connect(path)), bundle)
        _one_client(client, SequenceClient(greet(connect(path)), twin), bundle)
        _sixteen(client)
        _more_than_slots(client)
        _short_ones(client, path, bundle, pid)
    return 0


def _one_client(client: SequenceClient, twin: SequenceClient, bundle: Path) -> None:
    """Compare a step over the socket, a request to a model without state, and the module itself. They take turns."""
    kinds: Mapping[str, Callable[[], object]] = {
        "the module alone": _module_alone(bundle),
        "a step": lambda: client.answer(client.send(1, 0, _X)),
        "a request without state": lambda: twin.answer(twin.send(0, 0, _X)),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    client.answer(client.send(1, START, _X))
    for _ in range(_ROUNDS):
        for kind, once in kinds.items():
            for _ in range(_STEPS // _ROUNDS):
                started = time.perf_counter()
                once()
                times[kind].append(1e3 * (time.perf_counter() - started))
    client.answer(client.send(1, END, _X))
    # Other work on the machine delays most switches between processes. The fastest tenth is affected least.
    alone, *_ = (statistics.quantiles(durations, n=10) for durations in times.values())
    for kind, durations in times.items():
        tenths = statistics.quantiles(durations, n=10)
        print(
            f"one client, {kind}: p10 {tenths[0]:.3f} ms, p50 {tenths[4]:.3f} ms; "
            f"more than the module alone: {tenths[0] - alone[0]:.3f} and {tenths[4] - alone[4]:.3f} ms"
        )


def _module_alone(bundle: Path) -> Callable[[], object]:
    """Return a function that executes one step of one sequence in this process."""
    device, loaded = JaxDevice("cpu", ExecutableSources(WORK / "xla")), read_bundle(bundle)
    signature = check_signatures(loaded)[0, 1]
    executable = device.compile(read_module(loaded, (0, 1), signature), signature)
    assert loaded.manifest.state is not None
    weights = device.upload(load_weights(loaded))
    kinds = [((_SLOTS, *tensor.dims), np.dtype(np.float32)) for tensor in loaded.manifest.state.tensors]
    pools, slots = device.make_pools(kinds), np.zeros(1, np.int32)
    return lambda: device.read(device.launch(executable, weights, [_X[None], slots], (), pools))


def _sixteen(client: SequenceClient) -> None:
    """Let sixteen clients send their next steps as soon as they have answers."""
    waiting = [client.send(id, START, _X) for id in range(1, 17)]
    rows = list[int]()
    started, steps = time.perf_counter(), 0
    while steps < _STEPS:
        number = waiting.pop(0)
        done, _ = client.answer(number)
        rows.append(done.rows)
        waiting.append(client.send(steps % 16 + 1, 0, _X))
        steps += 1
    seconds = time.perf_counter() - started
    for number in waiting:
        client.answer(number)
    for id in range(1, 17):
        client.answer(client.send(id, END, _X))
    shared = statistics.harmonic_mean(rows)
    print(f"16 clients: {steps / seconds:.0f} steps/s, {shared:.1f} rows an execution")


def _more_than_slots(client: SequenceClient) -> None:
    """Step a thousand sequences in turn. All but 64 of them have their states on the host."""
    for id in range(1, _MANY + 1):
        client.answer(client.send(id, START, _X))
    started = time.perf_counter()
    for first in range(1, _MANY + 1, 16):
        for number in [client.send(id, 0, _X) for id in range(first, min(first + 16, _MANY + 1))]:
            client.answer(number)
    seconds = time.perf_counter() - started
    print(
        f"{_MANY} sequences on {_SLOTS} slots: {_MANY / seconds:.0f} steps/s, each with a move to and from the host"
    )
    for id in range(1, _MANY + 1):
        client.answer(client.send(id, END, _X))


def _short_ones(client: SequenceClient, path: Path, bundle: Path, pid: int) -> None:
    """Start and end sequences. Some connections close before their sequences have ended. Print the memory before and after."""
    before = private_bytes(pid) / 1e6
    for first in range(1, _SHORT + 1, 100):
        other = SequenceClient(greet(connect(path)), bundle)
        for id in range(first, first + 10):
            other.answer(other.send(id, START, _X))
        for id in range(first + 10, first + 100):
            client.answer(client.send(id, START | END, _X))
        other.connection.close()
    print(
        f"{_SHORT} sequences, a tenth of them abandoned: {before:.0f} MB before, {private_bytes(pid) / 1e6:.0f} MB after"
    )


def _export(path: Path, twin: Path) -> None:
    """Write a gated recurrent network with random weights, and a model without state that does the same work."""
    random = np.random.default_rng(1)
    params = {
        name: random.normal(0, _WIDTH**-0.5, (_WIDTH, 3 * _WIDTH)).astype(np.float32) for name in ("x", "h")
    }

    def step(params: Any, state: Any, x: Any) -> Any:
        (rx, zx, nx), (rh, zh, nh) = (
            jnp.split(value @ params[name], 3, axis=1) for name, value in (("x", x), ("h", state["h"]))
        )
        reset, update = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
        hidden = (1 - update) * jnp.tanh(nx + reset * nh) + update * state["h"]
        return {"y": hidden}, {"h": hidden}

    x = {"x": np.zeros((1, _WIDTH), np.float32)}
    first = {"h": jax.ShapeDtypeStruct((_WIDTH,), np.float32)}
    sizes: Any = {"batch_sizes": _SIZES, "overwrite": True}
    export_stateful(step, first, params, x, slots=_SLOTS, when_full="host", out_dir=path, **sizes)
    export_bundle(lambda params, x: step(params, {"h": x + 1}, x)[0], params, x, out_dir=twin, **sizes)


if __name__ == "__main__":
    main()
