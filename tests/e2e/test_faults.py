"""Each fault of `make chaos`, once. No answer is wrong, other models are not harmed, and all models that can recover do so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.figures import remarks
from tests.chaos.house import House, Kind, houses
from tests.chaos.run import QUICK, run_fault
from tests.chaos.streams import STREAMS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def house_for() -> Iterator[Callable[[Kind], House]]:
    """Return a function from a kind to a server of `make chaos`. Each server is built on first use."""
    with houses() as get:
        yield get


@pytest.mark.parametrize("kind", [*FAULTS, *STREAMS], ids=lambda kind: kind.__name__)
def test_a_fault_harms_no_other_model_and_passes(
    kind: type[Fault], house_for: Callable[[Kind], House]
) -> None:
    """Under load, each answer is right or an error. Bystanders are not affected, and all models recover."""
    row = run_fault(kind(), house_for(kind.house), QUICK, seed=0)
    assert not row.problems, remarks(row, kind.expected)
