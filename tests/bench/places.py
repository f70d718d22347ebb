"""Folders of the benchmark's files, and the settings of its runtime with a stated speed. Standard library only."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "tests" / "bench"
#: Bundles, model repositories, logs, and the result.
WORK = ROOT / "build" / "bench"
RESULT = WORK / "result.json"
#: The Python environment of the plain models. It is in the folder of other fetched files.
PLAIN_ENVIRONMENT = ROOT / ".triton" / "bench-plain"


def paced(execution_ms: float = 0, row_ms: float = 0, compile_ms: float = 0) -> dict[str, str]:
    """Return the environment of a server whose runtimes take these times (see paced_runtime.py)."""
    return {
        "RSRV_RUNTIME_PYTHON": str(HERE / "paced_python.sh"),
        "RSRV_BENCH_PYTHON": sys.executable,
        "RSRV_BENCH_EXECUTION_MS": str(execution_ms),
        "RSRV_BENCH_ROW_MS": str(row_ms),
        "RSRV_BENCH_COMPILE_MS": str(compile_ms),
    }
