"""The thread that owns a front: it submits and answers each waiting request once, whatever else happens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Event, Thread
from unittest.mock import Mock

import numpy as np
import pytest

from rsrv.front.events import Connect, LoadAsked, ModelRejected, Registered, RuntimeLost, Unloaded
from rsrv.front.front import Front
from rsrv.front.rules import DOWN, MAX_DEATHS, MAX_REQUEST_BYTES
from rsrv.front.states import ServingState
from rsrv.stub.front_loop import FrontLoop
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import Reply, RequestFailure, Responses
from rsrv.stub.request import ArrivalTime, ClientRequest, Outcomes
from rsrv.wire.frames import Status
from tests.fakes import FakePbUtils, FakeRequest, FakeSender
from tests.waiting import PATIENCE_S, wait_until

RESPONSES = Responses(FakePbUtils)
OUTCOMES = Outcomes(Meters(), RESPONSES)


@dataclass
class Outage:
    """A model whose runtime is gone until `come_back` is called. It records what the thread of its front does."""

    passed: float = 0.0
    takes: bool = True
    fails: bool = False
    #: Requests that were submitted to the next runtime.
    submitted: list[ClientRequest] = field(default_factory=list)
    tries: int = 0
    told: list[Mapping[str, int]] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    replies: dict[FakeRequest, Reply] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = FrontLoop(lambda: time.monotonic() + self.passed)
        self.loop.begin(Front("m", 1), self)
        self.loop.post(LoadAsked(0))
        self.come_back()
        self.loop.post(RuntimeLost(0))
        self.until(ServingState.CONNECTING)

    # --- effects

    def connect(self, attempt: Connect) -> None: ...

    def submit(self, request: ClientRequest) -> bool:
        self.tries += 1
        if self.fails:
            self.fails = False
            raise RequestFailure(Status.INTERNAL, "unforeseen")
        if self.takes:
            self.submitted.append(request)
        return self.takes

    def leave(self, device: int) -> bool:
        return True

    def tell(self, demand: Mapping[str, int]) -> None:
        self.told.append(demand)

    def replace_process(self, text: str) -> None:
        self.replaced.append(text)

    def refresh(self) -> None: ...

    # --- what tests do

    def until(self, state: ServingState) -> None:
        wait_until(lambda: self.loop.snapshot.devices[0].state is state)

    def come_back(self) -> None:
        self.loop.post(Registered(0, 1, 10.0))
        self.until(ServingState.READY)

    def add(self, triton: FakeRequest | None = None, deaths: int = 0) -> FakeRequest:
        """Add a request that waits for a runtime, and return it. `deaths` runtimes have died while they executed the request."""
        triton = triton or FakeRequest({"x": np.zeros((1, 3), np.float32)})
        request = ClientRequest(triton, ArrivalTime.now())
        request.reply = self.replies[triton] = Reply(triton.get_response_sender(), RESPONSES)
        request.deaths = deaths
        self.loop.add(request, OUTCOMES)
        return triton

    def answer(self, number: int) -> None:
        reply = self.submitted[number].reply
        assert reply is not None
        reply.send(RESPONSES.answer([]))


@pytest.fixture
def outage() -> Iterator[Outage]:
    made = Outage()
    yield made
    made.loop.close()
    for number in range(len(made.submitted)):
        made.answer(number)


def failure_of(request: FakeRequest) -> str:
    answer = request.answers.get(timeout=PATIENCE_S)
    assert answer.error is not None
    return str(answer.error.message)


def test_requests_get_the_next_runtime_in_their_order(outage: Outage) -> None:
    """Requests wait until the next runtime serves. Then each request is submitted to it once, in the order of arrival."""
    requests = [outage.add() for _ in range(20)]
    wait_until(lambda: outage.told and outage.told[-1] == {"asked": True})
    assert all(request.answers.empty() for request in requests)

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 20)
    assert [request.triton for request in outage.submitted] == requests


def test_a_request_is_refused_when_its_time_is_over(outage: Outage) -> None:
    """A request is refused at its limit, although no other event occurs."""
    request = outage.add()
    wait_until(lambda: outage.loop.snapshot.waiting)
    outage.passed += 10.5

    assert failure_of(request) == f"[rsrv:RUNTIME_DOWN] {DOWN}"


def test_the_next_suspect_follows_the_answer_of_the_one_before(outage: Outage) -> None:
    """Suspects are submitted one after another: the next one only when the one before has its answer."""
    for _ in range(3):
        outage.add(deaths=1)
    outage.come_back()
    for number in range(3):
        wait_until(lambda count=number + 1: len(outage.submitted) == count)  # type: ignore[misc]
        outage.answer(number)


def test_requests_that_no_runtime_takes_are_tried_again(outage: Outage) -> None:
    """If no runtime accepts a request, its submission is tried again.

    Later requests are submitted only after it, in the order of arrival.
    """
    requests = [outage.add() for _ in range(3)]
    outage.takes = False
    outage.come_back()
    wait_until(lambda: outage.tries > 1)
    assert outage.submitted == []

    outage.takes = True

    wait_until(lambda: len(outage.submitted) == 3)
    assert [request.triton for request in outage.submitted] == requests


def test_an_error_of_submitting_fails_its_request_alone(outage: Outage) -> None:
    """If the submission of a request raises an error, only this request fails."""
    bad, good = outage.add(), outage.add()
    outage.fails = True
    outage.come_back()

    assert "submitted again" in failure_of(bad)
    wait_until(lambda: len(outage.submitted) == 1)
    assert outage.submitted[0].triton is good


def test_an_instruction_that_fails_loses_no_other(outage: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an instruction raises an error, the other instructions are still carried out, and no request is lost."""

    def fail(demand: Mapping[str, int]) -> None:
        failed.set()
        raise RuntimeError("unforeseen")

    failed = Event()
    monkeypatch.setattr(outage, "tell", fail)
    request = outage.add()
    assert failed.wait(PATIENCE_S)

    outage.come_back()

    wait_until(lambda: [client_request.triton for client_request in outage.submitted] == [request])


