"""YAML: words that version 1.1 would misread, and hostile documents."""

from __future__ import annotations

import re

import pytest
import yaml

from rsrv_bundle import yaml12


@pytest.mark.parametrize("word", ["n", "y", "no", "on", "off", "yes", "N", "NO"])
def test_words_that_are_booleans_in_yaml_1_1_stay_text(word: str) -> None:
    """Words that YAML 1.1 reads as booleans stay text, because they are legal shapes and axis letters."""
    assert yaml12.load(f"shape: {word}\n{word}: 1".encode()) == {"shape": word, word: 1}


def test_keys_and_dates_are_text() -> None:
    """Keys and dates are read as text, exactly as they are written."""
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
        (b"1: a\n'1': b", "line 2: duplicate key '1'"),
        (b"? [1, 2]\n: a", "keys are text"),
        (b"a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        (b"a: !!binary aGk=", "line 1: the tag tag:yaml.org,2002:binary is not supported"),
        (b"a: [1", "not valid YAML: line 2"),
        (b"a: .inf", "only finite numbers"),
        (b"a: \xff", "is not UTF-8"),
        (b"--- 1\n--- 2", "not valid YAML"),
        (b"a: &x [*x]", "levels deep"),
        (b"[" * 5000, "levels deep"),
        (b"- " * 5000, "levels deep"),
        (b"a: 1" + b"0" * 5000, "at most 64 bits"),
        (b"a: 0x" + b"f" * 5000, "at most 64 bits"),
        (b"a: 0x1" + b"0" * 16, "at most 64 bits"),
        (b"- &a 1\n- &b [*a]\n- &a 2\n- *b", "line 3: the anchor &a is defined twice"),
        (b"a: *b", "line 1: the alias *b has no anchor"),
        (b"a: !!int b", "is not supported"),
        (b"a: 1e999", "only finite numbers"),
        (b'a: "\\UFFFFFFFF"', "not valid YAML"),
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


@pytest.mark.parametrize("text", [b"[" * 60_000, b"- " * 30_000, b"{a: " * 15_000], ids=["[", "-", "{"])
def test_deep_nesting_is_refused_before_the_rest_is_parsed(
    text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing stops as soon as the nesting is too deep, because 60,000 brackets would take half a minute."""
    taken = []
    take = yaml12._Document._take

    def counted(document: yaml12._Document) -> object:
        taken.append(1)
        return take(document)

    monkeypatch.setattr(yaml12._Document, "_take", counted)
    with pytest.raises(ValueError, match="levels deep"):
        yaml12.load(text)
    assert len(taken) < 200


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0x1F", 31),
        ("0o17", 15),
        ("-010", -10),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("1e5", 1e5),
        (".5", 0.5),
        ("2.", 2.0),
        ("-2.5e-07", -2.5e-07),
        ("+", "+"),
        ("~", None),
        ("", None),
        ("NULL", None),
        ("nULL", "nULL"),
        ("True", True),
        ("FALSE", False),
        ("'1'", "1"),
        ("''", ""),
        ("!!str 1", "1"),
        ("!!int '1'", 1),
        ("0b04ce17289a893ef7faeccec2b76157fcb04430", "0b04ce17289a893ef7faeccec2b76157fcb04430"),
        ("2.13.0+cpu", "2.13.0+cpu"),
        ("2026-02-03 04:05:06", "2026-02-03 04:05:06"),
        ("[&a {b: [1]}, *a]", [{"b": [1]}, {"b": [1]}]),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_values_are_those_of_the_core_schema(text: str, value: object) -> None:
    """A plain value is null, a boolean or a number if YAML 1.2's core schema says so. Otherwise it is text."""
    parsed = yaml12.parse(f"key: {text}")["key"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("parser", [yaml12._PARSER, yaml.SafeLoader], ids=["c", "python"])
@pytest.mark.parametrize("text", ["n", "no", "1e5", "010", "0o17", "0x1f", "1:30", "2026-02-03", "~", "", "<<", "=", "1_000", "é", "a\nb", "a: b", "#", " a ", "\u2028", "\x07", "a" * 150, 1e-7, 1e300, 2**63, True, None, [], {}, [[1], [{"a": []}]]])  # fmt: skip
def test_a_value_is_read_as_it_was_written(
    text: object, parser: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is written and read again is the same, of the same type, with either parser of PyYAML."""
    monkeypatch.setattr(yaml12, "_PARSER", parser)
    parsed = yaml12.parse(yaml12.dump({"key": text, str(text): 1}))
    assert parsed == {"key": text, str(text): 1}
    assert type(parsed["key"]) is type(text)


def test_values_of_an_alias_are_separate_objects() -> None:
    """An anchor's value and its aliases are separate objects: a change of one does not change the others."""
    parsed = yaml12.parse("- &a {b: []}\n- *a")
    parsed[0]["b"].append(1)
    assert parsed[1] == {"b": []}
