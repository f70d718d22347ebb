"""The command line of a running tritonserver: which options it was started with."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path


def read_command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; none if the process is gone, or another user's."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode("utf-8", "surrogateescape") for word in raw.split(b"\0")[:-1]]


class Options:
    """The options of a command line, as getopt_long reads them: `--name=value`, `--name value`, or `--name` for true.

    A name may be cut short as far as it stays unambiguous.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._given: list[tuple[str, str]] = []
        for word, following in zip_longest(words, words[1:], fillvalue="-"):
            if word == "--":
                return
            if word.startswith("-"):
                name, equals, value = word.lstrip("-").partition("=")
                self._given.append(
                    (name, value if equals else "true" if following.startswith("-") else following)
                )

    def values(self, name: str, shortest: str | None = None) -> list[str]:
        """Return the values of an option, in order. `shortest` is its shortest unambiguous abbreviation."""
        shortest = shortest or name
        return [
            value for given, value in self._given if given.startswith(shortest) and name.startswith(given)
        ]

    def last(self, name: str, default: str) -> str:
        """Return the value that counts of an option that may be given once."""
        return [default, *self.values(name)][-1]

    def is_on(self, name: str, *, default: bool) -> bool:
        return self.last(name, "true" if default else "false").lower() in ("true", "1", "on", "t")
