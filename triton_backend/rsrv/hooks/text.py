"""Text: strings, or u8 [n, bytes] in UTF-8 with zeros behind each row; and tokens, by the package tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """Decode the texts of strings [n] or [n, 1], objects of type bytes, or of u8 [n, bytes].

    Bytes that are not UTF-8, as of a character that was cut in two, are left out.
    """
    return _texts(rows, None)


def _texts(rows: Array, most: int | None) -> list[str]:
    """Decode at most so many bytes of each text."""
    if rows.dtype == object:
        return [one[:most].decode(errors="ignore") for one in rows.reshape(len(rows))]
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows[:, :most]]


def _open(path: Path | str) -> tokenizers.Tokenizer:
    """Read a tokeniser's file. Raises ImportError without tokenizers, ValueError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise needs("tokenizers") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - that is what it raises
        raise ValueError(f"{path} is no tokeniser: {error}") from None


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
        self._tokenizer = _open(path)
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
        """Make tokens of texts as in `from_text`, and of the second texts of pairs: Tokens [n, l], l the smallest length for all rows.

        Tokens beyond the largest length are cut off, of a pair from the longer text first, and so are bytes beyond 64
        for each of its tokens.
        """
        firsts = _texts(text, self._most_bytes)
        seconds = [None] * len(firsts) if second is None else _texts(second, self._most_bytes)
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


class PromptTokeniser:
    """Makes prompts of texts for a model that generates, and text of its tokens. Safe to use from any thread.

    The text takes the place of `{text}` in a template. Special tokens, as of a chat's turns, count in the template only:
    in the text they are characters like others.
    """

    def __init__(self, path: Path | str, template: str = "{text}") -> None:
        """Read the file `tokenizer.json`. Raises ImportError without tokenizers, ValueError for a file that cannot be read."""
        tokenizer = _open(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        before, after = template.split("{text}")
        marks = [one.content for one in tokenizer.get_added_tokens_decoder().values() if one.special]
        # Only what stands between the special tokens around the text depends on it, as spaces belong to words.
        begin = max((before.rfind(one) + len(one) for one in marks if one in before), default=0)
        end = min((after.find(one) for one in marks if one in after), default=len(after))
        self._left, self._right = before[begin:], after[:end]
        #: without special tokens in the template, the file puts its own around the text
        self._marked = not (begin or after[end:])
        self._before = tokenizer.encode(before[:begin], add_special_tokens=False).ids
        self._after = tokenizer.encode(after[end:], add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the prompt for a text."""
        own = self._tokenizer.encode(self._left + text + self._right, add_special_tokens=self._marked).ids
        return [*self._before, *own, *self._after]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


#: stands for bytes that are no character, or not yet
_BROKEN = "\N{REPLACEMENT CHARACTER}"
#: tokens without a whole character after which their bytes are none
_MAX_HELD = 16


class TextStream:
    """The text of an answer while its tokens come: whole characters only, and nothing that a stop text may begin with.

    Tokens are decoded together with those before them, because a character can have several, and a space may depend on
    its neighbours.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """Decode with `decode`. The text ends before the first of the texts `stop`, none of them empty."""
        self._decode = decode
        self._stop = stop
        #: the latest tokens, and the number of those whose text is in `_text`
        self._tokens: list[int] = []
        self._read = 0
        #: text that is not given out, as it may be the beginning of a stop text
        self._held = ""
        #: true once a stop text has come
        self.stopped = False

    def feed(self, tokens: Iterable[int]) -> str:
        """Take further tokens, and return the text that is certain now."""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            known, whole = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
            if not whole.endswith(_BROKEN) or len(self._tokens) - self._read > _MAX_HELD:
                self._held += whole[len(known) :]
                if whole or len(self._tokens) > _MAX_HELD:
                    # The tokens that came last are the next ones' neighbours.
                    del self._tokens[: self._read]
                self._read = len(self._tokens)
                self._find_stop()
        certain = len(self._held) - (0 if self.stopped else self._uncertain())
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """Return the rest of the text, at the answer's end."""
        known, whole = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
        if not self.stopped:
            # A limit may have cut the last character.
            self._held += whole[len(known) :].rstrip(_BROKEN)
            self._find_stop()
        text, self._held, self._tokens, self._read = self._held, "", [], 0
        return text

    def _find_stop(self) -> None:
        found = [at for one in self._stop if (at := self._held.find(one)) >= 0]
        if found:
            self._held, self.stopped = self._held[: min(found)], True

    def _uncertain(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop text."""
        lengths = (n for one in self._stop for n in range(1, len(one)) if self._held.endswith(one[:n]))
        return max(lengths, default=0)
