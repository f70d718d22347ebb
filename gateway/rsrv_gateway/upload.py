"""The body of a client's request. It is forwarded as it arrives, and kept for a failover if the memory budget allows that."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from aiohttp import StreamReader
from aiohttp.web import RequestPayloadError
from grpc import StatusCode

from rsrv_gateway.outcomes import Refusal

#: A body of at most this many bytes is sent to workers in one piece, after all of it has arrived.
SMALL_BODY_BYTES = 1 << 18
#: Maximum number of bytes of bodies that a process keeps for failovers. Beyond this limit, a body is sent to only one worker.
KEPT_MAX_BYTES = 1 << 30
#: Adjacent pieces of fewer bytes than this are joined.
_MERGED_BYTES = 1 << 16
_NO_MEMORY = (
    "the gateway's memory for request bodies is used up, and it must store this body to read its JSON. Send the request again "
    "later, or send binary data after the JSON"
)


@dataclass
class UploadBudget:
    """Number of bytes that all uploads together keep, and its maximum."""

    most: int = KEPT_MAX_BYTES
    bytes: int = 0


class UploadError(Exception):
    """The client's body cannot be received completely, or cannot be read."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        #: Error for the client.
        self.refusal = Refusal(code, message)


class Upload:
    """The body of one request, owned by one event loop. While it is kept, several workers may receive it at the same time."""

    def __init__(
        self, stream: StreamReader, size: int | None, most: int, keeping: UploadBudget | None = None
    ) -> None:
        """Start an upload of `size` bytes, or of an unknown size if `size` is None. The upload may have up to `most` bytes.

        `keeping` is the memory budget. Without a budget, the upload is kept regardless of its size. Raises UploadError.
        """
        self._stream = stream
        #: Number of bytes, or None if unknown.
        self.size = size
        self._most = most
        self._pieces: list[bytes] = []
        self._came = 0
        self._keeping = keeping
        self._counted = 0
        #: True if the upload can be sent from its beginning to any number of workers.
        self.kept = True
        #: True if the beginning of the upload was dropped.
        self.cut = False
        self._reading = asyncio.Lock()
        #: True once the client has sent everything.
        self.ended = False
        self.failed: UploadError | None = None
        if size is not None and size > most:
            raise self._too_large()

    async def read_ahead(self) -> AsyncGenerator[tuple[bytes, bool]]:
        """Yield the pieces of the body from its beginning, each with a flag: True for the last piece. Keep the whole body.

        Call this before `data`. Raises UploadError, also if the memory for bodies is used up.
        """
        at = 0
        while True:
            while at == len(self._pieces) and not self.ended:
                await self._more(at)
            if not self.kept and self._came > SMALL_BODY_BYTES:
                self.failed = UploadError(StatusCode.RESOURCE_EXHAUSTED, _NO_MEMORY)
                raise self.failed
            if at == len(self._pieces):
                yield b"", True
                return
            piece = self._pieces[at]
            at += 1
            last = self.ended and at == len(self._pieces)
            yield piece, last
            if last:
                return
            at = self._merge(at)

    def _merge(self, at: int) -> int:
        """Join small pieces before the index `at`, so that a body in many small pieces takes little memory.

        Return the new index of the piece that was at `at`.
        """
        pieces = self._pieces
        while at > 1 and len(pieces[at - 2]) <= len(pieces[at - 1]) < _MERGED_BYTES:
            pieces[at - 2 : at] = [pieces[at - 2] + pieces[at - 1]]
            at -= 1
        return at

    async def settle(self) -> bytes | None:
        """Wait for a small body, and return it. Return None at once for a larger body. Raises UploadError."""
        if self.size is None or self.size > SMALL_BODY_BYTES:
            return None
        while not self.ended:
            await self._more(len(self._pieces))
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def add_member(self, member: bytes) -> None:
        """Add a member to the JSON object that was read ahead. Call this before `data`."""
        for number, piece in enumerate(self._pieces):
            start, brace, members = piece.partition(b"{")
            if brace:
                following = (
                    b"".join([members, *self._pieces[number + 1 :]]) if not members.strip() else members
                )
                comma = b"" if following.lstrip().startswith(b"}") else b","
                self._pieces[number] = start + brace + member + comma + members
                if self.size is not None:
                    self.size += len(member) + len(comma)
                return

    async def wait(self) -> None:
        """Wait until the whole body has arrived. Raises UploadError, also if the memory for bodies is used up."""
        async for _ in self.read_ahead():
            pass

    def whole(self) -> bytes:
        """Return the body so far. It is complete after `wait`, or after a worker has received it."""
        return b"".join(self._pieces)

    def data(self) -> bytes | AsyncIterator[bytes]:
        """Return the body from its beginning, for one worker: bytes of a small body that has arrived, otherwise an iterator."""
        if self.ended and len(self._pieces) <= 1 and self._came <= SMALL_BODY_BYTES:
            return self._pieces[0] if self._pieces else b""
        return self._all()

    async def _all(self) -> AsyncIterator[bytes]:
        at = 0
        while True:
            if at and not self.kept:  # Sent bytes are not needed any more.
                del self._pieces[:at]
                at, self.cut = 0, True
            if at < len(self._pieces):
                at += 1
                yield self._pieces[at - 1]
            elif self.ended:
                break
            else:
                await self._more(at)

    def forget(self) -> None:
        """Stop keeping the body for a failover. This may be called several times."""
        self.kept = False
        if self._keeping is not None:
            self._keeping.bytes -= self._counted
        self._counted = 0

    async def _more(self, known: int) -> None:
        """Wait until there are more pieces than `known`, or the upload has ended. Raises UploadError."""
        async with self._reading:
            if len(self._pieces) > known or self.ended:
                return
            try:
                piece = await self._stream.readany()
            except RequestPayloadError:
                self.failed = UploadError(StatusCode.INVALID_ARGUMENT, "the request's body cannot be read")
                raise self.failed from None
            except OSError:
                self.failed = UploadError(StatusCode.CANCELLED, "the client has disconnected")
                raise self.failed from None
            self._came += len(piece)
            if self._came > self._most:
                raise self._too_large()
            if piece:
                self._pieces.append(piece)
                self._count(len(piece))
            self.ended = self._stream.at_eof()

    def _count(self, size: int) -> None:
        if self._keeping is None or not self.kept:
            return
        self._counted += size
        self._keeping.bytes += size
        if self._keeping.bytes > self._keeping.most:
            self.forget()

    def _too_large(self) -> UploadError:
        message = f"the request has more than {self._most} bytes, which is gateway.max_message_bytes"
        self.failed = UploadError(StatusCode.OUT_OF_RANGE, message)
        return self.failed
