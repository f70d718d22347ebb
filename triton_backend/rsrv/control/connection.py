"""A greeted connection to the runtime on an event loop: questions are answered in the order in which they were asked."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rsrv.wire import socket as wire
from rsrv.wire.frames import Kind, ProtocolError, check_hello, hello, read_header, unpack_json
from rsrv.wire.memory import SharedMemoryError, read_document

#: frames that are read before the loop does something else
_BURST = 64

Answer = asyncio.Future[dict[str, Any]]


class Connection:
    """`on_state` gets the JSON of each STATE frame, or of its document; it raises ProtocolError if that cannot be.

    `ended` is done when the connection is over, with the reason.
    """

    def __init__(self, path: Path, on_state: Callable[[dict[str, Any]], None]) -> None:
        """Raises OSError when nobody listens, ProtocolError when the listener is another user's."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._on_state = on_state
        self._waiting: deque[tuple[Kind, Answer]] = deque()
        self._sock = wire.connect(path)
        self._sock.setblocking(False)
        self._receiver = wire.Receiver(self._sock)
        self._loop.add_reader(self._sock, self._readable)
        #: the runtime's first frame
        self.greeting = self.ask(hello(), Kind.WELCOME)

    def send(self, frame: bytes) -> None:
        """Something that has no answer of its own; ends the connection if the runtime does not take it."""
        if self.ended.done():
            return
        try:
            wire.send(self._sock, frame)
        except BlockingIOError:
            self._end("the runtime does not read what it is asked")
        except (wire.Closed, OSError) as error:
            self._end(str(error))

    def ask(self, question: bytes, answer: Kind) -> Answer:
        """The JSON object that is the answer: in a document if there is one, else in the frame.

        Cancelled when the connection ends before. May be cancelled, or be given a result, by whoever asks.
        """
        future = self._loop.create_future()
        if self.ended.done():
            future.cancel()
            return future
        self._waiting.append((answer, future))
        self.send(question)
        return future

    def close(self) -> None:
        self._end("closed")

    def _end(self, reason: str) -> None:
        if self.ended.done():
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self.ended.set_result(reason)
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            future.cancel()

    def _readable(self) -> None:
        try:
            for _ in range(_BURST):
                if self.ended.done():
                    return
                frame, fds = self._receiver.receive()
                try:
                    self._take(frame, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except BlockingIOError:
            pass
        except (wire.Closed, ProtocolError, SharedMemoryError, OSError) as error:
            self._end(str(error))

    def _take(self, frame: memoryview, fds: list[int]) -> None:
        kind, _ = read_header(frame)
        if kind is Kind.STATE:
            self._on_state(read_document(fds[0]) if fds else unpack_json(frame))
            return
        expected, future = self._waiting.popleft() if self._waiting else (None, None)
        if kind is not expected or future is None:
            raise ProtocolError(f"the runtime sends {kind.name} instead of what it is asked for")
        if kind is Kind.WELCOME:
            check_hello(frame)
            value = unpack_json(frame)
        else:
            value = read_document(fds[0]) if fds else unpack_json(frame)
        with suppress(asyncio.InvalidStateError):  # whoever asked does not wait any more
            future.set_result(value)
