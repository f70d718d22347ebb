"""Resource limits of this process: the soft one holds, and may be raised up to the hard one."""

import resource


def raise_limit(which: int) -> None:
    """Raise a soft limit to the hard one; `which` is one of `resource.RLIMIT_...`."""
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (hard, hard))
