"""Transfers of weights to jax's device, and of large outputs back to the host: on a CPU and by CUDA's driver."""

import ctypes
import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from rsrv.limits import spare_memory
from rsrv.runtime.allocation import Reuse
from rsrv.runtime.cuda import CopyStream, CudaError, DeviceCopy, Driver
from rsrv.runtime.device import (
    Abandoned,
    Array,
    ArrayKind,
    Buffer,
    DeviceError,
    OutOfMemory,
    Targets,
    never,
)
from rsrv.runtime.device_errors import ErrorExaminer
from rsrv.runtime.device_memory import DeviceMemory
from rsrv.runtime.jax_compiler import ALLOCATION_END, HelperPrograms

#: Maximum number of bytes of an upload whose copies are enqueued. This suffices to keep PCIe busy while this thread waits for
#: the interpreter. Abandoning an upload waits for these copies, which takes 10 ms at 25 GB/s.
_IN_FLIGHT_BYTES = 256 << 20
#: On a CPU, check that the host has room for weights of at least this many bytes.
_LARGE_BYTES = 1 << 20

#: Function that copies an array to the device with jax, or uses it in place, and waits for it.
Put = Callable[[Array], Any]


class Transfers(Protocol):
    """Transfers of one device. `Device` explains the methods without a docstring."""

    def prepare_upload(self, kinds: Sequence[ArrayKind]) -> None:
        """Prepare uploads of arrays with these shapes and types.

        This does the steps that take no memory of the device, so that the first upload is faster.
        """

    def upload(
        self,
        arrays: Iterable[Array],
        abandoned: Callable[[], bool] = never,
        kinds: Sequence[ArrayKind] | None = None,
    ) -> list[Buffer]: ...

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None: ...

    def page_lock(self, address: int, nbytes: int, *, written: bool = False) -> Callable[[], None]: ...

    def start_outward(self, outputs: Sequence[Any], targets: Targets) -> ctypes.c_void_p:
        """Enqueue the copies of outputs to `targets`, and return an event for `finish_outward`.

        The outputs must stay until `finish_outward` has returned.
        """

    def finish_outward(self, event: ctypes.c_void_p) -> None:
        """Wait for the copies before an event."""


class CpuTransfers:
    """Transfers of jax's CPU, which uses memory of the host. An upload is one copy."""

    def __init__(self, put: Put, examiner: ErrorExaminer) -> None:
        self._put = put
        self._examiner = examiner
        self._reuse = Reuse()

    def prepare_upload(self, kinds: Sequence[ArrayKind]) -> None:
        pass

    def upload(
        self,
        arrays: Iterable[Array],
        abandoned: Callable[[], bool] = never,
        kinds: Sequence[ArrayKind] | None = None,
    ) -> list[Buffer]:
        self._require(kinds or ())
        arrived: list[Buffer] = []
        try:
            for array in arrays:
                if abandoned():
                    raise Abandoned
                # Copy the array, because its memory belongs to the host copy, and jax would use an aligned array in place.
                arrived.append(Buffer(self._reuse.put(array, self._put)))
            if abandoned():
                raise Abandoned
        except BaseException as error:
            self.free(arrived)
            self._examiner.examine(error)
            raise
        finally:
            self._give_back()
        return arrived

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None:
        buffer: Any
        for buffer in buffers:
            buffer.delete()
            self._reuse.free(buffer, reuse=reuse)
        if not reuse:
            _drop_arrays()

    def page_lock(self, address: int, nbytes: int, *, written: bool = False) -> Callable[[], None]:
        return lambda: None

    def start_outward(self, outputs: Sequence[Any], targets: Targets) -> ctypes.c_void_p:
        raise AssertionError("a CPU has no targets")

    def finish_outward(self, event: ctypes.c_void_p) -> None:
        raise AssertionError("a CPU has no targets")

    def _require(self, kinds: Sequence[ArrayKind]) -> None:
        """Raise OutOfMemory if the host has no room for these arrays. Otherwise, the kernel would kill a process."""
        needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)
        if needed < _LARGE_BYTES or needed <= spare_memory():
            return
        # Memory of evicted weights that was kept for reuse does not count as free. Return it to the system, and check again.
        self._give_back()
        if needed > (spare := spare_memory()):
            raise OutOfMemory(f"{needed} bytes of host memory are needed, and {spare} are free")

    def _give_back(self) -> None:
        """Return the memory that was kept for reuse to the system."""
        if self._reuse.give_back():
            _drop_arrays()


def _drop_arrays() -> None:
    """Make jax drop the freed arrays that it used in place.

    jax drops them in the next garbage collection. A collection of generation 0 suffices.
    """
    gc.collect(0)


