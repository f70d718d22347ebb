"""Source of the live page: its events, histories, actions and errors. Without aiohttp, which only the page's server needs."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

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


#: Characters of a line's time.
_TIME = len("2026-01-01 00:00:00,000")


class PageError(Exception):
    """A failed request of the page, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @classmethod
    def of(cls, code: str, text: str) -> "PageError":
        """Make the error of a gRPC status; `code`: its name."""
        return cls(_STATUSES.get(code, 500), text)


def story_lines(stories: Iterable[tuple[int, str, Sequence[str]]]) -> list[str]:
    """Return the lines of all stories in one list by time; with device and key if there are several.

    `stories`: number of the device, key of the version, and lines that begin with the time.
    """
    told = list(stories)
    if len(told) < 2:
        return [line for *_, lines in told for line in lines]
    several = len({device for device, *_ in told}) > 1
    found = [
        (line, f"{f'device {device}, ' if several else ''}{key}")
        for device, key, lines in told
        for line in lines
    ]
    return [f"{where}: {line}" for line, where in sorted(found, key=lambda one: one[0][:_TIME])]


class PageSource(Protocol):
    """One server, or several by name. A source with one server accepts any name."""

    def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        """Yield the server, the event's name and its JSON: the current state, then each event."""

    async def story(self, server: str, model: str) -> list[str]:
        """Return the history of a model. Raises PageError."""

    async def steer(self, server: str, model: str, what: str) -> None:
        """Carry out one of ACTIONS. Raises PageError."""
