"""Timers of the loop: each action is called once when it is due."""

from math import inf

from rsrv.runtime.timers import Timers


def test_actions_are_called_in_the_order_of_their_times() -> None:
    """An action is called once it is due, and again at the time that it returns."""
    timers, called = Timers(), list[str]()

    def early(now: float) -> float:
        called.append(f"early {now}")
        return now + 10

    def late(now: float) -> float:
        called.append(f"late {now}")
        return inf

    timers.set(late, 2.0)
    timers.set(early, 1.0)
    assert timers.next() == 1.0
    timers.call(0.5)
    assert called == []
    timers.call(3.0)
    assert called == ["early 3.0", "late 3.0"]
    assert timers.next() == 13.0


def test_a_time_is_replaced_or_advanced() -> None:
    """`set` replaces the time of an action, and `advance` only makes it earlier."""
    timers, called = Timers(), list[float]()

    def action(now: float) -> float:
        called.append(now)
        return inf

    timers.set(action, 1.0)
    timers.set(action, 5.0)
    timers.advance(action, 7.0)
    assert timers.next() == 5.0
    timers.advance(action, 4.0)
    assert timers.next() == 4.0
    timers.call(9.0)
    assert called == [9.0]
    assert timers.next() == inf


def test_an_action_that_is_due_at_once_again_leaves_the_loop_its_turn() -> None:
    """An action that returns the current time is called in the next round, not in this one."""
    timers, called = Timers(), list[float]()

    def action(now: float) -> float:
        called.append(now)
        return now

    timers.set(action, -inf)
    timers.call(1.0)
    assert called == [1.0]
    assert timers.next() == 1.0
