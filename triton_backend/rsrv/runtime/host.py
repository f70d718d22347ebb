"""The host tier of weights: each tensor once, whichever models have it.

A model's weights are known by content from the moment its bundle is opened. Whether the host keeps a copy is decided
model by model, and may change: what no model keeps any more is given back, and what is not kept is read from the
bundle's file when it is needed.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy.typing as npt

from rsrv.runtime.aligned import LARGE, Bytes
from rsrv.runtime.host_memory import Block, HostMemoryError, Memory, fresh
from rsrv_bundle import Bundle
from rsrv_bundle.weights import TensorKey, WeightsFile, as_array, changed_since_loaded, content_digest

log = logging.getLogger("rsrv.host")

Array = npt.NDArray[Any]
#: (address, bytes) -> what undoes it
PageLock = Callable[[int, int], Callable[[], None]]


class HostTensor(NamedTuple):
    """One weight of a model."""

    key: TensorKey
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostCounts:
    """What the host keeps."""

    #: bytes of the models' weights, each model's counted in full
    logical: int
    #: bytes of the tensors that hold them
    physical: int
    tensors: int


@dataclass(slots=True, eq=False)
class _Held:
    block: Block
    #: how many weights of models that are kept are this tensor
    count: int = 0


class HostStore:
    """The tensors that a runtime keeps on the host. Every method may be called from any thread.

    `page_lock` is called once for each mapping, and what it returns when nobody uses that mapping any more.
    """

    def __init__(self, memory: Memory, page_lock: PageLock | None = None) -> None:
        self._memory = memory
        self._page_lock = page_lock
        self._warned = False
        # Over all that follows, and held for moments only: nobody reads, hashes or copies under it.
        self._lock = Lock()
        self._held: dict[str, _Held] = {}
        self._closed = False
        self._open: set[HostWeights] = set()
        self._kept: set[HostWeights] = set()
        self._logical = 0
        self._physical = 0

    def open(self, bundle: Bundle, *, keep: bool) -> "HostWeights":
        """Read every weight once, to know it by content, and keep it if `keep`.

        Raises BundleError if the file is gone, has changed since the bundle was read, or does not match the manifest's
        checksum, and HostMemoryError.
        """
        file = WeightsFile(bundle)
        tensors: dict[int, HostTensor] = {}
        try:
            for index, filled in file.read_all(fresh):
                weight, digest = bundle.weights[index], content_digest(filled)
                if keep and not self._take(digest):
                    self._put(digest, filled)
                tensors[index] = HostTensor(TensorKey(digest, weight.dtype, weight.shape), weight.nbytes)
        except BaseException:
            if keep:
                self._give(tensors.values())
            file.close()
            raise
        weights = HostWeights(self, file, (tensors[index] for index in range(len(tensors))))
        with self._lock:
            self._open.add(weights)
        if keep:
            self._keeps(weights)
        return weights

    @property
    def counts(self) -> HostCounts:
        with self._lock:
            return HostCounts(self._logical, self._physical, len(self._held))

    def sweep(self) -> int:
        """Remove shared tensors that no runtime uses, for when those that may want them have them; how many."""
        return self._memory.sweep()

    def close(self) -> None:
        """Close all weights. Nobody may use the store afterwards; arrays that were handed out stay good.

        Weights that another thread is about to open or keep are given up as well, and that ends in a HostMemoryError.
        """
        for weights in list(self._open):
            weights.close()
        with self._lock:
            self._closed = True
            rest, self._held, self._physical = list(self._held.values()), {}, 0
        for held in rest:
            held.block.release()
        self._memory.close()

    def validate(self) -> None:
        """Raise AssertionError if the books are wrong; reads every byte. Nothing may be under way."""
        with self._lock:
            assert self._kept <= self._open
            references = Counter(t.key.digest for weights in self._kept for t in weights.tensors)
            counts = {digest: held.count for digest, held in self._held.items()}
            assert counts == references, "a tensor is held for as many weights as keep it"
            assert self._logical == sum(weights.nbytes for weights in self._kept)
            assert self._physical == sum(held.block.bytes.nbytes for held in self._held.values())
            for digest, held in self._held.items():
                assert content_digest(held.block.bytes) == digest, "a tensor's bytes never change"

    def _find(self, digest: str) -> Bytes | None:
        with self._lock:
            held = self._held.get(digest)
            return None if held is None else held.block.bytes

    def _take(self, digest: str) -> bool:
        """One more reference to a tensor, if the store has it."""
        with self._lock:
            held = self._held.get(digest)
            if held is not None:
                held.count += 1
            return held is not None

    def _put(self, digest: str, filled: Bytes) -> None:
        """The first reference to a tensor. Raises HostMemoryError."""
        block = self._memory.place(digest, filled)
        self._lock_pages(block.bytes)
        with self._lock:
            held = self._held.get(digest)
            if held is None and not self._closed:
                held = self._held[digest] = _Held(block)
                self._physical += block.bytes.nbytes
            if held is not None:
                held.count += 1
        if held is None:
            block.release()
            raise HostMemoryError("the runtime ends")
        if held.block is not block:
            block.release()  # another thread had read the same meanwhile

    def _give(self, tensors: Iterable[HostTensor]) -> None:
        """One reference less to each of them."""
        unused = []
        with self._lock:
            for tensor in tensors if not self._closed else ():
                held = self._held[tensor.key.digest]
                held.count -= 1
                if not held.count:
                    del self._held[tensor.key.digest]
                    self._physical -= held.block.bytes.nbytes
                    unused.append(held.block)
        for block in unused:
            block.release()

    def _keeps(self, weights: "HostWeights") -> bool:
        """All references of these weights are taken; False if they were before."""
        with self._lock:
            if weights in self._kept:
                return False
            self._kept.add(weights)
            self._logical += weights.nbytes
            return True

    def _drops(self, weights: "HostWeights") -> bool:
        """All references of these weights are to be given up; False if there are none."""
        with self._lock:
            if weights not in self._kept:
                return False
            self._kept.remove(weights)
            self._logical -= weights.nbytes
            return True

    def _forget(self, weights: "HostWeights") -> None:
        with self._lock:
            self._open.discard(weights)

    def _lock_pages(self, owner: Bytes) -> None:
        if self._page_lock is None or owner.nbytes < LARGE:
            return
        try:
            unlock = self._page_lock(owner.ctypes.data, owner.nbytes)
        except Exception as error:  # noqa: BLE001 - whatever a driver's binding raises, loads only take longer
            if not self._warned:
                self._warned = True
                log.warning("host memory is not page-locked, so loads take longer: %s", error)
            return
        # Views keep this array alive, and it keeps the mapping: it ends after its last view and before the mapping.
        # At the process's exit the driver does this better.
        weakref.finalize(owner, unlock).atexit = False


class HostWeights:
    """One model's weights on the host. `close` excepted, its methods may be called from any thread."""

    def __init__(self, store: HostStore, file: WeightsFile, tensors: Iterable[HostTensor]) -> None:
        self._store = store
        self._file = file
        #: in argument order
        self.tensors = tuple(tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        #: each tensor once -> its bytes; and what they take on a device that has none of them
        self.distinct = {tensor.key: tensor.nbytes for tensor in self.tensors}
        self.device_bytes = sum(self.distinct.values())

    @property
    def kept(self) -> bool:
        """Whether the host keeps a copy for this model."""
        return self in self._store._kept

    def keep(self) -> None:
        """Have the host keep a copy: of what it keeps for other models already, only a reference.

        Raises BundleError if the file has other weights since it was opened, and HostMemoryError; then all is as before.
        """
        if self.kept:
            return
        taken: list[HostTensor] = []
        try:
            for index, tensor in enumerate(self.tensors):
                if not self._store._take(tensor.key.digest):
                    filled = fresh(tensor.nbytes)
                    self._file.read_into(index, filled, digest=tensor.key.digest)
                    if content_digest(filled) != tensor.key.digest:
                        raise changed_since_loaded()
                    self._store._put(tensor.key.digest, filled)
                taken.append(tensor)
        except BaseException:
            self._store._give(taken)
            raise
        if not self._store._keeps(self):
            self._store._give(taken)  # another thread did the same

    def drop(self) -> None:
        """Give the copy up; the memory of what no other model keeps goes back to the system."""
        if self._store._drops(self):
            self._store._give(self.tensors)

    def read(self, index: int) -> Array:
        """A weight, read-only, in memory that lives as long as the array: the host's copy, or else from the file.

        Raises BundleError if there is no copy and the file has another weight there since it was opened, and
        HostMemoryError.
        """
        (digest, dtype, shape), nbytes = self.tensors[index]
        raw = self._store._find(digest)
        if raw is None:
            raw = fresh(nbytes)
            self._file.read_into(index, raw, digest=digest)
        return as_array(raw, dtype, shape)

    def close(self) -> None:
        """Drop the copy and close the file. Nobody may be reading; further calls do nothing."""
        self.drop()
        self._store._forget(self)
        self._file.close()
