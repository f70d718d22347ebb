"""Detection of errors of jax and of CUDA's driver that mean a lack of memory or the loss of the device."""

import errno
import re
from collections.abc import Callable
from types import TracebackType

from rsrv.runtime.device import OutOfMemory

#: CUDA errors after which every call of the process fails. The documentation of `CUresult` in NVIDIA's driver API says of most of them
#: that they leave the process in an inconsistent state. The list also has uncorrectable errors of memory and of links, errors about a
#: lost context or driver, and CUDA_ERROR_UNKNOWN.
_LOST = re.compile(
    r"CUDA_ERROR_(ILLEGAL_(ADDRESS|INSTRUCTION)|MISALIGNED_ADDRESS|INVALID_(ADDRESS_SPACE|PC)|LAUNCH_(FAILED|TIMEOUT)|"
    r"HARDWARE_STACK_ERROR|ASSERT|TENSOR_MEMORY_LEAK|CONTAINED|EXTERNAL_DEVICE|(ECC|NVLINK)_UNCORRECTABLE|"
    r"CONTEXT_IS_DESTROYED|DEINITIALIZED|MPS_CLIENT_TERMINATED|UNKNOWN)\b"
)


class ErrorExaminer:
    """Context that examines each exception that leaves it."""

    def __init__(self, lost: Callable[[str], object]) -> None:
        #: Function to call with an error of CUDA after which the process can do nothing more with the device.
        self.lost = lost

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.examine(error)

    def examine(self, error: BaseException) -> None:
        """Raise OutOfMemory if the error means a lack of memory. Call `lost` if it means that the device is lost."""
        if _exhausted(error):
            raise OutOfMemory(str(error)) from None
        if _LOST.search(str(error)):
            self.lost(str(error))


def _exhausted(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, OutOfMemory):
        return True
    names = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")
    return isinstance(error, MemoryError) or any(name in str(error) for name in names)
