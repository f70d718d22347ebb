"""Texts as tensors and as tokens, compared with the package tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from rsrv.hooks import BadInput
from rsrv.hooks.text import PromptTokeniser, Tokeniser, as_text, from_text

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "north", "south", "east", "west"]
LENGTHS = (4, 8, 16)


def tokenizer() -> Tokenizer:
    """Return a tokenizer of words, which puts BERT's special tokens around each text."""
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    built.normalizer = normalizers.Lowercase()
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return built


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the tokenizer, which pads rows to 99."""
    made = tokenizer()
    made.enable_padding(length=99, pad_id=7)
    made.enable_truncation(99)
    path = tmp_path_factory.mktemp("text") / "tokenizer.json"
    made.save(str(path))
    return path


@given(st.lists(st.text().filter(lambda text: not text.endswith("\0")), max_size=5))
def test_texts_come_back_from_their_tensor(texts: list[str]) -> None:
    """Texts that do not end with zeros are read back from their tensor unchanged."""
    tensor = as_text(texts)
    assert tensor.dtype == np.uint8
    assert tensor.shape == (len(texts), max([1, *(len(text.encode()) for text in texts)]))
    assert from_text(tensor) == texts


def test_rows_are_as_wide_as_they_are_asked_to_be() -> None:
    """Rows have the requested width. A longer text is an error."""
    assert as_text([b"\xff\0", "é"], width=3).tolist() == [[255, 0, 0], [0xC3, 0xA9, 0]]
    with pytest.raises(ValueError, match="a text has 3 bytes, but a row has only 2"):
        as_text(["abc"], width=2)


def test_broken_characters_are_left_out() -> None:
    """Invalid and incomplete characters are left out."""
    assert from_text(as_text([b"\xffa", "aé".encode()[:-1]])) == ["a", "a"]


words = st.lists(st.sampled_from([*WORDS[4:], "up", "WEST"]), max_size=20).map(" ".join)


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=4))
def test_tokens_are_those_of_the_package(path: Path, texts: list[str]) -> None:
    """Tokens are the same as the package's, padded to the smallest length that holds all rows."""
    tokens = Tokeniser(path, LENGTHS, dtype=np.int64)(as_text(texts))
    longest = max(len(text.split()) + 2 for text in texts)
    length = next((size for size in LENGTHS if size >= longest), LENGTHS[-1])
    by_itself = tokenizer()
    by_itself.enable_truncation(length)
    by_itself.enable_padding(length=length, pad_id=7)
    expected = by_itself.encode_batch(texts)
    assert tokens.ids.dtype == tokens.mask.dtype == tokens.types.dtype == np.int64
    assert tokens.ids.tolist() == [encoding.ids for encoding in expected]
    assert tokens.mask.tolist() == [encoding.attention_mask for encoding in expected]
    assert not tokens.types.any()


@settings(deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_pairs_are_told_apart_by_their_types(path: Path, pairs: list[tuple[str, str]]) -> None:
    """Pairs of texts become tokens with the types of their texts."""
    firsts, seconds = (as_text([pair[side] for pair in pairs]) for side in (0, 1))
    tokens = Tokeniser(path, [16])(firsts, seconds)
    by_itself = tokenizer()
    by_itself.enable_truncation(16)
    by_itself.enable_padding(length=16, pad_id=7)
    expected = by_itself.encode_batch(pairs)
    assert tokens.ids.dtype == np.int32
    assert tokens.ids.tolist() == [encoding.ids for encoding in expected]
    assert tokens.types.tolist() == [encoding.type_ids for encoding in expected]


def test_the_token_that_fills_rows_up_may_be_chosen(path: Path) -> None:
    """The padding token is the given one, or else the file's."""
    text = as_text(["north"])
    assert Tokeniser(path, LENGTHS)(text).ids.tolist() == [[2, 4, 3, 7]]
    assert Tokeniser(path, LENGTHS, pad_id=1)(text).ids.tolist() == [[2, 4, 3, 1]]


def test_the_file_says_which_side_is_cut(path: Path, tmp_path: Path) -> None:
    """A text is cut on the side that the file names, to the tokeniser's length."""
    changed: dict[str, Any] = json.loads(path.read_text())
    changed["truncation"]["direction"] = "Left"
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(changed))
    text = as_text(["north south east"])
    assert Tokeniser(path, [4])(text).ids.tolist() == [[2, 4, 5, 3]]
    assert Tokeniser(other, [4])(text).ids.tolist() == [[2, 5, 6, 3]]
    endless = as_text(["north" + " " * 1000 + "south"])
    assert Tokeniser(other, [4])(endless).ids.tolist() == [[2, 5, 3, 7]]


