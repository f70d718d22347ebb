"""Copies of an alias's requests: clients do not notice them, and each comparison is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from rsrv.stub.alias import Alias, Split
from rsrv.stub.replies import Responses
from rsrv.stub.request import ArrivalTime, ClientRequest
from rsrv.stub.shadow import Shadow, differing
from rsrv.stub.tensors import Tensors
from tests.fakes import FakeError, FakePbUtils, FakeRequest, FakeResponse, FakeTensor
from tests.waiting import wait_until

FINAL = FakePbUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(value: float | None) -> FakeResponse:
    """Return a response with this value, or a failure if the value is None."""
    if value is None:
        return FakeResponse([], FakeError("no", FakeError.INTERNAL))
    return FakeResponse([FakeTensor("y", np.full((1, 2), value, np.float32))])


class Model:
    """A model that always gives the same answer, in place or later. It counts the outcomes of comparisons."""

    ready = True

    def __init__(self, value: float | None, *, later: bool = False) -> None:
        self.value, self.later = value, later
        self.counts: Counter[str] = Counter()
        self.copies: list[Any] = []

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        if self.later:
            self.execute_later(requests)
            return None
        return [response(self.value) for _ in requests]

    def execute_later(self, requests: Sequence[Any]) -> None:
        self.copies += requests
        for request in requests:
            request.get_response_sender().send(response(self.value), flags=FINAL)

    def compared(self, outcome: str) -> None:
        self.counts[outcome] += 1

    def close(self) -> None: ...


def alias_of(model: Model, shadow: Model, execute: Callable[[Sequence[Any]], object] | None = None) -> Alias:
    copies = Shadow(
        "v9", Tensors(FakePbUtils), {"y": "f32"}, execute or shadow.execute_later, shadow.compared
    )
    loads: dict[str, Any] = {"v7": (model, None), "v9": (shadow, copies)}
    alias = Alias(Split("fraud", {"v7": 1.0, "v9": "shadow"}), loads.__getitem__, Responses(FakePbUtils))
    assert alias.load(loads) == {}
    return alias


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("answer", "copy", "outcome"),
    [
        (1.0, 1.0, "same"),
        (1.0, 1.001, "same"),
        (1.0, 2.0, "different"),
        (1.0, None, "failed"),
        (None, 1.0, "skipped"),
    ],
)
def test_a_copy_is_compared_and_dropped(
    answer: float | None, copy: float | None, outcome: str, *, later: bool
) -> None:
    """The client gets only the answer of the alias's model, in place or later.

    The outcome of each comparison is counted once.
    """
    shadow, requests = Model(copy), [FakeRequest({"x": np.ones((1, 2), np.float32)}) for _ in range(3)]

    alias = alias_of(Model(answer, later=later), shadow)
    returned = alias.execute(requests)
    alias.close()

    answers = returned or [request.answers.get_nowait() for request in requests]
    assert [reply.has_error() for reply in answers] == [answer is None] * 3
    assert all(request.answers.empty() for request in requests)
    assert all(answer is None or (reply.arrays["y"] == answer).all() for reply in answers)
    assert shadow.counts == {outcome: 3}


def test_clients_are_answered_without_a_thread_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started for the copies of requests, clients still get their answers.

    These copies are sent and compared when a later request has started the thread.
    """
    shadow, requests = Model(1.0), [FakeRequest({"x": np.ones((1, 2), np.float32)}) for _ in range(2)]
    alias = alias_of(Model(1.0), shadow)

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert len(alias.execute(requests[:1]) or []) == 1
    assert len(alias.execute(requests[1:]) or []) == 1
    alias.close()

    assert shadow.counts == {"same": 2}


