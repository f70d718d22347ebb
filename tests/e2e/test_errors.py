"""The errors that clients get over both protocols. After each error, the server still serves."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.e2e import bundles
from tests.e2e.bundles import deed
from tests.e2e.calls import (
    PROTOCOLS,
    Arrays,
    Caller,
    Refused,
    assert_same,
    at_once,
    caller,
    outcome,
    post_bytes,
    post_json,
    random_u32,
    refusal,
    tensors,
)
from tests.e2e.harness import RunningTriton
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

X = np.arange(8, dtype=np.float32).reshape(2, 4) + 1000


@pytest.fixture(params=PROTOCOLS)
def call(request: pytest.FixtureRequest, triton: RunningTriton) -> Iterator[Caller]:
    """Yield a client of each protocol in turn. After the test, two of the models must still answer."""
    with caller(triton, request.param) as made:
        yield made
        x = np.ones((1, 64), np.float32)
        assert_same(made("exact", {"x": x}), {"y": x @ bundles.exact_kernel()})
        assert_same(made("hooked", {"x": X}), {"y": 2 * X})


def model_status(triton: RunningTriton, model: str) -> dict[str, Any]:
    status: dict[str, Any] = read_status(triton.pid)["models"][model]
    return status


def wait_until_idle(triton: RunningTriton, *models: str) -> None:
    def idle() -> bool:
        return all(
            not model_status(triton, model)["queued"] and not model_status(triton, model)["executing"]
            for model in models
        )

    wait_until(idle, what=f"{models} to have nothing to do")


# --- the client's fault -------------------------------------------------------------------------------------------


ROW = np.zeros((1, 64), np.float32)
#: Bad requests: model, inputs, and words of the refusal.
BAD: Mapping[str, tuple[str, Arrays, tuple[str, ...]]] = {
    "an axis of another length": ("exact", {"x": ROW[:, :63]}, ("'x'",)),
    "axes too many": ("exact", {"x": ROW[..., None, None]}, ()),
    "elements of another type": ("exact", {"x": ROW.astype(np.float64)}, ("FP64",)),
    # In some cases, strings could end the stub's process.
    "strings": ("exact", {"x": np.full((1, 64), b"abc", object)}, ()),
    "a missing input": ("axes", {"a": np.zeros((3, 1), np.float32)}, ()),
    "an unknown input": ("exact", {"nobody": ROW}, ("nobody",)),
    "an input too many": ("exact", {"x": ROW, "more": ROW}, ()),
    "more rows than a request may have": ("exact", {"x": ROW.repeat(1025, 0)}, ("batch-size must be <= ",)),
    # Triton does not know this batch axis, so it does not split the request.
    "more rows than the largest size": (
        "axes",
        {"a": np.zeros((3, 5), np.float32), "b": np.zeros((5, 2), np.float32)},
        ("1, 4",),
    ),
    "inputs that disagree on the rows": (
        "axes",
        {"a": np.zeros((3, 2), np.float32), "b": np.zeros((3, 2), np.float32)},
        ("rows",),
    ),
    "a size that is not compiled": (
        "two_sizes",
        {"image": np.zeros((1, 17, 16, 3), np.float32)},
        ("16, 16", "24, 32"),
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_request_is_invalid(call: Caller, fault: str) -> None:
    """A request that the model cannot take is refused as the client's fault. The text has the words that help the client."""
    model, inputs, words = BAD[fault]
    refused = refusal(lambda: call(model, inputs))
    refused.assert_is("INVALID_ARG", call.protocol)
    assert [word for word in words if word not in refused.message] == []


def test_an_unknown_model_or_version_is_not_found(call: Caller) -> None:
    """A model or a version that is not in the repository is NOT_FOUND."""
    refusal(lambda: call("nobody", {"x": X})).assert_is("NOT_FOUND", call.protocol)
    refusal(lambda: call("exact", {"x": X}, model_version="7")).assert_is("NOT_FOUND", call.protocol)


def test_an_unknown_output_is_invalid(triton: RunningTriton) -> None:
    """A request for an unknown output is invalid."""
    outputs = [tritonclient.grpc.InferRequestedOutput("nobody")]
    with caller(triton) as call:
        refused = refusal(lambda: call("exact", {"x": np.zeros((1, 64), np.float32)}, outputs=outputs))
    refused.assert_is("INVALID_ARG", "grpc")


