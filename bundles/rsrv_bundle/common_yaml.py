"""Fast parser of the YAML that `rsrv-bundle` writes, and of no other.

ruamel.yaml takes ten milliseconds for a manifest, this parser a fiftieth of that. Where a rule of YAML 1.2 could give a
text another meaning than the one here, or makes it a mistake, it raises Uncommon, and ruamel.yaml decides.
"""

from __future__ import annotations

import re
from typing import Any

#: Levels of nesting.
_MAX_DEPTH = 12

_ENTRY = re.compile(r"([A-Za-z_][\w.-]*):(?: +(\S.*))?", re.ASCII)
_FLOW_KEY = re.compile(r"([A-Za-z_][\w.-]*): +", re.ASCII)
_FLOW_SCALAR = re.compile(r"[^\s{}\[\],:#'\"][^{}\[\],:#'\"]*")
_QUOTED = re.compile(r"\"([^\"\\]*)\"|'([^']*)'")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]{1,18}(?:e[-+][0-9]{1,2})?")
#: Words, version numbers, and hexadecimal checksums that cannot be numbers.
_TEXT = re.compile(
    r"[^\W\d][\w .,;/()+*=<>'\"-]*"
    r"|[0-9]{1,6}(?:\.[0-9]{1,6}){2}(?:\+\w+)?"
    r"|(?!0b[01]*\Z)(?=[0-9e]*[abcdf])[0-9a-f]{40,64}"
)
_BOOLEANS = {"true": True, "false": False}


class Uncommon(Exception):
    """The text is not of the kind that is parsed here."""


def parse(text: str) -> Any:
    """Return the document of a text. Raises Uncommon."""
    lines = [line.rstrip(" ") for line in text.split("\n")]
    if not text.startswith("format_version:") or not all(map(str.isprintable, lines)):
        raise Uncommon
    blocks = _Blocks(lines)
    document = blocks.mapping(0, 0)
    if blocks.indent() >= 0:
        raise Uncommon
    return document


class _Blocks:
    """Block mappings, and block lists of them."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._at = 0

    def indent(self) -> int:
        """Return the indentation of the next line that is neither blank nor a comment; -1 at the end."""
        while self._at < len(self._lines):
            line = self._lines[self._at].lstrip(" ")
            if line and not line.startswith("#"):
                return len(self._lines[self._at]) - len(line)
            self._at += 1
        return -1

    def mapping(self, indent: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.indent() == indent and not self._lines[self._at].startswith("- ", indent):
            entry = _ENTRY.fullmatch(self._lines[self._at], indent)
            if entry is None or entry[1] in found or entry[1].lower() == "null" or depth > _MAX_DEPTH:
                raise Uncommon
            self._at += 1
            found[entry[1]] = self._value(entry[2], indent, depth)
        if not found:
            raise Uncommon
        return found

    def _value(self, text: str | None, indent: int, depth: int) -> Any:
        if text is None:
            deeper = self.indent()
            if deeper >= indent and self._lines[self._at].startswith("- ", deeper):
                return self._list(deeper, depth + 1)
            if deeper <= indent:
                raise Uncommon
            return self.mapping(deeper, depth + 1)
        # The next line belongs to this value if it is indented more.
        while self._at < len(self._lines) and self._lines[self._at].startswith(" " * (indent + 1)):
            more = self._lines[self._at].lstrip(" ")
            if more.startswith("#"):
                raise Uncommon
            text += f" {more}"
            self._at += 1
        if text[0] in "{[":
            flow = _Flow(text)
            value = flow.value(depth + 1)
            if flow.rest():
                raise Uncommon
            return value
        if quoted := _QUOTED.fullmatch(text):
            return quoted[1] or quoted[2] or ""
        return _scalar(text)

    def _list(self, indent: int, depth: int) -> list[Any]:
        found: list[Any] = []
        while self.indent() == indent and self._lines[self._at].startswith("- ", indent):
            text = self._lines[self._at][indent + 2 :]
            if text.startswith(("{", "[")):
                self._at += 1
                found.append(self._value(text, indent, depth))
            else:
                # The first entry of the item is on the line of its dash.
                self._lines[self._at] = f"{' ' * (indent + 2)}{text}"
                found.append(self.mapping(indent + 2, depth))
        return found


class _Flow:
    """A flow collection, its lines joined."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :]

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise Uncommon
        if self._take("{"):
            found: dict[str, Any] = {}
            while not self._take("}"):
                key = self._match(_FLOW_KEY)[1]
                if key in found or key.lower() == "null":
                    raise Uncommon
                found[key] = self.value(depth + 1)
                self._separate("}")
            return found
        if self._take("["):
            items = []
            while not self._take("]"):
                items.append(self.value(depth + 1))
                self._separate("]")
            return items
        if self._text.startswith(("'", '"'), self._at):
            quoted = self._match(_QUOTED)
            return quoted[1] or quoted[2] or ""
        return _scalar(self._match(_FLOW_SCALAR)[0].rstrip(" "))

    def _take(self, mark: str) -> bool:
        """Take a mark and the spaces behind it, if the mark is next."""
        if not self._text.startswith(mark, self._at):
            return False
        self._at += 1
        while self._text.startswith(" ", self._at):
            self._at += 1
        return True

    def _separate(self, end: str) -> None:
        """Take a comma; there is none before the end."""
        while self._text.startswith(" ", self._at):
            self._at += 1
        if self._take(",") == self._text.startswith(end, self._at):
            raise Uncommon

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise Uncommon
        self._at = match.end()
        return match


def _scalar(text: str) -> bool | int | float | str:
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _TEXT.fullmatch(text) and text.lower() not in ("null", *_BOOLEANS):
        return text
    raise Uncommon
