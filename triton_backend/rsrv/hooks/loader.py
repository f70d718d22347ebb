"""Loading a bundle's `model.py`: trusted Python of the user's, executed in this process."""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
Hook = Callable[[Arrays], Arrays]


#: Seconds that an import may take, however short the limit of hooks is: large libraries take some.
_IMPORT_S = 60.0


class HookError(Exception):
    """model.py or the tokeniser is wrong; the message names the fault and the remedy."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """A model's hooks: each takes and returns {name: array}, row-major, for one request. None: tensors pass unchanged."""

    preprocess: Hook | None = None
    postprocess: Hook | None = None


def load_hooks(path: Path) -> Hooks:
    """Execute a model's `model.py`, if it exists, and return its hooks. Raises HookError, and any error of the file."""
    if not path.exists():
        return Hooks()
    module = _execute(path)
    found = {name: _function(module, name, "one dict of arrays") for name in ("preprocess", "postprocess")}
    if not any(found.values()):
        raise HookError(
            "model.py: defines neither preprocess nor postprocess; define one, or remove the file"
        )
    return Hooks(**found)


def load_run(path: Path) -> Callable[..., Any]:
    """Execute a meta model's `model.py`, and return its `run`. Raises HookError, and any error of the file."""
    run = _function(_execute(path), "run", "a dict of arrays and `call`")
    if run is None:
        raise HookError("model.py: a meta model defines run(inputs, call)")
    return run


def import_limit_s(hook_timeout_s: float | None) -> float | None:
    """Return the limit of an import of `model.py`, by `stub.hook_timeout_s`; None: there is none."""
    return None if hook_timeout_s is None else max(hook_timeout_s, _IMPORT_S)


def _execute(path: Path) -> types.ModuleType:
    module = types.ModuleType(f"rsrv_hooks.{path.parent.name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # pickles, dataclasses and typing look a module up by name
    # Compiled here, not imported: a .pyc beside it would look to Triton like a new version of the model.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # noqa: S102  trusted code, by the format's definition
    return module


def _function(module: types.ModuleType, name: str, arguments: str) -> Callable[..., Any] | None:
    function = getattr(module, name, None)
    if function is not None and not callable(function):
        raise HookError(f"model.py: {name} must be a function of {arguments}, not {type(function).__name__}")
    return function