@pytest.mark.parametrize("nbytes", [0, 1, 63 * 4, 64 * 4 - 1, 64 * 4 + 1])
def test_truncated_raw_data_is_invalid(triton: RunningTriton, nbytes: int) -> None:
    """Over both protocols, a request is refused if it has fewer or more raw bytes than the shape needs."""
    request = service_pb2.ModelInferRequest(model_name="exact")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 64])
    request.raw_input_contents.append(bytes(nbytes))
    with grpc.insecure_channel(triton.server.grpc_url) as channel, pytest.raises(grpc.RpcError) as refused:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": nbytes}}
    assert post_json(triton.http_port, "exact", {"inputs": [tensor]}, bytes(nbytes))[0] == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"inputs": 7}', b'{"inputs": [{"name": "x"}]}', bytes(range(256))]
)
def test_a_body_that_is_no_request_is_invalid(triton: RunningTriton, body: bytes) -> None:
    """A body that is not a request gets an error, in some cases Triton's own. The server then answers other requests."""
    assert post_bytes(triton.http_port, "exact", body)[0] in (400, 500)
    test_plain_json_as_curl_sends_it(triton)


def test_plain_json_as_curl_sends_it(triton: RunningTriton) -> None:
    """A request with JSON numbers, sent without a client library, is answered."""
    x = np.arange(64, dtype=np.float32).reshape(1, 64)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": x.ravel().tolist()}
    status, body = post_json(triton.http_port, "exact", {"inputs": [tensor]})
    assert status == 200
    (output,) = json.loads(body)["outputs"]
    np.testing.assert_array_equal(output["data"], (x @ bundles.exact_kernel()).ravel())


# --- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [
        {"rsrv_priority": "high"},
        {"rsrv_priority": True},
        {"rsrv_priority": -1},
        {"rsrv_priority": 2**40},
        {"rsrv_deadline_unix_ns": "tomorrow"},
        {"rsrv_deadline_unix_ns": False},
        {"rsrv_deadline_unix_ns": -5},
    ],
    ids=str,
)
def test_parameters_of_ours_with_wrong_values_are_invalid(call: Caller, parameters: dict[str, Any]) -> None:
    """A wrong value of one of rsrv's parameters is refused, and the error names the parameter."""
    refused = refusal(lambda: call("exact", {"x": np.zeros((1, 64), np.float32)}, parameters=parameters))
    refused.assert_is("INVALID_ARG", call.protocol)
    assert next(iter(parameters)) in refused.message


def test_parameters_of_others_are_ignored(call: Caller) -> None:
    """Other parameters of a client, with any characters, do not change the answer."""
    parameters = {"tenant": 'a "quoted" name\\ \n\t \u20ac', "count": 2**62, "flag": True, "": "empty"}
    x = np.ones((2, 64), np.float32)
    assert_same(
        call("exact", {"x": x}, parameters=parameters, request_id="id \u20ac"),
        {"y": x @ bundles.exact_kernel()},
    )


@pytest.mark.parametrize("timeout", [2**31, 2**53, 2**62, 2**63 - 1])
def test_a_timeout_beyond_all_time_is_no_deadline(call: Caller, timeout: int) -> None:
    """A request with a very long timeout is answered: the timeout causes no overflow."""
    x = np.ones((1, 64), np.float32)
    assert_same(call("exact", {"x": x}, timeout=timeout), {"y": x @ bundles.exact_kernel()})


def test_a_far_deadline_and_a_priority_change_nothing_for_one_request(call: Caller) -> None:
    """The largest allowed deadline and priority do not change the answer to a single request."""
    x = np.ones((1, 64), np.float32)
    for parameters in ({"rsrv_priority": 65534}, {"rsrv_deadline_unix_ns": 2**63 - 1}):
        assert_same(call("exact", {"x": x}, parameters=parameters), {"y": x @ bundles.exact_kernel()})


# --- too much, too late -------------------------------------------------------------------------------------------


@contextmanager
def paused(triton: RunningTriton, model: str) -> Iterator[None]:
    """Pause the model during the block, so that its requests wait."""
    triton.operate("pause", model)
    try:
        yield
    finally:
        triton.operate("continue", model)


