"""glossary_bytes: `glossary` for clients that send and get tokens, which are the bytes of UTF-8.

Tokens are integers, so Triton's stubs do not need numpy 1.26. With Triton 24.10, they need it for strings.
"""

from __future__ import annotations

from pathlib import Path

from examples import glossary


def make(out_dir: Path) -> None:
    """Train, and write the bundle `out_dir`, replacing an existing one.

    Raises RuntimeError if the trained model gives a wrong definition.
    """
    glossary.make(out_dir, text=False)
