"""Malformed requests beside honest ones: each fails alone, and no process dies."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any, Self

import jax
import numpy as np
import pytest

from local_triton import LOOPBACK
from rsrv_bundle.export import export_bundle
from rsrv_bundle.stateful import export_stateful
from tests.e2e import bundles, metas
from tests.e2e.answers import LEAST_STEPS, stepped
from tests.e2e.calls import Arrays, Caller, Refused
from tests.e2e.gateways import RunningGateway, running_gateway
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.status import read_status
from tests.waiting import PATIENCE_S

TWICE = """
def run(inputs, call):
    return {"y": call("scale", {"x": call("scale", {"x": inputs["x"]})["y"]})["y"]}
"""


#: Hooks of a model that returns the lengths of strings.
LENGTHS = """
import numpy as np


def preprocess(inputs):
    return {"length": np.array([[len(text)] for text in inputs["text"]], np.float32)}
"""


def _exact(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1 + number % 3, 64), number % 7, np.float32)
    return {"x": x}, {"y": x @ bundles.exact_kernel()}


def _elastic(number: int) -> tuple[Arrays, Arrays]:
    x, steps = np.full((1, 4), number, np.uint32), np.full((1, 1), 40, np.int32)
    return {"x": x, "steps": steps}, {"y": stepped(x, steps[0] + LEAST_STEPS)}


def _hooked(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1, 4), 1000 + number % 1000, np.float32)
    return {"x": x}, {"y": 2 * x}


def _twice(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1, metas.COLUMNS), number % 1000, np.float32)
    return {"x": x}, {"y": 9 * x}


def _text(number: int) -> tuple[Arrays, Arrays]:
    rows = 1 + number % 3
    text = np.array([[b"x" * (number % 40)]] * rows, object)
    return {"text": text}, {"y": np.full((rows, 1), number % 40, np.float32)}


def _wide(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1, 4), number % 1000, np.float32)
    return {"x": x}, {"y": 4 * x[:, :1]}


def _counter(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1, 3), number % 1000, np.float32)
    return {"x": x}, {"y": x}


#: A model answered inside execute(), one answered later, one with hooks, and a meta model.
QUESTIONS: dict[str, Callable[[int], tuple[Arrays, Arrays]]] = {
    "exact": _exact,
    "elastic": _elastic,
    "hooked": _hooked,
    "twice": _twice,
}

#: Models for malformed tensors: besides `exact`, one with strings, one with an axis that varies, and one with state.
MORE_QUESTIONS = {**QUESTIONS, "text": _text, "wide": _wide, "counter": _counter}

#: Ids of sequences, each of one step.
_SEQUENCES = count(1)

#: Inputs with which Triton's Python backend fails all requests of an execute(), or ends: model, input, and its data.
MALFORMED: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "a string longer than its tensor": (
        "text",
        {"name": "text", "datatype": "BYTES", "shape": [1, 1]},
        b"\0\0\0\x80abc",
    ),
    "no rows, with the data of one": (
        "exact",
        {"name": "x", "datatype": "FP32", "shape": [0, 64]},
        bytes(256),
    ),
    "rows that are none in 32 bits": (
        "exact",
        {"name": "x", "datatype": "FP32", "shape": [2**32, 64]},
        bytes(256),
    ),
    "a step without a row": (
        "counter",
        {"name": "x", "datatype": "FP32", "shape": [0, 3]},
        bytes(12),
    ),
    "bytes that are none in 64 bits": (
        "wide",
        {"name": "x", "datatype": "FP32", "shape": [1, 2**62]},
        b"",
    ),
}

#: Prefixes of a request's JSON.
HOSTILE = (
    b'{"id": "\xff", ',
    b'{"id": "a\xc3(", "parameters": {"rsrv_priority": 1}, ',
    b'{"parameters": {"a": "\xff"}, ',
    b'{"id": "known", "parameters": {"\xff": 1}, ',
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningTriton, RunningGateway]]:
    """A server with a model of each kind, and a gateway in front of it."""
    folder = tmp_path_factory.mktemp("hostile")
    metas.write_scale(folder / "bundles" / "scale", 3.0)
    metas.write_meta(folder / "bundles" / "twice", TWICE, ["scale"])
    export_bundle(
        lambda params, length: {"y": length},
        {},
        {"length": np.zeros((1, 1), np.float32)},
        batch_sizes=[1, 8],
        out_dir=folder / "bundles" / "text",
        hooks=LENGTHS,
        client_inputs=[{"name": "text", "dtype": "bytes", "shape": "n"}],
    )
    export_bundle(
        lambda params, x: {"y": x.sum(1, keepdims=True)},
        {},
        {"x": np.zeros((1, 4), np.float32)},
        batch_sizes=[1, 8],
        axes={"x": "nk"},
        input_shapes=[{"k": 1}, {"k": 4}],
        out_dir=folder / "bundles" / "wide",
    )
    export_stateful(
        lambda params, state, x: ({"y": state["sum"] + x}, {"sum": state["sum"] + x}),
        {"sum": jax.ShapeDtypeStruct((3,), np.float32)},
        {},
        {"x": np.zeros((1, 3), np.float32)},
        slots=16,
        batch_sizes=(1, 3),
        out_dir=folder / "bundles" / "counter",
    )
    made = bundles.ensure()
    sources = [made / name for name in ("exact", "elastic", "hooked")]
    repository = make_repository(folder, *sources, folder / "bundles")
    with (
        running_triton(repository, folder / "server.log") as server,
        running_gateway(folder, [server]) as gateway,
    ):
        yield server, gateway


class Honest:
    """Clients that check each answer until the block ends."""

    def __init__(self, server: RunningTriton, model: str) -> None:
        self._server = server
        self._ask = MORE_QUESTIONS[model]
        self._model = model
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=[protocol]) for protocol in ("grpc", "grpc", "http")
        ]
        self.right = 0
        self.failed: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, protocol: str) -> None:
        call = Caller(self._server, protocol)
        for number in count():
            if self._over.is_set():
                break
            inputs, wanted = self._ask(number)
            options: dict[str, Any] = {"client_timeout": PATIENCE_S} if protocol == "grpc" else {}
            if self._model == "counter":
                options |= {"sequence_id": next(_SEQUENCES), "sequence_start": True, "sequence_end": True}
            try:
                got = call(self._model, inputs, **options)
            except Refused as refused:
                self.failed.append(str(refused))
            except Exception as error:  # noqa: BLE001 - a connection that is gone, say
                self.failed.append(repr(error))
                break
            else:
                if not np.array_equal(got["y"], wanted["y"]):
                    self.failed.append(f"{inputs}: {got}")
                self.right += 1
        call.close()


def send(port: int, model: str, start: bytes) -> tuple[int, str]:
    """Send one hostile request over HTTP; return the status and the text of its answer."""
    inputs, _ = QUESTIONS[model](3)
    datatypes = {np.dtype(np.float32): "FP32", np.dtype(np.uint32): "UINT32", np.dtype(np.int32): "INT32"}
    tensors: list[dict[str, Any]] = [
        {"name": name, "shape": list(x.shape), "datatype": datatypes[x.dtype], "data": x.ravel().tolist()}
        for name, x in inputs.items()
    ]
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)
    try:
        connection.request(
            "POST", f"/v2/models/{model}/infer", start + json.dumps({"inputs": tensors}).encode()[1:]
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


@pytest.mark.parametrize("model", QUESTIONS)
@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.long)])
def test_a_request_that_is_no_text_fails_alone(
    servers: tuple[RunningTriton, RunningGateway], model: str, seconds: int
) -> None:
    """A request that is no text is refused as the client's fault without internals, and honest ones are answered."""
    server, gateway = servers
    processes = [read_status(server.pid)["pid"], *sorted(server.stub_pids())]
    lines = len(server.log_text().splitlines())
    outcomes: Counter[int] = Counter()
    texts: set[str] = set()
    began = time.monotonic()
    with Honest(server, model) as honest:
        for start, port in zip(cycle(HOSTILE), cycle([server.http_port] * 4 + [gateway.http_port] * 4)):
            status, text = send(port, model, start)
            outcomes[status] += 1
            texts.add(text)
            # Twenty of both also on a busy machine.
            if time.monotonic() > began + seconds and min(honest.right, outcomes.total()) > 20:
                break

    print(
        f"{model}: {honest.right} honest requests right, {len(honest.failed)} failed; hostile: {dict(outcomes)}"
    )
    assert honest.failed == []
    assert set(outcomes) == {400}, texts
    for text in texts:
        assert "UTF-8" in text
        Refused("400", text).assert_is("INVALID_ARG", "http")
    assert [read_status(server.pid)["pid"], *sorted(server.stub_pids())] == processes
    # The log has at most a line a second.
    assert len(server.log_text().splitlines()) - lines <= time.monotonic() - began + 5


