"""The key of Triton's APIs for operators: a file in the directory of `rsrv serve` that only the server's user can read."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from rsrv.tokens import read_token

#: Name of the key's file.
KEY_FILE: Final = "operator-key"


def operator_key(path: Path) -> str:
    """Return the key in the file. Make the file if it is missing. Raises OSError and TokenError."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{secrets.token_hex(16)}\n")
        except OSError:
            # Remove the file if writing failed, for example on a full disk. The next start would refuse a file without a key.
            path.unlink()
            raise
    return read_token(path, "the key of Triton's operator APIs").decode()
