"""Environment variables that change the behaviour of jax and XLA.

Variables of the server's shell must not reach jax and XLA by accident.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, MutableMapping

#: Variables of jax that the runtime keeps. Settings of rsrv.yaml replace all other variables of jax.
_KEPT_VARIABLES = frozenset({"JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"})
#: Program that makes XLA parse XLA_FLAGS. XLA ends the process at a flag that it does not know.
_PARSE = "from jaxlib import xla_client; xla_client.CompileOptions()"
#: Maximum seconds to wait for that program, which imports jaxlib. After a timeout, XLA_FLAGS are not checked.
_TIMEOUT_S = 60.0


class XlaFlagsError(Exception):
    """XLA does not accept XLA_FLAGS. The text says why, and what to do."""


def drop_jax_variables(environment: MutableMapping[str, str]) -> list[str]:
    """Remove all variables of jax except `_KEPT_VARIABLES`, for example JAX_DISABLE_JIT. Return the names of the removed ones."""
    dropped = sorted(name for name in environment if name.startswith("JAX_") and name not in _KEPT_VARIABLES)
    for name in dropped:
        del environment[name]
    return dropped


def check_xla_flags(environment: Mapping[str, str]) -> None:
    """Raise XlaFlagsError if XLA would end every runtime because of XLA_FLAGS in this environment."""
    if not environment.get("XLA_FLAGS"):
        return
    command = [sys.executable, "-P", "-c", _PARSE]
    try:
        trial = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
    # The process logs errors (E) and its fatal end (F). The first of these lines names the flag.
    reasons = re.findall(r"^[EF][0-9]{4} .*?\] (.*)", trial.stderr, re.MULTILINE)
    if trial.returncode != 0 and "parse_flags_from_env" in trial.stderr and reasons:
        raise XlaFlagsError(
            f"XLA_FLAGS in the environment of tritonserver cannot be used: {reasons[0]}. Change or remove it there, or "
            "install the release of jaxlib that has the flag, and start tritonserver again"
        )