def post(port: int, model: str, tensor: dict[str, Any], raw: bytes) -> tuple[int, str]:
    """Send a request with one tensor in binary over HTTP; return the status and the text of its answer."""
    described = {**tensor, "parameters": {"binary_data_size": len(raw)}}
    step = {"sequence_id": next(_SEQUENCES), "sequence_start": True, "sequence_end": True}
    head = json.dumps({"inputs": [described], "parameters": step if model == "counter" else {}}).encode()
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)
    try:
        headers = {"Inference-Header-Content-Length": str(len(head))}
        connection.request("POST", f"/v2/models/{model}/infer", head + raw, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.long)])
def test_a_malformed_tensor_fails_alone(
    servers: tuple[RunningTriton, RunningGateway], kind: str, seconds: int
) -> None:
    """A tensor that the backend cannot read is refused, and all requests of the other clients are answered."""
    server, gateway = servers
    model, tensor, raw = MALFORMED[kind]
    stubs = sorted(server.stub_pids())
    outcomes: Counter[tuple[int, str]] = Counter()
    began = time.monotonic()
    with Honest(server, model) as honest:
        for port in cycle([server.http_port, gateway.http_port]):
            outcomes[post(port, model, tensor, raw)] += 1
            if time.monotonic() > began + seconds and min(honest.right, outcomes.total()) > 20:
                break

    print(f"{kind}: {honest.right} honest requests right, {len(honest.failed)} failed; {dict(outcomes)}")
    assert honest.failed == []
    assert {status for status, _ in outcomes} == {400}, outcomes
    if tensor["datatype"] == "BYTES":
        assert all("input 'text': the length before a string" in text for _, text in outcomes)
    assert sorted(server.stub_pids()) == stubs
