"""Host copies of weights: one copy of each tensor, shared by all models that contain it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple

from rsrv.limits import spare_memory
from rsrv.runtime.allocation import Bytes, PageLock, PageLocks
from rsrv.runtime.device import Abandoned, Array
from rsrv.runtime.host_memory import HostMemory, HostMemoryError, MemoryLimit, TensorBytes, fresh
from rsrv_bundle import Bundle
from rsrv_bundle.spec import WeightSpec
from rsrv_bundle.weights import TensorKey, WeightsFile, as_array, changed_since_loaded, content_digest

#: Maximum number of models whose weights stay in memory between read and load: the model that is being loaded, and the next
#: one. The weights of other models stay in the kernel's cache.
_MOST_AHEAD = 2


class HostTensor(NamedTuple):
    """One weight of a model."""

    key: TensorKey
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Sizes of the host copies."""

    #: Bytes of the weights of all models with a host copy. Shared tensors are counted for each model.
    logical: int
    #: Bytes of the distinct tensors of these weights.
    physical: int
    tensors: int


@dataclass(slots=True, eq=False)
class _Room:
    """Reservation of memory for a copy that is being made."""

    #: Reserved bytes for which no tensor is stored yet.
    nbytes: int


@dataclass(slots=True, eq=False)
class _Held:
    block: TensorBytes
    #: Number of references from models with a host copy.
    count: int = 0


