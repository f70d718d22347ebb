"""Texts and tokens. Texts are strings, or u8 [n, bytes] in UTF-8 with zeros after each text. Tokens need the package tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rsrv.hooks import BadInput, needs

if TYPE_CHECKING:
    import tokenizers

Array = npt.NDArray[Any]

#: Only this many bytes of a text are read for each token of the largest length. Otherwise, a tokeniser would need most of a
#: second for a megabyte of text.
_BYTES_PER_TOKEN = 64


def as_text(texts: Sequence[str | bytes], *, width: int | None = None) -> Array:
    """Encode texts in UTF-8, with zeros after each text: u8 [n, width].

    Texts that are bytes are not changed. width: bytes of a row, by default those of the longest text, but at least 1.

    Raises ValueError when a text is longer.
    """
    coded = [text.encode() if isinstance(text, str) else text for text in texts]
    longest = max([1, *map(len, coded)])
    if width is not None and width < longest:
        raise ValueError(f"a text has {longest} bytes, but a row has only {width}")
    rows = np.zeros((len(coded), width or longest), np.uint8)
    for row, encoded in zip(rows, coded, strict=True):
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return rows


def as_strings(texts: Sequence[str]) -> Array:
    """Return one text per row: strings [n, 1], objects of type bytes."""
    return np.array([text.encode() for text in texts], object).reshape(-1, 1)


def as_json(rows: Sequence[Any]) -> Array:
    """Return one JSON text per row: strings [n, 1], objects of type bytes."""
    return as_strings([json.dumps(row, ensure_ascii=False) for row in rows])


def from_text(rows: Array) -> list[str]:
    """Decode the texts of strings [n] or [n, 1], objects of type bytes, or of u8 [n, bytes].

    Bytes that are not UTF-8 are left out, for example a character that was cut in two.
    """
    return _texts(rows, slice(None))


def _texts(rows: Array, part: slice) -> list[str]:
    """Decode a part of the bytes of each text."""
    if rows.dtype == object:
        return [text[part].decode(errors="ignore") for text in rows.reshape(len(rows))]
    return [row.tobytes().rstrip(b"\0")[part].decode(errors="ignore") for row in rows]


def _open(path: Path | str) -> tokenizers.Tokenizer:
    """Read a tokeniser's file. Raises ImportError if tokenizers is not installed, and ValueError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise needs("tokenizers") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises this class itself
        raise ValueError(f"{path} is not a tokeniser: {error}") from None


def _encode(
    tokenizer: tokenizers.Tokenizer, text: str, pair: str | None = None, *, add_special_tokens: bool = True
) -> tokenizers.Encoding:
    """Return the tokens of a text or of a pair. Raises BadInput for a text that the tokeniser cannot read."""
    with _no_panics():
        return tokenizer.encode(text, pair, add_special_tokens=add_special_tokens)


@contextmanager
def _no_panics() -> Iterator[None]:
    """Turn a panic of the package tokenizers into BadInput.

    A regular expression in a tokeniser's file panics after ten million steps of backtracking. The class of a panic is not a
    subclass of Exception, so a panic would end the thread.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BadInput(f"the model's tokeniser cannot process this text: {error!s:.200}") from None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens, [n, length] each: ids, mask (1 for a token, 0 after the last token), and type (1 in the second text of a pair).

    starts, ends: places of the tokens in their text, in characters. They are -1 for special tokens and after the last token. They
    are None unless the Tokeniser was made with spans=True.
    """

    ids: Array
    mask: Array
    types: Array
    starts: Array | None = None
    ends: Array | None = None


