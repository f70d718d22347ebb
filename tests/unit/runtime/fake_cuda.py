"""A fake of CUDA's driver library in host memory. It executes each call of `Driver` as late as CUDA may."""

import ctypes
from collections.abc import Callable
from typing import Any

_CONTEXT, _STREAM = 7, 8
_NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    700: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    712: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
}


class FakeCuda:
    """The driver's functions by their names. A function in `failing` does nothing and returns the CUresult that is given there.

    Copies are made only when a caller waits for an event that was recorded after them.
    """

    def __init__(self, *, read_only: bool = True, failing: dict[str, int] | None = None) -> None:
        self._read_only = read_only
        self.failing = failing or {}
        self._late: list[Callable[[], object]] = []
        #: Number of contexts on the stack of current contexts.
        self.depth = 0
        #: Bytes and flags of page-locked memory, by address.
        self.locked: dict[int | None, tuple[int, int]] = {}
        #: Bytes of each copy.
        self.copied: list[int] = []
        #: Number of events that exist.
        self.events = 0

    def __getattr__(self, function: str) -> Any:
        def called(*arguments: Any) -> int:
            does = vars(FakeCuda).get(f"_{function}")
            if code := self.failing.get(function):
                return code
            return (does(self, *arguments) or 0) if does is not None else 0

        return called

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context._obj.value = _CONTEXT

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        assert attribute == 113
        value._obj.value = int(self._read_only)

    def _cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        assert context.value == _CONTEXT
        self.depth += 1

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.depth -= 1

    def _cuMemHostRegister_v2(self, location: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: int) -> None:
        assert self.depth
        self.locked[location.value] = (nbytes.value, flags)

    def _cuMemHostUnregister(self, location: ctypes.c_void_p) -> None:
        assert self.depth
        del self.locked[location.value]

    def _cuGetErrorName(self, code: int, name: Any) -> None:
        name._obj.value = _NAMES.get(code)

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == 1
        stream._obj.value = _STREAM

    def _cuMemcpyHtoDAsync_v2(
        self, to: ctypes.c_uint64, source: ctypes.c_void_p, nbytes: ctypes.c_size_t, stream: ctypes.c_void_p
    ) -> None:
        assert self.depth
        assert stream.value == _STREAM
        self.copied.append(nbytes.value)
        target, source_at, count = to.value, source.value, nbytes.value
        assert source_at is not None
        self._late.append(lambda: ctypes.memmove(target, source_at, count))

    def _cuMemcpyDtoHAsync_v2(
        self, to: ctypes.c_void_p, source: ctypes.c_uint64, nbytes: ctypes.c_size_t, stream: ctypes.c_void_p
    ) -> None:
        assert to.value is not None
        self._cuMemcpyHtoDAsync_v2(ctypes.c_uint64(to.value), ctypes.c_void_p(source.value), nbytes, stream)

    def _cuEventCreate(self, event: Any, flags: int) -> None:
        assert flags == 3
        event._obj.value = 1
        self.events += 1

    def _cuEventSynchronize(self, event: ctypes.c_void_p) -> None:
        self._cuStreamSynchronize(event)

    def _cuStreamSynchronize(self, _: ctypes.c_void_p) -> None:
        while self._late:
            self._late.pop(0)()

    def _cuEventDestroy_v2(self, event: ctypes.c_void_p) -> None:
        self.events -= 1
