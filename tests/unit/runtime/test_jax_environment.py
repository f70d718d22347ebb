"""Variables in the server's environment that would change what jax and XLA do."""

import os

import pytest

from rsrv.runtime.jax_environment import XlaFlagsError, check_xla_flags, drop_jax_variables


def test_variables_for_debugging_do_not_reach_jax() -> None:
    """jax gets no debugging variables: JAX_DISABLE_JIT would fail all models, and JAX_DEBUG_NANS each answer with a NaN.

    Variables that select devices, and XLA's flags, stay.
    """
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
    """Flags that XLA does not accept are refused with the reason.

    With such flags, XLA would end each runtime at its first compilation, and no model would start.
    """
    with pytest.raises(
        XlaFlagsError, match=f"XLA_FLAGS in the environment of tritonserver cannot be used: {reason}"
    ):
        check_xla_flags({**os.environ, "XLA_FLAGS": flags})


def test_flags_that_xla_knows_are_accepted() -> None:
    """Flags that XLA accepts are allowed, because operators may tune XLA."""
    check_xla_flags({**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"})
