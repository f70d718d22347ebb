"""Count the servers' log lines by second, logger and model. Bad requests are cheap, so they must not cause many lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

#: Largest number of lines in a second with the same logger and model, and largest number of bytes in a line.
LINES, NBYTES = 10, 4000
#: The beginning of rsrv's lines, with the second, the logger and the model.
_OURS = re.compile(rb"\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d{3} [DIWEC] ([\w.]+(?: [^:]+)?): ")
#: Lines of Triton or its libraries. They are not limited.
_TRITONS = re.compile(rb"[IWEF]\d{4} |\[libprotobuf |\[\x1b?\[1;31mERROR|\s*$")


class Noise:
    """Counts the lines that are added to some logs."""

    def __init__(self, logs: Sequence[Path]) -> None:
        self._read = {log: log.stat().st_size for log in logs}
        self._lines: Counter[tuple[Path, bytes]] = Counter()
        self._place = dict.fromkeys(logs, b"")
        self._count = self._nbytes = self._theirs = 0

    def told(self) -> list[str]:
        """Return texts about lines that exceed the limits since the last call."""
        return [problem for log in self._read for line in self._new(log) for problem in self._take(log, line)]

    def _new(self, log: Path) -> list[bytes]:
        """Return the complete lines that were added."""
        with log.open("rb") as file:
            file.seek(self._read[log])
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read[log] += len(text)
        return text.splitlines()

    def _take(self, log: Path, line: bytes) -> list[str]:
        ours = _OURS.match(line)
        if ours is None and _TRITONS.match(line):
            self._theirs += 1
            return []
        if ours is not None:
            self._place[log] = b" ".join(ours.groups())
        # A line that does not begin like rsrv's lines belongs to the previous line.
        place = log, self._place[log]
        self._lines[place] += 1
        self._count += 1
        self._nbytes += len(line)
        problems = []
        if self._lines[place] == LINES + 1:
            problems.append(
                f"{log.name}: more than {LINES} lines in a second of {_text(place[1])}: {_text(line)}"
            )
        if len(line) > NBYTES:
            problems.append(f"{log.name}: a line of {len(line)} bytes: {_text(line)}")
        return problems

    def __str__(self) -> str:
        return f"the logs grew by {self._count} lines and {self._nbytes} bytes of rsrv's, and {self._theirs} lines of Triton's"


def _text(line: bytes) -> str:
    return line[:200].decode(errors="replace")
