"""State of sequences on jax's device: pools of tensors whose first axis is the slot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

import numpy as np

from rsrv.runtime.device import Array, ArrayKind, Pools
from rsrv.runtime.device_errors import ErrorExaminer
from rsrv.runtime.device_memory import DeviceMemory
from rsrv.runtime.jax_compiler import HelperPrograms


@dataclass(slots=True, eq=False)
class SlotPools:
    """Arrays of state tensors. Outside of the device, their type is `Pools`."""

    arrays: Sequence[Any]
    kinds: tuple[ArrayKind, ...]
    #: Keys of the pools' memory in `DeviceMemory`. The memory stays reserved: each execution writes its results there.
    keys: Sequence[int]


class DevicePools:
    """Makes pools, and reads and writes their slots. Executions replace the contents of pools (`DeviceExecutions`)."""

    def __init__(
        self, memory: DeviceMemory, programs: HelperPrograms, launching: Lock, examiner: ErrorExaminer
    ) -> None:
        """`launching` is the lock that is held while an execution is launched. It serializes all uses of a pool."""
        self._memory = memory
        self._programs = programs
        self._launching = launching
        self._examiner = examiner
        # Other keys in `DeviceMemory` are ids of objects, which are not negative.
        self._keys = count(-1, -1)

    def make_pools(self, kinds: Sequence[ArrayKind]) -> Pools:
        kinds = tuple(kinds)
        with self._examiner:
            self._memory.require([math.prod(shape) * dtype.itemsize for shape, dtype in kinds])
            arrays = self._programs.pool_maker(kinds)()
            for array in arrays:
                array.block_until_ready()
        keys = [next(self._keys) for _ in arrays]
        for key, array in zip(keys, arrays, strict=True):
            self._memory.note(key, array)
        return Pools(SlotPools(arrays, kinds, keys))

    def free_pools(self, pools: Pools) -> None:
        assert isinstance(pools, SlotPools)
        for array in pools.arrays:
            array.delete()
        for key in pools.keys:
            self._memory.forget(key)

    def holds(self, pools: Pools) -> bool:
        assert isinstance(pools, SlotPools)
        return not any(array.is_deleted() for array in pools.arrays)

    def read_slot(self, pools: Pools, slot: int) -> list[Array]:
        assert isinstance(pools, SlotPools)
        with self._examiner, self._launching:
            tensors = self._programs.slot_reader(pools.kinds)(list(pools.arrays), np.int32(slot))
            return [np.asarray(tensor) for tensor in tensors]

    def write_slot(self, pools: Pools, slot: int, values: Sequence[Array]) -> None:
        assert isinstance(pools, SlotPools)
        with self._examiner, self._launching:
            write = self._programs.slot_writer(pools.kinds)
            pools.arrays = write(list(pools.arrays), np.int32(slot), list(values))
