"""The number of function calls in a piece of work: a measure of time that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(work: Callable[[], Any], owner: object = None) -> int:
    """Return how many functions `work` calls, in Python and in C. With `owner`, count only C methods of this object."""
    count = 0

    def note(_: Any, event: str, called: Any) -> None:
        nonlocal count
        if owner is None:
            count += event in ("call", "c_call")
        else:
            count += event == "c_call" and called.__self__ is owner

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
