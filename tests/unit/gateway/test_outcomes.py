"""What a worker's refusal means."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from rsrv_gateway.outcomes import Refusal

#: code and message of a worker; the client's code, whether another worker is asked, whether this one is looked at
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
    """The tag of an unavailable model says what the client gets, and whether it is worth asking another worker."""
    refusal = Refusal(StatusCode[code], message)

    assert refusal.for_client() is StatusCode[client]
    assert refusal.is_retryable() is is_retryable
    assert refusal.suspects_worker() is suspects_worker


def test_which_refusal_is_the_clients() -> None:
    """The last one, unless it only says that the model is not there."""
    gone, missing = (Refusal(StatusCode[code], "") for code in ("UNAVAILABLE", "NOT_FOUND"))

    assert missing.preferred_to(gone) is gone
    assert gone.preferred_to(missing) is gone
    assert missing.preferred_to(None) is missing
