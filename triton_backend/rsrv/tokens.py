"""Bearer tokens: reads their files, and checks requests."""

import hmac
import os
import stat
from pathlib import Path


class TokenError(ValueError):
    """A token's file cannot be used. The message names the file and says why."""


def read_token(path: Path, key: str) -> bytes:
    """Return the token in a file. `key` is the setting that names the file.

    Raises TokenError if the file cannot be read, has no token, or can be read by every user.
    """
    try:
        token = parse_token(path.expanduser().read_bytes(), path, key)
        mode = stat.S_IMODE(os.stat(path.expanduser()).st_mode)
    except OSError as error:
        raise TokenError(f"{key}: {error}") from None
    if mode & 0o004:
        raise TokenError(f"{key}: every user can read {path}: run chmod o-r on it, and change the token")
    return token


def parse_token(content: bytes, path: Path, key: str) -> bytes:
    """Return the token in the content of a file. Raises TokenError. `key` is the setting or the option that names the file."""
    token = content.strip()
    if not (token.isascii() and token.decode("ascii", "replace").isprintable()) or len(token.split()) != 1:
        raise TokenError(f"{key}: {path} holds no token: one line of ASCII without spaces")
    return token


def bears(authorization: str | bytes, token: bytes) -> bool:
    """Return True if the header `authorization` has the token.

    The header's scheme may be in upper or lower case, and any number of blanks may follow it (RFC 9110).
    """
    # HTTP headers with bytes that are not text arrive as text with surrogates.
    sent = authorization.encode(errors="surrogateescape") if isinstance(authorization, str) else authorization
    scheme, _, secret = sent.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(secret.lstrip(b" "), token)
