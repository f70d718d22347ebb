"""Models that come and go, through the real loop and scheduler: latency, throughput, and traffic over many."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from rsrv.runtime.jax_device import JaxDevice
from rsrv.settings import Settings, load_settings
from tests.bench.gpu.client import Client, Wrong, counts, serving
from tests.bench.gpu.models import WIDTH, Model, Shape, make_models, spend


def settings_for(budget: int) -> Settings:
    return load_settings(f"runtime: {{weight_budget_bytes: {budget}}}")


@dataclass(frozen=True)
class Cold:
    """Seconds from a request to its answer for one size; `floor_s`: the bytes at the limit's rate."""

    nbytes: int
    cold_s: float
    warm_s: float
    floor_s: float

    @property
    def efficiency(self) -> float:
        """1: evicted weights cost their transfer and nothing else."""
        return self.floor_s / max(self.cold_s - self.warm_s, 1e-9)


def measure_cold(
    device: JaxDevice, directory: Path, sizes: Sequence[int], rounds: int, limit: float
) -> list[Cold]:
    """Measure each size after its eviction by a model that fills the budget. Medians over the rounds."""
    ascending = sorted(sizes)
    models: list[Model] = []
    for size in ascending:
        names = [f"cold{size}", *(["evictor"] if size == ascending[-1] else [])]
        models += make_models(directory, Shape(size), names)
    results = []
    with serving(device, settings_for(ascending[-1]), models) as clients:
        *asked, evictor = clients
        for client in asked:
            cold, warm = [], []
            for x in _inputs(rounds):
                evictor.ask(x)
                loads = counts()[1]
                cold.append(client.ask(x))
                if counts()[1] != loads + 1:
                    raise Wrong(f"{client.model.name} was still there when it should have been loaded")
                warm += [client.ask(x) for _ in range(5)]
            nbytes = client.model.nbytes
            results.append(Cold(nbytes, median(cold), median(warm), nbytes / limit))
    return results


def steps_for(seconds: float, matrix: int) -> int:
    """Return how many matrix products, at least 1, make an execution take so long on jax's device."""
    struct: Any = jax.ShapeDtypeStruct
    times = []
    for steps in (64, 128):
        function = partial(spend, steps)
        compiled = jax.jit(function).lower(struct((matrix, matrix), np.float32)).compile()
        start = np.zeros((matrix, matrix), np.float32)
        runs = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(compiled(start))
            runs.append(time.perf_counter() - began)
        times.append(min(runs))
    return max(1, round(seconds / max((times[1] - times[0]) / 64, 1e-7)))


@dataclass(frozen=True)
class Turns:
    """Models that use the device in turns, of which `fit` fit at a time."""

    models: int
    fit: int
    nbytes: int
    calls_per_s: float
    loads_per_s: float
    compute_s: float
    transfer_s: float

    @property
    def overlapped(self) -> float:
        """Return the calls per second if every call loads, beside the execution before it."""
        return 1 / max(self.compute_s, self.transfer_s)

    @property
    def serial(self) -> float:
        """Return the same without overlap, the only possibility in room for one."""
        return 1 / (self.compute_s + self.transfer_s)


def measure_turns(
    device: JaxDevice, directory: Path, shape: Shape, models: int, fit: int, seconds: float, limit: float
) -> Turns:
    """Measure with one request of every model always in flight."""
    made = make_models(directory, shape, [f"turns{fit}{chr(ord('a') + i)}" for i in range(models)])
    budget = shape.nbytes * fit + shape.nbytes // 2
    with serving(device, settings_for(budget), made) as clients:
        alone = [clients[0].ask(x) for x in _inputs(6)]
        before = counts()
        started = time.perf_counter()
        _run(clients, len(clients), seconds, lambda worker, _: worker)
        elapsed = time.perf_counter() - started
        answered, loads = (after - b for after, b in zip(counts(), before, strict=True))
    return Turns(
        models,
        fit,
        shape.nbytes,
        answered / elapsed,
        loads / elapsed,
        median(alone),
        shape.nbytes / limit,
    )


@dataclass(frozen=True)
class Traffic:
    """Many models under Zipf traffic with `clients` requests at a time."""

    models: int
    nbytes: int
    budget: int
    clients: int
    answered_per_s: float
    hit_rate: float
    loaded_bytes_per_s: float
    p50_s: float
    p99_s: float
    register_s: float


def measure_traffic(
    device: JaxDevice,
    directory: Path,
    shape: Shape,
    models: int,
    budget: int,
    seconds: float,
    clients: int = 16,
    exponent: float = 1.0,
) -> Traffic:
    """Draw a request's model with a probability of rank^-exponent. A hit needed no load."""
    made: list[Model] = make_models(directory, shape, [f"many{i:03}" for i in range(models)])
    weights = np.arange(1, models + 1, dtype=float) ** -exponent
    weights /= weights.sum()
    starting = time.perf_counter()
    with serving(device, settings_for(budget), made) as all_clients:
        register_s = time.perf_counter() - starting
        # Until the popular ones are resident.
        _run(all_clients, clients, seconds / 4, lambda _, rng: int(rng.choice(models, p=weights)))
        before = counts()
        started = time.perf_counter()
        took = _run(all_clients, clients, seconds, lambda _, rng: int(rng.choice(models, p=weights)))
        elapsed = time.perf_counter() - started
        answered, loads = (after - b for after, b in zip(counts(), before, strict=True))
    p50, p99 = np.quantile(took, [0.5, 0.99])
    return Traffic(
        models,
        shape.nbytes,
        budget,
        clients,
        answered / elapsed,
        1 - loads / answered,
        loads * shape.nbytes / elapsed,
        float(p50),
        float(p99),
        register_s,
    )


def _run(
    clients: Sequence[Client],
    workers: int,
    seconds: float,
    choose: Callable[[int, np.random.Generator], int],
) -> list[float]:
    """Run so many threads of successive requests; return the seconds of each. Raises their errors."""
    end = time.perf_counter() + seconds
    took: list[float] = []
    failures: list[Exception] = []

    def work(worker: int) -> None:
        rng = np.random.default_rng(worker)
        try:
            while time.perf_counter() < end and not failures:
                client = clients[choose(worker, rng)]
                x = rng.integers(-100, 100, (1, WIDTH)).astype(np.float32)
                asked = time.perf_counter()
                with client.busy:
                    client.ask(x)
                took.append(time.perf_counter() - asked)
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return took


def _inputs(count: int) -> list[np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
    rng = np.random.default_rng(1)
    return [rng.integers(-100, 100, (1, WIDTH)).astype(np.float32) for _ in range(count)]
