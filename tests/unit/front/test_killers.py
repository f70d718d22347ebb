"""Inputs that were executing when runtimes died: how long they are kept, and which ones are dropped."""

from __future__ import annotations

from rsrv.front.killers import Killers, deaths_of, may_have_killers
from rsrv.front.rules import MAX_DEATHS


def test_inputs_count_for_as_long_as_a_crash_counts() -> None:
    """Inputs are kept for an hour after a crash. After that, no request's inputs need to be hashed."""
    killers = Killers()
    assert not may_have_killers(killers.table, 0.0)
    killers.record(b"hostile", MAX_DEATHS, 100.0)

    assert may_have_killers(killers.table, 3699.0)
    assert deaths_of(killers.table, b"hostile", 3699.0) == MAX_DEATHS
    assert deaths_of(killers.table, b"other", 3699.0) == 0
    assert not may_have_killers(killers.table, 3700.0)
    assert deaths_of(killers.table, b"hostile", 3700.0) == 0


def test_inputs_count_until_a_request_with_them_is_answered() -> None:
    """Inputs are kept until a request with equal inputs is answered.

    Many inputs with one death do not replace inputs with more deaths.
    """
    killers = Killers()
    killers.record(b"hostile", MAX_DEATHS, 0.0)
    for number in range(100):
        killers.record(b"%d" % number, 1, 1.0)
    assert deaths_of(killers.table, b"hostile", 2.0) == MAX_DEATHS
    assert deaths_of(killers.table, b"99", 2.0) == 1

    killers.record(b"99", 0, 3.0)

    assert deaths_of(killers.table, b"99", 3.0) == 0
    assert len(killers.table) < 65
