"""Requests in shared memory, for a server on this machine that allows it.

A region is a file in /dev/shm. The client removes the file once the server has mapped it, so that a killed client leaves no
file behind. The server keeps its mapping until a client unregisters the region. `close` does this, or, if this process was
killed, the next client on this machine.
"""

import asyncio
import errno
import math
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from rsrv.client.retries import Code
from rsrv.client.signature import ModelSignature
from rsrv.client.transport import AttemptFailed, InferRequest, InferTensor, RegionPart, ServerConnection

#: Smaller requests are sent as bytes, which is as fast.
LEAST_BYTES: Final = 64 << 10
#: Sizes of regions are multiples of this, so that a region fits requests of similar sizes.
STEP_BYTES: Final = 1 << 20
#: Tensors begin at multiples of this offset in a region.
ALIGN_BYTES: Final = 64
#: A new region is made only for requests of at most this share of the free space in /dev/shm, which the server's models also use.
SHARE: Final = 0.25
#: Limit in seconds for each call about a region.
CALL_S: Final = 5.0
#: Seconds before `close` tries again to unregister a region that is in use.
IN_USE_S: Final = 0.05

_FOLDER: Final = Path("/dev/shm")
_NAME: Final = "rsrv-client"
#: Numbers in the names of regions. All clients of this process share the counter, because a name must be unique.
_numbers = count()


