"""A collector of traces. It receives OTLP over HTTP, as protobuf from rsrv and as JSON from Triton, and keeps the spans."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Seen:
    """A span. Its ids are hexadecimal digits. Its times are nanoseconds since 1970."""

    service: str
    trace: str
    id: str
    parent: str
    name: str
    start: int
    end: int
    #: Text of the failure, or empty.
    error: str
    attributes: Mapping[str, str | int | float]


class Collector:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        #: All spans from rsrv.
        self.spans: list[Seen] = []
        #: Ids of all spans from Triton.
        self.tritons: set[str] = set()

    def of(self, trace: str) -> dict[str, Seen]:
        """Return rsrv's spans of a trace, by name."""
        return {span.name: span for span in list(self.spans) if span.trace == trace}


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # The library requires this name.
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if "json" in self.headers["Content-Type"]:
                collector.tritons |= set(_ids(json.loads(body)))
            else:
                collector.spans += _read(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def _ids(node: object) -> Iterator[str]:
    """Return all span ids in Triton's JSON."""
    if isinstance(node, dict):
        if "spanId" in node:
            yield str(node["spanId"])
        for value in node.values():
            yield from _ids(value)
    elif isinstance(node, list):
        for value in node:
            yield from _ids(value)


def _read(body: bytes) -> Iterator[Seen]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    about["service.name"],
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
                    {
                        pair.key: getattr(pair.value, str(pair.value.WhichOneof("value")))
                        for pair in span.attributes
                    },
                )
