"""What children write, in one log: line by line, each with its author's name."""

from __future__ import annotations

import json

#: longest line that is waited for, bytes; what goes on is cut here. None of rsrv's is as long
_LONGEST = 1 << 20


class Prefixer:
    """Puts a name before each line of one process.

    Whole lines come out together, so that writing what comes out at once leaves no line of another one in between.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"[{name}] ".encode()
        self._field = f'{{"process": {json.dumps(name)}, '.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """What `data` completes: lines, each with its prefix and its end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._named(line) for line in lines)

    def end(self) -> bytes:
        """What was left without an end."""
        rest, self._rest = self._rest, b""
        return self._named(rest) if rest else b""

    def _named(self, line: bytes) -> bytes:
        """What is JSON stays JSON: there the name is a field."""
        if line.startswith(b'{"') and _is_json(line):
            return self._field + line[1:] + b"\n"
        return self._prefix + line + b"\n"


def _is_json(line: bytes) -> bool:
    """Not a piece of it, nor what only looks like it."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
