"""All HTTP calls except inference, routed by `inquiries`. Answers to merge are converted to messages of gRPC, and back."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from grpc import StatusCode
from multidict import CIMultiDict
from tritonclient.grpc import service_pb2

from rsrv_gateway.fanout import Answer
from rsrv_gateway.http_pools import HttpQuery, HttpReply, Pool
from rsrv_gateway.http_protocol import HttpRefusal, Target
from rsrv_gateway.inquiries import CHANGES, Inquiries
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.traffic import Traffic

#: Calls a worker with a timeout in seconds.
AskOne = Callable[[str, HttpQuery, float | None], Awaitable[HttpReply | Refusal]]


class HttpInquiries:
    def __init__(self, timeout_s: float, traffic: Traffic, pools: Mapping[str, Pool], ask: AskOne) -> None:
        self._timeout_s = timeout_s
        self._ask = ask
        self._inquiries = Inquiries(traffic, pools.keys(), _HttpForm())

    async def answer(self, target: Target, query: HttpQuery) -> HttpReply | Refusal:
        timeout = None if target.what in CHANGES else self._timeout_s

        async def ask(worker: str) -> HttpReply | Refusal:
            answer = await self._ask(worker, query, timeout)
            if "ready" in target.what and isinstance(answer, HttpRefusal) and answer.status == 400:
                # This status means that the worker or the model is not ready, so it is an answer and not an error.
                return HttpReply(answer.status, answer.headers, answer.body)
            return answer

        return await self._inquiries.answer(target.what, target.model, ask)


class _HttpForm:
    def yes(self) -> HttpReply:
        return HttpReply(200, CIMultiDict({"Content-Type": "text/plain"}))

    def is_yes(self, answer: HttpReply) -> bool:
        return answer.status == 200

    def parse(self, operation: str, answer: HttpReply) -> Answer:
        try:
            parsed = json.loads(answer.body)
            if operation == "index":
                message, parsed = service_pb2.RepositoryIndexResponse(), {"models": parsed}
            else:
                message = service_pb2.ModelStatisticsResponse()
            return ParseDict(parsed, message, ignore_unknown_fields=True)
        except (ValueError, ParseError, KeyError, TypeError, AttributeError):
            return Refusal(StatusCode.INTERNAL, "the worker's answer cannot be parsed")

    def render(self, operation: str, message: Any) -> HttpReply:
        fields: Any = _plain(message)
        if operation == "index":
            # Leave out empty fields. A model that is not loaded has only few other fields.
            fields = [{name: value for name, value in each.items() if value} for each in fields["models"]]
        body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        return HttpReply(200, CIMultiDict({"Content-Type": "application/json"}), body)


def _plain(message: Any) -> dict[str, Any]:
    """Return all fields of a message. json_format would omit some fields, and write large numbers as texts."""
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
