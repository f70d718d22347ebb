"""Questions and answers between two processes: JSON, a line each, both ways at once over one socket."""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger("rsrv.gateway")

#: bytes of one line: a table of many thousand models
_MOST = 1 << 28

Answers = Callable[[str, Any], Awaitable[Any]]


class PeerError(Exception):
    """The other side did not do it, with its reason; or it is gone."""


class Lines:
    """`answers(question, value)` gives the answer to one of the other side's questions; what it raises is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers) -> None:
        self._reader = reader
        self._writer = writer
        self._answers = answers
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def over(cls, sock: socket.socket, answers: Answers) -> "Lines":
        """The socket belongs to it from now on."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=_MOST)
        return cls(reader, writer, answers)

    async def ask(self, question: str, value: Any = None) -> Any:
        """The answer. Raises PeerError."""
        if self._writer.is_closing():
            raise PeerError("it is gone")
        self._count += 1
        number = self._count
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": question, "value": value, "number": number})
            return await future
        finally:
            self._asked.pop(number, None)

    def tell(self, news: str, value: Any = None) -> None:
        """Without an answer; nothing happens when the other side is gone."""
        if not self._writer.is_closing():
            self._send({"ask": news, "value": value})

    async def run(self) -> None:
        """Until the other side closes."""
        try:
            while line := await self._reader.readline():
                self._take(json.loads(line))
        except ConnectionError:
            pass  # as if it had closed
        except (OSError, ValueError) as error:
            log.warning("the other process cannot be understood any more: %s", error)
        finally:
            self.close()

    def close(self) -> None:
        self._writer.close()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(PeerError("it is gone"))
        for task in self._tasks:
            task.cancel()

    def _take(self, line: dict[str, Any]) -> None:
        if "ask" in line:
            task = asyncio.create_task(self._answer(line["ask"], line["value"], line.get("number")))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        future = self._asked.get(line["number"])
        if future is None or future.done():
            return  # whoever asked does not wait any more
        if "error" in line:
            future.set_exception(PeerError(line["error"]))
        else:
            future.set_result(line["answer"])

    async def _answer(self, question: str, value: Any, number: int | None) -> None:
        try:
            answer = {"answer": await self._answers(question, value)}
        except Exception as error:  # noqa: BLE001  it is for whoever asks
            answer = {"error": str(error) or type(error).__name__}
        if number is not None and not self._writer.is_closing():
            self._send({**answer, "number": number})

    def _send(self, value: dict[str, Any]) -> None:
        with suppress(OSError):
            self._writer.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
