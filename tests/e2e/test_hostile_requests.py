"""Malformed requests next to honest ones. Only the malformed requests fail, and no process dies."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any, Self

import numpy as np
import pytest
from tritonclient.utils import np_to_triton_dtype

from tests.e2e import bundles
from tests.e2e.answers import LEAST_STEPS, stepped
from tests.e2e.calls import Arrays, Caller, Refused, post_bytes, post_json
from tests.e2e.gateways import RunningGateway, running_gateway
from tests.e2e.harness import RunningTriton
from tests.status import read_status
from tests.waiting import PATIENCE_S


def _exact(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1 + number % 3, 64), number % 7, np.float32)
    return {"x": x}, {"y": x @ bundles.exact_kernel()}


def _elastic(number: int) -> tuple[Arrays, Arrays]:
    x, steps = np.full((1, 4), number, np.uint32), np.full((1, 1), 40, np.int32)
    return {"x": x, "steps": steps}, {"y": stepped(x, steps[0] + LEAST_STEPS)}


def _hooked(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1, 4), 1000 + number % 1000, np.float32)
    return {"x": x}, {"y": 2 * x}


def _text(number: int) -> tuple[Arrays, Arrays]:
    length, rows = number % 40, 1 + number % 3
    text = np.array([[b"x" * length]] * rows, object)
    return {"text": text}, {"label": np.array([[b"%d bytes" % length]] * rows, object)}


def _shout(number: int) -> tuple[Arrays, Arrays]:
    inputs, labels = _text(number)
    return inputs, {**labels, "text": np.char.upper(inputs["text"].astype(bytes)).astype(object).repeat(2, 1)}


def _wide(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1, 4), number % 1000, np.float32)
    return {"x": x}, {"y": 4 * x[:, :1]}


def _sums(number: int) -> tuple[Arrays, Arrays]:
    x = np.full((1, 4), number % 1000, np.float32)
    return {"x": x}, {"y": x.cumsum(1)}


#: Requests by model: a model that answers inside execute(), one that answers later, one with hooks, and a meta model.
QUESTIONS: dict[str, Callable[[int], tuple[Arrays, Arrays]]] = {
    "exact": _exact,
    "elastic": _elastic,
    "hooked": _hooked,
    "shout": _shout,
}

#: Requests by model for malformed tensors. The added models have strings, an axis that varies, and state.
MORE_QUESTIONS = {**QUESTIONS, "lengths": _text, "wide": _wide, "sums": _sums}

#: Ids of sequences. Each sequence has one step.
_SEQUENCES = count(1)

#: Inputs on which Triton's Python backend fails all requests of an execute(), or ends: model, input, and data.
MALFORMED: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "a string longer than its tensor": (
        "lengths",
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
        "sums",
        {"name": "x", "datatype": "FP32", "shape": [0, 4]},
        bytes(16),
    ),
    "bytes that are none in 64 bits": (
        "wide",
        {"name": "x", "datatype": "FP32", "shape": [1, 2**62]},
        b"",
    ),
}

#: Texts with which a request's JSON begins.
HOSTILE = (
    b'{"id": "\xff", ',
    b'{"id": "a\xc3(", "parameters": {"rsrv_priority": 1}, ',
    b'{"parameters": {"a": "\xff"}, ',
    b'{"id": "known", "parameters": {"\xff": 1}, ',
)


@pytest.fixture(scope="module")
def gateway(triton: RunningTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway in front of the shared server."""
    with running_gateway(tmp_path_factory.mktemp("hostile"), [triton]) as running:
        yield running


