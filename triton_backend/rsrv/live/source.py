"""Source of the live page: its events, histories, actions and errors. Without aiohttp, which only the page's server needs."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

#: Actions of clients with the token.
ACTIONS = ("pin", "unpin", "prefetch", "evict")
#: Residency that an action sets.
RESIDENCIES = {"pin": "device", "unpin": "system"}
#: HTTP status of a gRPC status.
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
        """Make the error of a gRPC status; `code`: its name."""
        return cls(_STATUSES.get(code, 500), text)


class PageSource(Protocol):
    """One server, or several by name. A source with one server accepts any name."""

    def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        """Yield the server, the event's name and its JSON: the current state, then each event."""

    async def panel(self, server: str, model: str) -> dict[str, Any]:
        """Return what is known of a model, as JSON. Raises PageError."""

    async def trace(self, server: str) -> str:
        """Return the latest spans of a server, for Perfetto. Raises PageError."""

    async def steer(self, server: str, model: str, action: str) -> None:
        """Carry out one of ACTIONS. Raises PageError."""

    async def infer(self, server: str, model: str, inputs: Any) -> tuple[int, str]:
        """Send inputs from a client to a model; return the HTTP status and the text of the answer. Raises PageError."""
