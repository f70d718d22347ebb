"""The weight budget: its formula, and the warnings about models that do not fit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from rsrv.runtime.weight_manager import Budget, solve_budget

GIB = 1 << 30

sizes = st.integers(0, 1 << 40)
shares = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])


@pytest.mark.parametrize(
    ("arena", "slack", "scratch", "pinned", "limit", "pool", "on_demand"),
    [
        (None, 0.1, 0, 0, None, None, None),  # a CPU, without a limit
        (None, 0.1, 500, 30, 100, 100, 70),  # a CPU with a limit, which scratch does not reduce
        (1000, 0.1, 0, 0, None, 900, 900),
        (1000, 0.1, 300, 0, None, 600, 600),
        (1000, 0.0, 0, 400, None, 1000, 600),
        (1000, 0.0, 0, 1400, None, 1000, 0),
        (1000, 0.1, 5000, 0, None, 0, 0),
        (1000, 0.1, 0, 0, 100, 100, 100),
        (1000, 0.1, 0, 0, 5000, 900, 900),
        (80 * GIB, 0.25, 10 * GIB, 20 * GIB, None, 50 * GIB, 30 * GIB),
    ],
)
def test_the_formula(
    arena: int | None,
    slack: float,
    scratch: int,
    pinned: int,
    limit: int | None,
    pool: int | None,
    on_demand: int | None,
) -> None:
    """The budget is min((1 - slack) * arena - scratch, limit), and pinned models reduce the rest."""
    budget = solve_budget(arena=arena, slack=slack, scratch=scratch, pinned=pinned, limit=limit)

    assert budget == Budget(pool, pinned, on_demand)


def test_what_fits_is_not_complained_of() -> None:
    """There is no warning without a limit, or if everything fits to the byte."""
    assert Budget(100, 40, 60).warning(60) is None
    assert Budget(100, 100, 0).warning(0) is None
    assert Budget(None, 1 << 40, None).warning(1 << 40) is None


def test_too_much_that_is_pinned_is_named_with_the_settings_that_help() -> None:
    """If pinned models exceed the budget, the warning has the pinned bytes, the budget, and the settings that help."""
    complaint = Budget(100, 101, 0).warning(50)

    assert complaint is not None
    assert complaint.startswith(
        "pinned models take 101 bytes of the device, more than the 100 bytes for weights"
    )
    assert "models.NAME.residency" in complaint
    assert "runtime.weight_budget_bytes" in complaint


def test_a_model_that_does_not_fit_is_named_with_what_is_left_for_it() -> None:
    """If a model does not fit, the warning has its bytes, the pinned bytes, and how many bytes of the pool are left."""
    complaint = Budget(100, 40, 60).warning(61)

    assert complaint is not None
    assert "takes 61 bytes of the device, but pinned models leave only 60 of 100" in complaint
    assert "unpin models" in complaint
