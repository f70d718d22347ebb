"""Common parts of hooks: `audio`, `boxes`, `image`, `labels`, `text` and `tokens` (docs/hook-library.md).

Importing one of these modules loads only numpy. Functions that need Pillow or tokenizers load them when they are called.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class BadInput(ValueError):
    """The request is at fault. A hook or a `run` raises this error to end the request with INVALID_ARG and the error's text."""


def floats(array: npt.NDArray[Any], name: str) -> None:
    """Raise ValueError unless `array` has a floating-point type of numpy. `name` is the array's name in the message."""
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"{name} must be floats, not {array.dtype}; hooks get bf16 as u16 with the same bits: let the model return f32"
        )


def needs(package: str) -> ImportError:
    """Return the error to raise if `package` is not installed."""
    return ImportError(
        f"{package} is not installed where the hooks run, with tritonserver's Python: pip install --no-deps {package}"
    )
