"""Part `interruptions`: the effects of a runtime's death, of `rsrv restart` and of `rsrv sleep` on clients."""

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
from rsrv.gpu.runtimes import WIDTH, Answers, Model, Unanswered, clients, make_models, runtime
from rsrv.gpu.server import BUNDLES, NoTriton, ServedModels, ask, serving
from rsrv.stub.connection import Rejected
from rsrv.stub.session import UNREACHABLE
from rsrv.text import amount, duration

#: Bytes that the server itself may hold on a card while its runtime sleeps.
_OF_SERVER = 1_000_000_000
_MODELS = 6
#: Share of the part's time for each pause. There are six pauses: one before and one after each of three interruptions.
_PAUSES = 0.08
#: If there is no Triton, number of requests before the runtime is killed.
_BEFORE = 20
#: Seconds between attempts to connect after the runtime was killed.
_RETRY_S = 0.02


def interruptions(part_input: PartInput, tell: Tell) -> None:
    """Kill the runtime twice, restart it, and let it sleep and wake, while clients send requests for several models."""
    amounts = part_input.amounts
    (folder := part_input.folder / BUNDLES).mkdir()
    models = make_models(
        replace(part_input, folder=folder), amounts.interrupted_each, [f"i{i}" for i in range(_MODELS)]
    )
    free = None if part_input.on_cpu else card_memory()[0]
    try:
        with serving(part_input, [model.name for model in models], {"stub": {"retry_s": 60}}) as served:
            _through_triton(part_input, tell, served, models, free)
    except NoTriton as error:
        _without_triton(part_input, tell, models)
        tell(Finding("rsrv restart, rsrv sleep", "NOT RUN", reason=str(error)))


def _through_triton(
    part_input: PartInput, tell: Tell, served: ServedModels, models: Sequence[Model], free: int | None
) -> None:
    """Interrupt the runtime of a server. `free` has the free bytes of the card before the server started."""
    pause_s = part_input.window(part_input.amounts.pause_s, _PAUSES)
    for title, act in (
        ("SIGKILL of the runtime", lambda: os.kill(served.runtime_pid(), signal.SIGKILL)),
        ("SIGSEGV of the runtime", lambda: os.kill(served.runtime_pid(), signal.SIGSEGV)),
        ("rsrv restart", lambda: served.rsrv("restart")),
    ):
        with _asking(served, models, part_input.amounts.clients) as load:
            tell(load.through(title, act, pause_s))
    tell(_sleep(served, free))
    with InferenceServerClient(served.address) as client:
        started = time.perf_counter()
        y = ask(client, models[0].name, np.zeros((1, WIDTH), np.float32))
        took = time.perf_counter() - started
    right = np.array_equal(y, np.full((1, WIDTH), models[0].constant, np.float32))
    tell(
        check(
            "a request after rsrv sleep",
            right,
            f"answered after {duration(took)}",
            "it wakes the device",
            {"seconds": took},
        )
    )


def _without_triton(part_input: PartInput, tell: Tell, models: Sequence[Model]) -> None:
    """Kill a runtime that runs without a server. One client then connects again and again until it gets an answer."""
    answers = Answers()
    with runtime(part_input, "death", part_input.device.platform) as process:
        with clients(process, models[:1]) as (client,):
            for _ in range(_BEFORE):
                answers.ask(client, models[0])
            began = time.perf_counter()
            os.kill(process.record().pid, signal.SIGKILL)
        while True:
            try:
                with clients(process, models[:1]) as (client,):
                    answers.ask(client, models[0])
                break
            except (*UNREACHABLE, Rejected, Unanswered):
                time.sleep(_RETRY_S)
        gap = time.perf_counter() - began
    reason = "without Triton: one client, which connects again, starts the runtime and registers its model"
    value = f"no answer for {duration(gap)}"
    tell(check("SIGKILL of the runtime", answers.wrong == 0, value, reason, {"gap_s": gap}))


def _sleep(served: ServedModels, before: int | None) -> Finding:
    """Let the device sleep. `before` has the free bytes of the card before the server started."""
    started = time.perf_counter()
    served.rsrv("sleep")
    took = time.perf_counter() - started
    if before is None:
        return Finding("rsrv sleep", "MEASURED", f"done after {duration(took)}")
    used = before - card_memory()[0]
    return check(
        "rsrv sleep",
        used <= _OF_SERVER,
        f"memory free after {duration(took)}",
        f"all but {amount(used)}, which tritonserver itself holds",
        {"seconds": took, "held_bytes": used},
    )


class _Load:
    """Results of the clients' requests so far."""

    def __init__(self) -> None:
        #: Times of the right answers.
        self.right: list[float] = []
        #: Models of the wrong answers.
        self.wrong: list[str] = []
        #: Errors of the failed requests.
        self.failed: list[str] = []

    def through(self, title: str, act: Callable[[], object], pause_s: float) -> Finding:
        """Interrupt the runtime with `act` while clients send requests. Wait `pause_s` seconds before and after that.

        Return a finding with the longest time without an answer. The finding is FAIL if an answer was wrong or a request failed.
        """
        time.sleep(pause_s)
        began = time.perf_counter()
        act()
        acted = time.perf_counter()
        time.sleep(pause_s)
        ended, now = sorted(self.right), time.perf_counter()
        # Consider the time from the last answer before the interruption until now.
        since = ended[max(0, bisect_left(ended, began) - 1) :]
        gap = (
            max(later - earlier for earlier, later in itertools.pairwise([*since, now]))
            if since
            else now - began
        )
        reason = f"{len(ended)} right answers, {len(self.wrong)} wrong, {len(self.failed)} requests failed"
        reason += f": {self.failed[0]}" if self.failed else ""
        passed = bool(ended) and ended[-1] > acted and not self.wrong and not self.failed
        return check(title, passed, f"no answer for {duration(gap)}", reason, {"gap_s": gap})


@contextmanager
def _asking(served: ServedModels, models: Sequence[Model], clients: int) -> Iterator[_Load]:
    """Send requests for random models, from this many clients, until the block ends."""
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
