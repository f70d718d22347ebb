"""A plane carries requests between clients and workers; the brain tells it where, and it tells the brain what it meets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rsrv_gateway.contract import Table, Worker

#: upper bounds, seconds, of the intervals in which Durations counts; above the last one is one more
DURATION_BOUNDS: tuple[float, ...] = tuple(0.0005 * 2**k for k in range(17))


@dataclass(frozen=True, slots=True)
class Durations:
    """How long requests took, from their arrival to the end of their answer."""

    #: requests in each interval of DURATION_BOUNDS, and above it: one more than there are bounds
    counts: tuple[int, ...]
    #: seconds, of all together
    sum: float


@dataclass(frozen=True, slots=True)
class Counts:
    """What a plane has done since its start, and what is under way. Names that clients made up are not in it."""

    #: inference requests that are over, by model, worker (empty: none was asked) and gRPC code by name, such as "OK"
    requests: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    #: items in requests that were sent on, by model
    items: Mapping[str, int] = field(default_factory=dict)
    #: what is under way, by worker, in the unit of the routes' charges
    load: Mapping[str, float] = field(default_factory=dict)
    #: requests under way, by model and worker; only where there are any
    outstanding: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: requests that went to another worker after this one had failed, by worker
    failovers: Mapping[str, int] = field(default_factory=dict)
    #: by model
    durations: Mapping[str, Durations] = field(default_factory=dict)


class Brain(Protocol):
    """What a plane may ask for. Called on the event loop that the plane was started on."""

    def failed(self, worker: str) -> None:
        """A connection to this worker broke or could not be made: it is looked at now, not with the next probe.

        Returns at once, and may be called for every request.
        """

    async def refresh(self, sure: bool = False) -> None:
        """A request names a model that is not in the table: all workers are looked at now.

        Returns when `apply` was called with what they said, or at once if that was less than a second ago. Whoever asks
        meanwhile waits for the same look. `sure`: something has changed, and a look that began before does not do.
        Never raises.
        """


class Plane(Protocol):
    @property
    def listens(self) -> bool:
        """After `start`: whether anybody takes connections now, so that clients are answered."""

    async def start(self) -> None:
        """Listens from now on. Raises ListenError where it cannot: the message says which setting is wrong."""

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        """What holds from now on, whole: it replaces what held before. May be called before `start`.

        `workers` are those that answer, by name, and all that `table` names are among them. Nothing new goes to one that
        is not there any more; its requests under way may end. A model with empty `ready` is known, and nobody serves it
        at the moment: UNAVAILABLE. One that is not in the table is not known: `Brain.refresh`, then NOT_FOUND.
        """

    def counts(self) -> Counts: ...

    async def drain(self, seconds: float) -> None:
        """Refuses new requests with UNAVAILABLE, and returns when those under way have ended, or after `seconds`."""

    async def stop(self) -> None:
        """Ends what is still under way, and frees all. Without effect the second time."""
