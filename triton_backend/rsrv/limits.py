"""Limits of what this process may have, which the system sets: a soft one that holds, and a hard one up to which it may be raised."""

import resource


def raise_limit(which: int) -> None:
    """To the hard one. `which`: one of `resource.RLIMIT_...`."""
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (hard, hard))
