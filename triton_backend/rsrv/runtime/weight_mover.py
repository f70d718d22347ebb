"""Transfers of weights between host and device, and the tensors on the device.

The scheduler decides which weights move, and in which order. There are three threads, and each works in order. One moves
weights to and from the device, so that memory is freed before the load that needs it. One reads weights from disk and makes
host copies. One frees host memory.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from rsrv.limits import spare_mappings, spare_memory
from rsrv.runtime.activity import ActivitySlot
from rsrv.runtime.allocation import give_back
from rsrv.runtime.device import Abandoned, Array, Buffer, Device, DeviceError, OutOfMemory
from rsrv.runtime.host_memory import HostMemoryError
from rsrv.runtime.host_weights import HostStore, HostWeights
from rsrv.runtime.models import CompiledModel, about
from rsrv.runtime.state_pool import StatePool
from rsrv.runtime.threads import Inbox, WorkerThread
from rsrv.scheduler import events as ev
from rsrv.wire.blackbox import Phase
from rsrv_bundle import BundleError
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.weights import TensorKey

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _ResidentTensor:
    buffer: Buffer
    nbytes: int
    #: Number of loaded models that have the tensor.
    users: int


class DeviceWeights:
    """Tensors on the device. Each is stored once for all models that have it. Belongs to one thread.

    A load transfers only tensors that no other model has on the device. A tensor is freed with the last model that has it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: dict[TensorKey, _ResidentTensor] = {}
        #: Bytes on the device. Each tensor is counted once. Any thread may read the value.
        self.nbytes = 0

    def absent(self, weights: HostWeights) -> dict[TensorKey, int]:
        """Return the distinct tensors that a load has to transfer, each with one of its indices among the model's weights."""
        # A model may have a tensor twice.
        return {
            tensor.key: index
            for index, tensor in enumerate(weights.tensors)
            if tensor.key not in self._tensors
        }

    def load(
        self,
        weights: HostWeights,
        read: Callable[[int], Array],
        abandoned: Callable[[], bool],
        pool: StatePool | None = None,
    ) -> Sequence[Buffer]:
        """Load a model's weights. Return them in argument order.

        `read`: the method `read` of `weights`, or a function that wraps it. `pool`: the model's state, for which memory is
        allocated. Raises Abandoned, OutOfMemory, BundleError and HostMemoryError. After an error, tensors that evictions kept
        on the device for this load are freed, and nothing else has changed.
        """
        absent = self.absent(weights)
        try:
            kinds = [(key.shape, numpy_dtype(key.dtype)) for key in absent]
            if pool is not None:
                pool.load(self._device)
            buffers = self._device.upload(map(read, absent.values()), abandoned, kinds)
        except BaseException:
            if pool is not None:
                pool.unload(self._device)
            self._drop(weights.distinct)
            raise
        for (key, index), buffer in zip(absent.items(), buffers, strict=True):
            nbytes = weights.tensors[index].nbytes
            self._tensors[key] = _ResidentTensor(buffer, nbytes, 0)
            self.nbytes += nbytes
        for key in weights.distinct:
            self._tensors[key].users += 1
        self.nbytes += 0 if pool is None else pool.nbytes
        return [self._tensors[tensor.key].buffer for tensor in weights.tensors]

    def free(
        self,
        weights: HostWeights,
        loading_for: HostWeights | None = None,
        pool: StatePool | None = None,
    ) -> None:
        """Free a loaded model's weights and its state. Nothing may execute on them. Sequences keep their state on the host.

        `loading_for`: the weights that are loaded next. Tensors that both models have stay on the device.
        """
        if pool is not None:
            pool.unload(self._device)
            self.nbytes -= pool.nbytes
        for key in weights.distinct:
            self._tensors[key].users -= 1
        shared = () if loading_for is None else loading_for.distinct
        self._drop((key for key in weights.distinct if key not in shared), reuse=loading_for is not None)

    def _drop(self, keys: Iterable[TensorKey], *, reuse: bool = False) -> None:
        """Free the given tensors unless a model uses them. `reuse`: the next load gets their memory."""
        unused = []
        for key in keys:
            tensor = self._tensors.get(key)
            if tensor is not None and not tensor.users:
                unused.append(tensor)
                del self._tensors[key]
        self._device.free((tensor.buffer for tensor in unused), reuse=reuse)
        # Update the figure last, so that the memory is free when a reader sees the new figure.
        self.nbytes -= sum(tensor.nbytes for tensor in unused)


