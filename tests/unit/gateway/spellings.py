"""Different spellings of a JSON request, all of which tritonserver accepts."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Mapping


def _gzip(body: bytes) -> tuple[bytes, str]:
    return gzip.compress(body), "gzip"


#: Functions that spell a request in another way. They return the body and its Content-Encoding.
SPELLINGS: Mapping[str, Callable[[bytes], tuple[bytes, str | None]]] = {
    "plain": lambda body: (body, None),
    "identity": lambda body: (body, "identity"),
    "gzip": _gzip,
    "deflate": lambda body: (zlib.compress(body), "deflate"),
    "late in gzip": lambda body: _gzip(_late(body, 300_000)),
    "late": lambda body: (_late(body, 17 << 20), None),
    "escaped": lambda body: (body.replace(b"e_", b"e\\u005F").replace(b"sha", b"sh\\u0061"), None),
    "marked": lambda body: (b"\xef\xbb\xbf \n" + body + b"\0 the end", None),
}


def _late(body: bytes, size: int) -> bytes:
    """Put a long text at the beginning of the object."""
    return b'{"id": "' + b"i" * size + b'", ' + body[1:]
