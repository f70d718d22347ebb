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
from rsrv.client.transport import (
    AttemptFailed,
    InferOutput,
    InferRequest,
    InferTensor,
    RegionPart,
    ServerConnection,
)

#: Requests of fewer bytes travel as bytes, which is as fast.
LEAST_BYTES: Final = 64 << 10
#: Sizes of regions are multiples of this, so that a region fits requests of similar sizes.
STEP_BYTES: Final = 1 << 20
#: Tensors begin at multiples of this offset in a region.
ALIGN_BYTES: Final = 64
#: Maximum size of a request that gets a new region, as a share of the free space in /dev/shm. The server's models also need space there.
SHARE: Final = 0.25
#: Limit in seconds for each call about a region.
CALL_S: Final = 5.0
#: Seconds before `close` tries again to unregister a region that is in use.
IN_USE_S: Final = 0.05
#: Number of abandoned regions that the client tries to unregister before it makes a new one.
_RELEASED: Final = 2
#: Make no new region while more regions than this are abandoned.
_MOST_ABANDONED: Final = 64
#: Reasons for failures to register a region that are no answer of the server.
_WITHOUT_ANSWER: Final = {
    Code.CONNECTION: "no connection to the server",
    Code.DEADLINE_EXCEEDED: "no answer from the server",
}

_FOLDER: Final = Path("/dev/shm")
_NAME: Final = "rsrv-client"
#: Numbers in the names of regions. All clients of this process share the counter, because a name must be unique.
_numbers = count()