class Region:
    """Memory that this process and the server share."""

    def __init__(self, size: int) -> None:
        self.name = f"{_owner()}-{next(_numbers)}"
        self.size = size
        file = os.open(_FOLDER / self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserve the memory now. Otherwise, a write to a full file system would kill this process.
            os.posix_fallocate(file, 0, size)
            self.memory = mmap.mmap(file, size)
        except OSError:
            self.unlink()
            raise
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Remove the file. Processes that have mapped the file keep its memory."""
        (_FOLDER / self.name).unlink(missing_ok=True)


class Regions:
    """The regions of one client. Requests reuse regions, so there are as many regions as requests in flight."""

    def __init__(self, connection: ServerConnection, unusable: str = "") -> None:
        """`unusable` is the reason why no request may use shared memory, or empty if requests may use it."""
        self._connection = connection
        self._free: list[Region] = []
        #: Names of all regions that the server may have mapped.
        self._registered: set[str] = set()
        #: Names of registered regions that no request gets any more: regions that were too small, and regions of unanswered
        #: requests, which the server may still use.
        self._abandoned: list[str] = []
        #: Why requests are sent as bytes.
        self.reason = unusable or "no request was large enough for shared memory"
        #: True if no further request tries shared memory.
        self._off = bool(unusable)

    @property
    def is_used(self) -> bool:
        """True if the server has mapped a region of this client, or may have."""
        return bool(self._registered)

    async def take(self, size: int, seconds: float = CALL_S) -> Region | None:
        """Return a region of at least `size` bytes, or None if the request must be sent as bytes.

        `seconds` is the time until the request's deadline.
        """
        if self._off or size < LEAST_BYTES:
            return None
        for region in self._free:
            if region.size >= size:
                self._free.remove(region)
                return region
        try:
            state = os.statvfs(_FOLDER)
            if size > state.f_bavail * state.f_frsize * SHARE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            region = Region(-(-size // STEP_BYTES) * STEP_BYTES)
        except OSError as error:
            # If there are registered regions, later requests still try shared memory, because /dev/shm may have space again.
            self._off = self._off or not self._registered
            self.reason = f"/dev/shm: {error.strerror}"
            return None
        if self._free:
            # All free regions are too small. Abandon one of them, so that larger requests do not increase the number of regions.
            self._abandoned.insert(0, self._free.pop(0).name)
        try:
            return await self._register(region, min(seconds, CALL_S))
        except AttemptFailed as error:
            code = error.failure.code
            is_refused = code not in (Code.CONNECTION, Code.DEADLINE_EXCEEDED)
            # Later requests try shared memory again only if the connection was broken, or if the request's deadline was too near.
            self._off = self._off or is_refused or (code is Code.DEADLINE_EXCEEDED and seconds >= CALL_S)
            self.reason = f"{'the server refuses shared memory' if is_refused else code}: {error}"
            return None
        finally:
            region.unlink()

    async def _register(self, region: Region, seconds: float) -> Region | None:
        """Register a new region, in exchange for an abandoned region if there is one. Raises AttemptFailed.

        Return the new region, or None if the server still uses the abandoned region.
        """
        if self._abandoned:
            # Unregister an abandoned region first, so that the number of registered regions does not grow.
            name = self._abandoned.pop(0)
            try:
                await self._connection.unregister(name, seconds)
            except AttemptFailed as error:
                if not error.failure.is_answer or "in use" in str(error):
                    self._abandoned.append(name)
                    return None
            self._registered.discard(name)
        if not self._registered:
            # Unregister the regions of processes that ended without doing so.
            for name in await self._connection.regions(seconds):
                if name.startswith(f"{_NAME}-") and not _is_alive(name):
                    with suppress(AttemptFailed):
                        await self._connection.unregister(name, seconds)
        self._registered.add(region.name)
        try:
            await self._connection.register(region.name, f"/{region.name}", region.size, seconds)
        except AttemptFailed as error:
            if error.failure.is_answer:
                self._registered.discard(region.name)
            else:
                self._abandoned.append(region.name)
            raise
        return region

    def give_back(self, region: Region, *, is_free: bool = True) -> None:
        """Reuse a region, unless the server may still use it for a request that it did not answer."""
        if is_free:
            self._free.append(region)
        else:
            self._abandoned.append(region.name)

    def forget(self, region: Region) -> None:
        """Abandon all regions. The caller has found that the server does not know `region`, so the server must have restarted."""
        self._abandoned += [region.name, *(free.name for free in self._free)]
        self._free.clear()

    async def close(self) -> None:
        """Unregister all regions. If the server still uses some for unanswered requests, wait for them for up to `CALL_S`."""
        self.reason, self._off = "the client is closed", True
        self._free.clear()
        self._abandoned.clear()
        deadline = time.monotonic() + CALL_S
        while self._registered:
            name = next(iter(self._registered))
            try:
                await self._connection.unregister(name, CALL_S)
            except AttemptFailed as error:
                if "in use" in str(error) and time.monotonic() < deadline:
                    await asyncio.sleep(IN_USE_S)
                    continue
            self._registered.discard(name)


def _owner() -> str:
    """Return a name for this process that no other process on this machine ever gets."""
    return f"{_NAME}-{_namespace()}-{os.getpid()}-{_start_time(os.getpid())}"


def _is_alive(name: str) -> bool:
    """Return False if the owner of a region has certainly ended. Owners in other containers count as alive."""
    try:
        namespace, pid, start, _ = map(int, name.removeprefix(f"{_NAME}-").split("-"))
    except ValueError:
        return True
    return namespace != _namespace() or _start_time(pid) == start


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int:
    """Return when a process started, in the kernel's ticks, or -1 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1


class Placement:
    """Positions of a request's tensors in its region: first the inputs, and then the outputs if all their sizes are known."""

    def __init__(self, signature: ModelSignature, request: InferRequest) -> None:
        self._request = request
        #: Size of all tensors in bytes.
        self.size = 0
        self._inputs = [self._place(len(tensor.content)) for tensor in request.inputs]
        rows = request.inputs[0].shape[:1] if signature.max_rows and request.inputs else ()
        sizes = {name: _bytes(spec.datatype, (*rows, *spec.dims)) for name, spec in signature.outputs.items()}
        self._outputs = (
            {}
            if None in sizes.values()
            else {name: self._place(size) for name, size in sizes.items() if size}
        )

    def _place(self, size: int) -> RegionPart:
        part = RegionPart("", size, self.size)
        self.size += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return part

    def write(self, region: Region) -> InferRequest:
        """Copy the inputs into the region, and return the request that names it."""
        inputs: list[InferTensor] = []
        for tensor, part in zip(self._request.inputs, self._inputs, strict=True):
            assert not isinstance(tensor.content, RegionPart)
            region.memory[part.offset : part.offset + part.size] = tensor.content
            inputs.append(replace(tensor, content=replace(part, region=region.name)))
        outputs = {name: replace(part, region=region.name) for name, part in self._outputs.items()}
        return replace(self._request, inputs=inputs, outputs=outputs)

    def read(self, outputs: Sequence[InferTensor], region: Region) -> list[InferTensor]:
        """Return the outputs. Outputs in the region are copied, because later requests reuse the region."""
        return [
            replace(output, content=self._copied(output, region)) if output.name in self._outputs else output
            for output in outputs
        ]

    def _copied(self, output: InferTensor, region: Region) -> bytes:
        offset = self._outputs[output.name].offset
        return region.memory[offset : offset + (_bytes(output.datatype, output.shape) or 0)]


def _bytes(datatype: str, shape: Sequence[int]) -> int | None:
    """Return the number of bytes of a tensor, or None if the number depends on the tensor's contents."""
    if datatype == "BYTES" or min(shape, default=0) < 0:
        return None
    itemsize = 2 if datatype == "BF16" else np.dtype(triton_to_np_dtype(datatype)).itemsize
    return itemsize * math.prod(shape)
