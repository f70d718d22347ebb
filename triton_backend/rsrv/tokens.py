"""Secrets: the files that they are in, and who sends them."""

import hmac
import os
import stat
from pathlib import Path


def read_token(path: Path, key: str) -> bytes:
    """What it holds, one line. Raises ValueError: the file that the setting `key` names is no secret."""
    try:
        token = path.expanduser().read_bytes().strip()
        mode = stat.S_IMODE(os.stat(path.expanduser()).st_mode)
    except OSError as error:
        raise ValueError(f"{key}: {error}") from None
    if mode & 0o004:
        raise ValueError(f"{key}: everybody can read {path}: chmod o-r it, and change the token")
    if not (token.isascii() and token.decode("ascii", "replace").isprintable()) or len(token.split()) != 1:
        raise ValueError(f"{key}: {path} holds no token: one line of ASCII without spaces")
    return token


def bears(authorization: str | bytes, token: bytes) -> bool:
    """Whether a request with this header `authorization` may come in. The scheme is in letters of any case (RFC 7235)."""
    # Over HTTP, bytes that are no text come as surrogates.
    sent = authorization.encode(errors="surrogateescape") if isinstance(authorization, str) else authorization
    scheme, _, secret = sent.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(secret, token)
