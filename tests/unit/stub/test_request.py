"""Reading a client's request at its arrival: parameters, deadlines, and hostile texts."""

import json
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.endpoint import WireTensor, read_inputs
from rsrv.stub.replies import RequestFailure
from rsrv.stub.request import ArrivalTime, ClientRequest, RequestParams, read_params
from rsrv.stub.tensors import Tensors
from rsrv.wire.frames import Status
from tests.fakes import FakePbUtils, FakeRequest
from tests.logged import logged_here

SECOND = 1_000_000_000
HOURS = 10 * 3600 * SECOND
#: The monotonic time and the Unix time, in nanoseconds: the machine has run for a day, and it is the year 2026.
NOW, TODAY = 24 * 3600 * SECOND, 1_790_000_000 * SECOND


def params(unix_ns: int = TODAY, timeout_us: int = 0, **parameters: int) -> RequestParams:
    return read_params(timeout_us, parameters, NOW, unix_ns)


@given(st.integers(-(1 << 62), 1 << 62))
def test_a_timeout_counts_from_now_for_any_calendar(jump: int) -> None:
    """A timeout begins at the request's arrival, whatever the calendar says.

    A request without a deadline does not depend on the calendar either.
    """
    assert params(TODAY + jump, timeout_us=5_000_000).deadline_ns == NOW + 5 * SECOND
    assert params(TODAY + jump, rsrv_priority=3) == RequestParams(0, 3)


def test_a_deadline_by_the_calendar_is_kept_by_the_clock_from_its_arrival_on() -> None:
    """A deadline by the calendar becomes a time of the monotonic clock when the request arrives.

    Later changes of the calendar do not affect it.
    """
    assert params(rsrv_deadline_unix_ns=TODAY + SECOND).deadline_ns == NOW + SECOND


def test_a_deadline_by_the_calendar_that_arrives_after_a_jump_is_what_the_calendar_says() -> None:
    """If the calendar was changed before a request arrives, a deadline by the calendar follows the new calendar.

    After a jump forward, the deadline has passed. After a jump back, it is hours away. A timeout is not affected.
    """
    until = TODAY + SECOND

    assert 0 < params(TODAY + HOURS, rsrv_deadline_unix_ns=until).deadline_ns < NOW
    assert params(TODAY - HOURS, rsrv_deadline_unix_ns=until).deadline_ns == NOW + HOURS + SECOND
    both = params(TODAY - HOURS, timeout_us=2_000_000, rsrv_deadline_unix_ns=until)
    assert both.deadline_ns == NOW + 2 * SECOND


@given(st.integers(1, (1 << 63) - 1), st.integers(0, 1 << 63))
def test_no_calendar_makes_a_deadline_that_cannot_be_sent(until: int, unix_ns: int) -> None:
    """For any calendar, a deadline is positive and fits into a frame."""
    assert 0 < params(unix_ns, rsrv_deadline_unix_ns=until).deadline_ns < 1 << 63


def test_the_earliest_of_several_deadlines_counts() -> None:
    """If a request has several deadlines, the earliest one is used.

    A deadline may be Triton's timeout, a time of the calendar, or the timeout that clients of ReactantServer send.
    """
    assert params(reactant_timeout_ns=SECOND).deadline_ns == NOW + SECOND
    assert params(reactant_timeout_ns=0).deadline_ns == params(reactant_timeout_ns=-1).deadline_ns == 0
    assert params(timeout_us=2_000_000, reactant_timeout_ns=SECOND).deadline_ns == NOW + SECOND
    assert params(timeout_us=500_000, reactant_timeout_ns=SECOND).deadline_ns == NOW + SECOND // 2
    assert params(rsrv_deadline_unix_ns=TODAY + 3, reactant_timeout_ns=(1 << 63) - 1).deadline_ns == NOW + 3


@pytest.mark.parametrize("name", ["rsrv_prioriti", "rsrv_", "rsrv_deadline_unix_ms", "rsrv_" + "x" * 200])
def test_a_misspelt_parameter_of_rsrv_is_refused_with_the_right_names(name: str) -> None:
    """An unknown parameter that begins with `rsrv_` is refused, and the error lists the known ones.

    Otherwise, a client with a spelling mistake would rely on a deadline or a priority that is ignored.
    """
    with pytest.raises(
        RequestFailure, match=r"unknown parameter 'rsrv_.*rsrv_priority and rsrv_sticky"
    ) as caught:
        params(**{name: 1})
    assert caught.value.status is Status.INVALID
    assert len(caught.value.text) < 200


