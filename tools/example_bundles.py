"""Builds the example bundles, unless they are already there and their makers have not changed since.

python tools/example_bundles.py -o build/bundles
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKER = ROOT / "bundles" / "examples" / "build.py"
DEFAULT_OUTPUT = ROOT / "build" / "bundles"


def sources_digest() -> str:
    """Changes with everything in this tree that the example bundles are made from."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted((ROOT / "bundles").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"\n{path.relative_to(ROOT)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def ensure(output: Path = DEFAULT_OUTPUT) -> Path:
    """Returns the folder of the example bundles, built if need be. Safe to call from two processes at once."""
    output.parent.mkdir(parents=True, exist_ok=True)
    stamp = output.parent / f"{output.name}.stamp"
    with (output.parent / f"{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        digest = sources_digest()
        if not stamp.exists() or stamp.read_text() != digest:
            subprocess.run([sys.executable, str(MAKER), "-o", str(output)], check=True, cwd=ROOT)
            stamp.write_text(digest)
    return output


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT_OUTPUT, help="default: %(default)s")
    print(f"example bundles in {ensure(parser.parse_args().output)}")


if __name__ == "__main__":
    main()
