"""Converts requests of the live page to calls of a control service.

The service is in this process, or on another server that a gateway reaches over a gRPC channel.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from rsrv.control.chrome_trace import SpanReader, chrome_trace
from rsrv.control.grpc_service import member, word
from rsrv.control.sentences import history_lines, life, meta_facts, model_facts, request_lines
from rsrv.control.v1 import control_pb2 as pb
from rsrv.live.source import RESIDENCIES, PageError
from rsrv.text import duration, one_line

#: Calls a method of the service by its name. Raises PageError.
Ask = Callable[[str, Message], Awaitable[Any]]
#: Maximum number of slow requests that a panel shows.
_MAX_SLOW = 20


async def panel(ask: Ask, model: str, now: float) -> dict[str, Any]:
    """Return a model's history, slowest requests, counters and executables at Unix time `now`."""
    status = await ask("GetStatus", pb.GetStatusRequest(model=model))
    try:
        history = history_lines(await ask("GetHistory", pb.GetHistoryRequest(model=model)), now)
    except PageError as absent:  # the model is cold, or has failed
        history = [str(absent)]
    try:
        slowest = await ask("GetRequests", pb.GetRequestsRequest(model=model))
    except PageError:  # no runtime records the slow requests of a meta model
        slowest = pb.GetRequestsResponse()
    del slowest.requests[_MAX_SLOW:]
    facts = [pair for model in status.models for pair in model_facts(model)]
    facts += [pair for meta in status.metas for pair in meta_facts(meta)]
    for shown_version in (
        version for model_status in (*status.models, *status.metas) for version in model_status.versions
    ):
        state = life(word(pb.State, shown_version.state) or "cold", word(pb.Weights, shown_version.weights))
        facts.append(("version", " ".join([shown_version.key, state, one_line(shown_version.error)]).strip()))
    return {
        "history": history,
        "slowest": request_lines(slowest, now),
        "facts": facts,
        "executables": [
            (
                str(executable.variant),
                str(executable.size),
                str(executable.count),
                duration(executable.cost_s) if executable.HasField("cost_s") else "-",
            )
            for model_status in status.models
            for executable in model_status.record.executables
        ],
    }


async def trace(ask: Ask) -> str:
    """Return all spans that the runtimes keep, for Perfetto."""
    reader = SpanReader()
    while reader.take(await ask("GetTimeline", reader.question)):
        pass
    return await asyncio.to_thread(lambda: json.dumps(chrome_trace(reader.spans)))


async def steer(ask: Ask, model: str, action: str) -> None:
    """Carry out one of the page's actions."""
    match action:
        case "prefetch":
            await ask("Prefetch", pb.PrefetchRequest(model=model))
        case "evict":
            await ask("Evict", pb.EvictRequest(target=pb.Target(model=model)))
        case _:
            residency = member(pb.Residency, RESIDENCIES[action])
            await ask("SetResidency", pb.SetResidencyRequest(model=model, residency=residency))
