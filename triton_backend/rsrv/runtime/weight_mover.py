"""Where weights are: on the host, on the device, and on their way between the two.

What moves is the scheduler's decision; the order is kept. One thread moves, in both directions, so that memory
is given back before the load that needs it starts.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rsrv.runtime.activity import ActivitySlot, Phase
from rsrv.runtime.device import Abandoned, Array, Buffer, Device, OutOfMemory
from rsrv.runtime.host_weights import HostMemoryError, HostStore, HostWeights, PrivateMemory, SharedMemory
from rsrv.runtime.models import Model, about
from rsrv.runtime.threads import Inbox, Worker
from rsrv.scheduler import events as ev
from rsrv.settings import Settings
from rsrv_bundle import BundleError
from rsrv_bundle.weights import TensorKey

log = logging.getLogger("rsrv.tiers")


@dataclass(slots=True)
class _Held:
    buffer: Buffer
    nbytes: int
    #: models that it was loaded for
    users: int


class DeviceWeights:
    """The tensors on the device, each once, for all models that have it.

    Belongs to one thread. What is loaded and freed, and in which order, is the scheduler's decision. A load moves what no other model has there; what a model frees goes when no other has it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: dict[TensorKey, _Held] = {}
        #: bytes on the device, each tensor once; any thread may read it
        self.nbytes = 0

    def load(
        self, weights: HostWeights, read: Callable[[int], Array], abandoned: Callable[[], bool]
    ) -> Sequence[Buffer]:
        """Have all of a model's weights on the device; in argument order. `read`: `weights`' own.

        Raises Abandoned, OutOfMemory, BundleError and HostMemoryError; then nothing has changed, but that what was
        kept for it is gone.
        """
        # A model may have a tensor twice.
        absent = {
            tensor.key: index for index, tensor in enumerate(weights.tensors) if tensor.key not in self._held
        }
        try:
            buffers = self._device.upload(map(read, absent.values()), abandoned)
        except BaseException:
            self._drop(weights.distinct)
            raise
        for (key, index), buffer in zip(absent.items(), buffers, strict=True):
            nbytes = weights.tensors[index].nbytes
            self._held[key] = _Held(buffer, nbytes, 0)
            self.nbytes += nbytes
        for key in weights.distinct:
            self._held[key].users += 1
        return [self._held[tensor.key].buffer for tensor in weights.tensors]

    def free(self, weights: HostWeights, loading_for: HostWeights | None = None) -> None:
        """A loaded model needs its weights no longer, and nothing executes on them.

        `loading_for`: what is loaded next; what both have is kept for it.
        """
        for key in weights.distinct:
            self._held[key].users -= 1
        kept = () if loading_for is None else loading_for.distinct
        self._drop((key for key in weights.distinct if key not in kept), reuse=loading_for is not None)

    def _drop(self, keys: Iterable[TensorKey], *, reuse: bool = False) -> None:
        """Free those that nobody uses."""
        unused = []
        for key in keys:
            held = self._held.get(key)
            if held is not None and not held.users:
                unused.append(held)
                del self._held[key]
        self._device.free((held.buffer for held in unused), reuse=reuse)
        # Not before: whoever waits for it finds the memory free.
        self.nbytes -= sum(held.nbytes for held in unused)


#: bytes per second: a hundred times less is no disk any more
_SLOW = 1e9

Ended = ev.WeightsLoaded | ev.LoadFailed | ev.LoadAbandoned


class WeightMover:
    """The weights of all models. Methods are called on the loop; `follow` excepted, which takes long."""

    def __init__(self, device: Device, settings: Settings, inbox: Inbox, slot: ActivitySlot) -> None:
        """What loads do with the device is noted at `slot`.

        Raises HostMemoryError if the memory to share with other runtimes is not safely ours.
        """
        runtime = settings.runtime
        shared = runtime.shared_host_weights
        memory = SharedMemory() if shared else PrivateMemory()
        self.host = HostStore(memory, device.page_lock)
        self.device = DeviceWeights(device)
        self._inbox = inbox
        # A thread of its own: a compilation would hold back a load for seconds.
        self._mover = Worker("weights")
        self._slot = slot
        #: the load under way; and whether nobody waits for it any more
        self._epoch = 0
        self._abandoned = False

    def load(self, model: Model, epoch: int, ended: Callable[[Ended, int], None]) -> None:
        """Bring a model's weights to the device; `ended` is called on the loop, when `model.weights` says how.

        It is also told the bytes that have come to the device.
        """
        assert model.weights is None, "the scheduler loads absent weights only"
        self._epoch, self._abandoned = epoch, False
        largest = max((tensor.nbytes for tensor in model.host.tensors), default=0)

        def begin() -> None:
            self._slot.begin(Phase.LOADING, model.key, largest, largest / _SLOW)

        def abandoned() -> bool:
            # Asked between tensors: for the watchdog what follows is a load of its own.
            begin()
            return self._abandoned

        def read(index: int) -> Array:
            # Where the host has no copy, storage may take as long as it likes: that is not the device's work.
            self._slot.rest()
            try:
                return model.host.read(index)
            finally:
                begin()

        def load() -> None:
            started, before = time.monotonic(), self.device.nbytes
            weights: Sequence[Buffer] | None = None
            event: Ended
            try:
                abandoned()
                weights = self.device.load(model.host, read, abandoned)
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
                event = ev.LoadFailed(model.key, epoch, f"{type(error).__name__}: {error}")

            self._slot.end()
            moved = max(0, self.device.nbytes - before)

            def end() -> None:
                model.weights = weights
                ended(event, moved)

            self._inbox.post(end)

        self._mover.put(load)

    def abandon(self, epoch: int) -> None:
        """End a load early, unless it is over."""
        if epoch == self._epoch:
            self._abandoned = True

    def free(self, model: Model, loading_for: Model | None) -> None:
        """Give the memory of a model's loaded weights back, but for what `loading_for`, loaded next, has too."""
        assert model.weights is not None, "the scheduler evicts resident weights only"
        model.weights = None
        weights, next_weights = model.host, None if loading_for is None else loading_for.host
        self._mover.put(lambda: self.device.free(weights, next_weights))

    def when_moved(self, action: Callable[[], None]) -> None:
        """Have the loop do something when all that was asked for before is done."""
        self._mover.put(lambda: self._inbox.post(action))

    def follow(self, model: Model) -> None:
        """Make or give up the host's copy, as the model's residency says. Takes as long as reading the weights."""
        try:
            if model.residency == "system":
                model.host.keep()
            else:
                model.host.drop()
        except (BundleError, HostMemoryError) as error:
            log.warning(
                "%s: the host keeps no copy of its weights, so each load reads the file: %s",
                model.key,
                error,
                extra=about(model),
            )
        except Exception:
            # As when a 2.0 bundle's weight finds no memory to be transposed in: that is no reason to end.
            log.exception(
                "%s: the host keeps no copy of its weights, so each load reads the file",
                model.key,
                extra=about(model),
            )
