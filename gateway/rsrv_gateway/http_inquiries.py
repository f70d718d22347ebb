"""All HTTP calls except inference, routed as in `grpc_inquiries`."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from grpc import StatusCode
from multidict import CIMultiDict
from tritonclient.grpc import service_pb2

from rsrv_gateway import fanout
from rsrv_gateway.fanout import Answer, Ask, Merge, ask_all, first
from rsrv_gateway.http_pools import HttpQuery, HttpReply, Pool
from rsrv_gateway.http_protocol import HttpRefusal, Target
from rsrv_gateway.outcomes import Refusal, no_worker, unsupported
from rsrv_gateway.traffic import Traffic

#: calls a worker with a timeout in seconds
AskOne = Callable[[str, HttpQuery, float | None], Awaitable[HttpReply | Refusal]]

_JSON = "application/json"
_YES = HttpReply(200, CIMultiDict({"Content-Type": "text/plain"}))


class HttpInquiries:
    def __init__(self, timeout_s: float, traffic: Traffic, pools: Mapping[str, Pool], ask: AskOne) -> None:
        self._timeout_s = timeout_s
        self._traffic = traffic
        self._pools = pools
        self._ask_one = ask

    async def answer(self, target: Target, query: HttpQuery) -> HttpReply | Refusal:
        match target.what:
            case "live":
                return _YES
            case "server ready":
                return await self._ready(query)
            case "server":
                return await first(self._pools, self._ask(query))
            case "ready":
                workers = await self._traffic.workers_for(target.model)
                return await first(workers, self._ask_leniently(query), _is_yes)
            case "model" | "config":
                return await first(await self._traffic.workers_for(target.model), self._ask(query))
            case "load" | "unload":
                answers = await ask_all(self._pools, lambda worker: self._ask_one(worker, query, None))
                # A client that knows the model as loaded or unloaded may rely on that.
                await self._traffic.brain.refresh(sure=True)
                answer = fanout.all_succeeded(answers)
                assert isinstance(answer, HttpReply | Refusal)
                return answer
            case "trace/setting" | "logging" | "status" | "register" | "unregister":
                return unsupported()
            case what:
                return await self._merged(what, query)

    async def _ready(self, query: HttpQuery) -> HttpReply | Refusal:
        if self._traffic.serves:
            return _YES
        answers = (await ask_all(self._pools, self._ask_leniently(query))).values()
        for answer in answers:
            if not isinstance(answer, Refusal) and _is_yes(answer):
                return answer
        return next(iter(answers), no_worker())

    async def _merged(self, what: str, query: HttpQuery) -> HttpReply | Refusal:
        answers = await ask_all(self._pools, self._ask(query))
        bodies = {
            worker: answer if isinstance(answer, Refusal) else answer.body
            for worker, answer in answers.items()
        }
        body = _merge(what, bodies)
        if isinstance(body, Refusal):
            return body
        return HttpReply(200, CIMultiDict({"Content-Type": _JSON}), body)

    def _ask(self, query: HttpQuery) -> Ask[HttpReply]:
        return lambda worker: self._ask_one(worker, query, self._timeout_s)

    def _ask_leniently(self, query: HttpQuery) -> Ask[HttpReply]:
        """Return a function that calls a worker and takes status 400 for the answer no."""

        async def ask(worker: str) -> HttpReply | Refusal:
            answer = await self._ask_one(worker, query, self._timeout_s)
            if isinstance(answer, HttpRefusal) and answer.status == 400:
                return HttpReply(answer.status, answer.headers, answer.body)
            return answer

        return ask


def _is_yes(answer: HttpReply) -> bool:
    return answer.status == 200


# --- answers over HTTP as messages of the gRPC service, and back: so that one merge serves both -------------


def _merge(what: str, bodies: Mapping[str, bytes | Refusal]) -> bytes | Refusal:
    """Merge the answers of all workers; `what` is as in `Target`."""
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
        return Refusal(StatusCode.INTERNAL, "its answer cannot be parsed")


def _plain(message: Any) -> dict[str, Any]:
    """Return all fields, numbers as numbers; json_format would omit some fields and write large numbers as text."""
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
    """Return the models' fields that are not empty: a model that is not loaded has few."""
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
