"""Envoy's external processing protocol: the facts in its messages about a request, and the answers to them. Pure.

Envoy sends the parts of a request one by one: the headers, parts of the body, perhaps the trailers, and perhaps parts of the
response. Each part gets one answer, in order. The answers are encoded as bytes, which can be cached because few differ.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rsrv_gateway.http_protocol import for_client
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.v1 import ext_proc_pb2 as pb

#: Name of the header, and of the metadata entry, from which Envoy's policy override_host takes the chosen endpoints.
DESTINATION = "x-gateway-destination-endpoint"
#: Namespace of the metadata entry DESTINATION.
_NAMESPACE = "envoy.lb"
#: Namespace and name of the metadata that limits the choice (Gateway API inference extension, proposal 004).
_SUBSET_NAMESPACE, _SUBSET = "envoy.lb.subset_hint", f"{DESTINATION}-subset"


class Head:
    """The headers of a request, and the endpoints that Envoy allows."""

    def __init__(self, message: Any) -> None:
        """`message` is the first message about a request."""
        part = message.request_headers
        # If a header occurs twice, tritonserver uses the first one.
        self._headers: Mapping[str, bytes] = {
            header.key: header.raw_value or header.value.encode() for header in reversed(part.headers.headers)
        }
        self.has_body = not part.end_of_stream
        self.method, self.path = self.text(":method"), self.text(":path")
        kind = self._headers.get("content-type", b"")
        # Recognise gRPC by the same rule as Envoy's own routes.
        self.is_grpc = kind == b"application/grpc" or kind.startswith(b"application/grpc+")
        self.authorization = self._headers.get("authorization", b"")
        #: The only endpoints that may be chosen, or None if any endpoint may be chosen.
        self.subset: frozenset[str] | None = None
        hint = message.metadata_context.filter_metadata
        if _SUBSET_NAMESPACE in hint and _SUBSET in hint[_SUBSET_NAMESPACE]:
            subset = hint[_SUBSET_NAMESPACE][_SUBSET]
            self.subset = frozenset(subset.split(",") if isinstance(subset, str) else map(str, subset))

    def has(self, name: str) -> bool:
        return name in self._headers

    def text(self, name: str) -> str:
        # A path that is not UTF-8 matches no model, as at tritonserver.
        return self._headers.get(name, b"").decode(errors="surrogateescape")

    def optional(self, name: str) -> str | None:
        return self.text(name) if name in self._headers else None


# --- answers -----------------------------------------------------------------------------------------------


@lru_cache(4096)
def directed(part: str, endpoints: tuple[str, ...], hidden: tuple[str, ...]) -> bytes:
    """Return the answer that names the endpoints, the best one first, and removes the `hidden` headers."""
    value = ",".join(endpoints)
    answer: Any = pb.ProcessingResponse()
    mutation = getattr(answer, part).response.header_mutation
    mutation.set_headers.add(
        header=pb.HeaderValue(key=DESTINATION, raw_value=value.encode()),
        append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    mutation.remove_headers.extend(hidden)
    answer.dynamic_metadata.update({_NAMESPACE: {DESTINATION: value}})
    return _bytes(answer)


@lru_cache
def passed(part: str) -> bytes:
    """Return the answer that changes nothing."""
    answer = pb.ProcessingResponse()
    getattr(answer, part).SetInParent()
    return _bytes(answer)


@lru_cache
def patient(seconds: int) -> bytes:
    """Return an answer that makes Envoy wait longer for the next answer, up to its max_message_timeout."""
    answer: Any = pb.ProcessingResponse()
    answer.override_message_timeout.seconds = seconds
    return _bytes(answer)


def returned(part: str, body: Any) -> bytes:
    """Return the answer that sends a part of a body back. In the mode FULL_DUPLEX_STREAMED, Envoy stores no parts itself."""
    answer: Any = pb.ProcessingResponse()
    getattr(answer, part).response.body_mutation.streamed_response.CopyFrom(body)
    return _bytes(answer)


def refused(refusal: Refusal, grpc: bool) -> bytes:
    """Return the answer that ends the request with an error. Over gRPC it is in the trailers, over HTTP in tritonserver's form."""
    answer: Any = pb.ProcessingResponse()
    immediate = answer.immediate_response
    if grpc:
        immediate.status.code = 200
        immediate.grpc_status.status = refusal.for_client().value[0]
        immediate.body = refusal.message.encode(errors="replace")
    else:
        immediate.status.code, headers, immediate.body = for_client(refusal)
        immediate.headers.set_headers.extend(
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name.lower(), raw_value=value.encode()),
                append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in headers.items()
        )
    return _bytes(answer)


def _bytes(answer: Any) -> bytes:
    data: bytes = answer.SerializeToString()
    return data
