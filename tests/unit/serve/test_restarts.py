"""The times at which a process that ended is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsrv.serve.supervise import Restarts


def test_pauses_double_up_to_half_a_minute() -> None:
    """The pauses of a process that ends at once double up to half a minute."""
    restarts = Restarts(0)

    assert [restarts.ended(0.1) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_long_life_is_a_new_beginning() -> None:
    """After a long life, earlier restarts do not count."""
    restarts = Restarts(2)

    assert [restarts.ended(lived) for lived in (0, 0, 60, 59, 1)] == [1, 2, 1, 2, None]


def test_a_process_without_a_limit_is_never_given_up() -> None:
    """A process without a limit is restarted for ever, at the longest pause."""
    restarts = Restarts(0)

    assert {restarts.ended(0) for _ in range(5000)} == {1, 2, 4, 8, 16, 30}


@given(lives=st.lists(st.floats(0, 200), max_size=50), most=st.integers(1, 5))
def test_it_is_given_up_after_so_many_in_a_row(lives: list[float], most: int) -> None:
    """A process is given up after so many restarts without a long life in between."""
    restarts = Restarts(most)
    row = 0
    for lived in lives:
        row = 1 if lived >= 60 else row + 1
        assert (restarts.ended(lived) is None) == (row > most)
