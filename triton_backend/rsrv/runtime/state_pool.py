"""State of sequences on the device: the pools of one model, and the state that each slot holds.

A slot may belong to a sequence whose state is elsewhere: in host memory after an eviction, or still in another slot.
`launch` brings each state to the slot where its row expects it. Before that, it saves the state that another live sequence
has in that slot. So the loop only decides which sequence has which slot. A retry of an execution finds each state where
the first attempt left it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np

from rsrv.runtime.device import (
    NO_TARGETS,
    Array,
    ArrayKind,
    Buffer,
    Device,
    Executable,
    Launched,
    Pools,
    Targets,
)
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.spec import StateSpec

log = logging.getLogger(__name__)


class StateLost(Exception):
    """An execution continues a sequence whose state is lost."""


@dataclass(slots=True, eq=False)
class SequenceTensors:
    """The state of one sequence, on the device or the host. Without `slot` and `arrays`, the state is lost or not made yet."""

    #: Slot that holds the state, or None.
    slot: int | None = None
    #: Copy of the state in host memory, or None.
    arrays: list[Array] | None = None
    #: False once the sequence has ended. Its state is then not saved.
    live: bool = True


class SlotRow(NamedTuple):
    """A row of an execution."""

    #: Slot of the row's sequence.
    slot: int
    tensors: SequenceTensors
    #: True if the sequence begins with this row.
    begins: bool


class StatePool:
    """Pools of one model.

    `load`, `unload` and `launch` never run at the same time, and `load` and `unload` never run during an execution of the
    model.
    """

    def __init__(self, model: str, spec: StateSpec) -> None:
        self.spec = spec
        self.nbytes = spec.pool_bytes
        #: Bytes of each pool, by keys that no other model's tensors have.
        self.tensors = {(model, tensor.name): spec.slots * tensor.nbytes for tensor in spec.tensors}
        self._kinds: tuple[ArrayKind, ...] = tuple(
            ((spec.slots, *tensor.dims), numpy_dtype(tensor.dtype)) for tensor in spec.tensors
        )
        self._pools: Pools | None = None
        #: The state that each slot holds, by slot.
        self._held: dict[int, SequenceTensors] = {}
        #: Number of times that the contents of the pools were lost. A failed execution destroys the contents only if this number
        #: has not changed since its launch. Otherwise, the contents are newer than the execution.
        self.losses = 0
        # A thread may handle a failed execution while another thread launches the next one.
        self._lock = Lock()

    def load(self, device: Device) -> None:
        """Allocate the pools. Raises OutOfMemory."""
        with self._lock:
            if self._pools is None:
                self._pools = device.make_pools(self._kinds)

    def unload(self, device: Device) -> None:
        """Free the pools. Live sequences keep their state in host memory."""
        with self._lock:
            for slot, tensors in self._held.items():
                tensors.slot = None
                if tensors.live:
                    try:
                        tensors.arrays = self._read(device, slot)
                    except Exception as error:  # noqa: BLE001 - the memory must be freed after any error
                        log.error("the state of a sequence cannot be saved, and is lost: %s", error)
            self._held.clear()
            self._free(device)

    def launch(
        self,
        device: Device,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        size: int,
        rows: Sequence[SlotRow] = (),
        targets: Targets = NO_TARGETS,
    ) -> tuple[Launched, int]:
        """Launch an execution of `size` rows: first `rows`, then padding. `targets`: see `Device.launch`.

        Return the launched execution and the number of losses before it, which `read` needs. Raises StateLost and the device's
        errors. After an error, `losses` shows whether the contents were lost.
        """
        self.load(device)
        with self._lock:
            assert self._pools is not None
            try:
                slots = self._place(device, size, rows)
                launched = device.launch(executable, weights, [*inputs, slots], (), self._pools, targets)
            except BaseException:
                if not device.holds(self._pools):
                    self._lose(device)
                raise
            # Do this only after a successful launch, because the former states are valid until then.
            for slot, tensors, begins in rows:
                if begins and tensors.slot != slot:
                    self._put(slot, tensors)
                    tensors.arrays = None
            return launched, self.losses

    def read(self, device: Device, launched: Launched, losses: int) -> tuple[list[Array], float]:
        """Read the outputs of an execution, and its seconds on the device.

        `losses`: the number that `launch` returned. If the execution has failed, drop the pools and all states in them, because
        the execution has written to them.
        """
        try:
            return device.read(launched)
        except BaseException:
            with self._lock:
                if losses == self.losses:
                    self._lose(device)
            raise

    def _place(self, device: Device, size: int, rows: Sequence[SlotRow]) -> Array:
        """Bring each row's state to its slot. Return the module's argument with the slots.

        The argument has one number for each row of the execution: the row's slot, ~slot if the row begins a sequence, or the
        number of slots if the row is padding.
        """
        slots = np.full(size, self.spec.slots, np.int32)
        for index, (slot, tensors, begins) in enumerate(rows):
            slots[index] = ~slot if begins else slot
            if tensors.slot != slot:
                if begins:
                    self._save(device, slot)
                else:
                    self._bring(device, slot, tensors)
        return slots

    def _lose(self, device: Device) -> None:
        self.losses += 1
        for tensors in self._held.values():
            tensors.slot = None
        self._held.clear()
        self._free(device)

    def _free(self, device: Device) -> None:
        if self._pools is not None:
            device.free_pools(self._pools)
            self._pools = None

    def _read(self, device: Device, slot: int) -> list[Array]:
        assert self._pools is not None
        return device.read_slot(self._pools, slot)

    def _save(self, device: Device, slot: int) -> None:
        """Save the state in a slot to host memory, unless its sequence has ended. The slot is then empty."""
        saved = self._held.get(slot)
        if saved is not None:
            if saved.live:
                saved.arrays = self._read(device, slot)
            del self._held[slot]
            saved.slot = None

    def _bring(self, device: Device, slot: int, tensors: SequenceTensors) -> None:
        """Bring a state to a slot, from another slot or from host memory. Raises StateLost."""
        arrays = tensors.arrays if tensors.slot is None else self._read(device, tensors.slot)
        if arrays is None:
            raise StateLost("an earlier execution has lost the state of a sequence that continues")
        self._save(device, slot)
        assert self._pools is not None
        device.write_slot(self._pools, slot, arrays)
        self._put(slot, tensors)
        tensors.arrays = None

    def _put(self, slot: int, tensors: SequenceTensors) -> None:
        """Record that this slot, and no other one, holds a state."""
        if tensors.slot is not None:
            del self._held[tensors.slot]
        self._held[slot] = tensors
        tensors.slot = slot
