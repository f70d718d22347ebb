"""Body of a client's request: forwarded as it arrives, and kept for a failover within the memory budget."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import StreamReader
from aiohttp.web import RequestPayloadError
from grpc import StatusCode

from rsrv_gateway.outcomes import Refusal

#: bytes up to which a body is awaited and sent as one
SMALL_BODY_BYTES = 1 << 18
#: Bytes of bodies kept by a process for failovers; further bodies go to one worker and are not kept.
KEPT_MAX_BYTES = 1 << 30


@dataclass
class UploadBudget:
    """Memory used by all uploads together."""

    most: int = KEPT_MAX_BYTES
    bytes: int = 0


class UploadError(Exception):
    """The client's body will never be complete."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        #: error for the client
        self.refusal = Refusal(code, message)


class Upload:
    """One event loop owns it; several workers may receive it at the same time while it is kept."""

    def __init__(
        self, stream: StreamReader, size: int | None, most: int, keeping: UploadBudget | None = None
    ) -> None:
        """Start an upload of `size` bytes (None: unknown), at most `most`. Raises UploadError.

        Without `keeping` it is kept regardless of its size.
        """
        self._stream = stream
        #: None: unknown
        self.size = size
        self._most = most
        self._pieces: list[bytes] = []
        self._came = 0
        self._keeping = keeping
        self._counted = 0
        #: it can be sent from its beginning to any number of workers
        self.kept = True
        #: its beginning has been dropped
        self.cut = False
        self._reading = asyncio.Lock()
        #: the client has sent all
        self.ended = False
        self.failed: UploadError | None = None
        if size is not None and size > most:
            raise self._too_large()

    async def head(self, size: int) -> bytes:
        """Return at least the first `size` bytes, or all if there are fewer. Raises UploadError."""
        while not self.ended and self._came < size:
            await self._more(len(self._pieces))
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    async def settle(self) -> None:
        """Wait for a small body; return at once for others. Raises UploadError."""
        if self.size is not None and self.size <= SMALL_BODY_BYTES:
            await self.head(self._most + 1)

    def data(self) -> bytes | AsyncIterator[bytes]:
        """Yield the body from its beginning, once for each worker."""
        if self.ended and len(self._pieces) <= 1 and self._came <= SMALL_BODY_BYTES:
            return self._pieces[0] if self._pieces else b""
        return self._all()

    async def _all(self) -> AsyncIterator[bytes]:
        at = 0
        while True:
            if at and not self.kept:  # sent bytes are not needed any more
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
        """Keep nothing for a failover any more. May be called again."""
        self.kept = False
        if self._keeping is not None:
            self._keeping.bytes -= self._counted
        self._counted = 0

    async def _more(self, known: int) -> None:
        """Wait until there are more pieces than `known`, or it has ended. Raises UploadError."""
        async with self._reading:
            if len(self._pieces) > known or self.ended:
                return
            try:
                piece = await self._stream.readany()
            except RequestPayloadError:
                self.failed = UploadError(StatusCode.INVALID_ARGUMENT, "the request's body cannot be read")
                raise self.failed from None
            except OSError:
                self.failed = UploadError(StatusCode.CANCELLED, "the client has gone")
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


def decoded(head: bytes, encoding: str, size: int) -> bytes:
    """Return the first `size` bytes of a compressed body; nothing for an unknown compression."""
    if encoding not in ("gzip", "deflate") or not size:  # to zlib, 0 is no limit
        return b""
    try:
        return zlib.decompressobj(47).decompress(head, size)  # the first bytes tell gzip from zlib
    except zlib.error:
        return b""
