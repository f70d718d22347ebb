"""Executions of models with state. Each request reads and writes the state of its sequence, which is in a slot."""

from collections.abc import Sequence
from dataclasses import dataclass

from rsrv.runtime.device import Array, Buffer, Device, Executable, Launched, Targets
from rsrv.runtime.execution import Dispatch
from rsrv.runtime.sequences import SequenceEntry
from rsrv.runtime.slices import RequestSlice
from rsrv.runtime.state_pool import SlotRow


@dataclass(slots=True, eq=False)
class SequenceSlice(RequestSlice):
    """A step's share of an execution."""

    #: Sequence of the request. None: the request is refused, or not handled yet.
    sequence: SequenceEntry | None = None


@dataclass(slots=True, eq=False)
class StepDispatch(Dispatch):
    """A dispatch of a model with state."""

    #: Slot and state of each slice's sequence, in the order of the slices.
    rows_in_slots: Sequence[SlotRow] = ()
    #: Number of times that the model's states were lost before the launch.
    losses: int = 0

    def launch(
        self,
        device: Device,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: list[Array | Buffer],
        targets: Targets,
    ) -> Launched:
        pool, size = self.model.pool, self.execute.size
        assert pool is not None
        launched, self.losses = pool.launch(
            device, executable, weights, inputs, size, self.rows_in_slots, targets
        )
        return launched

    def read(self, device: Device, launched: Launched) -> tuple[list[Array], float]:
        assert self.model.pool is not None
        return self.model.pool.read(device, launched, self.losses)
