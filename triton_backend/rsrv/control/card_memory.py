"""Memory of the server's GPUs as NVIDIA's driver counts it. It includes the weights, and memory of other processes."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

log = logging.getLogger(__name__)

#: Figures are reused for this many seconds, so that several clients cause only one call of the driver.
_VALID_S = 0.9


class CardMemory(NamedTuple):
    """Memory of a GPU in bytes: the part that all processes use, and the total."""

    used_bytes: int
    total_bytes: int


class NoFigures(Exception):
    """The driver reports no figures; the message says why."""


def read_card_memory(devices: Mapping[int, str]) -> dict[int, CardMemory]:
    """Ask the driver for the memory of GPUs. Leave out lost GPUs. Raises NoFigures.

    `devices` has the GPUs' names in CUDA_VISIBLE_DEVICES, by the number of the device.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NoFigures(str(error)) from None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoFigures(f"NVML says {error}") from None
    memory_of = {}
    for number, name in devices.items():
        with suppress(pynvml.NVMLError):
            if name.isdecimal():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name.encode())
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            memory_of[number] = CardMemory(int(memory.used), int(memory.total))
    pynvml.nvmlShutdown()
    return memory_of


class Cards:
    """The GPUs among a server's devices. Belongs to one event loop, and asks the driver on a thread, because it may block."""

    def __init__(
        self,
        devices: Sequence[str],
        read: Callable[[Mapping[int, str]], Mapping[int, CardMemory]] = read_card_memory,
    ) -> None:
        """`devices` has, for each device of the server, its name in CUDA_VISIBLE_DEVICES, or cpu."""
        self._gpus = {number: name for number, name in enumerate(devices) if name != "cpu"}
        self._read = read
        self._memory: Mapping[int, CardMemory] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")

    async def memory(self) -> Mapping[int, CardMemory]:
        """Return the memory of each GPU by the number of its device. It is empty if the driver does not report it."""
        now = asyncio.get_running_loop().time()
        if self._gpus and self._asking is None and now - self._asked_at >= _VALID_S:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            # If the driver takes long, return the previous figures.
            await asyncio.wait([self._asking], timeout=_VALID_S)
        return self._memory

    async def _ask(self) -> None:
        try:
            self._memory = await asyncio.to_thread(self._read, self._gpus)
        except NoFigures as error:
            log.warning("the memory of the GPUs is not shown: %s", error)
            self._gpus, self._memory = {}, {}
        finally:
            self._asked_at = asyncio.get_running_loop().time()
            self._asking = None
