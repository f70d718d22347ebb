"""The example bundles, for everything that starts from them; `make bundles` runs this.

Their maker leaves alone what is up to date, so this costs a moment only.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKER = ROOT / "bundles" / "examples" / "build.py"
OUTPUT = ROOT / "build" / "bundles"


def ensure(names: Sequence[str] = ()) -> Path:
    """Returns the folder of the example bundles; these, or all of them, are built if need be. Safe to call from two
    processes at once."""
    OUTPUT.parent.mkdir(exist_ok=True)
    with OUTPUT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, str(MAKER), "-o", str(OUTPUT), *names], check=True, cwd=ROOT)
    return OUTPUT


if __name__ == "__main__":
    ensure()
