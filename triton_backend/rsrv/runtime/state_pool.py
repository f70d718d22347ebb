"""State of sequences on the device: the pools of one model, and what each of their slots holds.

A slot may belong to a sequence whose state is elsewhere: in host memory after an eviction, or still in another slot.
`launch` brings each state to the slot where its row expects it, and first saves what another live sequence has there.
So the loop only decides which sequence has which slot, and a second try of an execution finds what the first one left.
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

log = logging.getLogger("rsrv.state")


class StateLost(Exception):
    """A sequence continues, but its state is gone."""


@dataclass(slots=True, eq=False)
class SequenceTensors:
    """The state of one sequence, wherever it lies. Without slot and arrays it is lost, or has not begun."""

    #: Slot of the pools that holds the state, or None.
    slot: int | None = None
    #: Copy of the state in host memory.
    arrays: list[Array] | None = None
    #: False once its sequence has ended. Such a state is not saved.
    live: bool = True


class SlotRow(NamedTuple):
    """A row of an execution: the slot of its sequence, and whether the sequence begins with this row."""

    slot: int
    tensors: SequenceTensors
    begins: bool


class StatePool:
    """Pools of one model. `load` and `unload` never run beside an execution of the model, nor do two launches."""

    def __init__(self, model: str, spec: StateSpec) -> None:
        self.spec = spec
        self.nbytes = spec.pool_bytes
        #: Bytes of each pool, under keys that no other model's tensors have.
        self.tensors = {(model, tensor.name): spec.slots * tensor.nbytes for tensor in spec.tensors}
        self._kinds: tuple[ArrayKind, ...] = tuple(
            ((spec.slots, *tensor.dims), numpy_dtype(tensor.dtype)) for tensor in spec.tensors
        )
        self._pools: Pools | None = None
        #: The state that each slot holds, by slot.
        self._held: dict[int, SequenceTensors] = {}
        #: How often the contents were lost. An execution that fails late must not destroy newer contents.
        self.losses = 0
        # A thread may find that an execution has failed while another one launches the next.
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
                    except Exception as error:  # noqa: BLE001 - the memory is needed, whatever the device answers
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
        """Launch an execution of `size` rows, of which the first are `rows`, and the others padding.

        `targets` as in `Device.launch`. Return it with the number of losses before it, for `read`. Raises StateLost
        and the device's errors. `losses` then shows whether the contents were lost.
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
            # Do this only after a successful launch: until then, the former states are valid.
            for slot, tensors, begins in rows:
                if begins and tensors.slot != slot:
                    self._put(slot, tensors)
                    tensors.arrays = None
            return launched, self.losses

    def read(self, device: Device, launched: Launched, losses: int) -> tuple[list[Array], float]:
        """Read an execution. If it has failed, drop the pools, which it has filled, and all states in them."""
        try:
            return device.read(launched)
        except BaseException:
            with self._lock:
                if losses == self.losses:
                    self._lose(device)
            raise

    def _place(self, device: Device, size: int, rows: Sequence[SlotRow]) -> Array:
        """Bring each row's state to its slot; return the module's argument."""
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
        """Save what a slot holds, unless its sequence has ended."""
        saved = self._held.get(slot)
        if saved is not None:
            if saved.live:
                saved.arrays = self._read(device, slot)
            del self._held[slot]
            saved.slot = None

    def _bring(self, device: Device, slot: int, tensors: SequenceTensors) -> None:
        """Bring a state to a slot, from another one or from host memory."""
        arrays = tensors.arrays if tensors.slot is None else self._read(device, tensors.slot)
        if arrays is None:
            raise StateLost("a sequence continues whose state an earlier execution has lost")
        self._save(device, slot)
        assert self._pools is not None
        device.write_slot(self._pools, slot, arrays)
        self._put(slot, tensors)
        tensors.arrays = None

    def _put(self, slot: int, tensors: SequenceTensors) -> None:
        """Record that a slot holds a state, and no other slot does."""
        if tensors.slot is not None:
            del self._held[tensors.slot]
        self._held[slot] = tensors
        tensors.slot = slot
