"""The tensors on the device, each once, for all models that have it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rsrv.runtime.device import Array, Buffer, Device
from rsrv.runtime.host import HostWeights
from rsrv_bundle.weights import TensorKey


@dataclass(slots=True)
class _Held:
    buffer: Buffer
    nbytes: int
    #: models that it was loaded for
    users: int


class WorkingSet:
    """Belongs to one thread. What is loaded and freed, and in which order, is the scheduler's decision.

    A load moves what no other model has there; what a model frees goes when no other has it.
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

    def free(self, weights: HostWeights, heir: HostWeights | None = None) -> None:
        """A loaded model needs its weights no longer, and nothing executes on them.

        `heir`: what is loaded next; what both have is kept for it.
        """
        for key in weights.distinct:
            self._held[key].users -= 1
        kept = () if heir is None else heir.distinct
        self._drop((key for key in weights.distinct if key not in kept), reuse=heir is not None)

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
