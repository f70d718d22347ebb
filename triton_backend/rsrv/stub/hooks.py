"""A bundle's `model.py`: trusted Python of the user's, run in this process and nowhere else."""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
Hook = Callable[[Arrays], Arrays]


class HookError(Exception):
    """The hooks' file is wrong; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Each takes and returns {name: array}, row-major, for one request. None: tensors pass unchanged."""

    preprocess: Hook | None = None
    postprocess: Hook | None = None


def load_hooks(path: Path) -> Hooks:
    """Run `model.py` and take its functions. Raises HookError, and whatever the file raises."""
    module = types.ModuleType(f"rsrv_hooks.{path.parent.name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # pickles, dataclasses and typing look a module up by name
    # Compiled here, not imported: a .pyc beside it would look to Triton like a new version of the model.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # noqa: S102  trusted code, by the format's definition
    found = {}
    for name in ("preprocess", "postprocess"):
        hook = getattr(module, name, None)
        if hook is not None and not callable(hook):
            raise HookError(
                f"model.py: {name} must be a function of one dict of arrays, not {type(hook).__name__}"
            )
        found[name] = hook
    if not any(found.values()):
        raise HookError(
            "model.py: defines neither preprocess nor postprocess; define one, or remove the file"
        )
    return Hooks(**found)