class Region:
    """Memory that this process and the server share."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        file = os.open(_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
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
        """Remove the file. The memory stays for all who have mapped it."""
        (_FOLDER / self.name).unlink(missing_ok=True)


class Regions:
    """The regions of one client. Requests reuse them, so there are as many as requests in flight."""

    def __init__(self, connection: ServerConnection, unusable: str = "") -> None:
        """`unusable`: why no request may travel in shared memory."""
        self._connection = connection
        self._free: list[Region] = []
        #: Regions that the server may not know, or may still use for a request that it did not answer.
        self._abandoned: list[Region] = []
        #: All regions that the server may have mapped.
        self._registered: dict[str, Region] = {}
        #: Why requests travel as bytes.
        self.reason = unusable or "no request was large enough for shared memory"
        #: True if no further request tries shared memory.
        self._off = bool(unusable)

    @property
    def is_used(self) -> bool:
        """True if requests travelled in shared memory."""
        return bool(self._registered)

    async def take(self, size: int, seconds: float = CALL_S) -> Region | None:
        """Return a region of at least `size` bytes, or None if the request must travel as bytes.

        `seconds` is the time that the request has left.
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
            region = Region(f"{_owner()}-{next(_numbers)}", -(-size // STEP_BYTES) * STEP_BYTES)
        except OSError as error:
            # If regions fitted before, /dev/shm may have room again later.
            self._off = self._off or not self._registered
            self.reason = f"/dev/shm: {error.strerror}"
            return None
        seconds = min(seconds, CALL_S)
        try:
            if self._free:
                # Abandon a region that is too small. Otherwise, each larger request would add a region.
                self._abandoned.insert(0, self._free.pop(0))
            await self._unregister_abandoned(seconds)
            if len(self._abandoned) > _MOST_ABANDONED:
                return None
            if not self._registered:
                await self._unregister_ownerless(seconds)
            self._registered[region.name] = region
            await self._connection.register(region.name, f"/{region.name}", region.size, seconds)
        except AttemptFailed as error:
            answered = error.failure.is_answer
            if answered:
                self._registered.pop(region.name, None)
            elif region.name in self._registered:
                self.abandon(region)
            outcome = _WITHOUT_ANSWER.get(error.failure.code, "the server refuses shared memory")
            broken = error.failure.code is Code.CONNECTION
            self._off = self._off or answered or (not broken and seconds == CALL_S)
            self.reason = f"{outcome}: {error}"
            return None
        finally:
            region.unlink()
        return region

    def give_back(self, region: Region) -> None:
        """Reuse a region whose request was answered."""
        self._free.append(region)

    def abandon(self, region: Region) -> None:
        """Unregister a region later: the server may still use it for a request that it did not answer."""
        self._abandoned.append(region)

    def forget(self, region: Region) -> None:
        """Abandon all regions, because the server did not know `region`: it has restarted, and has no regions any more."""
        self._abandoned += [region, *self._free]
        self._free.clear()

    async def close(self) -> None:
        """Unregister all regions. Regions of unanswered requests may still be in use; wait up to `CALL_S` for them."""
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
            del self._registered[name]

    async def _unregister_abandoned(self, seconds: float) -> None:
        """Unregister `_RELEASED` abandoned regions. More than one for each new region keeps their number small."""
        tried, self._abandoned = self._abandoned[:_RELEASED], self._abandoned[_RELEASED:]
        for region in tried:
            try:
                await self._connection.unregister(region.name, seconds)
            except AttemptFailed as error:
                if not error.failure.is_answer or "in use" in str(error):
                    self._abandoned.append(region)
                    continue
            self._registered.pop(region.name, None)

    async def _unregister_ownerless(self, seconds: float) -> None:
        """Unregister the regions of processes that ended without doing so."""
        for name in await self._connection.regions(seconds):
            if name.startswith(f"{_NAME}-") and not _is_alive(name):
                with suppress(AttemptFailed):
                    await self._connection.unregister(name, seconds)


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
    """Where the tensors of a request are in its region: the inputs, then the outputs if their sizes are known."""

    def __init__(self, signature: ModelSignature, request: InferRequest) -> None:
        self._request = request
        #: Offset of each input in the region.
        self._inputs: list[int] = []
        #: Offset and size of each output in the region.
        self._outputs: dict[str, RegionPart] = {}
        #: Size of all tensors in bytes.
        self.size = 0
        for tensor in request.inputs:
            self._inputs.append(self._place(len(tensor.content)))
        rows = request.inputs[0].shape[:1] if signature.max_rows and request.inputs else ()
        sizes = {name: _bytes(spec.datatype, (*rows, *spec.dims)) for name, spec in signature.outputs.items()}
        if None not in sizes.values():
            self._outputs = {
                name: RegionPart("", size, self._place(size)) for name, size in sizes.items() if size
            }

    def _place(self, size: int) -> int:
        at = self.size
        self.size += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return at

    def write(self, region: Region) -> InferRequest:
        """Copy the inputs into the region, and return the request that names it."""
        inputs: list[InferTensor] = []
        for tensor, offset in zip(self._request.inputs, self._inputs, strict=True):
            assert not isinstance(tensor.content, RegionPart)
            size = len(tensor.content)
            region.memory[offset : offset + size] = tensor.content
            inputs.append(replace(tensor, content=RegionPart(region.name, size, offset)))
        outputs = {name: replace(part, region=region.name) for name, part in self._outputs.items()}
        return replace(self._request, inputs=inputs, outputs=outputs)

    def read(self, outputs: Sequence[InferOutput], region: Region) -> list[InferOutput]:
        """Return the outputs. Copy those in the region, because later requests reuse it."""
        return [
            replace(output, content=self._copied(output, region)) if output.name in self._outputs else output
            for output in outputs
        ]

    def _copied(self, output: InferOutput, region: Region) -> bytes:
        offset = self._outputs[output.name].offset
        return region.memory[offset : offset + (_bytes(output.datatype, output.shape) or 0)]


def _bytes(datatype: str, shape: Sequence[int]) -> int | None:
    """Return the number of bytes of a tensor, or None if it depends on the contents."""
    if datatype == "BYTES" or min(shape, default=0) < 0:
        return None
    itemsize = 2 if datatype == "BF16" else np.dtype(triton_to_np_dtype(datatype)).itemsize
    return itemsize * math.prod(shape)