class CudaTransfers:
    """Transfers of a GPU, by streams of the driver. They do not wait for executions that are launched later."""

    def __init__(
        self,
        driver: Driver,
        memory: DeviceMemory,
        programs: HelperPrograms,
        put: Put,
        examiner: ErrorExaminer,
    ) -> None:
        """Make the streams. Raises CudaError."""
        self._driver = driver
        self._memory = memory
        self._programs = programs
        self._put = put
        self._examiner = examiner
        #: Stream for weights (inward), and stream for large outputs (outward).
        self._inward, self._outward = CopyStream(driver), CopyStream(driver)

    def prepare_upload(self, kinds: Sequence[ArrayKind]) -> None:
        self._allocator(kinds)

    def upload(
        self,
        arrays: Iterable[Array],
        abandoned: Callable[[], bool] = never,
        kinds: Sequence[ArrayKind] | None = None,
    ) -> list[Buffer]:
        if kinds is None:
            arrays = list(arrays)
            kinds = [(array.shape, array.dtype) for array in arrays]
        if not kinds:
            return []  # Other models have all tensors of this model on the device.
        buffers: list[Any] = []
        copying: deque[tuple[Array, ctypes.c_void_p]] = deque()
        copying_bytes = 0
        try:
            buffers = self._allocate(tuple(kinds))
            for array, buffer in zip(arrays, buffers, strict=True):
                while copying and copying_bytes + array.nbytes > _IN_FLIGHT_BYTES:
                    copying_bytes -= self._finish(copying)
                if abandoned():
                    raise Abandoned
                if array.nbytes:
                    source = np.asarray(array, order="C")
                    copy = DeviceCopy(source, buffer.unsafe_buffer_pointer())
                    copying.append((source, self._inward.start([copy])))
                    copying_bytes += array.nbytes
            while copying:
                if abandoned():
                    raise Abandoned
                self._finish(copying)
        except BaseException as error:
            # Wait for the copies in flight, because they read host memory that the caller may unmap next.
            while copying:
                with suppress(CudaError):
                    self._finish(copying)
            try:
                self.free(buffers)
            finally:  # If the context is lost, `free` also fails.
                self._examiner.examine(error)
            if isinstance(error, CudaError):
                raise DeviceError(str(error)) from None
            raise
        return buffers

    def _allocate(self, kinds: tuple[ArrayKind, ...]) -> list[Any]:
        """Return arrays without contents, for inward copies that start from now on.

        jax's allocator may allocate memory that earlier executions still use. So the stream waits for these executions, once
        for all arrays. `device_put` is not used, because jax transfers the inputs of executions by the same stream.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in (*kinds, ALLOCATION_END)]
        # In addition to the arrays, the allocation returns a table of their addresses.
        self._memory.require([*sizes, 8 * len(sizes)])
        allocated: list[Any]
        *allocated, end = self._allocator(kinds)()
        end.__dlpack__(stream=self._inward.handle)
        following = iter(allocated)
        # An executable cannot return an array that has no elements and that nothing has written (jaxlib 0.10.2).
        arrays = [
            next(following) if math.prod(shape) else self._put(np.empty(shape, dtype))
            for shape, dtype in kinds
        ]
        # Do this last, because only returned arrays are freed later.
        for array in allocated:
            self._memory.note(id(array), array)
        return arrays

    def _allocator(self, kinds: Sequence[ArrayKind]) -> Any:
        """Return the program that allocates the arrays with elements."""
        return self._programs.allocator(tuple(kind for kind in kinds if math.prod(kind[0])))

    def _finish(self, copying: deque[tuple[Array, ctypes.c_void_p]]) -> int:
        """Wait until the oldest copy is complete. Return its number of bytes."""
        source, event = copying.popleft()
        self._inward.finish(event)
        return source.nbytes

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None:
        buffer: Any
        for buffer in buffers:
            self._memory.forget(id(buffer))
            buffer.delete()

    def page_lock(self, address: int, nbytes: int, *, written: bool = False) -> Callable[[], None]:
        try:
            return self._driver.page_lock(address, nbytes, written=written)
        except CudaError as error:
            raise DeviceError(f"{nbytes} bytes cannot be page-locked: {error}") from None

    def start_outward(self, outputs: Sequence[Any], targets: Targets) -> ctypes.c_void_p:
        """Enqueue the copies of outputs to `targets`. See `Transfers`.

        jax itself would copy to fresh memory, which DMA cannot reach. If an executable had its outputs in jax's memory space
        `pinned_host`, they would arrive in memory of jax, and the host would have to copy them once more.
        """
        copies = []
        for index, arrays in targets.items():
            # This makes the stream wait for the execution. The thread does not wait.
            outputs[index].__dlpack__(stream=self._outward.handle)
            address = outputs[index].unsafe_buffer_pointer()
            for array in arrays:
                copies.append(DeviceCopy(array, address, to_host=True))
                address += array.nbytes
        return self._outward.start(copies)

    def finish_outward(self, event: ctypes.c_void_p) -> None:
        self._outward.finish(event)
