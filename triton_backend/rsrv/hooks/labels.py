"""Conversion of a classifier's scores to names of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.hooks import floats
from rsrv.hooks.text import as_text

Array = npt.NDArray[Any]


def softmax(logits: Array, axis: int = -1) -> Array:
    """Return exp(x) / sum(exp(x)) over `axis`, in the dtype of `logits`. Large numbers do not overflow.

    logits: floats, else ValueError. Floats of 16 bits are converted to 32 bits for the computation, because the sum of many of them
    would be infinite.
    """
    floats(logits, "logits")
    wide = logits.astype(np.result_type(logits, np.float32), copy=False)
    exponentials = np.exp(wide - wide.max(axis, keepdims=True))
    probabilities: Array = exponentials / exponentials.sum(axis, keepdims=True)
    return probabilities.astype(logits.dtype, copy=False)


def top_k(scores: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest of floats [..., c], best first, and their indices: [..., k] and i64 [..., k].

    Equal values keep their order. NaN comes last. If there are fewer than k values, all are returned. Raises ValueError for
    other types.
    """
    floats(scores, "scores")
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(scores, order, -1), order.astype(np.int64)


def read_names(path: Path | str, *, width: int | None = None) -> Array:
    """Read the names of classes from a file in UTF-8 with one name per line: u8 [c, width], with zeros after each name.

    Index the result with the classes of `top_k` to get a tensor that clients can read: `NAMES[classes]`, u8 [..., k, width].
    width: bytes of a row, by default those of the longest name. Raises ValueError when a name is longer.
    """
    return as_text(Path(path).read_text(encoding="utf-8").splitlines(), width=width)
