"""The native front has the same constants and texts as the Python modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import native_front
import native_rules

_LITERALS = re.compile(r'//[^\n]*|#include[^\n]*|\'(?:\\.|[^\'\\])\'|((?:"(?:\\.|[^"\\])*"\s*)+)')
_FIELDS = re.compile(r"%[-.*\d]*l*[a-zA-Z]|\{[^{}]*\}")


def _texts() -> Iterator[str]:
    """Yield, for each text in the sources of the native front, its longest part without placeholders."""
    for path in native_front.SOURCES.glob("*.[ch]"):
        if path != native_rules.HEADER:
            for literal in _LITERALS.finditer(path.read_text()):
                text = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', literal[1] or ""))
                yield max(map(str.strip, _FIELDS.split(text)), key=len)


def test_the_header_is_up_to_date() -> None:
    """The header equals the output of `python tools/native_rules.py`, which must be run after a change of a constant in Python."""
    assert native_rules.HEADER.read_text() == native_rules.rendered()


def test_no_text_of_the_native_front_is_written_in_python_again() -> None:
    """No text of the native front occurs in a Python module.

    Such a text belongs in rsrv.front.rules, which both fronts use.
    """
    package = native_front.SOURCES.parent
    trees = (ast.parse(path.read_text()) for path in package.rglob("*.py"))
    python = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    texts = [text for text in _texts() if len(text) >= 15 and " " in text]
    assert len(texts) > 20
    assert [text for text in texts if any(text in constant for constant in python)] == []
