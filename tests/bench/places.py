"""The folders of the benchmark's products. Standard library only."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "tests" / "bench"
#: Bundles, model repositories, logs, and the result.
WORK = ROOT / "build" / "bench"
RESULT = WORK / "result.json"
#: The environment of the plain model, beside other fetched files.
PLAIN_ENVIRONMENT = ROOT / ".triton" / "bench-plain"