def test_a_full_queue_refuses_with_a_time_to_retry(call: Caller, triton: RunningTriton) -> None:
    """At most two requests may wait for a model. Both are answered, and further ones are refused at once, with a retry time."""
    refused: list[Refused] = []

    def ask(own: Caller, number: int) -> Any:
        result = outcome(lambda: own("short_queue", {"x": random_u32(np.random.default_rng(number), 1)}))
        if isinstance(result, Refused):
            refused.append(result)
        return result

    with ThreadPoolExecutor(1) as pool:
        with paused(triton, "short_queue"):
            asking = pool.submit(at_once, triton, 12, ask, call.protocol)
            wait_until(lambda: len(refused) == 10 or asking.done(), what="ten refusals")
        results = asking.result()
    assert len(refused) == 10
    for each in refused:
        each.assert_is("UNAVAILABLE", call.protocol)
        assert each.message.startswith("[rsrv:QUEUE_FULL]")
        assert re.search(r"retry after \d+ ms", each.message), each.message
    for number, result in enumerate(results):
        if not isinstance(result, Refused):
            x = random_u32(np.random.default_rng(number), 1)
            assert_same(result, {"y": bundles.stepped(x, bundles.STEADY_STEPS)})
    wait_until_idle(triton, "short_queue")


@pytest.mark.parametrize("how", ["timeout", "parameter"])
def test_a_passed_deadline_is_refused_and_never_executed(
    call: Caller, triton: RunningTriton, how: str
) -> None:
    """A request whose deadline passes while it waits is refused, and the device never sees it."""
    wait_until_idle(triton, "steady")
    before = model_status(triton, "steady")

    def options() -> dict[str, Any]:
        if how == "timeout":
            return {"timeout": 100_000}
        return {"parameters": {"rsrv_deadline_unix_ns": time.time_ns() + 100_000_000}}

    with paused(triton, "steady"):
        refused = refusal(lambda: call("steady", {"x": random_u32(np.random.default_rng(1), 1)}, **options()))
    refused.assert_is("UNAVAILABLE", call.protocol)
    assert refused.message.startswith("[rsrv:DEADLINE]")
    wait_until_idle(triton, "steady")
    after = model_status(triton, "steady")
    assert after["dispatches"] == before["dispatches"]
    assert after["outcomes"]["expired"] == before["outcomes"].get("expired", 0) + 1


def test_a_deadline_in_the_past_is_refused(call: Caller, triton: RunningTriton) -> None:
    """A request whose deadline has already passed is refused, although the device is free."""
    before = model_status(triton, "exact")["dispatches"]
    late = {"rsrv_deadline_unix_ns": time.time_ns() - 1_000_000_000}
    refused = refusal(lambda: call("exact", {"x": np.ones((1, 64), np.float32)}, parameters=late))
    refused.assert_is("UNAVAILABLE", call.protocol)
    assert refused.message.startswith("[rsrv:DEADLINE]")
    assert model_status(triton, "exact")["dispatches"] == before


def test_a_deadline_that_can_be_met_is_met(call: Caller) -> None:
    """A request with a generous deadline is answered."""
    x = np.ones((1, 64), np.float32)
    soon = {"rsrv_deadline_unix_ns": time.time_ns() + 60_000_000_000}
    assert_same(call("exact", {"x": x}, parameters=soon), {"y": x @ bundles.exact_kernel()})
    assert_same(call("exact", {"x": x}, timeout=60_000_000), {"y": x @ bundles.exact_kernel()})


class Pending:
    """A gRPC request in flight, which can be cancelled."""

    def __init__(self, client: Any, model: str, inputs: Mapping[str, Any]) -> None:
        self._ended = threading.Event()
        self.error: InferenceServerException | None = None
        self._context = client.async_infer(model, tensors(tritonclient.grpc, inputs), self._end)

    def _end(self, result: Any, error: InferenceServerException | None) -> None:
        self.error = error
        self._ended.set()

    def cancel(self) -> None:
        self._context.cancel()

    def wait(self) -> None:
        assert self._ended.wait(PATIENCE_S)


def test_a_cancelled_request_is_never_executed(triton: RunningTriton) -> None:
    """A request that is cancelled while it waits never executes."""
    wait_until_idle(triton, "steady")
    before = model_status(triton, "steady")
    with paused(triton, "steady"):
        request = Pending(triton.grpc, "steady", {"x": random_u32(np.random.default_rng(0), 1)})
        wait_until(lambda: model_status(triton, "steady")["queued"] == 1)
        request.cancel()
        request.wait()
        wait_until(lambda: model_status(triton, "steady")["queued"] == 0)
    assert request.error is not None
    assert "CANCELLED" in str(request.error)
    after = model_status(triton, "steady")
    assert after["dispatches"] == before["dispatches"]
    assert after["outcomes"]["cancelled"] == before["outcomes"].get("cancelled", 0) + 1