def test_copies_have_the_lowest_priority_and_no_deadline_of_the_client() -> None:
    """A copy has the inputs and the id of the request.

    It has the lowest priority and its own deadline, and none of the client's parameters.
    """
    shadow = Model(1.0)
    request = FakeRequest(
        {"x": np.ones((1, 2), np.float32)}, 5, '{"rsrv_priority": 1, "rsrv_deadline_unix_ns": 7}', "mine"
    )

    alias = alias_of(Model(1.0), shadow)
    alias.execute([request])
    alias.close()

    copy = ClientRequest(shadow.copies[0], ArrivalTime(0.0, 0, 0))
    assert copy.failure is None
    assert (copy.id, copy.params.priority, copy.params.deadline_ns) == ("mine", 65534, 30 * 10**9)
    assert shadow.copies[0].inputs() is request.inputs()
    assert not shadow.copies[0].is_cancelled()


def test_a_shadow_that_is_slow_gets_no_further_copies() -> None:
    """While 64 copies are in progress, requests are not copied, and are counted as skipped."""
    shadow, taken = Model(1.0), list[Any]()
    alias = alias_of(Model(1.0), shadow, taken.extend)

    alias.execute([FakeRequest({"x": np.ones((1, 2), np.float32)}) for _ in range(70)])
    wait_until(lambda: len(taken) == 64, what="the copies")
    assert (len(taken), shadow.counts) == (64, {"skipped": 6})
    shadow.execute_later(taken)

    assert shadow.counts == {"skipped": 6, "same": 64}
    alias.execute([FakeRequest({"x": np.ones((1, 2), np.float32)})])
    alias.close()
    assert len(taken) == 65


def test_copies_take_no_memory_that_clients_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are not copied if answers that wait for comparison take too much memory, or if shared memory is scarce."""
    monkeypatch.setattr("rsrv.stub.shadow._MAX_ANSWER_BYTES", 20)
    shadow, taken = Model(1.0), list[Any]()
    alias = alias_of(Model(1.0), shadow, taken.extend)

    for _ in range(5):
        alias.execute([FakeRequest({"x": np.ones((1, 2), np.float32)})])
    alias.close()
    assert (len(taken), shadow.counts) == (3, {"skipped": 2})
    shadow.execute_later(taken)

    taken.clear()
    alias = alias_of(Model(1.0), shadow, taken.extend)
    monkeypatch.setattr("rsrv.stub.shadow.free_shared_memory", lambda: 1)
    alias.execute([FakeRequest({"x": np.ones((1, 2), np.float32)})])
    alias.close()
    assert not taken


def test_answers_that_were_compared_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compared answer does not count as waiting any more, so later requests are still copied."""
    monkeypatch.setattr("rsrv.stub.shadow._MAX_ANSWER_BYTES", 20)
    shadow, taken = Model(1.0), list[Any]()
    alias = alias_of(Model(1.0), shadow, taken.extend)

    for _ in range(10):
        alias.execute([FakeRequest({"x": np.ones((1, 2), np.float32)})])
        wait_until(lambda: bool(taken), what="the copy")
        shadow.execute_later(taken)
        taken.clear()
    alias.close()

    assert shadow.counts == {"same": 10}


@pytest.mark.parametrize(
    ("value", "other", "dtype", "differs"),
    [
        (np.array([1, 2]), np.array([1, 3]), "i64", True),
        (np.array([np.nan], np.float32), np.array([np.nan], np.float32), "f32", False),
        (np.zeros((1, 2), np.float32), np.zeros((2, 1), np.float32), "f32", True),
        (np.array([0x3F80], np.uint16), np.array([0x3F81], np.uint16), "bf16", False),
        (np.array([0x3F80], np.uint16), np.array([0x4000], np.uint16), "bf16", True),
        (np.array([b"a"], object), np.array([b"a"], object), "bytes", False),
    ],
)
def test_answers_differ_by_more_than_rounding(value: Any, other: Any, dtype: str, *, differs: bool) -> None:
    """Answers are equal if their floats differ by at most a hundredth. Values of bf16 are compared as floats.

    Values of all other types must be the same.
    """
    assert (differing({"y": value}, {"y": other}, {"y": dtype}) == "y") == differs
    assert differing({"y": value}, {}, {"y": dtype}) == "y"
    assert differing({}, {}, {"y": dtype}) == ""