class Honest:
    """Clients that send requests until the block ends, and check each answer."""

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
            inputs, expected = self._ask(number)
            options: dict[str, Any] = {"client_timeout": PATIENCE_S} if protocol == "grpc" else {}
            if self._model == "sums":
                options |= {"sequence_id": next(_SEQUENCES), "sequence_start": True, "sequence_end": True}
            try:
                got = call(self._model, inputs, **options)
            except Refused as refused:
                self.failed.append(str(refused))
            except Exception as error:  # noqa: BLE001 - a connection that is gone, say
                self.failed.append(repr(error))
                break
            else:
                if not all(np.array_equal(got[name], array) for name, array in expected.items()):
                    self.failed.append(f"{inputs}: {got}")
                self.right += 1
        call.close()


def send(port: int, model: str, start: bytes) -> tuple[int, str]:
    """Send a hostile request over HTTP. Return the status and the text of the answer."""
    inputs, _ = QUESTIONS[model](3)
    tensors: list[dict[str, Any]] = []
    for name, x in inputs.items():
        data = [element.decode() for element in x.ravel()] if x.dtype == object else x.ravel().tolist()
        tensor = {"shape": list(x.shape), "datatype": np_to_triton_dtype(x.dtype), "data": data}
        tensors.append({"name": name, **tensor})
    status, text = post_bytes(port, model, start + json.dumps({"inputs": tensors}).encode()[1:])
    return status, text.decode(errors="replace")


@pytest.mark.parametrize("model", QUESTIONS)
@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.long)])
def test_a_request_that_is_no_text_fails_alone(
    triton: RunningTriton, gateway: RunningGateway, model: str, seconds: int
) -> None:
    """Requests that are not UTF-8 are refused as the client's fault, and the text shows no internals. Honest requests are answered."""
    processes = [read_status(triton.pid)["pid"], *sorted(triton.stub_pids())]
    lines = len(triton.log_text().splitlines())
    outcomes: Counter[int] = Counter()
    texts: set[str] = set()
    began = time.monotonic()
    with Honest(triton, model) as honest:
        for start, port in zip(cycle(HOSTILE), cycle([triton.http_port] * 4 + [gateway.http_port] * 4)):
            status, text = send(port, model, start)
            outcomes[status] += 1
            texts.add(text)
            # On a busy machine, continue until there are more than twenty requests of both kinds.
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
    assert [read_status(triton.pid)["pid"], *sorted(triton.stub_pids())] == processes
    # The log has at most one line per second.
    assert len(triton.log_text().splitlines()) - lines <= time.monotonic() - began + 5


def send_tensor(port: int, model: str, tensor: dict[str, Any], raw: bytes) -> tuple[int, str]:
    """Send a request with one binary tensor over HTTP. Return the status and the text of the answer."""
    described = {**tensor, "parameters": {"binary_data_size": len(raw)}}
    step = {"sequence_id": next(_SEQUENCES), "sequence_start": True, "sequence_end": True}
    document = {"inputs": [described], "parameters": step if model == "sums" else {}}
    status, text = post_json(port, model, document, raw)
    return status, text.decode(errors="replace")


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.long)])
def test_a_malformed_tensor_fails_alone(
    triton: RunningTriton, gateway: RunningGateway, kind: str, seconds: int
) -> None:
    """A tensor that the backend cannot read is refused. All requests of other clients are answered."""
    model, tensor, raw = MALFORMED[kind]
    stubs = sorted(triton.stub_pids())
    outcomes: Counter[tuple[int, str]] = Counter()
    began = time.monotonic()
    with Honest(triton, model) as honest:
        for port in cycle([triton.http_port, gateway.http_port]):
            outcomes[send_tensor(port, model, tensor, raw)] += 1
            if time.monotonic() > began + seconds and min(honest.right, outcomes.total()) > 20:
                break

    print(f"{kind}: {honest.right} honest requests right, {len(honest.failed)} failed; {dict(outcomes)}")
    assert honest.failed == []
    assert {status for status, _ in outcomes} == {400}, outcomes
    if tensor["datatype"] == "BYTES":
        assert all("input 'text': the length before a string" in text for _, text in outcomes)
    assert sorted(triton.stub_pids()) == stubs
