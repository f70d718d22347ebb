"""Errors of bundles, in words that their author can act on."""

from __future__ import annotations

from collections.abc import Iterable


class BundleError(Exception):
    """A bundle breaks the format's rules.

    `problems` holds one line per broken rule, `<file>: <tensor or key>: <rule and what to do>`, in the order
    in which they were found. The text of the exception is these lines, joined by newlines.
    """

    def __init__(self, problems: Iterable[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[BundleError], tuple[tuple[str, ...]]]:
        # By default, unpickling would pass the joined text as one problem.
        return type(self), (self.problems,)


class PaddingError(BundleError):
    """Padding changes the answers of a model, or no check can show that it does not."""


class TargetError(BundleError):
    """A bundle cannot be written to its target. The bundle itself is valid."""


def mismatch(file: str) -> str:
    """Return the problem of a file that does not have the manifest's checksum."""
    return (
        f"{file} does not match the manifest: it is being written, or was changed without exporting. Export the "
        "bundle again, and replace bundles by renaming new ones into place"
    )


#: Maximum number of lines of a report, because a person reads it.
_MAX_LINES = 100
#: Maximum number of characters of a line of a report.
_MAX_LENGTH = 1000


class Problems:
    """Broken rules of a bundle. One check reports all of them, or the first hundred."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, file: str, key: str, rule: str) -> None:
        """Record one broken rule. `key` is empty if the rule concerns the whole file."""
        line = f"{file}: {key}: {rule}" if key else f"{file}: {rule}"
        if len(line) > _MAX_LENGTH:
            line = line[:_MAX_LENGTH] + "..."
        # A bundle is untrusted, so a newline in a name must not forge a second line in a log.
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
        if line not in self.lines and len(self.lines) < _MAX_LINES:
            self.lines.append(line)

    def raise_if_any(self) -> None:
        """Raise `BundleError` with all recorded problems, if there are any."""
        if self.lines:
            raise BundleError(self.lines)


def summary(error: Exception) -> str:
    """Return the type of an error and the first line of its message. The traceback has the other lines."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
