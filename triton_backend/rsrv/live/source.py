"""The interface between the live page and its source: events, histories, actions and errors. It does not import aiohttp."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

#: Actions of clients with the token.
ACTIONS = ("pin", "unpin", "prefetch", "evict")
#: The residency that each of these actions sets.
RESIDENCIES = {"pin": "device", "unpin": "system"}
#: HTTP status for each gRPC status.
_STATUSES = {
    "NOT_FOUND": 404,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 409,
    "UNAUTHENTICATED": 502,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class PageError(Exception):
    """A failed request of the page, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @classmethod
    def of(cls, code: str, text: str) -> "PageError":
        """Make the error for a gRPC status. `code` is the name of the status."""
        return cls(_STATUSES.get(code, 500), text)


class PageSource(Protocol):
    """One server, or several by name. A source with one server accepts any name."""

    def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        """Yield (server, name of the event, its JSON): first the current state, then each event."""

    async def panel(self, server: str, model: str) -> dict[str, Any]:
        """Return a model's history, slow requests, counters and executables as JSON. Raises PageError."""

    async def trace(self, server: str) -> str:
        """Return the latest spans of a server, for Perfetto. Raises PageError."""

    async def steer(self, server: str, model: str, action: str) -> None:
        """Carry out one of ACTIONS. Raises PageError."""

    async def infer(self, server: str, model: str, inputs: Any) -> tuple[int, str]:
        """Send inputs from a client to a model. Return the HTTP status and the text of the answer. Raises PageError."""
