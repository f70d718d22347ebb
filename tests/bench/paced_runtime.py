"""`paced_runtime.py -P -m rsrv.runtime ...`: the runtime, whose executions take a stated time without using a CPU.

It represents an accelerator that works concurrently with the CPU. jax computes the answer. An execution starts at its launch
or at the end of the previous execution, whichever is later. It takes RSRV_BENCH_EXECUTION_MS, plus RSRV_BENCH_ROW_MS for each
row. Each compilation takes RSRV_BENCH_COMPILE_MS longer.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rsrv.runtime import jax_device
from rsrv.runtime.__main__ import main
from rsrv.runtime.device_executables import DeviceExecutables
from rsrv.runtime.device_executions import DeviceExecutions, LaunchedExecution
from rsrv.runtime.jax_device import JaxDevice

SECONDS = float(os.environ["RSRV_BENCH_EXECUTION_MS"]) / 1e3
ROW_SECONDS = float(os.environ.get("RSRV_BENCH_ROW_MS", "0")) / 1e3
COMPILE_SECONDS = float(os.environ.get("RSRV_BENCH_COMPILE_MS", "0")) / 1e3


def pace(arrays: Sequence[Any]) -> float:
    """Return how many seconds an execution with these outputs must last."""
    rows: int = math.prod(arrays[0].shape[:1])
    return SECONDS + ROW_SECONDS * rows


class PacedExecutables(DeviceExecutables):
    """Executables whose compilation takes longer."""

    def _compile(self, *arguments: Any) -> Any:
        time.sleep(COMPILE_SECONDS)
        return super()._compile(*arguments)


class PacedExecutions(DeviceExecutions):
    """Executions that last the stated time, one after the other."""

    def _wait(self, execution: LaunchedExecution) -> float:
        # Read these attributes before `ready`. Another thread sets `ready` before it empties them.
        outputs, previous = execution.outputs, execution.previous
        if execution.ready is None:
            free = execution.started if previous is None else max(execution.started, self._wait(previous))
            for output in outputs:
                output.block_until_ready()
            time.sleep(max(0.0, free + pace(outputs) - time.perf_counter()))
        return super()._wait(execution)


class PacedDevice(JaxDevice):
    """jax's device, slowed down. Like a GPU, it executes concurrently with the thread that launches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, asynchronous_cpu=True, **options)


if __name__ == "__main__":
    if sys.argv[1:4] != ["-P", "-m", "rsrv.runtime"]:
        sys.exit(f"expected -P -m rsrv.runtime, got {sys.argv[1:]}")
    # The main module of the runtime imports this class from jax_device when it makes its device.
    jax_device.JaxDevice = PacedDevice  # type: ignore[misc]
    # JaxDevice takes these classes from jax_device.
    jax_device.DeviceExecutables = PacedExecutables  # type: ignore[attr-defined]
    jax_device.DeviceExecutions = PacedExecutions  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[4:]))
