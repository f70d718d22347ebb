"""Requests that wait for a runtime: who gets one, in which order, and how the others end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rsrv.stub.metrics import Meters
from rsrv.stub.replies import Reply, RequestFailure, Responses
from rsrv.stub.request import ArrivalTime, ClientRequest, Outcomes
from rsrv.stub.resubmission import CROWDED, MAX_BYTES, MAX_DEATHS, MAX_REQUESTS, Resubmission
from rsrv.stub.session import DOWN, Session
from rsrv.wire.frames import Status
from tests.fakes import FakeError, FakePbUtils, FakeRequest, FakeSender
from tests.waiting import wait_until

RESPONSES = Responses(FakePbUtils)
OUTCOMES = Outcomes(Meters(), RESPONSES)


@dataclass
class Outage:
    """A model whose runtime is gone until `is_back`."""

    now: float = 100.0
    is_back: bool = False
    #: what was submitted to the next runtime
    submitted: list[ClientRequest] = field(default_factory=list)
    session: Any = field(
        default_factory=lambda: SimpleNamespace(attachment=None, down=DOWN, cold=False, started=True)
    )
    #: how often a cold model was to start, and whether it starts on another device
    woken: int = 0
    moves: bool = False

    def __post_init__(self) -> None:
        self.resubmission = Resubmission([cast(Session, self.session)], lambda: self.now)
        self.resubmission.retry_s, self.resubmission.start_timeout_s = 10.0, 60.0
        self.resubmission.wake = self._wake
        self.resubmission.place = self._place

    def _wake(self) -> bool:
        self.woken += 1
        return self.moves

    def _place(self, request: ClientRequest) -> bool:
        if self.is_back:
            self.submitted.append(request)
        return self.is_back

    def add(self, triton: FakeRequest | None = None, deaths: int = 0, due_s: float = 0) -> FakeRequest:
        """Have a request wait that was executing when as many runtimes died."""
        triton = triton or FakeRequest({"x": np.zeros((1, 3), np.float32)})
        request = ClientRequest(triton, ArrivalTime.now())
        request.reply = Reply(triton.get_response_sender(), RESPONSES)
        request.deaths = deaths
        if due_s:
            request.params = request.params._replace(deadline_ns=int(1e9 * due_s))
        self.resubmission.add(request, OUTCOMES)
        return triton

    def come_back(self) -> None:
        self.session.attachment, self.is_back = object(), True

    def answer(self, number: int) -> None:
        reply = self.submitted[number].reply
        assert reply is not None
        reply.send(RESPONSES.answer([]))


@pytest.fixture
def outage() -> Any:
    made = Outage()
    yield made
    made.resubmission.close()
    for number in range(len(made.submitted)):
        made.answer(number)


def failure_of(request: FakeRequest) -> str:
    answer = request.answers.get(timeout=10)
    assert answer.error is not None
    return str(answer.error.message)


def test_requests_wait_for_the_next_runtime_in_their_order(outage: Outage) -> None:
    """None of them is answered before there is a runtime, and then it gets each of them once."""
    requests = [outage.add() for _ in range(20)]
    assert all(one.answers.empty() for one in requests)

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 20)
    assert [one.triton for one in outage.submitted] == requests


def test_a_request_waits_no_longer_than_it_may(outage: Outage) -> None:
    """After stub.retry_s it is refused, also if it has waited in several pieces."""
    request = outage.add()
    outage.now += 9.9
    outage.come_back()
    wait_until(lambda: len(outage.submitted) == 1)
    outage.session.attachment, outage.is_back = None, False
    (again,) = outage.submitted
    outage.resubmission.add(again, OUTCOMES)
    assert request.answers.empty()

    outage.now += 0.2

    assert DOWN in failure_of(request)


def test_a_request_whose_deadline_is_before_the_end_of_the_start_is_refused_at_once(outage: Outage) -> None:
    """The runtime knows how long the start takes at least; requests with later deadlines, and without one, wait."""
    waits = [outage.add(due_s=0), outage.add(due_s=107), outage.add(due_s=103)]

    outage.resubmission.starting(5.0)

    for request in (waits.pop(), outage.add(due_s=104)):
        assert failure_of(request).startswith(
            "[rsrv:DEADLINE] the model is starting, which takes 5.0 s more, and this request's deadline is before that"
        )
    outage.come_back()
    wait_until(lambda: len(outage.submitted) == 2)
    assert [one.triton for one in outage.submitted] == waits


def test_without_a_wait_requests_are_refused_at_once(outage: Outage) -> None:
    """`retry_s: 0` refuses as if there were no next runtime."""
    outage.resubmission.retry_s = 0.0

    assert failure_of(outage.add()).startswith("[rsrv:RUNTIME_DOWN]")


def test_suspects_are_executed_one_after_another(outage: Outage) -> None:
    """Those that were executing at the death go alone; a request that was not goes at once."""
    for _ in range(3):
        outage.add(deaths=1)
    outage.add()

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 2)
    assert [one.deaths for one in outage.submitted] == [1, 0]
    outage.answer(0)
    wait_until(lambda: len(outage.submitted) == 3)
    outage.answer(2)
    wait_until(lambda: len(outage.submitted) == 4)


def test_suspects_wait_for_their_turn_beyond_the_limit(outage: Outage) -> None:
    """Once there is a runtime, long executions of the suspects before it end no suspect; another outage does."""
    for _ in range(2):
        outage.add(deaths=1)
    last = outage.add(deaths=1)
    outage.come_back()
    wait_until(lambda: len(outage.submitted) == 1)

    outage.now += 11.0
    outage.answer(0)

    wait_until(lambda: len(outage.submitted) == 2)
    outage.session.attachment, outage.is_back = None, False
    assert DOWN in failure_of(last)


def test_a_suspect_whose_next_runtime_dies_before_it_is_executed_goes_on(outage: Outage) -> None:
    """It waits again, is not a suspect of the second death, and delays no other suspect."""
    for _ in range(2):
        outage.add(deaths=1)
    outage.come_back()
    wait_until(lambda: len(outage.submitted) == 1)
    outage.session.attachment, outage.is_back = None, False
    (first,) = outage.submitted
    outage.resubmission.add(first, OUTCOMES)

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 2)
    outage.answer(1)
    wait_until(lambda: len(outage.submitted) == 3)


def test_a_request_whose_runtime_is_gone_when_it_is_submitted_waits_on(outage: Outage) -> None:
    """It is the next one again, and no suspect that others wait for."""
    tried: list[ClientRequest] = []

    def place(request: ClientRequest) -> bool:
        tried.append(request)
        return outage._place(request)

    outage.resubmission.place = place
    requests = [outage.add(deaths=1) for _ in range(2)]
    outage.session.attachment = object()  # of a runtime that has just died
    wait_until(lambda: len(tried) >= 3)
    assert all(one.triton is requests[0] for one in tried)

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 1)
    outage.answer(0)
    wait_until(lambda: len(outage.submitted) == 2)
    assert [one.triton for one in outage.submitted] == requests


def test_a_request_ends_two_runtimes_at_most(outage: Outage) -> None:
    """It fails alone, as a fault that no retry of its client cures."""
    outage.come_back()
    other = outage.add(deaths=1)

    answer = outage.add(deaths=MAX_DEATHS).answers.get(timeout=10)

    assert answer.error is not None
    assert answer.error.code == FakeError.INTERNAL
    assert "not tried again" in answer.error.message
    wait_until(lambda: len(outage.submitted) == 1)
    assert other.answers.empty()


def test_waiting_requests_are_bounded(outage: Outage) -> None:
    """Neither their number nor the bytes of their inputs exceed the limits; those beyond are refused."""
    half = np.zeros(MAX_BYTES // 2, np.uint8)
    for _ in range(2):
        assert outage.add(FakeRequest({"x": half})).answers.empty()
    assert DOWN in failure_of(outage.add())
    outage.come_back()
    wait_until(lambda: len(outage.submitted) == 2)

    outage.session.attachment, outage.is_back = None, False
    for _ in range(MAX_REQUESTS):
        assert outage.add(FakeRequest({})).answers.empty()
    assert DOWN in failure_of(outage.add(FakeRequest({})))


def test_a_second_death_is_told_where_no_more_requests_may_wait(outage: Outage) -> None:
    """Its client must not send the request again, which the text of a full queue invites to."""
    for _ in range(MAX_REQUESTS):
        outage.add(FakeRequest({}))

    assert "not tried again" in failure_of(outage.add(deaths=MAX_DEATHS))


@pytest.mark.parametrize("is_back", [False, True])
def test_unloading_while_requests_are_submitted_ends_each_once(
    outage: Outage, is_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end with the model's, and so does the one that finds no runtime; each counts once."""
    counted: list[ClientRequest] = []
    ended = OUTCOMES.ended

    def count(one: ClientRequest, *how: Any) -> None:
        counted.append(one)
        ended(one, *how)

    monkeypatch.setattr(OUTCOMES, "ended", count)

    def place(request: ClientRequest) -> bool:
        if outage.session.attachment is None:
            return False
        outage.resubmission.close()
        if is_back:
            outage.submitted.append(request)
        return is_back

    outage.resubmission.place = place
    requests = [outage.add() for _ in range(3)]
    outage.session.attachment = object()

    expected = requests[1:] if is_back else requests
    assert all("unloaded" in failure_of(one) for one in expected)
    wait_until(lambda: not outage.resubmission._running)
    assert sorted(id(one.triton) for one in counted) == sorted(map(id, expected))


