"""Executions on jax's device. They execute in the order of their launches, and may be read in any order."""

import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any

import numpy as np

from rsrv.runtime.device import (
    NO_TARGETS,
    Array,
    Buffer,
    DeviceRows,
    Executable,
    Launched,
    Pools,
    Targets,
)
from rsrv.runtime.device_errors import ErrorExaminer
from rsrv.runtime.device_memory import DeviceMemory
from rsrv.runtime.device_pools import SlotPools
from rsrv.runtime.device_transfers import Transfers
from rsrv.runtime.jax_compiler import HelperPrograms

#: Placeholder for an output that stays on the device, or has targets.
_UNREAD = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class LaunchedExecution:
    """A launched execution. Outside of the device, its type is `Launched`."""

    started: float
    outputs: Sequence[Any]
    unread: Collection[int]
    #: The execution launched before this one, or None once this one is read.
    previous: "LaunchedExecution | None" = None
    #: Time of the execution's end, once a thread has observed it.
    ready: float | None = None
    #: Indices of the outputs that are copied to targets.
    written: Collection[int] = ()
    #: Event after the copies to targets.
    copied: ctypes.c_void_p | None = None


class DeviceExecutions:
    """Executions of one device. A synchronous device executes within `launch`."""

    def __init__(
        self,
        memory: DeviceMemory,
        working_bytes: Callable[[Executable], Sequence[int]],
        transfers: Transfers,
        programs: HelperPrograms,
        launching: Lock,
        examiner: ErrorExaminer,
        *,
        asynchronous: bool,
    ) -> None:
        """`working_bytes` returns the bytes that an execution allocates, or an empty sequence if they are unknown.

        The lock `launching` is held during each launch, so that executions run in the order of their launches. A CPU executes
        within the launch, so it makes one execution at a time.
        """
        self._memory = memory
        self._working_bytes = working_bytes
        self._transfers = transfers
        self._programs = programs
        self._launching = launching
        self._examiner = examiner
        self._asynchronous = asynchronous
        #: Thread in which a synchronous device executes, or executed last.
        self.launcher: int | None = None
        self._latest: LaunchedExecution | None = None
        self._noticing = Lock()

    def launch(
        self,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        unread: Collection[int] = (),
        pools: Pools | None = None,
        targets: Targets = NO_TARGETS,
    ) -> Launched:
        call: Callable[..., Sequence[Any]] = executable  # type: ignore[assignment]
        assert pools is None or isinstance(pools, SlotPools)
        with self._examiner:
            if self._memory.limit is not None:
                # `require` may wait. The lock is not held meanwhile, so other launches can overtake this one.
                moved = [array.nbytes for array in inputs if isinstance(array, np.ndarray)]
                self._memory.require([*moved, *self._working_bytes(executable)])
            with self._launching:
                if not self._asynchronous:
                    self.launcher = get_ident()
                started = time.perf_counter()
                outputs = call(*inputs, *weights, *(() if pools is None else pools.arrays))
                if not self._asynchronous:
                    for out in outputs:
                        out.block_until_ready()
                if pools is not None:
                    taken = len(pools.arrays)
                    # Remove the pools, which come first (`lower`), from the outputs: the next execution takes their memory,
                    # perhaps before this execution is read.
                    pools.arrays, outputs = outputs[:taken], outputs[taken:]
                if not self._asynchronous:
                    return Launched(LaunchedExecution(started, outputs, unread, ready=time.perf_counter()))
                execution = self._latest = LaunchedExecution(started, outputs, unread, self._latest)
                # Enqueue the copies to the host now. Then they wait for this execution, but not for the next one.
                for index, out in enumerate(outputs):
                    if index not in unread and index not in targets:
                        out.copy_to_host_async()
                if targets:
                    execution.written = targets
                    execution.copied = self._transfers.start_outward(outputs, targets)
                return Launched(execution)

    def keep(self, launched: Launched, index: int) -> Buffer:
        assert isinstance(launched, LaunchedExecution)
        return Buffer(launched.outputs[index])

    def merge(self, base: Array, axis: int, pieces: Sequence[DeviceRows]) -> Buffer:
        merged: Any = base
        for buffer in {id(piece.buffer): piece.buffer for piece in pieces}.values():
            rows = np.full(base.shape[axis], -1, np.int32)
            for piece in pieces:
                if piece.buffer is buffer:
                    rows[piece.at : piece.at + piece.rows] = np.arange(piece.first, piece.first + piece.rows)
            with self._examiner:
                self._memory.require([base.nbytes] * 2)
                merged = self._programs.merge(merged, buffer, rows, axis)
        return Buffer(merged)

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        execution = launched
        assert isinstance(execution, LaunchedExecution)
        previous = execution.previous
        try:
            with self._examiner:
                ready = self._wait(execution)
                if execution.copied is not None:
                    self._transfers.finish_outward(execution.copied)
                if execution.unread or execution.written:
                    # jax raises the failure of an execution when an output is copied. Perhaps no output is copied here, so
                    # wait for the outputs, which also raises the failure.
                    _block(execution.outputs)
                outputs = [
                    _UNREAD if index in execution.unread or index in execution.written else np.asarray(out)
                    for index, out in enumerate(execution.outputs)
                ]
        finally:
            # The next execution refers to this one, so drop this one's outputs and predecessors.
            execution.outputs, execution.previous = (), None
        free = execution.started if previous is None else max(execution.started, self._wait(previous))
        return outputs, ready - free

    def _wait(self, execution: LaunchedExecution) -> float:
        """Wait for an execution, and return the time of its end. The ends of its predecessors are observed first.

        Several threads may wait for one execution, because a new model warms up between executions of other models. Only the
        reader of an execution gets its failure.
        """
        # Read these attributes before `ready`, because a thread sets `ready` before it empties them.
        outputs, previous = execution.outputs, execution.previous
        if execution.ready is None:
            if previous is not None:
                self._wait(previous)
            with suppress(Exception):
                _block(outputs)
            with self._noticing:
                execution.ready = execution.ready or time.perf_counter()
        return execution.ready


def _block(outputs: Sequence[Any]) -> None:
    """Wait for outputs. Raises the failure of their execution."""
    for out in outputs:
        out.block_until_ready()