def test_requests_end_in_time_though_the_placement_table_cannot_be_read(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the placement table cannot be read, requests are still refused at their limits."""
    refresh = Mock(side_effect=OSError)
    monkeypatch.setattr(outage, "refresh", refresh)
    request = outage.add()
    wait_until(lambda: refresh.called)

    outage.passed = 100.0

    assert DOWN in failure_of(request)


def test_a_fault_after_the_end_of_the_thread_leaves_no_run_waiting(outage: Outage) -> None:
    """If a run asks after the end of the thread whether it may continue, it is refused and does not wait forever.

    This holds even if an earlier event of the loop has raised an error.
    """
    outage.loop.close()
    outage.loop.post(Mock(side_effect=RuntimeError("unforeseen")))

    with pytest.raises(RequestFailure, match="unloaded"):
        outage.loop.may_go_on(ClientRequest(FakeRequest({}), ArrivalTime.now()))


def test_a_suspect_that_comes_back_while_it_is_submitted_is_submitted_again(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the runtime dies while a suspect is submitted to it, the suspect is submitted again.

    The next suspect is submitted after the first one has its answer.
    """
    submit = outage.submit

    def lose(request: ClientRequest) -> bool:
        monkeypatch.setattr(outage, "submit", submit)
        outage.loop.add(request, OUTCOMES)
        return True

    for _ in range(2):
        outage.add(deaths=1)
    monkeypatch.setattr(outage, "submit", lose)
    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 1)
    outage.answer(0)
    wait_until(lambda: len(outage.submitted) == 2)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda outage, request: outage.loop.post(ModelRejected(0, "", "it has crashed")), "it has crashed"),
        (lambda outage, request: setattr(request, "cancelled", True), "cancelled"),
        (lambda outage, request: outage.loop.stop(), "unloaded"),
    ],
    ids=["the runtime rejects the model", "the client cancels", "the model is unloaded"],
)
def test_a_wait_that_is_in_vain_ends(outage: Outage, end: object, text: str) -> None:
    """If a waiting request can never be executed, it fails with the reason at once, and not only at its limit."""
    request = outage.add()
    assert callable(end)

    end(outage, request)

    assert text in failure_of(request)


def test_a_request_that_was_answered_meanwhile_is_not_submitted(outage: Outage) -> None:
    """If a request was answered while it waited, here because its deadline passed, only the other requests are submitted."""
    request, other = outage.add(), outage.add()
    outage.replies[request].send_failure(Status.DEADLINE, "late")
    assert "late" in failure_of(request)

    outage.come_back()

    wait_until(lambda: other in [client_request.triton for client_request in outage.submitted])


