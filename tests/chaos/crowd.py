"""Clients that connect, send a request, and leave before its answer. They run in a separate process.

`python -m tests.chaos.crowd grpc|http URL COUNT RATE`: each client has its own connection. A gRPC client cancels its request, and
an HTTP client closes its connection. RATE clients connect per second, and several of them run at the same time.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.chaos.questions import QUESTIONS
from tests.e2e.calls import tensors

#: Number of clients at the same time.
_TOGETHER = 16
#: Longest time in seconds from a client's request to its end. A request takes some milliseconds.
_LONGEST = 0.01
#: Models of the requests: one whose requests are short, and for gRPC also one whose requests take longer.
_MODELS = {"grpc": ("exact", "elastic"), "http": ("exact",)}


def main(arguments: Sequence[str]) -> None:
    kind, url, count, rate = arguments
    leave = {"grpc": _grpc_client, "http": _http_client}[kind](url)
    begin = time.monotonic()

    def some(first: int) -> None:
        rng = np.random.default_rng(first)
        for number in range(first, int(count), _TOGETHER):
            time.sleep(max(0.0, begin + number / float(rate) - time.monotonic()))
            leave(number, float(rng.uniform(0, _LONGEST)))

    threads = [threading.Thread(target=some, args=(first,)) for first in range(_TOGETHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _grpc_client(url: str) -> Callable[[int, float], None]:
    requests = []
    for model in _MODELS["grpc"]:
        inputs = tensors(tritonclient.grpc, QUESTIONS[model](np.random.default_rng(0)).inputs)
        request: Any = service_pb2.ModelInferRequest(model_name=model)
        for tensor in inputs:
            request.inputs.append(tensor._get_tensor())
            request.raw_input_contents.append(tensor._get_content())
        requests.append(request)

    def leave(number: int, seconds: float) -> None:
        # Without this option, the channel would share the connections of other channels.
        with grpc.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelInfer.future(requests[number % len(requests)], wait_for_ready=True, timeout=30)
            time.sleep(seconds)
            call.cancel()

    return leave


def _http_client(url: str) -> Callable[[int, float], None]:
    host, _, port = url.partition(":")
    inputs = tensors(tritonclient.http, QUESTIONS["exact"](np.random.default_rng(0)).inputs)
    body, header_length = tritonclient.http.InferenceServerClient.generate_request_body(inputs)
    head = (
        f"POST /v2/models/exact/infer HTTP/1.1\r\nHost: {url}\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {header_length}\r\n\r\n"
    ).encode()

    def leave(number: int, seconds: float) -> None:
        with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), 30) as client:
            client.sendall(head + body)
            time.sleep(seconds)

    return leave


if __name__ == "__main__":
    main(sys.argv[1:])
