"""`paced_runtime.py -P -m rsrv.runtime ...`: the runtime, with executions that take a stated time without a CPU.

It stands for an accelerator that works beside the CPU: jax computes the answer, then the device's thread sleeps until
RSRV_BENCH_EXECUTION_MS have passed since the execution's start, and RSRV_BENCH_ROW_MS for each of its rows. A compilation
takes RSRV_BENCH_COMPILE_MS more.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from rsrv.runtime import jax_device
from rsrv.runtime.__main__ import main
from rsrv.runtime.device import Array, Buffer, Executable, Launched, Pools
from rsrv.runtime.jax_device import JaxDevice

SECONDS = float(os.environ["RSRV_BENCH_EXECUTION_MS"]) / 1e3
ROW_SECONDS = float(os.environ.get("RSRV_BENCH_ROW_MS", "0")) / 1e3
COMPILE_SECONDS = float(os.environ.get("RSRV_BENCH_COMPILE_MS", "0")) / 1e3


def pace(arrays: Sequence[Any]) -> float:
    """Return the seconds of an execution with these inputs or outputs."""
    rows: int = math.prod(arrays[0].shape[:1])
    return SECONDS + ROW_SECONDS * rows


class PacedDevice(JaxDevice):
    """jax's device, slowed down."""

    def _compile(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(COMPILE_SECONDS)
        return super()._compile(*arguments, **options)

    def launch(
        self,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        unread: Collection[int] = (),
        pools: Pools | None = None,
    ) -> Launched:
        started = time.perf_counter()
        launched = super().launch(executable, weights, inputs, unread, pools)
        time.sleep(max(0.0, started + pace(inputs) - time.perf_counter()))
        return launched

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        outputs, seconds = super().read(launched)
        return outputs, max(pace(outputs), seconds)


if __name__ == "__main__":
    if sys.argv[1:4] != ["-P", "-m", "rsrv.runtime"]:
        sys.exit(f"expected -P -m rsrv.runtime, got {sys.argv[1:]}")
    # The runtime's entry imports the class from here when it makes its device.
    jax_device.JaxDevice = PacedDevice  # type: ignore[misc]
    sys.exit(main(sys.argv[4:]))