#: Lower bound of the expected rate of a transfer to the device. The watchdog allows a hundred times the expected duration.
_SLOWEST_BYTES_PER_S = 1e9
#: While less than this share of the mappings is left, idle models fall back to cold. A large executable for a CPU takes a
#: hundred mappings, and XLA aborts a process that gets none.
_SCARCE_MAPPINGS = 1 / 8
#: Minimum number of seconds between two counts of the mappings.
_COUNT_S = 0.5

LoadEvent = ev.WeightsLoaded | ev.LoadFailed | ev.LoadAbandoned


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load has ended, see `event`. `weights` is None unless the load succeeded."""

    event: LoadEvent
    model: CompiledModel
    weights: Sequence[Buffer] | None
    #: Number of bytes that were transferred.
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read of weights ahead of their load has ended, see `event`."""

    event: ev.WeightsRead | ev.LoadFailed | ev.LoadAbandoned
    model: CompiledModel


@dataclass(frozen=True, slots=True)
class HostMemoryMeasured:
    """A measurement of the host's memory."""

    #: Bytes that are free.
    spare: int
    #: Monotonic time just before the measurement.
    at: float


@dataclass(frozen=True, slots=True)
class ModelClosed(HostMemoryMeasured):
    """An unloaded model's weights are closed, and all memory of the model is free."""


@dataclass(frozen=True, slots=True)
class CopiesDropped(HostMemoryMeasured):
    """Host copies were dropped, and their memory is free."""


@dataclass(frozen=True, slots=True)
class CopyMade(HostMemoryMeasured):
    """A host copy was made, or could not be made."""

    #: Key of the model.
    model: str


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """The memory of all weights that were evicted before `instruction` is free, so this retry can start."""

    instruction: ev.Execute | ev.WarmUp


class _Transfer:
    """One load. A thread carries it out. The loop may set `abandoned` at any time."""

    def __init__(
        self, model: CompiledModel, epoch: int, slot: ActivitySlot, abandoned: threading.Event
    ) -> None:
        self._model = model
        self._epoch = epoch
        self._slot = slot
        self._largest = max((tensor.nbytes for tensor in model.host.tensors), default=0)
        self._abandoned = abandoned

    def run(self, device: DeviceWeights) -> LoadEnded:
        model, epoch = self._model, self._epoch
        started, before = time.monotonic(), device.nbytes
        weights: Sequence[Buffer] | None = None
        event: LoadEvent
        try:
            self._is_abandoned()
            weights = device.load(model.host, self._read, self._is_abandoned, model.pool)
            event = ev.WeightsLoaded(model.key, epoch, time.monotonic() - started)
        except Abandoned:
            event = ev.LoadAbandoned(model.key, epoch)
        except OutOfMemory as error:
            log.warning(
                "%s: no memory on the device for its weights: %s", model.key, error, extra=about(model)
            )
            event = ev.LoadFailed(model.key, epoch, str(error), out_of_memory=True)
        except (BundleError, HostMemoryError) as error:
            log.error("%s: loading weights failed: %s", model.key, error, extra=about(model))
            event = ev.LoadFailed(model.key, epoch, str(error))
        except Exception as error:
            log.exception("%s: loading weights failed", model.key, extra=about(model))
            # Clients get this text. It includes the text of a DeviceError only, because texts of other errors may contain paths.
            reason = error if isinstance(error, DeviceError) else "the server's log says why"
            event = ev.LoadFailed(model.key, epoch, f"{type(error).__name__}: {reason}")
        self._slot.end()
        return LoadEnded(event, model, weights, max(0, device.nbytes - before))

    def _begin(self) -> None:
        expected = self._largest / _SLOWEST_BYTES_PER_S
        self._slot.begin(Phase.LOADING, self._model.key, self._largest, expected)

    def _is_abandoned(self) -> bool:
        # This function is called between transfers. Begin a new task each time, so that the watchdog times each transfer alone.
        self._begin()
        return self._abandoned.is_set()

    def _read(self, index: int) -> Array:
        # Without a host copy, the read may take any time. The device is not involved, so the watchdog must ignore the read.
        self._slot.rest()
        try:
            return self._model.host.read(index)
        finally:
            self._begin()


