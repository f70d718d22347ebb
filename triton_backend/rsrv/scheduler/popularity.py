"""How often a model is asked for of late, from when its latest requests came."""

from math import sqrt

#: requests of a model that are remembered. More would tell the popular from the rest a little better where nothing
#: changes, and fewer would follow a change sooner.
_MEMORY = 8

#: when the latest requests for a model came, oldest first. A memory is as long as it takes the model's own
#: requests to come, not a number of seconds.
Uses = tuple[float, ...]


def remember(uses: Uses, requests: int, now: float) -> Uses:
    """The latest uses, after that many more at `now`."""
    return (uses + (now,) * min(requests, _MEMORY))[-_MEMORY:]


def rate(uses: Uses, now: float, grain: float) -> float:
    """Requests per second to be expected, but for a factor that is the same for all.

        (sum over uses of age ** -1/2) ** 2 / number of uses,          age = now - use + grain

    The less time has passed since something was asked for, the likelier it is asked for again: by a power of that
    time (J. Anderson and L. Schooler: Reflections of the Environment in Memory, Psychological Science 2, 1991); -1/2
    is the usual one (J. Anderson and C. Lebiere: The Atomic Components of Thought, 1998). It is a weight as in LRFU (D. Lee et al.: IEEE Trans. Computers 50, 2001), but without a unit of time: if
    everything took twice as long, the order would be the same. To remember a few uses, and also of what is
    not resident, is LRU-K's (E. O'Neil, P. O'Neil, G. Weikum: SIGMOD 1993).

    `grain`, in seconds, above 0: how far apart two moments must be to matter.
    """
    if not uses:
        return 0.0
    return sum([1.0 / sqrt(now - use + grain) for use in uses]) ** 2 / len(uses)
