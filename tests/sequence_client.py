"""A connection to a runtime that sends the steps of sequences, without a stub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.stub.connection import Greeted, RuntimeConnection
from rsrv.wire.frames import Completion, Status, Submission
from rsrv.wire.layout import NUMPY, Block, Interface
from rsrv.wire.memory import Bytes

Array = npt.NDArray[Any]


class SequenceClient:
    """A registered connection for one model with one variant. Each step has one row. For a model without state, the sequence is 0."""

    def __init__(self, greeted: Greeted, bundle: Path) -> None:
        self.connection = RuntimeConnection(greeted)
        body = self.connection.register({"model": bundle.name, "bundle": str(bundle)})
        self.stateful = body["models"][0]["stateful"]
        variant = Interface.from_json(body["models"][0]["interface"]).variants[0]
        self._inputs, self._outputs = variant.inputs, variant.outputs
        self._slabs: dict[int, Any] = {}
        self._ended: dict[int, Completion] = {}

    def send(self, id: int, flags: int, *inputs: Array, **changes: int) -> int:
        """Send a step of a sequence; return the request's number. `changes`: fields of the submission."""
        taken = self._inputs.places[1].nbytes
        slab = self.connection.take(taken + self._outputs.places[1].nbytes, users=1)
        at, segment = slab.place.offset, slab.place.segment
        for to, value in zip(_views(self._inputs, slab.segment, at), inputs, strict=True):
            to[...] = value
        (number,) = self.connection.next_ids(1)
        self._slabs[number] = slab
        step = Submission(number, 0, 1, 0, 0, segment, flags, at, at + taken, sequence=id)
        self.connection.submit([step._replace(**changes)])
        return number

    def end(self, number: int) -> Completion:
        """Wait for the end of a request."""
        while number not in self._ended:
            for done in self.connection.receive(60):
                self._ended[done.request] = done
        return self._ended.pop(number)

    def answer(self, number: int) -> tuple[Completion, list[Array]]:
        """Wait for the answer of a request. Return its completion, and a copy of the only row of each output."""
        done = self.end(number)
        assert done.status is Status.OK, done.text
        slab = self._slabs.pop(number)
        views = _views(self._outputs, slab.segment, slab.place.offset + self._inputs.places[1].nbytes)
        outputs = [view[0].copy() for view in views]
        self.connection.release(slab)
        return done, outputs


def _views(block: Block, segment: Bytes, start: int) -> list[Array]:
    return [
        np.ndarray(tensor.shape(1), NUMPY[tensor.dtype], segment, start + place)
        for tensor, place in zip(block.tensors, block.places[1].offsets, strict=True)
    ]
