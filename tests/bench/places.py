"""Where the benchmark keeps what it makes. Standard library only."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "tests" / "bench"
#: Bundles, model repositories, logs, and the result.
WORK = ROOT / "build" / "bench"
RESULT = WORK / "result.json"
#: The environment of the plain model, beside what else was fetched.
PLAIN_ENVIRONMENT = ROOT / ".triton" / "bench-plain"
