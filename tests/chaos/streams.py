"""Strikes on a model that generates, whose one slot shows at once what a stream leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence

from tests.chaos.faults import Fault
from tests.chaos.figures import Expected
from tests.chaos.house import House
from tests.chaos.load import Load
from tests.e2e.stateful import close_streams, generate, grpc_streams, told

#: the model
_MODEL = "alone"


class _Streams(Fault):
    def prepare(self, house: House) -> None:
        house.add(_MODEL)
        house.load_model(_MODEL)

    def check(self, house: House) -> Iterable[str]:
        answer = generate(house.server, _MODEL, text_input="hello", max_tokens=20)
        if answer.get("text_output") != told(b"hello", 20):
            yield f"afterwards, a generation gets {answer}"

    def tidy(self, house: House) -> None:
        house.remove(_MODEL)


class StreamsClose(_Streams):
    name = "clients that close streams of tokens at every step"
    expected = Expected(())

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        close_streams(house.server, _MODEL, clients=4, each=15)
        return struck


class KillStreaming(_Streams):
    name = "kill -9 of the runtime while it streams tokens"
    expected = Expected(())
    unhealthy = ""

    def strike(self, house: House, load: Load) -> float:
        with grpc_streams(house.server) as streams:
            streams.ask(_MODEL, "x", b"hello")
            streams.next()
            struck = time.monotonic()
            os.kill(house.runtime_pid(), signal.SIGKILL)
            self._ended = streams.failure()
        return struck

    def check(self, house: House) -> Iterable[str]:
        if "[rsrv:RUNTIME_DOWN]" not in self._ended:
            yield f"the stream ended with {self._ended!r}"
        yield from super().check(house)


STREAMS: Sequence[type[Fault]] = (StreamsClose, KillStreaming)