class WeightMover:
    """Threads that move the weights of all models. Methods are called on the loop."""

    def __init__(self, device: Device, host: HostStore, inbox: Inbox, slot: ActivitySlot) -> None:
        """Start the threads. The thread that moves weights records its work on the device in `slot`."""
        self.host = host
        self.device = DeviceWeights(device)
        self._inbox = inbox
        # Loads have their own thread, because a compilation would delay them for seconds.
        self._device_thread = WorkerThread("weights")
        # Reads have their own thread, because storage may be slow, and memory may have to be freed during a read.
        self._disk_thread = WorkerThread("host copies")
        self._host_memory_thread = WorkerThread("host memory")
        self._slot = slot
        #: Epoch of the latest load, and the event that abandons it. The load itself is not stored, because it refers to the
        #: model, which may be unloaded long before the next load.
        self._latest: tuple[int, threading.Event] | None = None
        #: Epoch of the latest read, and the event that abandons it.
        self._latest_read: tuple[int, threading.Event] | None = None
        #: True if this process had few mappings left at the latest count.
        self.lacks_mappings = False
        #: Time of the latest count of mappings.
        self.counted_at = -inf
        #: True if the next measurement must count the mappings.
        self._uncounted = False
        #: Number of unloaded models whose memory is not free yet.
        self._closing = 0
        #: Time of the latest `ModelClosed`.
        self._closed_at = -inf

    def load(self, model: CompiledModel, epoch: int) -> None:
        """Load a model's weights. Ends in `LoadEnded`."""
        assert model.weights is None, "the scheduler loads absent weights only"
        abandoned = threading.Event()
        self._latest = epoch, abandoned
        transfer = _Transfer(model, epoch, self._slot, abandoned)
        self._device_thread.put(lambda: self._inbox.post(transfer.run(self.device)))

    def read(self, model: CompiledModel, epoch: int) -> None:
        """Read from disk the weights of a model that are not on the device. Ends in `ReadEnded`."""
        abandoned = threading.Event()
        self._latest_read = epoch, abandoned

        def begin() -> None:
            # Do this on the device thread, because only that thread knows which tensors are on the device.
            indices = self.device.absent(model.host).values()
            self._disk_thread.put(lambda: self._inbox.post(_read(model, epoch, indices, abandoned.is_set)))

        self._device_thread.put(begin)

    def abandon(self, epoch: int) -> None:
        """End a load or a read early, unless it has ended."""
        for latest in (self._latest, self._latest_read):
            if latest is not None and epoch == latest[0]:
                latest[1].set()

    def free(self, model: CompiledModel, loading_for: CompiledModel | None) -> None:
        """Free a model's loaded weights, except tensors of `loading_for`, which is loaded next."""
        assert model.weights is not None, "the scheduler evicts resident weights only"
        model.weights = None
        next_weights = None if loading_for is None else loading_for.host
        self._device_thread.put(partial(self.device.free, model.host, next_weights, model.pool))

    def post_when_freed(self, instruction: ev.Execute | ev.WarmUp) -> None:
        """Post `MemoryFreed` when all earlier transfers and evictions are done."""
        self._device_thread.put(partial(self._inbox.post, MemoryFreed(instruction)))

    # --- host copies --------------------------------------------------------------------------------------

    def follow_residency(self, model: CompiledModel) -> None:
        """Make or drop the host copy of a model's weights, depending on its residency. Ends in `HostMemoryMeasured`."""
        if model.residency != "system":
            # Detach the copy at once, because the caller may report next that it is gone. If a copy is being made now,
            # `_follow_residency` drops it afterwards.
            self._host_memory_thread.put(model.host.detach())
        self._disk_thread.put(partial(_follow_residency, model))
        self._disk_thread.put(partial(self._measure, HostMemoryMeasured))

    def make_copy(self, model: CompiledModel) -> None:
        """Make the host copy of a model if its residency is `system`. Ends in `CopyMade`."""
        self._disk_thread.put(partial(_follow_residency, model))
        self._disk_thread.put(partial(self._measure, partial(CopyMade, model=model.key)))

    def end_read_ahead(self, weights: HostWeights) -> None:
        """Free the weights that were read for a load."""
        self._host_memory_thread.put(weights.end_read_ahead())
        self._host_memory_thread.put(give_back)

    def drop_copies(self, several: Sequence[HostWeights]) -> None:
        """Drop host copies, and return their memory to the system. Ends in `CopiesDropped`."""
        for weights in several:
            # Detach the copy at once, because the caller reports next that it is gone.
            self._host_memory_thread.put(weights.detach())
        self._host_memory_thread.put(give_back)
        self._host_memory_thread.put(partial(self._measure, CopiesDropped))

    def measure(self, *, mappings: bool = False) -> None:
        """Measure how much memory the host can spare, and count the mappings if `mappings` is true.

        Ends in `HostMemoryMeasured`.
        """
        self._uncounted |= mappings
        self._host_memory_thread.put(partial(self._measure, HostMemoryMeasured))

    def _measure(self, message: Callable[[int, float], HostMemoryMeasured]) -> None:
        # Reading the kernel's files takes milliseconds, so this does not run on the loop.
        now = time.monotonic()
        if self._uncounted and now >= self.counted_at + _COUNT_S:
            self._uncounted = False
            left, most = spare_mappings()
            lacked, self.lacks_mappings = self.lacks_mappings, left < most * _SCARCE_MAPPINGS
            self.counted_at = now
            if self.lacks_mappings and not lacked:
                log.warning(
                    "the kernel allows this process %d more memory mappings (vm.max_map_count: %d): idle models fall back "
                    "to cold if they may, and the runtime ends when none is left. Raise the limit",
                    left,
                    most,
                )
        self._inbox.post(message(spare_memory(), now))

    def forget_left(self, excess: int) -> None:
        """Remove `excess` bytes of the tensors that an earlier runtime left for models that have not returned."""
        self._host_memory_thread.put(partial(self.host.forget_left, excess))

    def close(self, weights: HostWeights) -> None:
        """Close an unloaded model's weights on the host, after earlier calls that free or copy them. Ends in `ModelClosed`."""
        self._closing += 1
        self._device_thread.put(partial(self._close, weights))

    def _close(self, weights: HostWeights) -> None:
        self._disk_thread.put(weights.close)
        # Return memory to the system after the close, when no reference to the model is left.
        self._disk_thread.put(give_back)
        self._disk_thread.put(partial(self._measure, ModelClosed))

    def closed(self, message: ModelClosed) -> None:
        """Record that the memory of one more unloaded model is free."""
        self._closing -= 1
        self._closed_at = max(self._closed_at, message.at)
        # Unloaded models have also freed mappings, so a shortage of mappings must be counted again.
        self._uncounted |= self.lacks_mappings

    def is_outdated(self, at: float) -> bool:
        """Return whether unloaded models have freed memory after the time `at`, or are about to free it."""
        return self._closing > 0 or at < self._closed_at


