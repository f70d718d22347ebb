"""Part `interruptions`: what clients notice of a runtime's death, of `rsrv restart` and of `rsrv sleep`."""

import itertools
import os
import signal
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from rsrv.gpu.memory import card_memory
from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.runtimes import WIDTH, Model, make_models
from rsrv.gpu.server import BUNDLES, ServedModels, ask, serving, tritonserver_for
from rsrv.text import amount, duration

#: bytes that the server itself may hold on a card while its runtime sleeps
_OF_SERVER = 1_000_000_000


def interruptions(given: PartInput, tell: Tell) -> None:
    """Kill the runtime twice, restart it, and have it sleep and wake, while clients ask for several models."""
    if (tritonserver := tritonserver_for("a runtime's death", tell)) is None:
        return
    amounts = given.amounts
    (folder := given.folder / BUNDLES).mkdir()
    models = make_models(
        replace(given, folder=folder), amounts.eviction_each // 10, [f"i{i}" for i in range(6)]
    )
    free = None if given.on_cpu else card_memory()[0]
    with serving(given, tritonserver, [one.name for one in models], {"stub": {"retry_s": 60}}) as served:
        for name in ("SIGKILL", "SIGSEGV"):
            with _asking(served, models, amounts.clients) as load:
                tell(
                    load.through(
                        f"{name} of the runtime", _killing(served, signal.Signals[name]), amounts.pause_s
                    )
                )
        with _asking(served, models, amounts.clients) as load:
            tell(load.through("rsrv restart", lambda: served.rsrv("restart"), amounts.pause_s))
        tell(_sleep(served, free))
        with InferenceServerClient(served.address) as client:
            started = time.perf_counter()
            right = np.array_equal(
                ask(client, models[0].name, np.zeros((1, WIDTH), np.float32)),
                np.full((1, WIDTH), models[0].constant, np.float32),
            )
            took = time.perf_counter() - started
        tell(
            check(
                "a request after it",
                right,
                f"answered after {duration(took)}",
                "it wakes the device",
                {"seconds": took},
            )
        )


def _killing(served: ServedModels, number: signal.Signals) -> Callable[[], None]:
    pid = served.runtime_pid()
    return lambda: os.kill(pid, number)


def _sleep(served: ServedModels, before: int | None) -> Finding:
    """Have the device sleep; `before`: free bytes of the card before the server started."""
    started = time.perf_counter()
    served.rsrv("sleep")
    took = time.perf_counter() - started
    if before is None:
        return Finding("rsrv sleep", "MEASURED", f"done after {duration(took)}")
    held = before - card_memory()[0]
    return check(
        "rsrv sleep",
        held <= _OF_SERVER,
        f"memory free after {duration(took)}",
        f"all but {amount(held)}, which tritonserver itself holds",
        {"seconds": took, "held_bytes": held},
    )


class _Load:
    """Answers that the clients got so far."""

    def __init__(self) -> None:
        #: times of the right ones
        self.right: list[float] = []
        #: models of the wrong ones
        self.wrong: list[str] = []
        self.failed: list[str] = []

    def through(self, what: str, act: Callable[[], object], pause_s: float) -> Finding:
        """Interrupt the runtime amid requests; return how long no answer came, and whether any failed."""
        time.sleep(pause_s)
        began = time.perf_counter()
        act()
        acted = time.perf_counter()
        time.sleep(pause_s)
        ended, now = sorted(self.right), time.perf_counter()
        # From the last answer before it on, until now.
        since = ended[max(0, bisect_left(ended, began) - 1) :]
        gap = max(later - one for one, later in itertools.pairwise([*since, now])) if since else now - began
        reason = f"{len(ended)} right answers, {len(self.wrong)} wrong, {len(self.failed)} requests failed"
        reason += f": {self.failed[0]}" if self.failed else ""
        passed = bool(ended) and ended[-1] > acted and not self.wrong and not self.failed
        return check(what, passed, f"no answer for {duration(gap)}", reason, {"gap_s": gap})


@contextmanager
def _asking(served: ServedModels, models: Sequence[Model], clients: int) -> Iterator[_Load]:
    """Ask models at random, with so many clients, until the block ends."""
    load, stop = _Load(), threading.Event()

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        with InferenceServerClient(served.address) as client:
            while not stop.is_set():
                model = models[int(rng.integers(len(models)))]
                x = rng.integers(-100, 100, (1, WIDTH)).astype(np.float32)
                try:
                    right = np.array_equal(ask(client, model.name, x), x + np.float32(model.constant))
                    if right:
                        load.right.append(time.perf_counter())
                    else:
                        load.wrong.append(model.name)
                except InferenceServerException as error:
                    load.failed.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join()