def test_parameters_of_others_pass() -> None:
    """Parameters whose names do not begin with rsrv_ are ignored. They may be Triton's, a proxy's or the client's own."""
    others = {
        "RSRV_PRIORITY": 1,
        "priority": 1,
        "my_rsrv_x": 1,
        "tenant": 1,
        "rsrv_sticky": 1,
        "rsrv_device": 1,
    }
    assert params(**others) == RequestParams(0)


def test_a_string_that_the_guard_found_too_long_is_the_clients_fault() -> None:
    """If the guard of batches reports a string that exceeds its tensor, the request is refused as the client's fault."""
    request = arrived(FakeRequest({}, parameters=json.dumps({"rsrv_incomplete": "text"})))
    assert request.failure is not None
    assert request.failure.status is Status.INVALID
    assert request.failure.text.startswith("input 'text': the length before a string")


def arrived(request: FakeRequest) -> ClientRequest:
    return ClientRequest(request, ArrivalTime(1.0, NOW, TODAY))


def as_triton_gives(data: bytes) -> Any:
    """Return a property whose method decodes these bytes at each call, as Triton's stub does with texts of a client."""
    return property(lambda self: lambda: data.decode())


@pytest.mark.parametrize("what", ["request_id", "parameters"])
def test_text_that_is_not_utf8_is_the_clients_fault(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """A request whose text is not UTF-8 fails once, without a line in the log. Later reads of the text do not raise."""
    kind = type("Hostile", (FakeRequest,), {what: as_triton_gives(b'{"a": "\xff"}')})

    request = arrived(kind({}))

    assert request.failure is not None
    assert (request.failure.status, request.failure.text) == (
        Status.INVALID,
        "the request's id and parameters must be UTF-8",
    )
    assert (request.id, request.tag == 0) == (("", True) if what == "request_id" else ("fake", False))
    assert not logged_here(caplog)


@pytest.mark.parametrize("text", ["[1]", "{nan", '{"a": ' + "[" * 100_000, "9" * 5000, '"text"', "null"])
def test_parameters_that_are_no_object_are_the_clients_fault(text: str) -> None:
    """A request whose parameters are not a JSON object fails as the client's fault, even if Triton has made the JSON invalid.

    Triton leaves out some numbers, such as NaN.
    """
    request = arrived(FakeRequest({}, parameters=text))
    assert request.failure is not None
    assert request.failure.status is Status.INVALID


def test_a_fault_while_reading_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    """If reading a request raises an unexpected error, the error is logged. The client gets only the status INTERNAL."""

    class Odd(FakeRequest):
        def timeout(self) -> int:
            raise RuntimeError("/opt/secret")

    with caplog.at_level(logging.ERROR, "rsrv.stub"):
        request = arrived(Odd({}))

    assert request.failure is not None
    assert request.failure.status is Status.INTERNAL
    assert "secret" not in request.failure.text
    assert "/opt/secret" in caplog.text


@given(st.text(), st.dictionaries(st.text(), st.one_of(st.text(), st.booleans(), st.integers(), st.floats())))
def test_reading_never_raises(id: str, parameters: dict[str, Any]) -> None:
    """Any request is read, or fails as the client's fault."""
    names = ("rsrv_priority", "rsrv_deadline_unix_ns", "rsrv_run", "reactant_timeout_ns", "traceparent")
    for forged in ({}, dict(zip(names, parameters.values(), strict=False))):
        request = arrived(FakeRequest({}, parameters=json.dumps(parameters | forged), id=id))
        assert request.failure is None or request.failure.status is Status.INVALID


@pytest.mark.parametrize("shape", [(16,), (2, 4, 1, 1), (0,)])
def test_tensors_with_another_number_of_axes_are_the_clients_fault(shape: tuple[int, ...]) -> None:
    """A tensor with a wrong number of axes is refused as the client's fault, so that hooks never get one.

    Triton refuses most such tensors, but not those whose number of elements overflows.
    """
    wire = WireTensor("x", "f32", (-1, 4))
    request = FakeRequest({"x": np.zeros(shape, np.float32)})
    with pytest.raises(RequestFailure, match="input 'x': expected shape") as caught:
        read_inputs(Tensors(FakePbUtils), request, {"x": wire})
    assert caught.value.status is Status.INVALID


def test_an_input_that_the_model_does_not_have_is_the_clients_fault() -> None:
    """A request with an input that the model does not have is refused as the client's fault, so that hooks never get it.

    Usually, Triton refuses such a request.
    """
    request = FakeRequest({"y": np.zeros((1, 4), np.float32)})
    with pytest.raises(RequestFailure, match="an input that the model does not have") as caught:
        read_inputs(Tensors(FakePbUtils), request, {"x": WireTensor("x", "f32", (-1, 4))})
    assert caught.value.status is Status.INVALID