def test_many_cancelled_requests_are_never_executed(triton: RunningTriton) -> None:
    """Many waiting requests are cancelled, the last ones first. The others are answered, and the cancelled ones never execute."""
    wait_until_idle(triton, "steady")
    before = model_status(triton, "steady")
    with paused(triton, "steady"):
        requests = [
            Pending(triton.grpc, "steady", {"x": random_u32(np.random.default_rng(n), 1)}) for n in range(40)
        ]
        wait_until(lambda: model_status(triton, "steady")["queued"] == 40)
        for request in reversed(requests[4:]):
            request.cancel()
        wait_until(lambda: model_status(triton, "steady")["queued"] == 4, what="36 cancellations")
    for request in requests:
        request.wait()
    assert [request.error is None for request in requests] == [True] * 4 + [False] * 36
    wait_until_idle(triton, "steady")
    after = model_status(triton, "steady")
    assert after["dispatches"] - before["dispatches"] <= 4
    assert after["outcomes"]["cancelled"] == before["outcomes"].get("cancelled", 0) + 36


# --- hooks --------------------------------------------------------------------------------------------------------

WHEN = ("preprocess", "postprocess")


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    "what",
    [
        "raise",
        "sys_exit",
        "not_a_dict",
        "missing",
        "wrong_dtype",
        "wrong_shape",
        "wrong_rows",
        "wrong_rank",
        "objects",
        "huge",
    ],
)
def test_a_hook_that_fails_is_internal(call: Caller, when: str, what: str) -> None:
    """If a hook fails in any way, its own request fails, and the client gets no details of the code."""
    x = X.copy()
    x[0, 0] = deed(when, what)
    refused = refusal(lambda: call("hooked", {"x": x}))
    refused.assert_is("INTERNAL", call.protocol)
    assert "hook" in refused.message


@pytest.mark.parametrize("when", WHEN)
def test_a_hook_may_refuse_the_request(call: Caller, when: str) -> None:
    """If a hook refuses a request, the client gets the hook's own words."""
    x = X.copy()
    x[0, 0] = deed(when, "blame")
    refused = refusal(lambda: call("hooked", {"x": x}))
    refused.assert_is("INVALID_ARG", call.protocol)
    assert "row 0 is upside down" in refused.message


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("what", ["list", "extra", "fortran", "in_place"])
def test_what_hooks_may_do(call: Caller, when: str, what: str) -> None:
    """Hooks may return lists, additional tensors and other memory layouts, and may write into their inputs."""
    x = X.copy()
    x[0, 0] = deed(when, what)
    assert_same(call("hooked", {"x": x}), {"y": 2 * x})


def test_a_hook_that_fails_harms_only_its_own_request(triton: RunningTriton) -> None:
    """When a hook fails for one request, other requests of the same execute() call are answered."""

    def work(call: Caller, number: int) -> None:
        for turn in range(10):
            x = X + number
            fails = (number + turn) % 4 == 0
            x[0, 0] = deed(WHEN[turn % 2], ("raise", "sys_exit")[number % 2]) if fails else 5000
            if fails:
                refusal(lambda x=x: call("hooked", {"x": x})).assert_is("INTERNAL", call.protocol)  # type: ignore[misc]
            else:
                assert_same(call("hooked", {"x": x}), {"y": 2 * x})

    at_once(triton, 16, work)


@pytest.mark.parametrize("when", WHEN)
def test_a_slow_hook_stalls_no_other_model(triton: RunningTriton, when: str) -> None:
    """While a hook waits, another model answers."""
    x = X.copy()
    x[0, 0] = deed(when, "wait")
    meeting = Path(triton.server.env[bundles.MEETING])
    ones = np.ones((1, 64), np.float32)
    with ThreadPoolExecutor(1) as pool, caller(triton) as own, caller(triton) as call:
        slow = pool.submit(own, "hooked", {"x": x})
        try:
            wait_until((meeting / "waits").exists, what="the hook")
            for _ in range(30):
                assert_same(call("exact", {"x": ones}), {"y": ones @ bundles.exact_kernel()})
        finally:
            (meeting / "go").touch()
        assert_same(slow.result(), {"y": 2 * x})
    for file in meeting.iterdir():
        file.unlink()
