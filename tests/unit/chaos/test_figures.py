"""What is made of the clients' records."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import pytest

from tests.chaos.figures import (
    HEADERS,
    RIGHT,
    STRIKE,
    UNANSWERED,
    WRONG,
    Expected,
    Record,
    Stretch,
    cells,
    judge,
    remarks,
    together,
)

#: struck at 10, the cause was gone at 15, and all was over at 20
STRETCH = Stretch(5.0, 10.0, 15.0, 20.0)
DOWN = "UNAVAILABLE RUNTIME_DOWN"
HURT = Expected({"victim"})


def record(model: str, sent: float, ended: float, outcome: str = RIGHT, protocol: str = "grpc") -> Record:
    return Record(model, protocol, sent, ended, outcome)


def steady(model: str, since: float, until: float, seconds: float) -> list[Record]:
    """Right answers, ten in a second."""
    count = int((until - since) * 10)
    return [record(model, since + n / 10, since + n / 10 + seconds) for n in range(count)]


def test_what_was_under_way_or_came_meanwhile_is_counted() -> None:
    """Neither what ended before the strike nor what was sent when all was over."""
    records = [
        record("victim", 9.0, 9.5, DOWN),
        record("victim", 9.9, 10.1, DOWN),
        record("victim", 12.0, 12.1, "INTERNAL"),
        record("victim", 16.0, 16.1),
        record("victim", 20.5, 20.6),
    ]
    row = judge("fault", records, STRETCH, HURT)
    assert (row.in_flight, row.right, row.errors) == (1, 1, Counter({DOWN: 1, "INTERNAL": 1}))
    assert row.problems == ()


def test_a_model_is_back_with_its_first_right_answer_after_its_last_failure() -> None:
    """Of several models, the last one says when."""
    records = [
        record("victim", 11.0, 15.5),
        record("victim", 15.6, 15.7, DOWN),
        record("victim", 15.8, 16.0),
        record("other victim", 15.0, 15.1),
    ]
    row = judge("fault", records, STRETCH, Expected({"victim", "other victim"}))
    assert row.victims_back == pytest.approx(1.0)
    assert row.bystanders_back == 0.0


def test_who_does_not_come_back_is_a_problem_unless_it_should_stay_away() -> None:
    records = [record("victim", 11.0, 11.1), record("victim", 16.0, 16.1, DOWN)]
    row = judge("fault", records, STRETCH, HURT)
    assert row.victims_back == inf
    assert row.problems == ("the victims did not come back",)
    stays = Expected({"victim"}, stays={"victim": "it hung"})
    row = judge("fault", records, STRETCH, stays)
    assert row.problems == ()
    assert "victim does not come back by itself: it hung" in remarks(row, stays)


def test_strikes_do_not_say_whether_the_model_is_back() -> None:
    """They are meant to fail; that they end is all that is asked."""
    records = [record("victim", 15.0, 15.1), record("victim", 10.0, 19.0, "INTERNAL", STRIKE)]
    row = judge("fault", records, STRETCH, HURT)
    assert row.victims_back == pytest.approx(0.1)
    assert row.errors == Counter({"INTERNAL": 1})


def test_a_wrong_answer_is_a_problem_whosever_it_is() -> None:
    row = judge("fault", [record("victim", 11.0, 11.1, WRONG), record("victim", 16, 17)], STRETCH, HURT)
    assert row.wrong == 1
    assert row.problems == ("wrong answers: victim x 1",)


def test_a_model_whose_answers_triton_mixes_up_may_answer_wrongly() -> None:
    """The excuse is for that model alone, and is told with the wrong answers."""
    mixed = Expected(None, mixes_up={"victim": "Triton's fault"})
    records = [record("victim", 11.0, 11.1, WRONG), record("victim", 16, 17)]
    row = judge("fault", records, STRETCH, mixed)
    assert row.wrong == 1
    assert row.problems == ()
    assert "wrong answers of victim: Triton's fault" in remarks(row, mixed)
    records += [record("bystander", 11.0, 11.1, WRONG), record("bystander", 16, 17)]
    assert judge("fault", records, STRETCH, mixed).problems == ("wrong answers: bystander x 1",)


def test_no_answer_needs_an_excuse_which_bystanders_never_have() -> None:
    records = [
        record("victim", 11.0, 26.0, UNANSWERED),
        record("bystander", 11.0, 26.0, UNANSWERED),
        record("victim", 16, 17),
        record("bystander", 16, 17),
    ]
    assert judge("fault", records, STRETCH, HURT).problems == ("never answered: victim x 1, bystander x 1",)
    excused = replace(HURT, excuse="the stub's")
    row = judge("fault", records, STRETCH, excused)
    assert row.problems == ("never answered: bystander x 1",)
    assert "2*" in cells(row, excused)
    assert "* the stub's" in remarks(row, excused)


def test_an_error_of_a_bystander_is_a_problem() -> None:
    records = [record("bystander", 11.0, 11.1, DOWN), record("bystander", 16, 17)]
    problems = judge("fault", records, STRETCH, HURT).problems
    assert problems == (f"errors of models that it should not touch: bystander {DOWN} x 1",)
    assert judge("fault", records, STRETCH, Expected(None)).problems == ()


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (0.9, []),
        (2.0, ["the health service did not tell before 2.0 s"]),
        (inf, ["the health service did not tell"]),
    ],
)
def test_the_health_service_has_a_second_to_tell(told: float, problem: list[str]) -> None:
    row = judge("fault", [record("victim", 16, 17)], STRETCH, HURT, told=told)
    assert list(row.problems) == problem


def test_bystanders_are_compared_with_themselves_before() -> None:
    """By the 99th percentile of their right answers, if there are enough of them."""
    before, during = steady("bystander", 4.0, 10.0, 0.01), steady("bystander", 10.0, 20.0, 0.03)
    row = judge("fault", [*before, *during], STRETCH, HURT)
    assert row.slower == pytest.approx(3.0)
    assert judge("fault", [*before[-20:], *during], STRETCH, HURT).slower is None


@pytest.mark.parametrize(("seconds", "verdict"), [(0.019, "ok"), (0.03, "ok, p99 x 3.0")])
def test_bystanders_that_are_much_slower_are_remarked(seconds: float, verdict: str) -> None:
    """It is no failure: the machine may have had others to serve."""
    back = [record("victim", 15.5, 15.6)]
    before, during = steady("bystander", 4.0, 10.0, 0.01), steady("bystander", 10.0, 20.0, seconds)
    row = judge("fault", [*before, *during, *back], STRETCH, HURT)
    assert row.problems == ()
    assert cells(row, HURT)[-1] == verdict


def test_strikes_of_a_fault_are_added_up_and_the_worst_is_told() -> None:
    first = judge("fault", [record("victim", 9.9, 10.5, DOWN), record("victim", 15, 16)], STRETCH, HURT)
    second = judge(
        "fault",
        [record("victim", 9.9, 10.2, DOWN), record("victim", 15, 18)],
        STRETCH,
        HURT,
        told=0.2,
        problems=["p"],
        notes=["n"],
    )
    row = together([first, second, second])
    assert (row.strikes, row.in_flight, row.right, row.errors.total()) == (3, 3, 3, 3)
    assert row.slowest == pytest.approx(3.0)
    assert row.victims_back == pytest.approx(3.0)
    assert (first.told, row.told) == (None, 0.2)
    assert (row.problems, row.notes) == (["p (2 times)"], ["n (2 times)"])
    assert len(cells(row, HURT)) == len(HEADERS)
    assert cells(row, HURT)[-1] == "FAILED"
