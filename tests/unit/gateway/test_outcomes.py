"""The meaning of a worker's refusal."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from rsrv_gateway.outcomes import Refusal

#: Code and message of a worker; the client's code, whether to ask another worker, whether to probe this one.
MEANINGS = [
    ("NOT_FOUND", "unknown", "NOT_FOUND", True, False),
    ("UNAVAILABLE", "connection refused", "UNAVAILABLE", True, True),
    ("UNAVAILABLE", "[rsrv:RUNTIME_DOWN] restarting", "UNAVAILABLE", True, False),
    ("UNAVAILABLE", "[rsrv:PAUSED] by an operator", "UNAVAILABLE", True, False),
    ("UNAVAILABLE", "[rsrv:NOT_RESIDENT] load it", "FAILED_PRECONDITION", True, False),
    ("UNAVAILABLE", "[rsrv:QUEUE_FULL] later", "RESOURCE_EXHAUSTED", False, False),
    ("UNAVAILABLE", "[rsrv:DEADLINE] late", "DEADLINE_EXCEEDED", False, False),
    ("UNAVAILABLE", "in ensemble 'e', [rsrv:QUEUE_FULL] later", "RESOURCE_EXHAUSTED", False, False),
    ("INTERNAL", "[rsrv:QUEUE_FULL] says a hook", "INTERNAL", False, False),
    ("INVALID_ARGUMENT", "shape", "INVALID_ARGUMENT", False, False),
    ("DEADLINE_EXCEEDED", "late", "DEADLINE_EXCEEDED", False, False),
    ("CANCELLED", "given up", "CANCELLED", False, False),
]


@pytest.mark.parametrize(("code", "message", "client", "is_retryable", "suspects_worker"), MEANINGS)
def test_meaning(code: str, message: str, client: str, is_retryable: bool, suspects_worker: bool) -> None:
    """The tag of a refusal decides the client's code, and whether another worker is asked."""
    refusal = Refusal(StatusCode[code], message)

    assert refusal.for_client() is StatusCode[client]
    assert refusal.is_retryable() is is_retryable
    assert refusal.suspects_worker() is suspects_worker


def test_which_refusal_is_the_clients() -> None:
    """The client gets the last refusal, unless that one is NOT_FOUND after another."""
    gone, missing = (Refusal(StatusCode[code], "") for code in ("UNAVAILABLE", "NOT_FOUND"))

    assert missing.preferred_to(gone) is gone
    assert gone.preferred_to(missing) is gone
    assert missing.preferred_to(None) is missing
