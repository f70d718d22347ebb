"""What hooks need again and again: `image`, `labels`, `boxes` and `text` (docs/hooks.md).

Importing a module of it loads numpy and nothing else. Pillow and tokenizers are loaded by the functions that need them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class BadInput(ValueError):
    """The request is at fault. Raised by a hook or a `run`, it ends that request: INVALID_ARG, with this text."""


def floats(array: npt.NDArray[Any], name: str) -> None:
    """ValueError unless `array` has numbers that numpy computes with as floats; `name` says in the text what they are."""
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"{name} are floats, not {array.dtype}; bf16 reaches hooks as the u16 of its bits: let the model return f32"
        )


def needs(package: str) -> ImportError:
    """To be raised where `package` is not installed."""
    return ImportError(
        f"{package} is not installed where the hooks run, with tritonserver's Python: pip install 'rsrv[hooks]'"
    )
