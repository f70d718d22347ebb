"""Hostile tokenizers that would keep a processor busy for hours: each is refused within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from rsrv_bundle import BundleError
from rsrv_bundle.hf.tokenizer_trial import try_tokenizer


def tokenizer(pattern: str = "", replaced: str = "", most: int = 100) -> str:
    """Return a tokenizer. `pattern` splits texts, `replaced` matches parts to replace, and a word has `most` characters at most."""
    made = Tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]", max_input_chars_per_word=most)
    )
    if pattern:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    if replaced:
        made.normalizer = normalizers.Replace(Regex(replaced), "x")
    return made.to_str()


BOMBS = {
    "repeated repetitions": (tokenizer("(a+)+b"), "fails with .* 'a'.*: Onig: .*retry-limit-in-match over"),
    "a word that two ways match": (tokenizer("(foo|foo)+!"), "fails with .* 'foo'"),
    "a replacement": (tokenizer(replaced=r"(\w|_)+$"), "fails with .* 'a_'"),
    "all spaces, from each one on": (tokenizer(r"\s+$"), "takes more than 1 s of a processor for .* ' '"),
    "a character that is needed": (tokenizer(r"(\w|_)+[!?]"), "fails with .* 'a_' and"),
    "long words": (tokenizer(most=10**9), "takes more than 1 s of a processor for .* 'a'"),
}


@pytest.mark.parametrize(("file", "reason"), BOMBS.values(), ids=BOMBS)
def test_a_tokenizer_that_is_a_bomb_is_refused(file: str, reason: str) -> None:
    """A tokenizer that takes too long is refused. The error names the text that takes so long, and what to change."""
    with pytest.raises(BundleError, match=f"tokenizer.json: {reason}.*Simplify its regular expressions"):
        try_tokenizer(file, 512)


def test_code_in_the_working_directory_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of a tokenizer runs in a directory with files named like packages, and executes none of them."""
    for name in ("tokenizers", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    try_tokenizer(tokenizer(), 1)
    assert not (tmp_path / "executed").exists()


def test_a_usual_tokenizer_passes() -> None:
    """The regular expression of GPT-4, one of the most complicated in use, passes."""
    try_tokenizer(
        tokenizer(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        512,
    )