class Tokeniser:
    """Makes tokens from texts with a file `tokenizer.json`, in rows of one of a few lengths. Safe to use from any thread."""

    def __init__(
        self,
        path: Path | str,
        lengths: Sequence[int],
        *,
        pad_id: int | None = None,
        dtype: npt.DTypeLike = np.int32,
        too_long: Literal["cut", "refuse"] = "cut",
        prefix: str = "",
        spans: bool = False,
    ) -> None:
        """Read the tokeniser's file.

        lengths: tokens in a row that the model is compiled for. pad_id: the id after a text's end, by default the id in the file,
        or 0. too_long: whether a text with more tokens than the largest length is cut or refused. prefix: text put in front of each
        text, except the second one of a pair. spans: also return places of the tokens. Raises ImportError if tokenizers is not
        installed. Raises ValueError if the file is missing or is not a tokeniser, or if the largest length does not hold the
        special tokens that the file puts around each text or pair.
        """
        self._tokenizer = _open(path)
        self._lengths = sorted(lengths)
        least = max(1, *(self._tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)))
        if max(self._lengths, default=0) < least:
            raise ValueError(
                f"lengths are {self._lengths}: the largest must be at least {least}, because of the special tokens around texts"
            )
        self._most_bytes = _BYTES_PER_TOKEN * self._lengths[-1]
        self._dtype = np.dtype(dtype)
        self._cuts, self._prefix, self._spans = too_long == "cut", prefix, spans
        # Override the file's padding and length, but cut at the side that the file names. Also override a file that cuts only one
        # text of a pair, because tokenizers would raise an error if the other text alone were too long.
        padding, truncation = self._tokenizer.padding or {}, self._tokenizer.truncation or {}
        self._pad_id = padding.get("pad_id", 0) if pad_id is None else pad_id
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        side = truncation.get("direction", "right")
        self._left = self._cuts and side == "left"
        if self._cuts:
            self._tokenizer.enable_truncation(self._lengths[-1], strategy="longest_first", direction=side)

    def __call__(self, text: Array, second: Array | None = None) -> Tokens:
        """Make tokens from texts in a form of `from_text`, and from the second texts of pairs.

        The result is Tokens [n, l], where l is the smallest length that holds all rows.

        Tokens beyond the largest length are cut off at the side that the file names, in a pair from the longer text first.
        Bytes beyond 64 for each token of the largest length are also cut off. With too_long="refuse", such a text raises
        BadInput instead.
        """
        # To detect a text that is too long, read four more bytes, because an incomplete character would be left out.
        most = self._most_bytes + (0 if self._cuts else 4)
        part = slice(-most, None) if self._left else slice(most)
        firsts = _texts(text, part)
        seconds = [None] * len(firsts) if second is None else _texts(second, part)
        if not self._cuts:
            for index, pair in enumerate(zip(firsts, seconds, strict=True)):
                if any(len(text.encode()) > self._most_bytes for text in pair if text):
                    self._refuse(index, "more")
        if self._prefix:
            firsts = [self._prefix + text for text in firsts]
        # Encode texts one by one, because `encode_batch` starts a thread for each processor in every process that serves a
        # model.
        rows = [_encode(self._tokenizer, *pair) for pair in zip(firsts, seconds, strict=True)]
        longest = max((len(row.ids) for row in rows), default=0)
        if longest > self._lengths[-1]:
            self._refuse([len(row.ids) for row in rows].index(longest), longest)
        shape = len(rows), next(length for length in self._lengths if length >= longest)
        tokens = Tokens(
            ids=np.full(shape, self._pad_id, self._dtype),
            mask=np.zeros(shape, self._dtype),
            types=np.zeros(shape, self._dtype),
            starts=np.full(shape, -1, np.int32) if self._spans else None,
            ends=np.full(shape, -1, np.int32) if self._spans else None,
        )
        for index, row in enumerate(rows):
            tokens.ids[index, : len(row.ids)] = row.ids
            tokens.mask[index, : len(row.ids)] = 1
            tokens.types[index, : len(row.ids)] = row.type_ids
            if tokens.starts is not None and tokens.ends is not None and row.ids:
                spans = np.where(np.array(row.special_tokens_mask)[:, None] == 1, -1, np.array(row.offsets))
                tokens.starts[index, : len(spans)], tokens.ends[index, : len(spans)] = spans.T
        return tokens

    def _refuse(self, row: int, count: int | str) -> None:
        raise BadInput(
            f"text {row} has {count} tokens; the model reads at most {self._lengths[-1]}: shorten it"
        )

    def id_of(self, token: str) -> int:
        """Return the id of a token. Raises ValueError if the file has no such token."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokeniser has no token {token!r}")
        return int(token_id)

    def words(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens have in the middle of a text. Special tokens are included."""
        names = [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]
        decoder = self._tokenizer.decoder
        return " ".join(names) if decoder is None else str(decoder.decode(names))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))


#: Delimiters of the contents that a chat's client has written, in a prompt that a chat template has made. These code
#: points are noncharacters of Unicode.
CONTENT_BEGIN, CONTENT_END = "\ufdd0", "\ufdd1"


