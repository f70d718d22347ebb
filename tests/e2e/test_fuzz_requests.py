"""Two hundred bad requests of the kinds that `make fuzz` sends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.servers import check_requests

pytestmark = pytest.mark.long


def test_bad_requests_harm_no_server_and_no_honest_client(tmp_path: Path) -> None:
    """A server and a gateway get hundreds of hostile requests. Both survive, leak nothing, and answer honest requests right."""
    verdicts = list(check_requests(range(200), tmp_path))

    bad = [f"{verdict.outcome}: seed {verdict.seed}: {verdict.detail}" for verdict in verdicts if verdict.bad]
    assert not bad, "\n".join(bad)
    assert (
        min(
            Counter(verdict.outcome for verdict in verdicts)[each]
            for each in ("answered", "refused", "closed")
        )
        > 5
    )
