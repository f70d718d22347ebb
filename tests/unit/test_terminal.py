"""Colours of words: on terminals only, and not with NO_COLOR."""

from __future__ import annotations

import io

import pytest

from rsrv.terminal import styled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_severities_have_colours_on_a_terminal() -> None:
    """On a terminal, the most urgent severity is red. Spaces after a word are kept, but not coloured."""
    assert styled("critical", Terminal()) == "\x1b[1;31mcritical\x1b[0m"
    assert styled("ok      ", Terminal()) == "\x1b[32mok      \x1b[0m"
    assert styled("other", Terminal()) == "other"


def test_a_file_gets_no_codes() -> None:
    """In a file or a pipe, words have no colour codes."""
    assert styled("critical", io.StringIO()) == "critical"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_person_or_a_terminal_can_refuse_colours(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """With NO_COLOR, a convention of https://no-color.org, or on a dumb terminal, words have no colour codes."""
    monkeypatch.setenv(name, value)

    assert styled("critical", Terminal()) == "critical"
