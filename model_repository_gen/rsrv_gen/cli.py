"""The command rsrv-gen: bundles in, a Triton model repository out."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    raise NotImplementedError
