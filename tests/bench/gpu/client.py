"""A runtime in this process, with its own loop and scheduler on a real device, and its clients."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.runtime.device import Device
from rsrv.runtime.loop import Loop
from rsrv.settings import Settings
from rsrv.stub.connection import RuntimeConnection, greet
from rsrv.wire.frames import Status, Submission
from rsrv.wire.layout import NUMPY, Interface
from rsrv.wire.paths import SOCKET, make_private, runtime_directory
from rsrv.wire.socket import connect, listen, read_status
from tests.bench.gpu.models import Model

#: The longest time of an answer, in seconds.
_TIMEOUT = 120.0


class Wrong(Exception):
    """An answer that is wrong or missing."""


class Client:
    """One model over one connection, for one thread at a time."""

    def __init__(self, socket: Path, model: Model) -> None:
        self.model = model
        self.busy = threading.Lock()
        self._lane = RuntimeConnection(greet(connect(socket)))
        document = self._lane.register({"model": model.name, "bundle": str(model.path)})
        self._variant = Interface.from_json(document["models"][0]["interface"]).variants[0]
        self._slab = self._lane.take(
            self._variant.inputs.places(1)[1] + self._variant.outputs.places(1)[1], 1
        )

    def ask(self, x: np.ndarray[Any, Any]) -> float:
        """Return the seconds until the answer. Raises Wrong if it is not the right one."""
        started = time.perf_counter()
        slab, variant = self._slab, self._variant
        input, output = variant.inputs.tensors[0], variant.outputs.tensors[0]
        at = slab.place.offset
        outputs_at = at + variant.inputs.places(1)[1]
        np.ndarray(input.shape(1), NUMPY[input.dtype], slab.segment, at)[...] = x
        (id,) = self._lane.next_ids(1)
        self._lane.submit([Submission(id, 0, 1, 0, 0, slab.place.segment, at, outputs_at)])
        (done,) = self._lane.receive(_TIMEOUT)
        if done.status is not Status.OK:
            raise Wrong(f"{self.model.name}: {done.status.name}: {done.text}")
        y = np.ndarray(output.shape(1), NUMPY[output.dtype], slab.segment, outputs_at)
        if not np.array_equal(y, self.model.answer(x)):
            raise Wrong(f"{self.model.name}: {y} for {x}, expected {self.model.answer(x)}")
        return time.perf_counter() - started

    def close(self) -> None:
        self._lane.close()


@contextmanager
def serving(device: Device, settings: Settings, models: Sequence[Model]) -> Iterator[list[Client]]:
    """Serve these models, registered in turn. The runtime finds its directory as a tritonserver's does."""
    directory = runtime_directory(os.getpid(), "0")
    make_private(directory)
    socket = directory / SOCKET
    listener = listen(socket)
    loop = Loop(listener, os.getpid(), settings, lambda: device)
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    with ExitStack() as stack:
        stack.callback(socket.unlink)
        stack.callback(listener.close)
        stack.callback(thread.join)
        stack.callback(loop.stop)
        clients = []
        for model in models:
            clients.append(Client(socket, model))
            stack.callback(clients[-1].close)
        yield clients
        for client in clients:
            client.close()
        _until_nothing_is_left()


def _until_nothing_is_left(seconds: float = 30) -> None:
    """Wait until every model's weights are freed, as the next part would otherwise find the device full."""
    end = time.monotonic() + seconds
    while (status := read_status(os.getpid()))["models"] or status["memory"]["device"]["held_bytes"]:
        if time.monotonic() > end:
            raise Wrong("models do not leave with their clients")
        time.sleep(0.01)


def counts() -> tuple[int, int]:
    """Return the requests answered and the weights loaded so far, over all models of the runtime."""
    models = read_status(os.getpid())["models"].values()
    return sum(m["outcomes"].get("answered", 0) for m in models), sum(m["loads"] for m in models)
