"""Faults on models with state: a model that generates text, and a model with sequences.

The model that generates has one slot, so a stream that keeps its slot is noticed at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import ClassVar

from tests.chaos.faults import Fault
from tests.chaos.figures import Expected
from tests.chaos.house import House
from tests.chaos.load import Load
from tests.e2e.calls import Caller, Refused, at_once, caller, outcome
from tests.e2e.stateful import Stream, close_streams, generate, grpc_streams, sums, told
from tests.waiting import wait_until

#: Number of tokens in an answer that is not read at first, and size of the buffers in the clients' kernels.
_UNREAD_TOKENS, _BUFFER_BYTES = 2000, 4096
#: Number of slots for sequences in the model of sums, and number of further sequences that wait for a slot.
_SLOTS, _FURTHER = 64, 8
#: Number of sequences that a death of the runtime ends.
_LIVE = 20


class _WithState(Fault):
    """A fault on a model with state. `tidy` does not unload the model.

    Triton 24.10 may never unload a model if a client cancelled a gRPC stream at its end.
    """

    expected = Expected(())
    model: ClassVar[str]

    def prepare(self, house: House) -> None:
        if not house.ready(self.model):
            house.add(self.model)
            house.load_model(self.model)


class _Streams(_WithState):
    model = "alone"

    def check(self, house: House) -> Iterable[str]:
        answer = generate(house.server, self.model, text_input="hello", max_tokens=20)
        if answer.get("text_output") != told(b"hello", 20):
            yield f"afterwards, a generation gets {answer}"


class StreamsClose(_Streams):
    name = "clients that close streams of tokens at every step"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        close_streams(house.server, self.model, clients=4, each=15)
        return struck


class StreamsUnread(_Streams):
    name = "clients that read their streams of tokens only after others have theirs"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        fields = {"text_input": "slow", "max_tokens": _UNREAD_TOKENS}
        with ExitStack() as held:
            streams = [
                held.enter_context(Stream(house.server, self.model, buffer_bytes=_BUFFER_BYTES, **fields))
                for _ in range(4)
            ]
            # The model has one slot. So each answer is generated completely before the next one begins, although nobody reads it.
            texts = [next(iter(stream))["text_output"] for stream in streams]
            self._beside = generate(house.server, self.model, text_input="a", max_tokens=5)
            for number, stream in enumerate(streams):
                texts[number] += "".join(piece["text_output"] for piece in stream)
        self._texts = texts
        return struck

    def check(self, house: House) -> Iterable[str]:
        if self._beside.get("text_output") != told(b"a", 5):
            yield f"beside them, a generation gets {self._beside}"
        for text in self._texts:
            if text != told(b"slow", _UNREAD_TOKENS):
                yield f"a stream read late has {len(text)} characters, and ends with {text[-50:]!r}"
        yield from super().check(house)


class KillStreaming(_Streams):
    name = "kill -9 of the runtime while it streams tokens"
    unhealthy = ""

    def strike(self, house: House, load: Load) -> float:
        with grpc_streams(house.server) as streams:
            streams.ask(self.model, "x", b"hello")
            streams.next()
            struck = time.monotonic()
            os.kill(house.runtime_pid(), signal.SIGKILL)
            self._ended = streams.failure()
        return struck

    def check(self, house: House) -> Iterable[str]:
        if "[rsrv:RUNTIME_DOWN]" not in self._ended:
            yield f"the stream ended with {self._ended!r}"
        yield from super().check(house)


class _Sequences(_WithState):
    """A fault on a model with sequences. Every sum is right, and no sequence keeps its slot."""

    model = "sums"

    def __init__(self) -> None:
        self._problems: list[str] = []

    def check(self, house: House) -> Iterable[str]:
        yield from self._problems
        if any(sequences := house.model(self.model)["sequences"].values()):
            yield f"sequences are left: {list(sequences)}"

    def _expect(self, what: str, got: object, expected: object) -> None:
        if got != expected:
            self._problems.append(f"{what}: {got} instead of {expected}")


class KillUnderSequences(_Sequences):
    name = f"kill -9 of the runtime under {_LIVE} live sequences"
    unhealthy = ""

    def strike(self, house: House, load: Load) -> float:
        begun = threading.Barrier(_LIVE + 1)

        def step_until_lost(call: Caller, number: int) -> None:
            id, total = number + 1, 1.0
            self._expect("a first step", sums(call, id, [1.0], start=True), [total])
            begun.wait(60)
            try:
                while total < 1e6:
                    total += 1
                    self._expect("a step", sums(call, id, [1.0]), [total])
            except Refused as refused:
                if "[rsrv:SEQUENCE_LOST]" not in refused.message:
                    self._problems.append(f"a step after the death was refused with {refused}")
            self._expect("a new sequence", sums(call, id, [2.0], start=True, end=True), [2.0])

        with ThreadPoolExecutor(1) as pool:
            clients = pool.submit(at_once, house.server, _LIVE, step_until_lost)
            begun.wait(60)
            struck = time.monotonic()
            os.kill(house.runtime_pid(), signal.SIGKILL)
            clients.result()
        return struck


class SlotsExhausted(_Sequences):
    name = f"{_SLOTS} sequences that hold all slots, and others that wait for one"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()

        def begin_and_end(call: Caller, number: int) -> None:
            self._expect(
                "a sequence that waited", sums(call, f"w{number}", [5.0], start=True, end=True), [5.0]
            )

        with caller(house.server) as call, ThreadPoolExecutor(1) as pool:
            for id in range(1, _SLOTS + 1):
                self._expect("a first step", sums(call, id, [float(id)], start=True), [float(id)])
            late = outcome(lambda: sums(call, "late", [1.0], start=True, timeout=200_000))
            if not isinstance(late, Refused) or "[rsrv:DEADLINE]" not in late.message:
                self._problems.append(f"a sequence without a slot, at its deadline: {late}")
            waiting = pool.submit(at_once, house.server, _FURTHER, begin_and_end)
            wait_until(
                lambda: house.model(self.model)["sequences"]["waiting"] == _FURTHER, what="further sequences"
            )
            for id in range(1, _SLOTS + 1):
                self._expect("a last step", sums(call, id, [1.0], end=True), [id + 1.0])
            waiting.result()
        return struck


STREAMS: Sequence[type[Fault]] = (
    StreamsClose,
    StreamsUnread,
    KillStreaming,
    KillUnderSequences,
    SlotsExhausted,
)
