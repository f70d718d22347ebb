"""The spare: a process that has imported everything, and becomes the next runtime when the runtime ends.

The spare shares the runtime's listening socket. From the runtime's death on, connections wait there for the spare, so no
stub starts a runtime meanwhile. The spare has no device: jax makes its client, and with it a CUDA context, when a device
is first used.
"""

import importlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

log = logging.getLogger("rsrv.runtime")

#: seconds without a model that is being built, before a spare starts; and between two looks
_QUIET_S, _LOOK_S = 2.0, 0.5
#: seconds between a spare's end and the start of the next one
_PAUSE_S = 30.0
#: niceness of the imports; only a thread of its own can have one for a time
_NICENESS = 19
#: modules of ours that import the others, and modules of jax and beside it that are imported at their first use
_MODULES = (
    "rsrv.runtime.loop",
    "rsrv.runtime.jax_device",
    "rsrv_bundle.inspection",
    "jax.dlpack",
    "jax.export",
    "jax.monitoring",
    "jaxlib.mlir.dialects.mhlo",
    "safetensors",
    "scipy.linalg",
)


def keep_spare(
    command: Sequence[str],
    environment: Mapping[str, str],
    listener: int,
    is_building: Callable[[], bool],
    rest: Callable[[float], None] = time.sleep,
) -> None:
    """Have a spare at all times, for as long as this process lives.

    `command` starts the spare, which gets the descriptor `listener`; `rest` sleeps for a number of seconds.
    """
    while True:
        quiet_s = 0.0
        while quiet_s < _QUIET_S:
            rest(_LOOK_S)
            quiet_s = 0.0 if is_building() else quiet_s + _LOOK_S
        try:
            # Nothing is written to the pipe: the kernel closes its end with this process.
            spare = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(listener,), start_new_session=True, env=environment
            )
        except OSError as error:
            ended = f"cannot be started: {error}"
        else:
            # Within the block, whose end closes the pipe.
            with spare:
                ended = f"ended with status {spare.wait()}"
        log.error("the spare runtime %s; starting another in %.0f s", ended, _PAUSE_S)
        rest(_PAUSE_S)


def wait_for_turn(server: int, modules: Sequence[str] = _MODULES) -> bool:
    """In the spare: import everything, and wait until the runtime that started this process ends.

    `server` is tritonserver's pidfd. Returns False if the server has ended, too.
    """
    thread = threading.Thread(target=_import, args=(modules,), name="import")
    thread.start()
    thread.join()
    ready, _, _ = select.select([server, sys.stdin.fileno()], [], [])
    return server not in ready


def _import(modules: Sequence[str]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    for name in modules:
        # What the runtime cannot do without fails again, and is reported, when it is used.
        with suppress(Exception):
            importlib.import_module(name)
