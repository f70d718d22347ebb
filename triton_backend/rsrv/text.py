"""Text for people: figures with their units, lines from other processes, and hints about unknown words.

Every command and page uses these units: bytes in steps of 1000 (kB, MB, GB), times in µs, ms, s, min and h, and rates per
second. Figures have three digits, but minutes and hours have one decimal. A figure that is not known is a dash.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


def amount(count: float | None, unit: str = "B") -> str:
    """Return a number of bytes, or of another `unit`, with the prefix that fits: `1.5 kB`."""
    if count is None:
        return "-"
    for prefix in ("", "k", "M", "G", "T"):
        if count < 999.5:
            return f"{count:.3g} {prefix}{unit}".rstrip()
        count /= 1000
    return f"{count:.3g} P{unit}"


def duration(seconds: float | None) -> str:
    """Return a time with the unit that fits."""
    if seconds is None:
        return "-"
    # Use the larger unit if the smaller one would be rounded up to it.
    if seconds >= 59.95 * 60:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 59.95:
        return f"{seconds / 60:.1f} min"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return "0 s"


def by_number(name: str) -> list[str | int]:
    """Return a sort key for names that sorts numbers by value: `m2` before `m10`."""
    # Texts and numbers alternate, so two keys have equal types at each place.
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"([0-9]+)", name))]


def rate(per_second: float | None) -> str:
    """Return a rate with its unit: `12.5/s`."""
    return "-" if per_second is None else f"{amount(per_second, '')}/s"


def percent(share: float | None) -> str:
    """Return a share of one as a percentage."""
    return "-" if share is None else f"{100 * share:.3g}%"


def printable(text: str) -> str:
    """Return a line from another process without characters that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def one_line(text: str) -> str:
    """Return a text of any lines as one printable line."""
    return printable(" ".join(text.split()))


def os_error(error: OSError) -> str:
    """Return the file and the reason of an error, without its error number. If `error` has several errors, use the first one."""
    if error.strerror is None:
        several = error.args[0] if error.args else None
        if isinstance(several, list) and several:
            # shutil.Error has a tuple for each file: its source, its target and the reason as text.
            _, target, reason = several[0]
            match = re.match(r"\[Errno -?[0-9]+\] ([^:]+)", reason)
            return f"{target}: {match[1] if match else reason}"
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add `path` to every OSError of the block that names no file or folder, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint about an unknown word: the most similar known word, or all known words."""
    # Import difflib only here: every command imports this module, but only a wrong word needs difflib.
    import difflib

    known = list(known)
    near = difflib.get_close_matches(word[:100], known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"; known are {shown}" if shown else ""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 weight` or `3 weights`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some(names: Sequence[str]) -> str:
    """Return the first three names as text, and the number of further names."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
