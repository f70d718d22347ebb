"""YAML: the traps of version 1.1, and hostile documents."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from rsrv_bundle import common_yaml, yaml12


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


GOLDEN = sorted(Path(__file__).parents[2].glob("golden/**/manifest.yaml"))
#: What a damaged manifest gets in place of a byte.
_BYTES = b" \n:,-{}[]'\"#&*!|>%@0123456789eExo_.~?\\\tyna=<"


def _by_ruamel(data: bytes, monkeypatch: pytest.MonkeyPatch) -> object:
    def uncommon(_: str) -> object:
        raise common_yaml.Uncommon

    with monkeypatch.context() as patch:
        patch.setattr(yaml12, "parse", uncommon)
        try:
            return yaml12.load(data)
        except ValueError as error:
            return error


@pytest.mark.parametrize("manifest", GOLDEN, ids=lambda path: "-".join(path.parts[-4:-1]))
def test_the_fast_parser_reads_manifests_as_ruamel_does(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every golden manifest is read by the fast parser, with the values and types that ruamel.yaml gives."""
    data = manifest.read_bytes()
    assert repr(common_yaml.parse(data.decode())) == repr(_by_ruamel(data, monkeypatch))


def test_the_fast_parser_takes_no_damaged_manifest_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged manifest that the fast parser takes is one that ruamel.yaml takes too, with the same values."""
    chosen, taken = random.Random(0), 0
    for _ in range(800):
        data = bytearray(chosen.choice(GOLDEN).read_bytes())
        at = chosen.randrange(len(data))
        data[at : at + chosen.randrange(2)] = bytes([chosen.choice(_BYTES)])
        try:
            found = common_yaml.parse(data.decode())
        except (common_yaml.Uncommon, UnicodeDecodeError):
            continue
        taken += 1
        assert repr(found) == repr(_by_ruamel(bytes(data), monkeypatch)), data.decode()
    assert taken > 100


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0b04ce17289a893ef7faeccec2b76157fcb04430", "0b04ce17289a893ef7faeccec2b76157fcb04430"),
        ("2.13.0+cpu", "2.13.0+cpu"),
        ("'a: b'", "a: b"),
        ("a b\n  c", "a b c"),
        ("{a: [1, -2.5e-07], b: {}}", {"a": [1, -2.5e-07], "b": {}}),
        ("\n- {h: 1}\n- n: y\n  m: [x]", [{"h": 1}, {"n": "y", "m": ["x"]}]),
    ],
)
def test_the_fast_parser_knows_what_exporters_write(
    text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of exported manifests are read by the fast parser as ruamel.yaml reads them."""
    document = f"format_version: '3.1'\nkey: {text}\n"
    assert common_yaml.parse(document)["key"] == value
    assert repr(common_yaml.parse(document)) == repr(_by_ruamel(document.encode(), monkeypatch))


@pytest.mark.parametrize(
    "text", ["null", "~", "1_000", "0x1f", "010", "1e5", ".5", "2026-02-03", "a: b", "a #b", "&a b", "*a", "|", "\"\\n\"", "[1, 2,]", "a\n- b"]
)  # fmt: skip
def test_the_fast_parser_leaves_the_rest_to_ruamel(text: str) -> None:
    """A value with a meaning of its own in YAML, or a mistake, is left to ruamel.yaml."""
    with pytest.raises(common_yaml.Uncommon):
        common_yaml.parse(f"format_version: '3.1'\nkey: {text}\n")
