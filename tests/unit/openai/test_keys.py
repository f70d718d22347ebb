"""The file of keys, and the usage of its callers."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from rsrv.openai.keys import KeysError, find_caller, read_keys
from rsrv.openai.usage import Usage

HASH = sha256(b"secret").hexdigest()
PAGE = Path(__file__).parents[3] / "docs" / "openai.md"


def test_a_caller_is_found_by_its_key(tmp_path: Path) -> None:
    """Only the right key in a bearer header identifies a caller. A caller may call only its own models."""
    (file := tmp_path / "keys.yaml").write_text(
        f"a: {{sha256: {HASH}, models: [embed, 'rank-*'], priority: 1}}"
    )
    keys = read_keys(file)
    assert [find_caller(keys, header) for header in ("", "Bearer wrong", "Basic secret", "secret")] == [
        None
    ] * 4
    caller = find_caller(keys, "bearer  secret")
    assert caller is not None
    assert (caller.name, caller.priority) == ("a", 1)
    assert [caller.may_call(model) for model in ("embed", "rank-2", "embed2")] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no key"),
        ("a: secret", "a: "),
        ("a: {sha256: secret}", r"a.sha256: String should match pattern"),
        (f"a: {{sha256: {HASH}, model: x}}", "a.model: Extra inputs"),
        (f"a: {{sha256: {HASH}, priority: 0}}", "a.priority"),
        (f"a: {{sha256: {HASH}}}\nb: {{sha256: {HASH}}}", "two names have the same key"),
        ("a: [", "keys.yaml: "),
    ],
)
def test_a_wrong_file_is_refused_without_its_keys(tmp_path: Path, text: str, reason: str) -> None:
    """The error for a wrong file names the entry. It never has a value, which may be a key."""
    (file := tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(KeysError, match=reason) as refused:
        read_keys(file)
    assert "secret" not in str(refused.value)


def test_the_page_has_the_example_and_every_metric() -> None:
    """The hash on the page is the hash of its key. The table is the output of `python -m rsrv.openai.usage`."""
    text = PAGE.read_text(encoding="utf-8")
    assert HASH in text
    rest = text.partition("<!-- python -m rsrv.openai.usage -->")[2]
    assert rest.partition("\n## ")[0].strip() == Usage().table()


def test_usage_is_text_for_prometheus() -> None:
    """The usage is text for Prometheus. Counts have the caller, the model and the status."""
    usage = Usage()
    usage.answers.labels("a", "embed", "200").inc(2)
    assert b'rsrv_openai_requests_total{key="a",model="embed",status="200"} 2.0' in usage.text()
