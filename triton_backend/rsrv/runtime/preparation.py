"""Preparation of the next runtime, which makes its device and executables while the current runtime still serves.

A GPU's memory has no room for the weights of two runtimes. So on a GPU, the next runtime only makes its CUDA context and loads
executables, including the executables of the probe and of the programs that allocate memory for weights. The context takes some
hundred megabytes outside of `memory_fraction`. The next runtime takes the memory for weights when the current one has ended.
"""

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rsrv.runtime.cuda import MemoryShare
from rsrv.runtime.device import DeviceError, Executable
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.models import modules_of
from rsrv.runtime.numerics import probes
from rsrv.settings import Settings
from rsrv.wire import paths
from rsrv_bundle import read_bundle
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.modules import Signature

log = logging.getLogger(__name__)

#: After this many seconds, no further model is prepared.
_MAX_S = 20.0


@dataclass(frozen=True, slots=True)
class Preparation:
    """A device with executables."""

    #: Settings of the device, and of the runtime that this process becomes.
    settings: Settings
    device: JaxDevice
    #: Executables that were made ahead. This list keeps them alive, because the device drops executables that nothing uses.
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

    `directory` is the runtime's directory. `own_cache`: see `ExecutableSources`. Returns None if the device cannot be used
    while the current runtime uses it. The caller must `claim` the device later. Changes CUDA_VISIBLE_DEVICES of this process.
    """
    runtime, platform = settings.runtime, settings.runtime.platform
    if devices[number] == "cpu":
        if platform not in ("auto", "cpu"):
            return None
        platform = "cpu"
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[number]
    known = KnownModules(directory / paths.MODULES)
    sources = ExecutableSources(runtime.compilation_cache_dir, repository, known, own_cache)
    memory = MemoryShare(runtime.memory_fraction)
    try:
        device = JaxDevice(platform, sources, memory=memory, numerics=runtime.numerics, claims=False)
    except DeviceError as error:
        # For example, the card admits only one process, or has no room for another context.
        log.info("the next runtime can open its device only after the current runtime has ended: %s", error)
        return None
    made = Preparation(settings, device, [])

    def read_signature(blob: bytes, _: str) -> Signature:
        return known[hashlib.sha256(blob).hexdigest()]

    if device.hardware.platform != "cpu":
        with suppress(Exception):
            made.executables.extend([device.compile(*module) for module in probes(runtime.numerics)])
    until = time.monotonic() + _MAX_S
    for folder in sorted(repository.glob("*/*/bundle")):
        if time.monotonic() < until:
            # Ignore errors here, because the runtime reports them later.
            with suppress(Exception):
                name = folder.parent.parent.name
                modules = modules_of(folder, settings, name, device.hardware, read_signature)
                made.executables.extend(
                    [device.compile(module, signature) for _, module, signature in modules]
                )
                # Prepare the allocation of all the model's tensors. If the first load needs fewer, because some are equal or
                # another model has loaded them, it still compiles a program.
                weights = read_bundle(folder, verify=False).weights
                device.prepare_upload([(weight.shape, numpy_dtype(weight.dtype)) for weight in weights])
    # Do this last, because from here until the claim, all allocations take memory from the prepared heap.
    device.prepare_claim()
    log.info("%d executables are ready for the next runtime", len(made.executables))
    return made
