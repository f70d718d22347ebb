"""Build the example bundles for long tests and benches. `make bundles` runs this.

Other tests need only a few of them, which are built in seconds. Bundles that are up to date are not built again.
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
    """Build these example bundles, or all, if they are missing. Return their folder.

    Safe to call from two processes at once.
    """
    OUTPUT.parent.mkdir(exist_ok=True)
    with OUTPUT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, str(MAKER), "-o", str(OUTPUT), *names], check=True, cwd=ROOT)
    return OUTPUT


if __name__ == "__main__":
    ensure()
