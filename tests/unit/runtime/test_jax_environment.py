"""Variables of the server's shell that would change what jax and XLA do."""

import os

import pytest

from rsrv.runtime.jax_environment import XlaFlagsError, check_xla_flags, drop_jax_variables


def test_variables_for_debugging_do_not_reach_jax() -> None:
    """JAX_DISABLE_JIT would fail all models, and JAX_DEBUG_NANS each answer with a NaN. The choice of devices stays."""
    environment = {
        "JAX_DISABLE_JIT": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_DEBUG_NANS": "1",
        "XLA_FLAGS": "--a",
        "A": "",
    }

    assert drop_jax_variables(environment) == ["JAX_DEBUG_NANS", "JAX_DISABLE_JIT"]
    assert environment == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--a", "A": ""}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--xla_nonsense=1", "Unknown flag in XLA_FLAGS: --xla_nonsense=1"),
        (
            "--xla_cpu_enable_fast_math=maybe",
            "Couldn't interpret value maybe for flag xla_cpu_enable_fast_math",
        ),
    ],
)
def test_flags_that_would_end_each_runtime_are_refused_with_the_reason(flags: str, reason: str) -> None:
    """XLA ends a process at the first compilation, so each runtime would die, and its models would stay cold."""
    with pytest.raises(
        XlaFlagsError, match=f"XLA_FLAGS in the environment of tritonserver cannot be used: {reason}"
    ):
        check_xla_flags({**os.environ, "XLA_FLAGS": flags})


def test_flags_that_xla_knows_are_accepted() -> None:
    """Operators may tune XLA."""
    check_xla_flags({**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"})
