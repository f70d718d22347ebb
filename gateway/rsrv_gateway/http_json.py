"""tritonserver's answers over HTTP as messages of its gRPC service, and back: so that one merge serves both. Pure."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from grpc import StatusCode
from tritonclient.grpc import service_pb2

from rsrv_gateway import fanout
from rsrv_gateway.fanout import Answer, Merge
from rsrv_gateway.outcomes import Refusal


def merged(what: str, bodies: Mapping[str, bytes | Refusal]) -> bytes | Refusal:
    """One answer made of all workers', by worker; `what` is as in `http_paths.Target`."""
    merge, kind, parse, render = _MERGED[what]
    answers: dict[str, Answer] = {
        worker: body if isinstance(body, Refusal) else _parsed(body, kind, parse)
        for worker, body in bodies.items()
    }
    answer = merge(answers)
    if isinstance(answer, Refusal):
        return answer
    return json.dumps(render(answer), ensure_ascii=False, separators=(",", ":")).encode()


def _parsed(body: bytes, kind: Any, parse: Callable[[Any], Any]) -> Answer:
    try:
        return ParseDict(parse(json.loads(body)), kind(), ignore_unknown_fields=True)
    except (ValueError, ParseError, KeyError, TypeError, AttributeError):
        return Refusal(StatusCode.INTERNAL, "what it answered cannot be read")


def _plain(message: Any) -> dict[str, Any]:
    """All fields, numbers as numbers: what json_format would leave out, or write as text."""
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            out[field.name] = value
        elif field.message_type.GetOptions().map_entry:
            out[field.name] = {key: _plain(each) for key, each in value.items()}
        elif hasattr(value, "DESCRIPTOR"):
            out[field.name] = _plain(value)
        else:
            out[field.name] = [_plain(each) for each in value]
    return out


def _index(message: Any) -> list[dict[str, Any]]:
    """What a model that is not loaded does not have is left out."""
    return [{name: value for name, value in _plain(each).items() if value} for each in message.models]


def _itself(said: Any) -> Any:
    return said


_MERGED: Mapping[str, tuple[Merge, Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "stats": (fanout.merge_statistics, service_pb2.ModelStatisticsResponse, _itself, _plain),
    "index": (
        fanout.merge_index,
        service_pb2.RepositoryIndexResponse,
        lambda said: {"models": said},
        _index,
    ),
}
