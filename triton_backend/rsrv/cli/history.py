"""The commands `rsrv history`, about the events of a model, and `rsrv why`, about the time of a request."""

import sys
import time
from collections.abc import Mapping
from math import inf

from rsrv.cli.client import CommandLineError, Server
from rsrv.cli.output import print_json, print_table
from rsrv.control.sentences import MIN_PART_S, clock_time, history_lines, request_lines
from rsrv.control.v1 import control_pb2 as pb
from rsrv.text import duration

#: With --follow, seconds between two requests for the history.
_FOLLOW_S = 1.0
#: Maximum number of lines in the table of slow requests.
_MOST_SLOWEST = 25


def run_history(server: Server) -> int:
    request = pb.GetHistoryRequest(model=server.options.model)
    if not server.options.follow:
        return server.show(server.ask("GetHistory", request), history_page)
    before: dict[tuple[int, str], pb.History] = {}
    while True:
        answer = server.ask("GetHistory", request)
        fresh = pb.GetHistoryResponse(histories=[_fresh(history, before) for history in answer.histories])
        before = {(history.device, history.key): history for history in answer.histories}
        if not server.json:
            history_page(fresh)
        elif any(history.records or history.waits_for for history in fresh.histories):
            print_json(fresh, line=True)
        time.sleep(_FOLLOW_S)


def _fresh(history: pb.History, before: Mapping[tuple[int, str], pb.History]) -> pb.History:
    """Return the part of a history that the previous answer did not have."""
    known = before.get((history.device, history.key), pb.History())
    latest = max((record.clock_s for record in known.records), default=-inf)
    return pb.History(
        key=history.key,
        device=history.device,
        records=[record for record in history.records if record.clock_s > latest],
        waits_for="" if history.waits_for == known.waits_for else history.waits_for,
    )


def run_why(server: Server) -> int:
    request, model = server.options.request, server.options.slowest
    if bool(request) == bool(model):
        raise CommandLineError("name a request, or a model with --slowest")
    if model:
        answer = server.ask("GetRequests", pb.GetRequestsRequest(model=model))
        return server.show(answer, slowest_page)
    answer = server.ask("GetRequests", pb.GetRequestsRequest(request=request))
    server.show(answer, why_page)
    if not answer.requests and not server.json:
        print(
            f"request {request!r} is not known: the server knows the requests in progress, and each model's slowest hundred "
            "of the last hour, which `rsrv why --slowest MODEL` lists",
            file=sys.stderr,
        )
    return int(not answer.requests)


def history_page(answer: pb.GetHistoryResponse) -> None:
    for line in history_lines(answer, time.time()):
        print(line, flush=True)


def why_page(answer: pb.GetRequestsResponse) -> None:
    for line in request_lines(answer, time.time()):
        print(line)


#: Explanation of the columns of `slowest_page`.
_LEGEND = """\
TOOK: the time in the runtime. It is the sum of four parts: WEIGHTS (until the model's weights were on the device),
PEERS (held back so that other requests share the execution), OTHERS (the device executed other requests), EXECUTED.
BEFORE and AFTER: the time in the model's own process, for its hooks and copies. BEHIND: the models that executed meanwhile."""


def slowest_page(answer: pb.GetRequestsResponse) -> None:
    """Print the slowest requests of a model, and how they spent their time."""
    if not answer.requests:
        print(
            "no request has ended in a runtime in the last hour (a request that fails in preprocess does not reach a runtime)"
        )
        return
    now, several = time.time(), len({request.device for request in answer.requests}) > 1
    shown = answer.requests[:_MOST_SLOWEST]
    print_table(
        shown,
        {
            "NUMBER": lambda request: request.number,
            **({"ON": lambda request: str(request.device)} if several else {}),
            "ARRIVED": lambda request: clock_time(request.arrived_unix_s, now),
            "BEFORE": lambda request: _part(request.before_s),
            "TOOK": lambda request: _part(request.seconds),
            "WEIGHTS": lambda request: _part(request.weights_s),
            "PEERS": lambda request: _part(request.peers_s),
            "OTHERS": lambda request: _part(request.others_s),
            "EXECUTED": lambda request: _part(request.executing_s),
            "AFTER": lambda request: _part(request.after_s),
            "ROWS": lambda request: str(request.rows),
            "OUTCOME": lambda request: request.outcome,
            "BEHIND": lambda request: ", ".join(request.behind),
        },
    )
    if len(answer.requests) > len(shown):
        print(f"\n{len(answer.requests) - len(shown)} more: --json has all")
    print(f"\n{_LEGEND}")


def _part(seconds: float) -> str:
    return duration(seconds) if seconds >= MIN_PART_S else "-"
