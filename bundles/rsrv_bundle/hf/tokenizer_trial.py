"""Try untrusted tokenizers with long texts, in a separate process with a time limit for each text.

A short regular expression can take hours for a text of some kilobytes. A tokenizer with a high limit of characters in a word can
also take hours.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import permutations
from math import ceil
from typing import Any, Final

from rsrv_bundle.errors import BundleError

#: Maximum number of bytes of a tried text.
_MAX_BYTES = 256 * 1024
#: Maximum number of bytes that a server reads for each token, as in `rsrv.hooks.text`.
_BYTES_PER_TOKEN = 64
#: A text may take one CPU second, and another second for each multiple of this many bytes.
_BYTES_PER_SECOND = 64 * 1024
#: After this many CPU seconds, no further text is tried.
_MAX_SECONDS = 120
#: Seconds after which the process is killed, even if a busy machine gave it little CPU time.
_PATIENCE_S = 1200
#: Each text repeats one of these: letters of both cases, digits, spaces, ends of lines, punctuation marks, accents, other
#: scripts.
_UNITS: Final = (
    "a",
    "A",
    "1",
    " ",
    "\n",
    "\r\n",
    ".",
    "'",
    "-",
    "é",
    "\u0301",
    "東",
    "Aa",
    "a1",
    "a ",
    " \n",
    "\U0001f680",
)
#: Texts also repeat the characters and words of the tokenizer's regular expressions, at most this many characters and words.
_MAX_FOUND = 20
#: Number of bytes of the texts that repeat two characters.
_PAIR_BYTES = 600
#: A character that few regular expressions match. An expression that fails at this character may try all other ways to match the
#: text in front of it.
_RARE: Final = "\ue000"


def try_tokenizer(tokenizer: str, longest: int) -> None:
    """Raise BundleError if a tokenizer is too slow for a text that a server would read, or fails on such a text.

    tokenizer: the text of tokenizer.json. longest: number of tokens of the longest row.
    """
    size = min(_MAX_BYTES, _BYTES_PER_TOKEN * longest)
    if why := _trouble(tokenizer, size):
        raise BundleError(
            f"tokenizer.json: {why}; a client could stop the server with such texts. Simplify its regular expressions, and lower"
            " max_input_chars_per_word"
        )


def _trouble(tokenizer: str, size: int) -> str:
    """Return why a tokenizer cannot read texts of at most `size` bytes, or an empty text if it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(size)],
            input=tokenizer.encode(),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {_PATIENCE_S} s for some texts of {size:,} bytes"
    if not done.returncode:
        return ""
    text = (done.stdout.decode(errors="replace").splitlines() or ["a text"])[-1]
    if done.returncode == -signal.SIGKILL:
        raise BundleError(
            "tokenizer.json: the process that tries it was killed: perhaps the machine has too little memory"
        )
    if done.returncode == -signal.SIGXCPU:
        return f"takes more than {_seconds(size)} s of a processor for {text}"
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"signal {-done.returncode}"]
    return f"fails with {text}: {lines[-1]:.200}"


def _seconds(size: int) -> int:
    return 1 + size // _BYTES_PER_SECOND


def texts(tokenizer: Any, size: int) -> Iterator[tuple[str, str]]:
    """Yield texts of at most `size` bytes, each with its description.

    `tokenizer` is the content of tokenizer.json. Its regular expressions supply characters and words.
    """
    patterns = list(_patterns(tokenizer))
    characters = list(dict.fromkeys("".join(patterns)))[:_MAX_FOUND]
    words = list(dict.fromkeys(word for pattern in patterns for word in re.findall(r"\w{2,}", pattern)))[
        :_MAX_FOUND
    ]
    small = min(size, _PAIR_BYTES)
    pairs = ["".join(pair) for pair in permutations(dict.fromkeys(("a", "1", " ", *characters)), 2)]
    for most, units in ((small, pairs), (size, dict.fromkeys((*_UNITS, *characters, *words)))):
        for unit in units:
            # Half of the texts end with all characters of the regular expressions. Otherwise, an expression is not even tried if
            # the text lacks a character that the expression needs.
            for end in ("", _RARE + "".join(characters)):
                count = (most - len(end.encode())) // len(unit.encode())
                if count > 0:
                    yield f"{count:,} times {unit!r:.40}{end and f' and {end!r:.40}'}", unit * count + end


def _patterns(tokenizer: Any) -> Iterator[str]:
    """Yield the regular expressions of a tokenizer, at any depth, but not the words of its vocabulary."""
    waiting = [tokenizer.get(part) for part in ("normalizer", "pre_tokenizer")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(value.get("Regex"), str):
                yield value["Regex"]
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def main() -> int:
    """Try the tokenizer on standard input. The argument is the maximum number of bytes of a text."""
    from tokenizers import Tokenizer

    size, source = int(sys.argv[1]), sys.stdin.buffer.read().decode()
    tokenizer = Tokenizer.from_str(source)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    begun = time.process_time()
    for name, text in texts(json.loads(source), size):
        if time.process_time() - begun > _MAX_SECONDS:
            break
        print(name.encode(errors="backslashreplace").decode(), flush=True)
        limit = ceil(time.process_time()) + _seconds(size)
        resource.setrlimit(
            resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
        )
        try:
            tokenizer.encode(text)
        except BaseException as error:  # noqa: BLE001 - a panic of the package is not an Exception
            print(f"{error!s:.300}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