def test_inputs_are_compared_for_as_long_as_a_crash_counts(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal inputs are refused, other ones are not, and after an hour nothing is hashed any more."""
    hostile = {"x": np.zeros((1, 3), np.float32)}
    outage.resubmission.remember(MAX_DEATHS, hostile)
    with pytest.raises(RequestFailure, match="equal inputs, so this one is not tried"):
        outage.resubmission.check({"x": hostile["x"].copy()})
    for other in (hostile["x"] + 1, hostile["x"].astype(np.int32), hostile["x"].reshape(3, 1)):
        outage.resubmission.check({"x": other})

    outage.now += 3600.0

    monkeypatch.setattr("rsrv.stub.resubmission._digest", lambda arrays: pytest.fail("it is hashed"))
    outage.resubmission.check(hostile)


def test_inputs_that_saw_one_death_count_until_a_request_with_them_is_answered(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with them is tried as the second one of a suspect; many of them push out no hostile ones."""
    hostile, unlucky = ({"x": np.full((1, 3), value, np.float32)} for value in (-1, -2))
    outage.resubmission.remember(MAX_DEATHS, hostile)
    for value in range(100):
        outage.resubmission.remember(1, {"x": np.full((1, 3), value, np.float32)})
    outage.resubmission.remember(1, unlucky)
    with pytest.raises(RequestFailure):
        outage.resubmission.check(hostile)
    assert outage.resubmission.check(unlucky) == 1

    outage.resubmission.remember(0, unlucky)

    assert outage.resubmission.check(unlucky) == 0


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda outage, request: setattr(outage.session, "down", "it has crashed"), "it has crashed"),
        (lambda outage, request: setattr(request, "cancelled", True), "cancelled"),
        (lambda outage, request: outage.resubmission.close(), "unloaded"),
    ],
    ids=["the runtime refuses the model", "the client cancels", "the model is unloaded"],
)
def test_a_wait_that_is_in_vain_ends(
    outage: Outage, end: Callable[[Outage, FakeRequest], None], text: str
) -> None:
    """The client gets the reason before stub.retry_s has passed."""
    request = outage.add()

    end(outage, request)
    outage.now += 1.0

    assert text in failure_of(request)


