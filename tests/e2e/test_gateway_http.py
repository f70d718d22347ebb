"""The gateway's HTTP in front of two real tritonservers. To a client, it looks like one tritonserver."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from local_triton import TritonServer
from tests.e2e.gateways import Fleet, running_gateway, write_repository
from tests.e2e.harness import running_triton
from tests.waiting import PATIENCE_S, wait_until

INFER = "/v2/models/echo/infer"
ONE = {"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [7]}]}


@dataclass(frozen=True)
class Answer:
    status: int
    kind: str | None
    body: bytes

    @property
    def said(self) -> tuple[int, str | None, Any]:
        """The answer in a form for comparisons: JSON as values, and an error without its content type."""
        kind = self.kind if self.status < 400 else None
        try:
            return self.status, kind, json.loads(self.body)
        except ValueError:
            return self.status, kind, self.body


def ask(
    port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a request. `body` is bytes, or an object that is sent as JSON."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, data, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, response.headers["Content-Type"], response.read())


def number(value: int) -> Any:
    return {"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [value]}]}


#: Requests to which tritonserver and the gateway must answer in the same way: method, path, body, headers.
ALIKE: dict[str, tuple[Any, ...]] = {
    "an inference": ("POST", INFER, ONE),
    "a version": ("POST", "/v2/models/echo/versions/1/infer", {**ONE, "id": "5"}),
    "gzip": ("POST", INFER, gzip.compress(json.dumps(ONE).encode()), {"Content-Encoding": "gzip"}),
    "gzip both ways": (
        "POST",
        INFER,
        gzip.compress(json.dumps(ONE).encode()),
        {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"},
    ),
    "no inputs": ("POST", INFER, {}),
    "a wrong type": (
        "POST",
        INFER,
        {"inputs": [{"name": "X", "shape": [1], "datatype": "INT64", "data": [7]}]},
    ),
    "a wrong length of the JSON": ("POST", INFER, ONE, {"Inference-Header-Content-Length": "9999"}),
    "an unknown model": ("POST", "/v2/models/nothing/infer", ONE),
    "an unknown version": ("POST", "/v2/models/echo/versions/7/infer", ONE),
    "a wrong argument": ("POST", "/v2/models/refusing/infer", number(3)),
    "an internal error": ("POST", "/v2/models/refusing/infer", number(4)),
    "one answer of several": ("POST", "/v2/models/several/infer", ONE),
    "generate": ("POST", "/v2/models/echo/generate", {"X": [1, 2]}),
    "generate an error": ("POST", "/v2/models/refusing/generate", {"X": [3]}),
    "generate too much": ("POST", "/v2/models/several/generate", {"X": [3]}),
    "generate with an unknown model": ("POST", "/v2/models/nothing/generate", {"X": [3]}),
    "generate without an input": ("POST", "/v2/models/echo/generate", {"Z": [3]}),
    "a stream": ("POST", "/v2/models/several/generate_stream", {"X": [3]}),
    "a stream's error": ("POST", "/v2/models/refusing/generate_stream", {"X": [4]}),
    "live": ("GET", "/v2/health/live"),
    "ready": ("GET", "/v2/health/ready"),
    "a model is ready": ("GET", "/v2/models/echo/ready"),
    "an unknown model is ready": ("GET", "/v2/models/nothing/ready"),
    "an unknown version is ready": ("GET", "/v2/models/echo/versions/7/ready"),
    "metadata": ("GET", "/v2"),
    "a model's metadata": ("GET", "/v2/models/echo"),
    "metadata of an unknown model": ("GET", "/v2/models/nothing"),
    "a model's config": ("GET", "/v2/models/echo/config"),
    "config of an unknown version": ("GET", "/v2/models/echo/versions/7/config"),
    "statistics of an unknown model": ("GET", "/v2/models/nothing/stats"),
    "loading an unknown model": ("POST", "/v2/repository/models/nothing/load"),
    "unloading an unknown model": ("POST", "/v2/repository/models/nothing/unload", {}),
    "the index": ("POST", "/v2/repository/index", {"ready": True}),
    "nothing": ("GET", "/v2/nothing"),
    "a name that is encoded": ("GET", "/v2/models/%65cho"),
    "no name": ("GET", "/v2/models//ready"),
    "a query": ("GET", "/v2/models/echo/ready?x=1"),
    "a wrong method": ("GET", INFER),
    "another wrong method": ("POST", "/v2/health/live"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_as_a_tritonserver(fleet: Fleet, name: str) -> None:
    """The gateway's answers and refusals have the same words and the same status as those of a tritonserver."""
    direct = ask(fleet.workers[0].http_port, *ALIKE[name]).said

    assert ask(fleet.gateway.http_port, *ALIKE[name]).said == direct


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        (INFER, b"x", {"Content-Encoding": "br"}, 501, "the compression 'br' is not supported"),
        (INFER, b"{", {}, 400, "not complete"),
        ("/v2/repository/index", b"{", {}, 400, "not complete"),
    ],
)
def test_the_gateway_refuses_what_it_cannot_read(
    fleet: Fleet, path: str, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    """The gateway itself refuses an unknown compression and broken JSON. The error has the form of tritonserver's errors."""
    answer = ask(fleet.gateway.http_port, "POST", path, body, headers)
    assert answer.status == status
    assert words in json.loads(answer.body)["error"]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_the_client_library(fleet: Fleet, binary: bool, compression: str | None) -> None:
    """Tensors return unchanged: binary and as JSON, compressed or not, small and large."""
    for size in (1, 300_000):
        sent = np.arange(size, dtype=np.int32)
        tensor = InferInput("X", [size], "INT32").set_data_from_numpy(sent, binary_data=binary)
        result = fleet.gateway.http.infer(
            "echo",
            [tensor],
            outputs=[InferRequestedOutput("Y", binary_data=binary)],
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
        assert np.array_equal(result.as_numpy("Y"), sent)


def test_large_tensors(fleet: Fleet) -> None:
    """A tensor of 16 MB returns unchanged."""
    sent = np.arange(4_000_000, dtype=np.int32)
    tensor = InferInput("X", [sent.size], "INT32").set_data_from_numpy(sent)

    assert np.array_equal(fleet.gateway.http.infer("echo", [tensor]).as_numpy("Y"), sent)


def test_requests_are_answered_by_both(fleet: Fleet) -> None:
    """Each worker answers some of the requests, and the answers are right. The gateway's statistics count all of them."""

    def executed(client: InferenceServerClient) -> int:
        (model,) = client.get_inference_statistics("counted")["model_stats"]
        return int(model["inference_count"])

    before = [executed(worker.http) for worker in fleet.workers]
    for value in range(40):
        answer = ask(fleet.gateway.http_port, "POST", "/v2/models/counted/infer", number(value))
        assert json.loads(answer.body)["outputs"][0]["data"] == [value]

    def counted() -> list[int]:
        """Return the counts when they are complete. Triton counts a request after its answer."""
        after = [executed(worker.http) for worker in fleet.workers]
        return after if sum(after) - sum(before) >= 40 else []

    after = wait_until(counted, what="the statistics")
    assert sum(after) - sum(before) == 40
    assert all(now > then for now, then in zip(after, before, strict=True))
    assert executed(fleet.gateway.http) == sum(after)


def test_statistics_have_the_same_form(fleet: Fleet) -> None:
    """Merged statistics have the same names and types as the statistics of one server."""

    def form(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: form(value) for name, value in node.items()}
        # A list has an entry for each batch size that was executed, and servers differ in this.
        return [form(value) for value in node[:1]] if isinstance(node, list) else type(node)

    for worker in fleet.workers:
        ask(worker.http_port, "POST", INFER, ONE)
    for path in ("/v2/models/stats", "/v2/models/echo/versions/1/stats"):
        _, kind, direct = ask(fleet.workers[0].http_port, "GET", path).said
        assert ask(fleet.gateway.http_port, "GET", path).said[1] == kind
        assert form(ask(fleet.gateway.http_port, "GET", path).said[2]) == form(direct)


@pytest.mark.parametrize(("which", "status"), [(0, 429), (1, 504), (2, 412)])
@pytest.mark.parametrize("what", ["infer", "generate"])
def test_tagged_refusals_have_the_status_of_their_tag(
    fleet: Fleet, what: str, which: int, status: int
) -> None:
    """The gateway gives a refusal the status that its tag means, and does not change the message."""
    body = number(which) if what == "infer" else {"X": [which]}
    path = f"/v2/models/refusing/{what}"
    direct = ask(fleet.workers[0].http_port, "POST", path, body)
    answer = ask(fleet.gateway.http_port, "POST", path, body)

    assert (answer.status, answer.body) == (status, direct.body)


def test_a_model_is_unloaded_and_loaded(fleet: Fleet) -> None:
    """Both workers unload and load the model before the request is answered."""
    gateway = fleet.gateway.http
    gateway.unload_model("several")
    wait_until(lambda: not any(worker.http.is_model_ready("several") for worker in fleet.workers))
    gateway.load_model("several")

    assert all(worker.http.is_model_ready("several") for worker in fleet.workers)
    assert (
        ask(fleet.gateway.http_port, "POST", "/v2/models/several/generate_stream", {"X": [2]}).status == 200
    )


def test_settings_are_a_servers_own(fleet: Fleet) -> None:
    """The gateway refuses calls about a server's settings, and the error says to ask a server itself."""
    for ask in (
        fleet.gateway.http.get_log_settings,
        fleet.gateway.http.get_trace_settings,
        fleet.gateway.http.get_system_shared_memory_status,
    ):
        with pytest.raises(InferenceServerException, match="ask a server itself") as refused:
            ask()
        assert refused.value.status() == "501"


def test_a_server_behind_a_gateway_stops_in_order(tmp_path: Path) -> None:
    """A stopping tritonserver does not wait for idle connections of the gateway: it unloads its models within its exit timeout."""
    with (
        running_triton(
            write_repository(tmp_path / "models", ["echo"]),
            tmp_path / "server.log",
            make=partial(TritonServer, exit_timeout_s=int(PATIENCE_S)),
        ) as server,
        running_gateway(tmp_path, [server]) as gateway,
    ):
        x = InferInput("X", [1], "INT32")
        x.set_data_from_numpy(np.array([7], np.int32))
        gateway.http.infer("echo", [x])
        os.kill(server.pid, signal.SIGTERM)
        ends = ("Found 0 live models", "Exit timeout expired")
        wait_until(lambda: any(end in server.log_text() for end in ends), what="the server's end")
        assert ends[1] not in server.log_text()