def _read(
    model: CompiledModel, epoch: int, indices: Iterable[int], abandoned: Callable[[], bool]
) -> ReadEnded:
    """Read weights of a model ahead of its load."""
    started = time.monotonic()
    event: ev.WeightsRead | ev.LoadFailed | ev.LoadAbandoned
    try:
        model.host.read_ahead(indices, abandoned)
        event = ev.WeightsRead(model.key, epoch, time.monotonic() - started)
    except Abandoned:
        event = ev.LoadAbandoned(model.key, epoch)
    except BundleError as error:
        log.error("%s: reading weights failed: %s", model.key, error, extra=about(model))
        event = ev.LoadFailed(model.key, epoch, str(error))
    except Exception as error:
        # Memory is short, or the reason is unknown. The load will read the file itself, and report an error if that fails.
        log.warning(
            "%s: its weights could not be read ahead of their load: %s",
            model.key,
            error,
            exc_info=not isinstance(error, HostMemoryError | MemoryError),
            extra=about(model),
        )
        event = ev.WeightsRead(model.key, epoch, time.monotonic() - started)
    return ReadEnded(event, model)


def _follow_residency(model: CompiledModel) -> None:
    """Make or drop the host copy, depending on the model's residency. This takes as long as reading the weights."""
    try:
        if model.residency == "system":
            model.host.keep()
        else:
            model.host.drop()
    except Exception as error:
        # This may be any error. For example, there may be no memory to transpose a weight of a 2.0 bundle. The runtime
        # continues.
        known = isinstance(error, BundleError | HostMemoryError)
        log.log(
            logging.WARNING if known else logging.ERROR,
            "%s: the host keeps no copy of its weights, so each load reads the file: %s",
            model.key,
            error,
            exc_info=not known,
            extra=about(model),
        )