@pytest.mark.parametrize("parameters", ['{"rsrv_run": "7"}', '{"rsrv_priority": -1}'])
def test_a_request_that_no_other_runtime_can_answer_does_not_wait(outage: Outage, parameters: str) -> None:
    """Only the dead runtime knows a sub-call's run, and a malformed request keeps its own failure."""
    answer = outage.add(FakeRequest({}, parameters=parameters)).answers.get(timeout=10)

    assert answer.error is not None


def test_a_request_that_was_answered_meanwhile_is_not_submitted(outage: Outage) -> None:
    """Its deadline passed while it waited: it has its one answer."""
    request, other = outage.add(), outage.add()
    assert failure_of_waiting(outage, request)
    # A look that began before may still submit it, in vain.
    wait_until(lambda: len(outage.resubmission._waiting) == 1)

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 1)
    assert outage.submitted[0].triton is other


def failure_of_waiting(outage: Outage, triton: FakeRequest) -> bool:
    """Answer a waiting request, as the check of deadlines does."""
    (reply,) = (one for one in RESPONSES.owed() if one._sender._request is triton)
    reply.send_failure(Status.DEADLINE, "late")
    return not triton.answers.empty()


def test_an_error_of_submitting_fails_its_request_alone(outage: Outage) -> None:
    """The others get the runtime."""
    place = outage._place

    def fail_once(request: ClientRequest) -> bool:
        outage.resubmission.place = place
        raise RequestFailure(Status.INTERNAL, "unforeseen")

    bad, _ = outage.add(), outage.add()
    outage.resubmission.place = lambda request: outage.is_back and fail_once(request)
    outage.come_back()

    assert "submitted again" in failure_of(bad)
    wait_until(lambda: len(outage.submitted) == 1)