@pytest.mark.parametrize("strategy", ["longest_first", "only_first", "only_second"])
def test_texts_of_any_length_become_tokens_whatever_the_file_cuts(strategy: str, tmp_path: Path) -> None:
    """Whatever the file's truncation settings are, long texts and pairs are cut to the largest length."""
    made = tokenizer()
    made.enable_truncation(99, strategy=strategy)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    tokenise = Tokeniser(path, [4, 8])
    long, short = as_text(["north " * 30]), as_text(["south"])
    assert tokenise(long).ids.tolist() == [[2, *[4] * 6, 3]]
    assert tokenise(long, short).ids.tolist() == [[2, *[4] * 4, 3, 5, 3]]
    assert tokenise(short, long).ids.tolist() == [[2, 5, 3, *[4] * 4, 3]]
    assert tokenise(long, long).types.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("lengths", [[], [0], [2], [1, 2]])
def test_rows_have_room_for_the_marks_around_texts(path: Path, lengths: list[int]) -> None:
    """If a length has no room for the special tokens around a text, the tokeniser cannot be made."""
    with pytest.raises(ValueError, match="the largest must be at least 3"):
        Tokeniser(path, lengths)
    text = as_text(["north"])
    assert Tokeniser(path, [3])(text, text).ids.tolist() == [[2, 3, 3]]


def test_only_the_beginning_of_an_endless_text_is_read(path: Path) -> None:
    """Of a long text, only 64 bytes per token are read."""
    text = as_text(["north" + " " * (16 * 64) + "south", "north" + " " * (16 * 63) + "south"])
    assert Tokeniser(path, LENGTHS)(text).ids.tolist() == [[2, 4, 3, 7], [2, 4, 5, 3]]


def test_no_texts_have_no_tokens(path: Path) -> None:
    """For an array without texts, the result has no rows, and the smallest length."""
    assert Tokeniser(path, LENGTHS)(np.zeros((0, 9), np.uint8)).mask.shape == (0, 4)


def test_a_file_that_is_no_tokeniser_is_named(tmp_path: Path) -> None:
    """The error for a missing or invalid file names it."""
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for path in (bad, tmp_path / "nothing.json"):
        with pytest.raises(ValueError, match=f"{path} is not a tokeniser: "):
            Tokeniser(path, LENGTHS)


def test_strings_need_no_zeros_behind_them(path: Path) -> None:
    """An array with one string per row is accepted as texts. Bytes of a string beyond the limit are not read."""
    texts = ["north south", "", "west" + " east" * 1000]
    strings = np.array([text.encode() for text in texts], object)
    assert from_text(strings) == from_text(strings.reshape(-1, 1)) == texts
    tokens, expected = Tokeniser(path, LENGTHS)(strings), Tokeniser(path, LENGTHS)(as_text(texts))
    assert tokens.ids.tolist() == expected.ids.tolist()


def test_a_text_that_is_too_long_may_be_refused(path: Path) -> None:
    """With too_long="refuse", a text with too many tokens or bytes is refused as the client's mistake, with the limit."""
    tokenise = Tokeniser(path, LENGTHS, too_long="refuse")
    # The text is one word. Its last character is partly beyond the limit of 1,024 bytes.
    with pytest.raises(BadInput, match="text 0 has more tokens"):
        tokenise(np.array([("東" * 342).encode()], object))
    assert tokenise(as_text(["the " * 14])).ids.shape == (1, 16)
    with pytest.raises(BadInput, match="text 1 has 17 tokens; the model reads at most 16"):
        tokenise(as_text(["the", "the " * 15]))
    with pytest.raises(BadInput, match="text 0 has more tokens"):
        tokenise(as_text(["x" * 2000]))
    with pytest.raises(BadInput, match="text 0 has more tokens"):
        tokenise(as_text(["the"]), as_text(["x" * 2000]))


def test_a_prefix_and_places_of_tokens(path: Path) -> None:
    """A prefix is put before each first text. Places of tokens count characters; special tokens and padding have no place."""
    plain, prefixed = Tokeniser(path, LENGTHS, spans=True), Tokeniser(path, LENGTHS, prefix="the ")
    tokens = plain(as_text(["the  ünknown"]))
    assert tokens.starts is not None
    assert tokens.ends is not None
    assert (tokens.starts.tolist(), tokens.ends.tolist()) == ([[-1, 0, 5, -1]], [[-1, 3, 12, -1]])
    text = as_text(["the"])
    assert prefixed(text).ids.tolist() == plain(as_text(["the the"])).ids.tolist()
    assert prefixed(text).starts is None


def test_a_text_that_a_regular_expression_gives_up_on_is_refused(tmp_path: Path) -> None:
    """A text on which a regular expression of the package gives up is refused.

    After ten million backtracking steps, the package panics. A panic is not an Exception, and would end a thread of
    the server.
    """
    made = tokenizer()
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    text = "a" * 40
    with pytest.raises(BadInput, match=r"cannot process this text: .*retry-limit"):
        Tokeniser(tmp_path / "tokenizer.json", [16])(np.array([[text.encode()]], object))
    with pytest.raises(BadInput, match=r"cannot process this text: .*retry-limit"):
        PromptTokeniser(tmp_path / "tokenizer.json").encode(text)
