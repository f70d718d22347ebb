"""YAML: the traps of version 1.1, and hostile documents."""

from __future__ import annotations

import re

import pytest

from rsrv_bundle import yaml12


@pytest.mark.parametrize("word", ["n", "y", "no", "on", "off", "yes", "N", "NO"])
def test_words_that_are_booleans_in_yaml_1_1_stay_text(word: str) -> None:
    """Words that YAML 1.1 reads as booleans stay text, because they are legal shapes and axis letters."""
    assert yaml12.load(f"shape: {word}\n{word}: 1".encode()) == {"shape": word, word: 1}


def test_keys_become_text_and_dates_become_iso_text() -> None:
    """Keys become text, and dates become ISO text."""
    assert yaml12.load(b"7: a\n2.5: b\ntrue: c\nat: 2026-02-03") == {
        "7": "a",
        "2.5": "b",
        "true": "c",
        "at": "2026-02-03",
    }


def test_numbers_of_yaml_1_1_with_colons_stay_text() -> None:
    """Numbers with colons, which YAML 1.1 reads in base 60, stay text."""
    assert yaml12.load(b"a: 1:30\nb: 010") == {"a": "1:30", "b": 10}


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (b"a: 1\na: 2", "duplicate key"),
        (b"1: a\n'1': b", "has the key '1' twice"),
        (b"? [1, 2]\n: a", "keys are text"),
        (b"a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        (b"a: !!binary aGk=", "the type bytes"),
        (b"a: [1", "not valid YAML 1.2: line"),
        (b"a: .inf", "only finite numbers"),
        (b"a: \xff", "is not UTF-8"),
        (b"--- 1\n--- 2", "not valid YAML"),
        (b"a: &x [*x]", "levels deep"),
        (b"[" * 5000, "nested too deeply"),
        (b"- " * 5000, "nested too deeply"),
        (b"a: 1" + b"0" * 5000, "not valid YAML"),
        (b"a: 0x" + b"f" * 5000, "a number of 20000 bits"),
        (b"? 0x" + b"f" * 5000 + b"\n: a", "a key of the type int"),
        (b"a: &a {b: 1}\nc: {<<: *a}", "line 2: merge keys (<<) are not supported"),
    ],
)
def test_bad_documents_are_refused_in_one_line(text: bytes, fragment: str) -> None:
    """A bad document is refused with a one-line ValueError."""
    with pytest.raises(ValueError, match=re.escape(fragment)) as caught:
        yaml12.load(text)
    assert "\n" not in str(caught.value)


def test_a_document_over_the_size_limit_is_refused_unparsed() -> None:
    """A document over the size limit is refused without being parsed."""
    with pytest.raises(ValueError, match="the limit is"):
        yaml12.load(b"#" * (yaml12.MAX_BYTES + 1))


def test_aliases_that_expand_exponentially_are_refused() -> None:
    """Aliases that expand exponentially, as in the billion laughs, are refused."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ValueError, match="remove its aliases"):
        yaml12.load("\n".join(lines).encode())


def test_merge_keys_that_expand_exponentially_are_refused() -> None:
    """Merge keys that expand exponentially are refused before the parser expands them."""
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)]
    with pytest.raises(ValueError, match="merge keys"):
        yaml12.load("\n".join(lines).encode())