def test_a_suspect_that_comes_back_at_once_is_submitted_again(outage: Outage) -> None:
    """The next runtime may die while the suspect is submitted to it; neither it nor the other suspects wait for itself."""
    place = outage._place

    def lose(request: ClientRequest) -> bool:
        outage.resubmission.place = place
        outage.resubmission.add(request, OUTCOMES)
        return True

    for _ in range(2):
        outage.add(deaths=1)
    outage.resubmission.place = lambda request: outage.is_back and lose(request)
    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 1)
    outage.answer(0)
    wait_until(lambda: len(outage.submitted) == 2)


def test_a_fault_of_checking_for_cancellation_leaves_the_others_waiting(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose client cannot be asked still gets the next runtime."""

    def fail(sender: FakeSender) -> bool:
        checked.append(sender)
        raise RuntimeError("Triton cannot tell")

    checked: list[FakeSender] = []
    monkeypatch.setattr(FakeSender, "is_cancelled", fail)
    outage.add()
    outage.now += 1.0
    wait_until(lambda: bool(checked))

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 1)


def test_requests_wait_while_one_device_may_come_back(outage: Outage) -> None:
    """A model that one device's runtime refuses waits for the other device's, and is refused when both refuse it."""
    refusing: Any = SimpleNamespace(attachment=None, down="it has crashed", cold=False, started=True)
    outage.resubmission = Resubmission([refusing, cast(Session, outage.session)], lambda: outage.now)
    outage.resubmission.retry_s = 10.0
    request = outage.add()
    assert request.answers.empty()

    outage.session.down = "it has crashed"

    assert "it has crashed" in failure_of(request)


# --- cold models


@pytest.fixture
def start(outage: Outage) -> Outage:
    """Return the outage of a cold model, which is to start."""
    outage.session.cold, outage.session.started = True, False
    return outage


def test_the_first_request_starts_a_cold_model(start: Outage) -> None:
    """Nothing starts it before; requests that come meanwhile have one start, and wait for it."""
    assert start.woken == 0
    requests = [start.add() for _ in range(3)]
    wait_until(lambda: start.woken)

    start.come_back()

    wait_until(lambda: len(start.submitted) == 3)
    assert [one.triton for one in start.submitted] == requests


def test_a_start_that_takes_too_long_is_refused_with_what_to_do(start: Outage) -> None:
    """The limit is `start_timeout_s`; `retry_s` is for deaths."""
    request = start.add()
    start.now += 59.0
    wait_until(lambda: start.woken)
    assert request.answers.empty()

    start.now += 1.5

    text = failure_of(request)
    assert text.startswith("[rsrv:RUNTIME_DOWN] the model is starting; this request has waited 60.5 s")
    assert "rsrv prefetch --warm" in text


def test_a_start_that_too_many_wait_for_is_the_reason_of_those_beyond(start: Outage) -> None:
    """Nothing restarts, so their clients are not told so."""
    for _ in range(MAX_REQUESTS):
        assert start.add(FakeRequest({})).answers.empty()
    assert failure_of(start.add(FakeRequest({}))) == f"[rsrv:QUEUE_FULL] {CROWDED}"


def test_a_wait_after_a_death_goes_on_if_the_device_sleeps_then(outage: Outage) -> None:
    """The next runtime ended before the request was submitted; the start that follows has a limit of its own."""
    request = outage.add()
    outage.now += 9.0
    outage.session.cold, outage.session.started = True, False
    wait_until(lambda: outage.resubmission._waiting[0].request.retry_until == 160.0)

    outage.now += 50.0
    assert request.answers.empty()
    outage.now += 1.5

    assert failure_of(request).startswith("[rsrv:RUNTIME_DOWN] the model is starting")


def test_a_deadline_before_the_end_of_a_start_is_kept(start: Outage) -> None:
    """The request is refused when its deadline passes, and others wait on."""
    start.now = time.monotonic()
    patient, hurried = start.add(), start.add(FakeRequest({}, timeout_us=2_000_000))

    start.now += 2.5

    assert failure_of(hurried).startswith("[rsrv:DEADLINE] the model is starting")
    assert patient.answers.empty()


def test_a_failed_start_refuses_those_who_wait_with_its_reason(start: Outage) -> None:
    """Until the next start, which a request after the pause begins, requests have the reason at once."""
    first = start.add()
    start.session.cold, start.session.down = False, "its bundle is gone"
    assert failure_of(first) == "[rsrv:RUNTIME_DOWN] its bundle is gone"
    assert "its bundle is gone" in failure_of(start.add())
    before = start.woken

    start.session.cold, start.session.down = True, DOWN

    assert start.add().answers.empty()
    wait_until(lambda: start.woken > before)


def test_a_model_that_one_device_rejects_is_waited_for_while_another_starts_it(start: Outage) -> None:
    """When that one rejects it, too, requests get the reason."""
    start.session.cold, start.session.down, start.moves = (
        False,
        "the model could not be started: no room",
        True,
    )
    request = start.add()
    wait_until(lambda: start.woken > 3)
    assert request.answers.empty()

    start.moves = False

    assert "no room" in failure_of(request)


def test_the_demand_names_the_earliest_deadline(start: Outage) -> None:
    """REGISTER says that requests wait, and until when the first of them does, if one has a deadline."""
    assert start.resubmission.demand() == {}
    start.now = time.monotonic()
    start.add()
    assert start.resubmission.demand() == {"asked": True}
    start.add(FakeRequest({}, timeout_us=60_000_000))
    start.add(FakeRequest({}, timeout_us=30_000_000))

    demand = start.resubmission.demand()

    assert demand["asked"]
    assert 29 < demand["deadline_ns"] / 1e9 - start.now < 31


def test_the_demand_is_told_until_nothing_waits(start: Outage) -> None:
    """A start that goes on has no demand any more when its last client has given up."""
    told: list[Mapping[str, int]] = []
    start.resubmission.tell = told.append
    request = start.add()
    wait_until(lambda: {"asked": True} in told)

    request.cancelled = True
    start.now += 1.0

    assert "cancelled" in failure_of(request)
    wait_until(lambda: not told[-1])


def test_a_sub_call_waits_for_a_start_and_not_for_the_next_runtime(outage: Outage) -> None:
    """The runtime that starts the callee knows the run; after a death only its meta model can repeat the call."""
    sub_call = '{"rsrv_run": "7"}'
    outage.session.cold, outage.session.started = True, False
    assert outage.add(FakeRequest({}, parameters=sub_call)).answers.empty()

    outage.session.cold, outage.session.started = False, True

    assert DOWN in failure_of(outage.add(FakeRequest({}, parameters=sub_call)))
