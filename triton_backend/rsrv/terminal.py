"""Colours of words on terminals. The environment variable NO_COLOR turns them off."""

import os
import sys
from collections.abc import Mapping
from typing import Final, TextIO

#: Words that are coloured, and rich's style of each.
STYLES: Final[Mapping[str, str]] = {
    "critical": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "ok": "green",
    "failed": "bold red",
    "not run": "magenta",
    "ready": "green",
    "loading": "yellow",
    "hold": "magenta",
    "drain": "magenta",
}


def obeys_codes(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that understands control codes."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def styled(word: str, stream: TextIO | None = None) -> str:
    """Return a word with the codes of its colour if `stream` (default: stdout) is a terminal and rich is installed.

    Otherwise, return the word without codes.
    """
    style = STYLES.get(word.strip(), "")
    if not style or os.environ.get("NO_COLOR") or not obeys_codes(stream or sys.stdout):
        return word
    try:
        from rich.color import ColorSystem
        from rich.style import Style
    except ImportError:
        return word
    return Style.parse(style).render(word, color_system=ColorSystem.STANDARD)