class PromptTokeniser:
    """Makes prompts of texts for a model that generates, and text of its tokens. Safe to use from any thread.

    The text takes the place of `{text}` in a template. Special tokens, for example the delimiters of a chat's messages, are
    recognised only in the template. In the text, they are ordinary characters.
    """

    def __init__(self, path: Path | str, template: str = "{text}") -> None:
        """Read the file `tokenizer.json`.

        Raises ImportError without tokenizers, and ValueError if the file cannot be read.
        """
        tokenizer = _open(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        before, after = template.split("{text}")
        marks = [
            special.content for special in tokenizer.get_added_tokens_decoder().values() if special.special
        ]
        # Encode the text together with the template's text up to the neighbouring special tokens, because a token may include a
        # space before a word.
        begin = max((before.rfind(mark) + len(mark) for mark in marks if mark in before), default=0)
        end = min((after.find(mark) for mark in marks if mark in after), default=len(after))
        self._left, self._right = before[begin:], after[:end]
        #: True if the template has no special tokens. The file then puts its own special tokens around the text.
        self._marked = not (begin or after[end:])
        self._before = _encode(tokenizer, before[:begin], add_special_tokens=False).ids
        self._after = _encode(tokenizer, after[end:], add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._path = path
        self._special = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")

    @cached_property
    def _template_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokeniser for the parts of a chat's template, where special tokens are recognised."""
        tokenizer = _open(self._path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the prompt for a text."""
        own = _encode(self._tokenizer, self._left + text + self._right, add_special_tokens=self._marked).ids
        return [*self._before, *own, *self._after]

    def encode_chat(self, text: str) -> list[int]:
        """Return the prompt for a chat. Special tokens are recognised only outside of the delimited contents."""
        ids: list[int] = []
        plain = ""
        for index, part in enumerate(re.split(f"[{CONTENT_BEGIN}{CONTENT_END}]", text)):
            spots = [] if index % 2 else [spot.span() for spot in self._special.finditer(part)]
            if spots:
                begin, end = spots[0][0], spots[-1][1]
                # Encode a content together with the text before and after it, because a token may include a space before a word.
                ids += _encode(self._tokenizer, plain + part[:begin], add_special_tokens=False).ids
                ids += _encode(self._template_tokenizer, part[begin:end], add_special_tokens=False).ids
                plain = ""
                part = part[end:]
            plain += part
        return [*ids, *_encode(self._tokenizer, plain, add_special_tokens=False).ids]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, without special tokens unless `special` is set."""
        with _no_panics():
            return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))


#: The tokeniser returns this character for bytes that are no character, or that are not a complete character yet.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
#: After this many tokens without a complete character, return replacement characters for the bytes of these tokens.
_MAX_HELD = 16


class TextStream:
    """The text of an answer while its tokens arrive.

    `feed` returns only whole characters, and holds back a possible beginning of a stop text. Tokens are decoded together with the
    tokens before them, because a character can consist of several tokens, and a space may depend on the neighbouring tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """`decode` decodes tokens. The text ends before the first of the texts in `stop`, none of which may be empty."""
        self._decode = decode
        self._stop = stop
        #: The latest tokens.
        self._tokens: list[int] = []
        #: Number of tokens in `_tokens` whose text was already added to `_held`.
        self._read = 0
        #: Text that is held back, because it may be the beginning of a stop text.
        self._held = ""
        #: True once a stop text has arrived.
        self.stopped = False

    def feed(self, tokens: Iterable[int]) -> str:
        """Add further tokens, and return the text that is certain now."""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            known, whole = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
            if not whole.endswith(_BROKEN) or len(self._tokens) - self._read > _MAX_HELD:
                self._held += whole[len(known) :]
                if whole or len(self._tokens) > _MAX_HELD:
                    # Keep the latest tokens, because the text of the next tokens may depend on them.
                    del self._tokens[: self._read]
                self._read = len(self._tokens)
                self._find_stop()
        certain = len(self._held) - (0 if self.stopped else self._uncertain())
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """Return the rest of the text. Call this at the answer's end."""
        known, whole = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
        if not self.stopped:
            # The limit of tokens may have cut the last character.
            self._held += whole[len(known) :].rstrip(_BROKEN)
            self._find_stop()
        text, self._held, self._tokens, self._read = self._held, "", [], 0
        return text

    def _find_stop(self) -> None:
        places = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if places:
            self._held, self.stopped = self._held[: min(places)], True

    def _uncertain(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop text."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        return max(lengths, default=0)
