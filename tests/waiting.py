"""Helpers that wait for a condition, and that run tests which are coroutines."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

#: Time limit in seconds for a condition or a whole coroutine. It is enough even if ten other processes start concurrently.
PATIENCE_S = 120.0

#: Time limits in seconds, for tests of what happens when a limit has passed. On a busy machine, a short limit may pass before
#: the test has reached the state that it needs. The test then tries the next limit.
LIMITS_S = (0.3, 3.0, 30.0)

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float = PATIENCE_S, *, what: str = "") -> T:
    """Call `predicate` every 20 ms until it returns a true value, and return this value.

    Fails the test after `timeout` seconds. The message names `what` the test waited for.
    """
    deadline = time.monotonic() + timeout
    tick = threading.Event()
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or predicate}")
        tick.wait(0.02)
    return answer


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine on its own event loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), PATIENCE_S))

    return run
