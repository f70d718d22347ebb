"""Answers about tokens, as transformers' pipelines give them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from rsrv.hooks.text import Tokeniser, as_json, as_text
from rsrv.hooks.tokens import candidates, entities

LABELS = ("O", "B-PER", "I-PER", "LOC")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "anna", "##bel", "in", "rome")


@pytest.fixture
def tokeniser(tmp_path: Path) -> Tokeniser:
    """Return a tokeniser of parts of words, which reports the places of tokens."""
    made = Tokenizer(models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.add_special_tokens(list(WORDS[:5]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokeniser(tmp_path / "tokenizer.json", [8], spans=True)


def test_neighbouring_tokens_with_a_label_are_an_entity(tokeniser: Tokeniser) -> None:
    """Neighbouring tokens with the same label are an entity. B- begins another entity.

    Tokens with the label O, special tokens and padding are left out.
    """
    tokens = tokeniser(as_text(["annabel anna in rome"]))
    assert tokens.starts is not None
    assert tokens.ends is not None
    # The tokens are: [CLS] anna ##bel anna in rome [SEP] [PAD].
    best = [3, 1, 2, 1, 0, 3, 3, 3]
    scores = np.full((1, 8, 4), 0.1, np.float32)
    scores[0, range(8), best] = [0.7, 0.6, 0.8, 0.7, 0.7, 0.9, 0.7, 0.7]

    (row,) = entities(scores, tokens.ids, tokens.starts, tokens.ends, LABELS, tokeniser)

    assert [(each["entity_group"], each["word"], each["start"], each["end"]) for each in row] == [
        ("PER", "annabel", 0, 7),
        ("PER", "anna", 8, 12),
        ("LOC", "rome", 16, 20),
    ]
    assert [each["score"] for each in row] == pytest.approx([0.7, 0.7, 0.9])


def test_a_mask_gets_candidates_with_their_texts(tokeniser: Tokeniser) -> None:
    """Each candidate has the text in which it replaces the mask, without the special tokens around the text."""
    tokens = tokeniser(as_text(["anna in [MASK]"]))
    rows = candidates(np.array([[0.9, 0.1]]), np.array([[8, 7]]), tokens.ids, tokens.mask, 4, tokeniser)
    assert rows == [
        [
            {"score": 0.9, "token": 8, "token_str": "rome", "sequence": "anna in rome"},
            {"score": 0.1, "token": 7, "token_str": "in", "sequence": "anna in in"},
        ]
    ]


def test_answers_are_json_in_one_string_per_row() -> None:
    """Each row of the answer is one JSON string in UTF-8."""
    answers = as_json([[{"a": "ü"}], []])
    assert answers.shape == (2, 1)
    assert [json.loads(row) for row in answers[:, 0]] == [[{"a": "ü"}], []]
