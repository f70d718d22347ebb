"""Work of the next runtime before its turn, beside the one that still serves: on a CPU, its device and executables.

A GPU's memory may have no room for two, so there the next runtime compiles when its turn has come.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rsrv.runtime.device import Executable
from rsrv.runtime.jax_device import ExecutableSources, JaxDevice
from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.models import modules_of
from rsrv.settings import Settings
from rsrv.wire import paths
from rsrv_bundle.modules import Signature

log = logging.getLogger("rsrv.runtime")

#: seconds after which no further model is compiled ahead
_MAX_S = 20.0


@dataclass(frozen=True, slots=True)
class Preparation:
    """A device with executables, for as long as the settings stay as they were."""

    settings: Settings
    device: JaxDevice
    #: The device forgets executables that have no user.
    executables: list[Executable]


def prepare(
    settings: Settings,
    repository: Path,
    directory: Path,
    devices: Sequence[str],
    number: int,
    own_cache: Path | None = None,
) -> Preparation | None:
    """Prepare the device with this number, and the models of the repository that a runtime has compiled before.

    `directory` is the runtime's, and `own_cache` as in `ExecutableSources`. Returns None if the device is a GPU.
    """
    runtime = settings.runtime
    if devices[number] != "cpu" or runtime.platform not in ("auto", "cpu"):
        return None
    known = KnownModules(directory / paths.MODULES)
    sources = ExecutableSources(runtime.compilation_cache_dir, repository, known, own_cache)
    device = JaxDevice("cpu", sources, numerics=runtime.numerics)
    made = Preparation(settings, device, [])

    def look(blob: bytes, _: str) -> Signature:
        return known[hashlib.sha256(blob).hexdigest()]

    until = time.monotonic() + _MAX_S
    for folder in sorted(repository.glob("*/*/bundle")):
        if time.monotonic() < until:
            # What does not work here is the runtime's to report.
            with suppress(Exception):
                modules = modules_of(folder, settings, folder.parent.parent.name, device.hardware, look)
                made.executables.extend(
                    [device.compile(module, signature) for _, module, signature in modules]
                )
    log.info("%d executables are there for the next runtime", len(made.executables))
    return made
