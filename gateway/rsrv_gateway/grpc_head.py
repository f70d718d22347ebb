"""Reader for the parts of gRPC messages that decide their route. The messages arrive in pieces.

`GrpcHead` reads every message of a call, because any message may crash a server.
"""

from rsrv_gateway.http_head import Inflater
from rsrv_gateway.peek import SMALL_BYTES, Malformed, MessageReader, Peeked

#: Bytes of a gRPC message before its content: a flag for compression, and the length.
_PREFIX_BYTES = 5
#: Maximum number of bytes of a message's names and parameters.
_MOST_KEPT = 1 << 20


class GrpcHead:
    """Reads the body of one call."""

    def __init__(self, encoding: str, most: int) -> None:
        """Start a body. `encoding` is the compression of compressed messages. A message may have up to `most` bytes."""
        self._encoding = encoding
        self._most = most
        self._prefix = b""
        #: Bytes of the current message that are still to come.
        self._left = 0
        self._reader: MessageReader | None = None
        self._inflater: Inflater | None = None
        #: Messages that have been completed since the last call of `take`.
        self._ended: list[Peeked] = []

    @property
    def current(self) -> MessageReader | None:
        """The message that is not complete yet."""
        return self._reader

    def take(self) -> list[Peeked]:
        """Return the messages that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises Malformed."""
        at = 0
        while at < len(data) or (self._reader is not None and not self._left):
            if self._reader is None:
                more = data[at : at + _PREFIX_BYTES - len(self._prefix)]
                self._prefix += more
                at += len(more)
                if len(self._prefix) < _PREFIX_BYTES:
                    return
                compressed = self._prefix[0] != 0
                self._left = int.from_bytes(self._prefix[1:], "big")
                self._prefix = b""
                if self._left > self._most:
                    raise Malformed(
                        f"the message has more than {self._most} bytes, which is gateway.max_message_bytes"
                    )
                if not compressed and self._left <= min(SMALL_BYTES, len(data) - at):
                    # Read a small message with protobuf, which takes a tenth of the time.
                    self._ended.append(Peeked(data[at : at + self._left]))
                    at += self._left
                    self._left = 0
                    continue
                self._reader = MessageReader(_MOST_KEPT)
                self._inflater = Inflater(self._encoding) if compressed else None
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._inflater is None:
                self._reader.feed(piece, not self._left)
            else:
                for inflated in self._inflater.slices(piece):
                    self._reader.feed(inflated, last=False)
                if not self._left:
                    self._reader.feed(b"", last=True)
            if not self._left:
                self._ended.append(Peeked(bytes(self._reader.without_tensors)))
                self._reader = self._inflater = None
