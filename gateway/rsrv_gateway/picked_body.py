"""The body of a request that passes Envoy, as the picker reads it. Pure.

Envoy buffers only a part of a body, so the picker may have to choose a server before it has the whole body. The picker reads the
rest of the body while Envoy forwards the body. `findings` returns facts that were unknown when the server was chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from rsrv_gateway.ext_proc import Head
from rsrv_gateway.grpc_head import GrpcHead
from rsrv_gateway.http_head import HttpHead
from rsrv_gateway.outcomes import another_model
from rsrv_gateway.peek import Malformed, Peeked


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of a body that decide its route."""

    model: str
    version: str = ""
    items: int = 1
    sequence: int | str | None = None
    #: Names of the outputs that the client wants as classes.
    classified: tuple[str, ...] = ()


#: The input and the axis whose extent is the number of items of a request, or None if each request counts as one item.
Measured = tuple[str, int] | None


class Body(Protocol):
    #: True if the picker needs no later bytes.
    complete: bool
    #: True if a few bytes may take long to read, because they are compressed.
    is_slow: bool

    def steps(self, data: bytes, last: bool) -> Iterator[None]:
        """Read the next data. Each step reads a part of it, so that other work can run between the steps.

        `last` is True if the body ends with this data. Raises Malformed.
        """

    def is_enough(self) -> bool:
        """Return True if a server can be chosen, even if the body continues."""

    def model(self) -> str:
        """Return the model, or an empty text if it is not known yet. Raises Malformed."""

    def wanted(self, measured: Measured) -> Wanted:
        """Return the parts that are known now. `findings` checks the parts that arrive later. Raises Malformed."""

    def findings(self) -> tuple[str, ...]:
        """Return the outputs that the client wants as classes and that were unknown so far.

        Raises Malformed if the new parts show that the chosen server was wrong.
        """


class HttpBody:
    """The body of an inference request over HTTP."""

    def __init__(self, head: Head, operation: str, model: str, version: str, most: int) -> None:
        """Start a body. Raises Malformed."""
        encoding, length = (
            head.text(name) if head.has(name) else None
            for name in ("content-encoding", "inference-header-content-length")
        )
        self._head = HttpHead(operation, encoding, length, most)
        self._model, self._version = model, version
        self._wanted = Wanted(model, version)
        #: True if a server was chosen before the head was complete.
        self._early = False
        self.complete = self._head.head is not None
        self.is_slow = self._head.is_compressed

    def steps(self, data: bytes, last: bool) -> Iterator[None]:
        yield from self._head.steps(data, last)
        self.complete = self._head.head is not None

    def is_enough(self) -> bool:
        return self._head.knows_sequence

    def model(self) -> str:
        return self._model

    def wanted(self, measured: Measured) -> Wanted:
        head = self._head.head
        self._early = head is None
        if head is None:
            self._wanted = Wanted(self._model, self._version, sequence=self._head.sequence)
        else:
            items, sequence, classified = head.items(measured), head.sequence, head.classified
            self._wanted = Wanted(self._model, self._version, items, sequence, classified)
        return self._wanted

    def findings(self) -> tuple[str, ...]:
        head = self._head.head
        if head is None or not self._early:
            return ()
        self._early = False
        if head.sequence != self._wanted.sequence:
            raise Malformed(
                "the request's sequence_id is not in the first part of the body, which is all that Envoy shows to the endpoint picker. Put the "
                "parameters before the inputs, send binary data, or use the gateway's own port"
            )
        return head.classified


class GrpcBody:
    """The body of a gRPC call. Its first message decides the route."""

    def __init__(self, head: Head, infers: bool, streams: bool, most: int) -> None:
        self._reader = GrpcHead(head.text("grpc-encoding"), most)
        self._infers, self._streams = infers, streams
        self._first: Peeked | None = None
        #: Complete messages that `findings` has not checked yet.
        self._later: list[Peeked] = []
        self._chosen: Wanted | None = None
        self.complete = False
        # Reading is fast, because tensors are skipped even if they are compressed.
        self.is_slow = False

    def steps(self, data: bytes, last: bool) -> Iterator[None]:
        self._reader.feed(data)
        ended = self._reader.take()
        if self._chosen is not None:
            self._later += ended
        elif ended and self._first is None:
            self._first, *self._later = ended
        self.complete = last or (bool(ended) and not self._streams)
        yield

    def is_enough(self) -> bool:
        current = self._reader.current
        return self._first is not None or (current is not None and current.has_tensors)

    def _known(self) -> Peeked:
        if self._first is not None:
            return self._first
        current = self._reader.current
        return Peeked(b"" if current is None else bytes(current.without_tensors))

    def model(self) -> str:
        return self._known().model

    def wanted(self, measured: Measured) -> Wanted:
        known = self._known()
        if not known.model and self._first is None:
            raise Malformed(
                "the beginning of the request does not name its model: make model_name its first field"
            )
        items = known.items(measured)
        self._chosen = Wanted(known.model, known.version, items, known.sequence, known.classified)
        return self._chosen

    def findings(self) -> tuple[str, ...]:
        later, self._later = self._later, []
        classified: list[str] = []
        for message in later:
            assert self._chosen is not None
            if not self._infers:
                continue
            if message.model != self._chosen.model:
                raise Malformed(another_model(self._chosen.model, message.model).message)
            if self._first is None:
                # This is the message whose beginning decided the route.
                self._first = message
                if message.sequence != self._chosen.sequence:
                    raise Malformed("the request's sequence_id must come before its tensors")
            classified += message.classified
        return tuple(classified)
