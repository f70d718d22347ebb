"""glossary_bytes: `glossary` for clients that send and get tokens, which are the bytes of UTF-8.

Triton's stubs then need no numpy 1.26, which they would need for text.
"""

from __future__ import annotations

from pathlib import Path

from examples import glossary


def make(out_dir: Path) -> None:
    """Train, and write the bundle `out_dir`, replacing an existing one. RuntimeError if a definition is not known."""
    glossary.make(out_dir, text=False)