class HostStore:
    """Host copies of a runtime's tensors. Every method may be called from any thread.

    `page_lock` is called once for each large mapping. The function that it returns is called before the mapping is removed.
    """

    def __init__(
        self, memory: HostMemory, page_lock: PageLock | None = None, limit: MemoryLimit | None = None
    ) -> None:
        self._memory = memory
        self.limit = limit
        self._page_lock = page_lock
        self._locks = PageLocks()
        # Guards the fields below. It is held only briefly: no thread reads, hashes or copies tensors while it holds the lock.
        self._lock = Lock()
        self._held: dict[str, _Held] = {}
        self._closed = False
        self._open: set[HostWeights] = set()
        self._kept: set[HostWeights] = set()
        self._physical = 0
        #: Bytes of the copies that are being made, and bytes of weights that were read ahead.
        self._reading = 0
        #: Number of models whose weights were read ahead of a load that has not ended.
        self.ahead = 0
        #: Bytes of sequences' state in host memory at the loop's last check.
        self.states = 0
        #: If the device is the CPU, bytes of free host memory that weights will still take when they are loaded. Otherwise 0.
        self.promised = 0

    def open(self, bundle: Bundle, *, keep: bool) -> "HostWeights":
        """Identify every weight by its content. Keep a host copy if `keep` is true and there is room.

        The file is read once. If an earlier runtime has left a note of its content, this reads only tensors that the copy needs
        and that are not in memory yet. Raises HostMemoryError, and BundleError if the file is removed, has changed since the
        bundle was read, or does not match the manifest's checksum.
        """
        file = WeightsFile(bundle)
        try:
            digests = self._memory.recall(file)
            if digests is None or len(digests) != len(bundle.weights):
                with self._room(sum(weight.nbytes for weight in bundle.weights) if keep else 0) as room:
                    weights = self._read(bundle, file, room if keep else None)
                self._memory.note(file, [tensor.key.digest for tensor in weights.tensors])
            else:
                weights = HostWeights(self, file, map(_identified, bundle.weights, digests))
                if keep:
                    weights.keep()
        except BaseException:
            self._memory.forget(file)
            file.close()
            raise
        with self._lock:
            self._open.add(weights)
        return weights

    def _read(self, bundle: Bundle, file: WeightsFile, room: _Room | None) -> "HostWeights":
        """Identify the weights, and keep a copy if there is room for it."""
        tensors: dict[int, HostTensor] = {}
        try:
            for index, filled in file.read_all(fresh):
                digest = content_digest(filled)
                if room is not None and not self._take(digest):
                    self._put(digest, self._memory.place(digest, filled), room)
                tensors[index] = _identified(bundle.weights[index], digest)
        except BaseException:
            if room is not None:
                self._give(tensors.values())
            raise
        weights = HostWeights(self, file, (tensors[index] for index in range(len(tensors))))
        if room is not None:
            self._keeps(weights)
        return weights

    @property
    def counts(self) -> HostCounts:
        with self._lock:
            logical = sum(weights.nbytes for weights in self._kept)
            return HostCounts(logical, self._physical, len(self._held))

    @property
    def taken(self) -> int:
        """Bytes of host copies, of tensors that are being copied or were read ahead, and of sequences' state.

        Each tensor is counted once.
        """
        return self._physical + self._reading + self.states

    @property
    def left(self) -> int:
        """Bytes of tensors that an earlier runtime left for models that have not returned, as found by the last `sweep`."""
        return self._memory.left

    def sweep(self) -> int:
        """Remove shared tensors that no runtime uses or has noted. Return the number of removed tensors."""
        return self._memory.sweep()

    def forget_left(self, excess: int) -> None:
        """Remove `excess` bytes of the tensors that an earlier runtime left for models that have not returned."""
        with self._lock:
            versions = {weights._file.version for weights in self._open}
        self._memory.forget_left(versions, excess)

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[_Room | None]:
        """Reserve bytes for a copy that is made in the block. Yields None if there is no room."""
        fits = self._reserve(nbytes)
        room = _Room(nbytes if fits else 0)
        try:
            yield room if fits else None
        finally:
            self._end_reserve(room.nbytes)

    def _reserve(self, nbytes: int) -> bool:
        """Count bytes as taken until `_end_reserve`. Return False if there is no room."""
        spare = 0 if self.limit is None else spare_memory() - self.promised
        with self._lock:
            fits = self.limit is None or self.limit.fits(self.taken, spare, nbytes)
            self._reading += nbytes if fits else 0
        return fits

    def _end_reserve(self, nbytes: int) -> None:
        with self._lock:
            self._reading -= nbytes

    def leave(self) -> None:
        """End the store, and leave the shared tensors to the server's next runtime, which then need not read them again.

        The process must end soon. If another thread is opening or keeping weights, it gets a HostMemoryError.
        """
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Close all weights. Do not use the store afterwards. Arrays that `HostWeights.read` has returned stay valid.

        If another thread is opening or keeping weights, it gets a HostMemoryError.
        """
        for weights in list(self._open):
            weights.close()
        with self._lock:
            self._closed = True
            blocks, self._held, self._physical = list(self._held.values()), {}, 0
        for stored in blocks:
            stored.block.release()
        self._memory.close()

    def _find(self, digest: str) -> Bytes | None:
        with self._lock:
            stored = self._held.get(digest)
            return None if stored is None else stored.block.bytes

    def _take(self, digest: str) -> bool:
        """Add a reference to a tensor. Return False if the store does not have it."""
        with self._lock:
            stored = self._held.get(digest)
            if stored is not None:
                stored.count += 1
            return stored is not None

    def _put(self, digest: str, block: TensorBytes, room: _Room) -> None:
        """Store a tensor with its first reference. Its bytes are taken from `room`. Raises HostMemoryError."""
        if self._page_lock is not None:
            self._locks.add(block.bytes, self._page_lock)
        with self._lock:
            stored = self._held.get(digest)
            if stored is None and not self._closed:
                stored = self._held[digest] = _Held(block)
                self._physical += block.bytes.nbytes
                self._reading -= block.bytes.nbytes
                room.nbytes -= block.bytes.nbytes
            if stored is not None:
                stored.count += 1
        if stored is None:
            block.release()
            raise HostMemoryError("the runtime is ending")
        if stored.block is not block:
            block.release()  # Another thread has already stored the same tensor.

    def _give(self, tensors: Iterable[HostTensor]) -> None:
        """Remove a reference to each tensor. Release the tensors without references."""
        unused = []
        with self._lock:
            for tensor in tensors if not self._closed else ():
                stored = self._held[tensor.key.digest]
                stored.count -= 1
                if not stored.count:
                    del self._held[tensor.key.digest]
                    self._physical -= stored.block.bytes.nbytes
                    unused.append(stored.block)
        for block in unused:
            block.release()

    def _keeps(self, weights: "HostWeights") -> bool:
        """Record that these weights have a host copy. Return False if they had one before."""
        with self._lock:
            known = weights in self._kept
            self._kept.add(weights)
            return not known

    def _drops(self, weights: "HostWeights") -> bool:
        """Record that these weights have no host copy any more. Return False if they had none."""
        with self._lock:
            known = weights in self._kept
            self._kept.discard(weights)
            return known

    def _forget(self, weights: "HostWeights", file: WeightsFile) -> None:
        with self._lock:
            self._open.discard(weights)
            # Keep the note of the file for the next runtime, or for another model with the same file.
            noted = self._closed or any(open_file._file.version == file.version for open_file in self._open)
        if not noted:
            self._memory.forget(file)


def _identified(weight: WeightSpec, digest: str) -> HostTensor:
    return HostTensor(TensorKey(digest, weight.dtype, weight.shape), weight.nbytes)


class HostWeights:
    """Weights of one model on the host. Every method except `close` may be called from any thread."""

    def __init__(self, store: HostStore, file: WeightsFile, tensors: Iterable[HostTensor]) -> None:
        self._store = store
        self._file = file
        self._closed = False
        #: Bytes of the tensors that were read for the next load, by digest.
        self._ahead: dict[str, Bytes] = {}
        #: Tensors of other models' copies to which this object holds a reference until the next load has ended.
        self._ahead_held: tuple[HostTensor, ...] = ()
        #: Tensors in argument order.
        self.tensors = tuple(tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        #: Bytes of each distinct tensor.
        self.distinct = {tensor.key: tensor.nbytes for tensor in self.tensors}
        #: Bytes of each distinct content, by its digest. A host copy takes the sum of these bytes.
        self.copied = {key.digest: nbytes for key, nbytes in self.distinct.items()}

    @property
    def kept(self) -> bool:
        """True if the host keeps a copy for this model."""
        return self in self._store._kept

    @property
    def missing_bytes(self) -> int:
        """Bytes that a host copy would need in addition to the copies of other models."""
        stored = self._store._held
        return sum(nbytes for digest, nbytes in self.copied.items() if digest not in stored)

    def keep(self) -> None:
        """Keep a host copy if there is room. For tensors that the store has for other models, only add a reference.

        Raises HostMemoryError, and BundleError if the file's weights have changed since it was opened. After an error, nothing
        has changed.
        """
        if self.kept or self._closed:
            return
        with self._store._room(self.missing_bytes) as room:
            if room is not None:
                self._keep(room)

    def _keep(self, room: _Room) -> None:
        taken: list[HostTensor] = []
        try:
            for index, tensor in enumerate(self.tensors):
                if not self._store._take(tensor.key.digest):
                    self._store._put(tensor.key.digest, self._find(index), room)
                taken.append(tensor)
        except BaseException:
            self._store._give(taken)
            raise
        if not self._store._keeps(self):
            self._store._give(taken)  # Another thread has already made the copy.

    def _find(self, index: int) -> TensorBytes:
        """Return a tensor from shared memory. If it is not there, read it from the file and check it."""
        (digest, _, _), nbytes = self.tensors[index]
        memory = self._store._memory
        block = memory.find(digest, nbytes)
        if block is None:
            filled = fresh(nbytes)
            self._file.read_into(index, filled, digest=digest)
            if content_digest(filled) != digest:
                raise changed_since_loaded()
            block = memory.place(digest, filled)
        return block

    def drop(self) -> None:
        """Drop the host copy. The memory of tensors that no other model keeps returns to the system."""
        self.detach()()

    def detach(self) -> Callable[[], None]:
        """Forget the host copy at once. Return a function that frees its memory, which may take long."""
        had = self._store._drops(self)
        return partial(self._store._give, self.tensors if had else ())

    @property
    def is_read_ahead(self) -> bool:
        """True if tensors were read ahead for the next load."""
        return bool(self._ahead or self._ahead_held)

    def read_ahead(self, indices: Iterable[int], abandoned: Callable[[], bool]) -> None:
        """Read weights without a host copy, so that the next load does not wait for storage.

        These weights stay in memory until `end_read_ahead`, including weights of which other models have host copies. If there
        is no room for them, this only reads the file, so that the kernel caches it, provided that enough memory is free for
        that. Raises Abandoned, HostMemoryError, and BundleError if a weight in the file has changed.
        """
        self.end_read_ahead()()
        needed = {self.tensors[index].key.digest: index for index in indices}
        taken = [digest for digest in needed if self._store._take(digest)]
        self._ahead_held = tuple(self.tensors[needed.pop(digest)] for digest in taken)
        nbytes = sum(self.tensors[index].nbytes for index in needed.values())
        fits = self._store.ahead < _MOST_AHEAD and self._store._reserve(nbytes)
        if not fits and spare_memory() < nbytes:
            return
        ahead: dict[str, Bytes] = {}
        try:
            for digest, index in needed.items():
                if abandoned():
                    raise Abandoned
                raw = fresh(self.tensors[index].nbytes)
                self._file.read_into(index, raw, digest=digest)
                if fits:
                    ahead[digest] = raw
        except BaseException:
            self._store._end_reserve(nbytes if fits else 0)
            self.end_read_ahead()()
            raise
        with self._store._lock:
            self._ahead = ahead
            self._store.ahead += bool(ahead)

    def end_read_ahead(self) -> Callable[[], None]:
        """Forget the weights that were read ahead. Return a function that frees their memory, which may take a long time."""
        with self._store._lock:
            ahead, self._ahead = self._ahead, {}
            taken, self._ahead_held = self._ahead_held, ()
            self._store.ahead -= bool(ahead)
        self._store._end_reserve(sum(raw.nbytes for raw in ahead.values()))

        def free() -> None:
            ahead.clear()
            self._store._give(taken)

        return free

    def read(self, index: int) -> Array:
        """Return a weight as a read-only array.

        The weight comes from the host copy or from the weights that were read ahead. If neither has it, it is read from the
        file. The memory lives as long as the array. Raises HostMemoryError, and BundleError if there is no copy and the weight
        in the file has changed since it was opened.
        """
        (digest, dtype, shape), nbytes = self.tensors[index]
        raw = self._store._find(digest)
        if raw is None:
            raw = self._ahead.get(digest)
        if raw is None:
            raw = fresh(nbytes)
            self._file.read_into(index, raw, digest=digest)
        return as_array(raw, dtype, shape)

    def close(self) -> None:
        """Drop the host copy and close the file. No thread may be reading. Further calls do nothing."""
        self._closed = True
        self.drop()
        self.end_read_ahead()()
        self._store._forget(self, self._file)
        self._file.close()
