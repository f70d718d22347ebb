"""Text: as tensors, u8 [n, bytes] in UTF-8 with zeros behind each row, and as tokens, by the package tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rsrv.hooks import needs

if TYPE_CHECKING:
    import tokenizers

Array = npt.NDArray[Any]

#: No more bytes of a text are looked at, for each token that is kept: a megabyte would keep a tokeniser busy for most of a second.
_BYTES_PER_TOKEN = 64


def as_text(texts: Sequence[str | bytes], *, width: int | None = None) -> Array:
    """Encode texts in UTF-8 (bytes as they are), zeros behind each: u8 [n, width]. width: by default the longest one's, 1 at least.

    Raises ValueError when a text is longer.
    """
    coded = [one.encode() if isinstance(one, str) else one for one in texts]
    longest = max([1, *map(len, coded)])
    if width is not None and width < longest:
        raise ValueError(f"a text of {longest} bytes in rows of {width}")
    rows = np.zeros((len(coded), width or longest), np.uint8)
    for row, one in zip(rows, coded, strict=True):
        row[: len(one)] = np.frombuffer(one, np.uint8)
    return rows


def from_text(rows: Array) -> list[str]:
    """Decode the texts of u8 [n, bytes]. Bytes that are not UTF-8, as of a character that was cut in two, are left out."""
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens, [n, length] each: their ids, 1 for a token and 0 behind the last, 1 in the second text of a pair."""

    ids: Array
    mask: Array
    types: Array


class Tokeniser:
    """Makes tokens of texts as a file `tokenizer.json` says, in rows of one of a few lengths. Safe to use from any thread."""

    def __init__(
        self,
        path: Path | str,
        lengths: Sequence[int],
        *,
        pad_id: int | None = None,
        dtype: npt.DTypeLike = np.int32,
    ) -> None:
        """Read the tokeniser's file.

        lengths: tokens in a row that the model is compiled for. pad_id: the id behind a text's end, by default the file's, or 0.

        Raises ImportError without tokenizers, ValueError for a file that is not there or no tokeniser, and when the largest length
        does not hold the marks that the file puts around each text or pair.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise needs("tokenizers") from None
        try:
            self._tokenizer: tokenizers.Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - that is what it raises
            raise ValueError(f"{path} is no tokeniser: {error}") from None
        self._lengths = sorted(lengths)
        least = max(1, *(self._tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)))
        if max(self._lengths, default=0) < least:
            raise ValueError(
                f"lengths are {self._lengths}: the largest must be at least {least}, for the marks around texts"
            )
        self._most_bytes = _BYTES_PER_TOKEN * self._lengths[-1]
        self._dtype = np.dtype(dtype)
        # The file may ask for padding and for another length; which side is cut stays its affair. Of a pair it may want only one
        # text cut, which raises where the other is too long by itself.
        padding, truncation = self._tokenizer.padding or {}, self._tokenizer.truncation or {}
        self._pad_id = padding.get("pad_id", 0) if pad_id is None else pad_id
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(
            self._lengths[-1], strategy="longest_first", direction=truncation.get("direction", "right")
        )

    def __call__(self, text: Array, second: Array | None = None) -> Tokens:
        """Make tokens of texts, and of the second texts of pairs: u8 [n, bytes] -> Tokens [n, l], l the smallest length for all rows.

        Tokens beyond the largest length are cut off, of a pair from the longer text first, and so are bytes beyond 64
        for each of its tokens.
        """
        firsts = from_text(text[:, : self._most_bytes])
        seconds = [None] * len(firsts) if second is None else from_text(second[:, : self._most_bytes])
        # One by one: `encode_batch` starts a thread for each processor, in every process that serves a model.
        rows = [self._tokenizer.encode(*pair) for pair in zip(firsts, seconds, strict=True)]
        longest = max((len(row.ids) for row in rows), default=0)
        shape = len(rows), next(length for length in self._lengths if length >= longest)
        tokens = Tokens(
            ids=np.full(shape, self._pad_id, self._dtype),
            mask=np.zeros(shape, self._dtype),
            types=np.zeros(shape, self._dtype),
        )
        for index, row in enumerate(rows):
            tokens.ids[index, : len(row.ids)] = row.ids
            tokens.mask[index, : len(row.ids)] = 1
            tokens.types[index, : len(row.ids)] = row.type_ids
        return tokens
