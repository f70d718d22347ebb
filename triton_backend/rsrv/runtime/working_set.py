"""The tensors on the device, each once, for all models that have it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rsrv.runtime.device import Buffer, Device
from rsrv.runtime.host import HostWeights, TensorKey


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

    def load(self, weights: HostWeights, abandoned: Callable[[], bool]) -> Sequence[Buffer]:
        """Have all of a model's weights on the device; in argument order.

        Raises Abandoned, OutOfMemory, BundleError and HostMemoryError; then nothing has changed.
        """
        # A model may have a tensor twice.
        absent = {
            tensor.key: index for index, tensor in enumerate(weights.tensors) if tensor.key not in self._held
        }
        buffers = self._device.upload((weights.read(index) for index in absent.values()), abandoned)
        for (key, index), buffer in zip(absent.items(), buffers, strict=True):
            nbytes = weights.tensors[index].nbytes
            self._held[key] = _Held(buffer, nbytes, 0)
            self.nbytes += nbytes
        for key in weights.distinct:
            self._held[key].users += 1
        return [self._held[tensor.key].buffer for tensor in weights.tensors]

    def free(self, weights: HostWeights) -> None:
        """A loaded model needs its weights no longer, and nothing executes on them."""
        unused, freed = [], 0
        for key in weights.distinct:
            held = self._held[key]
            held.users -= 1
            if not held.users:
                unused.append(held.buffer)
                freed += held.nbytes
                del self._held[key]
        self._device.free(unused)
        # Not before: whoever waits for it finds the memory free.
        self.nbytes -= freed
