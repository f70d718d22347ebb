"""Each fault of `make chaos` once: no answer is wrong, other models are not harmed, and what can recover does."""

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
    """Return the houses of `make chaos`, each built on first use."""
    with houses() as get:
        yield get


@pytest.mark.parametrize("kind", [*FAULTS, *STREAMS], ids=lambda kind: kind.__name__)
def test_a_fault_harms_no_other_model_and_passes(
    kind: type[Fault], house_for: Callable[[Kind], House]
) -> None:
    """Under load, answers are right or errors, bystanders are untouched, and all models recover."""
    row = run_fault(kind(), house_for(kind.house), QUICK, seed=0)
    assert not row.problems, remarks(row, kind.expected)
