"""The parts of a large request: when each one is submitted, and which one ends the request."""

from random import Random

import pytest

from rsrv.front.parts import Parts, RowRange
from rsrv.front.rules import MAX_PARTS


def test_the_parts_cover_the_rows_in_order() -> None:
    """Each part has as many rows as the largest compiled size, and the last part has the rest."""
    assert Parts(21, 8).take() == [RowRange(0, 8), RowRange(8, 8), RowRange(16, 5)]


def test_only_some_parts_are_submitted_at_a_time() -> None:
    """A limited number of parts is submitted at a time. Each answer lets one more part follow."""
    parts = Parts(100, 8)
    assert len(parts.take()) == MAX_PARTS
    assert not parts.take()
    assert not parts.end(answered=True)
    assert parts.take() == [RowRange(8 * MAX_PARTS, 8)]


def test_the_first_failure_ends_the_request_and_submits_no_further_part() -> None:
    """The first failure ends the request, and no further part is submitted. The ends of the other parts change nothing."""
    parts = Parts(100, 8)
    parts.take()
    assert parts.end(answered=False)
    assert parts.ended
    assert not parts.take()
    assert not any(parts.end(answered=answered) for answered in (True, False, True))


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_submitted_once_and_the_request_ends_once(seed: int) -> None:
    """Each row is submitted once and the request ends once, for any number of rows and any order of answers and failures."""
    random = Random(seed)
    rows, largest = random.randrange(1, 300), random.randrange(1, 40)
    parts, submitted, seen, ends = Parts(rows, largest), list[RowRange](), list[RowRange](), 0
    submitted += parts.take()
    fails = random.random() < 0.5
    while submitted:
        seen.append(submitted.pop(random.randrange(len(submitted))))
        ends += parts.end(answered=not (fails and random.random() < 0.1))
        submitted += parts.take()
        assert len(submitted) <= MAX_PARTS
    assert ends == 1
    covered = [row for part in sorted(seen) for row in range(part.first, part.first + part.rows)]
    assert covered == list(range(len(covered)))
    assert fails or len(covered) == rows
