"""Inputs that were executing when runtimes died. Time is an argument."""

from collections.abc import Mapping

from rsrv.front.rules import DIGEST_COUNTS_S, MAX_DEATHS, MAX_DIGESTS

#: For each digest of inputs, the number of runtimes that died while they executed these inputs, and the time when the entry
#: expires.
KillerTable = Mapping[bytes, tuple[int, float]]


class Killers:
    """The record of inputs that runtimes executed when they died.

    Any thread may read `table`, because it is never changed, only replaced.
    """

    def __init__(self) -> None:
        self.table: KillerTable = {}

    def record(self, digest: bytes, deaths: int, now: float) -> None:
        """Record how many runtimes died while they executed these inputs. 0 clears the record: the inputs were answered."""
        table = {known: entry for known, entry in self.table.items() if known != digest and now < entry[1]}
        if deaths:
            if len(table) == MAX_DIGESTS:
                harmless = (known for known, (count, _) in table.items() if count < MAX_DEATHS)
                del table[next(harmless, next(iter(table)))]
            table[digest] = deaths, now + DIGEST_COUNTS_S
        self.table = table


def deaths_of(table: KillerTable, digest: bytes, now: float) -> int:
    """Return how many runtimes died while they executed these inputs."""
    deaths, until = table.get(digest, (0, 0.0))
    return deaths if now < until else 0


def may_have_killers(table: KillerTable, now: float) -> bool:
    """Return False if the table has no valid entry. The caller then need not hash inputs."""
    return bool(table) and now < max(until for _, until in table.values())
