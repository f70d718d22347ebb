"""Limits that the system sets for a process."""

from __future__ import annotations

import resource

from rsrv.limits import raise_limit


def test_a_limit_is_raised_as_far_as_it_may_be() -> None:
    """The soft limit of open files becomes the hard one, which stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        raise_limit(resource.RLIMIT_NOFILE)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
