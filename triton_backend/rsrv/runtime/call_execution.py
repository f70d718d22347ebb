"""Executions that include sub-calls of meta models. The tensors of sub-calls may be on the device, and stay there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rsrv.runtime.device import Array, Buffer, Device, DeviceRows, Executable, Launched, Targets
from rsrv.runtime.execution import ContiguousRun, Dispatch
from rsrv.runtime.runs import Kept, MetaRun
from rsrv.runtime.slices import RequestKind, RequestSlice
from rsrv.runtime.transport import PeerConnection
from rsrv.wire.layout import Block
from rsrv_bundle.dtypes import numpy_dtype


@dataclass(slots=True, eq=False)
class RunSlice(RequestSlice):
    """A sub-call's share of an execution, if the sub-call arrived as a request of its model's stub."""

    #: The run, or None after its end.
    run: MetaRun | None = None


@dataclass(slots=True, eq=False)
class CallSlice:
    """A sub-call's share of an execution. Each tensor has its own place, on the host or on the device."""

    connection: PeerConnection
    request: int
    rows: int
    run: MetaRun
    sources: Sequence[Array | Kept]
    #: Memory for each output. None: the output is not needed on the host.
    targets: Sequence[Array | None]
    #: Outputs to keep on the device. The key is the output's index, the value is the output's number in the run.
    keep: Mapping[int, int]
    kind: RequestKind | None = None
    #: Outputs to keep, by their numbers in the run. The execution stores them here, and the loop gives them to the run.
    made: dict[int, Kept] = field(default_factory=dict)
    #: Only a `RequestSlice` has a segment.
    segment: None = None
    shapes: None = None

    def source(self, index: int, block: Block) -> Array | Kept:
        return self.sources[index]

    def target(self, index: int, block: Block) -> Array | None:
        return self.targets[index]

    def mark(self) -> None:
        """Set the first byte of the first non-empty output to 1. `Slice.mark` explains why."""
        for target in self.targets:
            if target is not None and target.nbytes:
                target.reshape(-1).view(np.uint8)[0] = 1
                return

    def settle(self, *, succeeded: bool) -> None:
        """Give the kept outputs to the run. After a failure, drop them, because the execution may be retried.

        Call this on the loop.
        """
        if succeeded:
            self.run.kept |= self.made
            self.end_promises()
        self.made.clear()

    def end_promises(self) -> None:
        """Remove this call's outputs from the run's promised outputs, because the run has them now or will never get them.

        Call this on the loop.
        """
        for number in self.keep.values():
            self.run.promised.pop(number, None)


@dataclass(slots=True, eq=False)
class CallDispatch(Dispatch):
    """A dispatch with sub-calls among its slices."""

    def __post_init__(self) -> None:
        block = self.variant.outputs
        outputs, inputs = range(len(block.tensors)), range(len(self.variant.inputs.tensors))
        self.unread = {i for i in outputs if all(part.target(i, block) is None for part in self.slices)}
        # Merging inputs on the device may compile a program first.
        self.compiles = any(
            kept_parts and not self._covered(i, kept_parts) for i in inputs if (kept_parts := self._kept(i))
        )

    def launch(
        self,
        device: Device,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: list[Array | Buffer],
        targets: Targets,
    ) -> Launched:
        """Launch, and keep on the device the outputs that runs asked for."""
        launched = device.launch(executable, weights, inputs, self.unread, None, targets)
        first = 0
        for part in self.slices:
            if isinstance(part, CallSlice):
                for index, number in part.keep.items():
                    tensor = self.variant.outputs.tensors[index]
                    batched = tensor.batch_axis is not None
                    at, size = (first, self.execute.size) if batched else (0, 1)
                    part.made[number] = Kept(device.keep(launched, index), tensor, at, part.rows, size)
            first += part.rows
        return launched

    def _input(
        self, index: int, staged: Array | None, groups: list[ContiguousRun], device: Device
    ) -> Array | Buffer:
        kept_parts = self._kept(index)
        tensor, size = self.variant.inputs.tensors[index], self.execute.size
        if kept_parts is None or (kept_parts[0] is None and (staged is None or tensor.batch_axis is None)):
            return Dispatch._input(self, index, staged, groups, device)
        if kept_parts[0] is not None and self._covered(index, kept_parts):
            return kept_parts[0].buffer
        if staged is None:
            stacked = np.zeros(tensor.shape(size), numpy_dtype(tensor.dtype))
        else:
            stacked = self._stack(index, groups, staged)
        rows, at = [], 0
        for part, part_kept in zip(self.slices, kept_parts, strict=True):
            if part_kept is not None:
                rows.append(DeviceRows(part_kept.buffer, part_kept.first, part.rows, at))
            at += part.rows
        return device.merge(stacked, tensor.batch_axis or 0, rows)

    def _kept(self, index: int) -> list[Kept | None] | None:
        """Return, for each slice, the tensor of an input that is already on the device, or None.

        Return None if no slice has such a tensor.
        """
        sources = [part.sources[index] if isinstance(part, CallSlice) else None for part in self.slices]
        parts = [source if isinstance(source, Kept) else None for source in sources]
        return parts if any(parts) else None

    def _covered(self, index: int, parts: Sequence[Kept | None]) -> bool:
        """Return whether one tensor on the device already is this input: it has the rows of all slices in their places."""
        first, at = parts[0], 0
        batched = self.variant.inputs.tensors[index].batch_axis is not None
        if first is None or first.size != (self.execute.size if batched else 1):
            return False
        for part, part_kept in zip(self.slices, parts, strict=True):
            if part_kept is None or part_kept.buffer is not first.buffer or part_kept.first != at:
                return False
            at += part.rows
        return True