def test_a_fault_of_checking_for_cancellation_leaves_the_others_waiting(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If checking one request for cancellation fails, the next runtime still gets all waiting requests."""
    checked = Event()

    def fail(sender: FakeSender) -> bool:
        checked.set()
        raise RuntimeError("Triton cannot tell")

    monkeypatch.setattr(FakeSender, "is_cancelled", fail)
    outage.add()
    assert checked.wait(PATIENCE_S)

    outage.come_back()

    wait_until(lambda: len(outage.submitted) == 1)


def test_the_bytes_of_waiting_requests_are_those_of_their_inputs(outage: Outage) -> None:
    """The bytes of waiting requests are the bytes of their inputs. A request beyond the limit is refused at once."""
    half = np.zeros(MAX_REQUEST_BYTES // 2, np.uint8)
    for _ in range(2):
        outage.add(FakeRequest({"x": half}))

    assert DOWN in failure_of(outage.add())


@pytest.mark.parametrize("parameters", ['{"rsrv_run": "7"}', '{"rsrv_priority": -1}'])
def test_a_request_that_no_other_runtime_can_answer_does_not_wait(outage: Outage, parameters: str) -> None:
    """A sub-call does not wait, because only the dead runtime knows its run.

    A malformed request does not wait either, and fails with its own error.
    """
    assert failure_of(outage.add(FakeRequest({}, parameters=parameters)))


@pytest.mark.parametrize("takes", [False, True])
def test_unloading_while_requests_are_submitted_ends_each_once(
    outage: Outage, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the model is unloaded while requests are submitted, each request ends once and is counted once.

    Requests that no runtime has accepted fail.
    """
    counted: list[ClientRequest] = []
    original = OUTCOMES.ended

    def count(request: ClientRequest, *how: object) -> None:
        counted.append(request)
        original(request, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(OUTCOMES, "ended", count)

    def submit(request: ClientRequest) -> bool:
        outage.loop.post(Unloaded())
        if takes:
            outage.submitted.append(request)
        return takes

    monkeypatch.setattr(outage, "submit", submit)
    requests = [outage.add(deaths=1) for _ in range(3)]
    outage.loop.post(Registered(0, 1, 10.0))

    expected = requests[1:] if takes else requests
    assert all("unloaded" in failure_of(request) for request in expected)
    assert "unloaded" in failure_of(late := outage.add())
    assert sorted(id(request.triton) for request in counted) == sorted(map(id, [*expected, late]))


def test_runs_get_their_answers_on_their_threads(outage: Outage) -> None:
    """A run asks whether it may continue, and gets the answer on its own thread.

    It may continue. If it is a suspect, it must ask again while another suspect executes. After the end of the loop, it fails.
    """
    request = ClientRequest(FakeRequest({}), ArrivalTime.now())
    assert outage.loop.may_go_on(request)
    outage.add(deaths=1)
    outage.come_back()
    wait_until(lambda: len(outage.submitted) == 1)
    suspect = ClientRequest(FakeRequest({}), ArrivalTime.now())
    suspect.deaths = 1
    assert not outage.loop.may_go_on(suspect)

    outage.loop.close()

    with pytest.raises(RequestFailure, match="unloaded"):
        outage.loop.may_go_on(request)


def test_requests_that_race_with_the_end_of_the_thread_are_refused(outage: Outage) -> None:
    """Each request that arrives while the thread ends is refused once, either by this thread or by the one that adds it."""
    requests: list[FakeRequest] = []
    stop = Event()

    def add() -> None:
        while not stop.wait(0.001):
            requests.append(outage.add())

    threads = [Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    outage.loop.close()
    stop.set()
    for thread in threads:
        thread.join()

    assert all(failure_of(request) for request in requests)


def test_inputs_that_have_ended_runtimes_are_not_tried_again(outage: Outage) -> None:
    """A request is refused if equal inputs have ended several runtimes. Requests with other inputs are accepted.

    After an hour, requests with these inputs are accepted again.
    """
    hostile = {"x": np.zeros((1, 3), np.float32)}
    outage.loop.record(MAX_DEATHS, hostile)
    wait_until(lambda: outage.loop.snapshot.killers)

    with pytest.raises(RequestFailure, match="equal inputs, so this one is not tried"):
        outage.loop.check({"x": hostile["x"].copy()})
    for other in (hostile["x"] + 1, hostile["x"].astype(np.int32), hostile["x"].reshape(3, 1)):
        assert outage.loop.check({"x": other}) == 0

    outage.passed += 3600.0
    assert outage.loop.check(hostile) == 0
