"""Steps of generations as slices of executions. Their tensors are in memory of the runtime, not of a stub."""

from heapq import heappop, heappush
from typing import Any

import numpy.typing as npt

from rsrv.runtime.allocation import Bytes, aligned
from rsrv.runtime.generations import Chunks, Generation, GenerationCounts
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.slices import RequestKind, view
from rsrv.runtime.state_execution import SequenceSlice
from rsrv.runtime.transport import PeerConnection
from rsrv.scheduler import events as ev
from rsrv.wire.generation import Generate
from rsrv.wire.layout import Block
from rsrv_bundle.spec import GenerateSpec

#: Number of generations in one block of memory.
_PLACES = 64


class StepMemory:
    """Memory for the steps of one model's generations.

    Generations lie side by side, so that an execution copies the tensors of neighbours at once. The memory never shrinks,
    because the number of concurrent generations of a model is bounded.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        """`inputs`, `outputs`: maximum bytes of the inputs and of the outputs of a step, multiples of the alignment."""
        self.inputs = inputs
        self._stride = inputs + outputs
        self._blocks: list[Bytes] = []
        #: Heap of the free places. The first place is at its top.
        self._free: list[int] = []

    def take(self) -> int:
        """Take the first free place, and return it. If no place is free, add a block."""
        if not self._free:
            first = len(self._blocks) * _PLACES
            self._blocks.append(aligned(_PLACES * self._stride))
            self._free = list(range(first, first + _PLACES))
        return heappop(self._free)

    def give(self, place: int) -> None:
        """Free the place of a generation that has ended."""
        heappush(self._free, place)

    def locate(self, place: int) -> tuple[Bytes, int]:
        """Return the block and the offset of a place."""
        return self._blocks[place // _PLACES], place % _PLACES * self._stride


def step_memory(model: CompiledModel) -> StepMemory:
    """Return memory for generations of a model."""
    variants = model.interface.variants
    inputs = max(variant.inputs.places[1].nbytes for variant in variants)
    return StepMemory(inputs, max(variant.outputs.places[1].nbytes for variant in variants))


class StepSlice(SequenceSlice):
    """The share of one generation in an execution: its next chunk, and the token that the step returns.

    All steps of a generation use the same memory, one after the other.
    """

    def __init__(
        self,
        connection: PeerConnection,
        number: int,
        ask: Generate,
        served: tuple[CompiledModel, StepMemory, GenerationCounts],
        now: float,
        kind: RequestKind,
    ) -> None:
        """Begin a generation. `number`: the loop's number for it.

        `served`: the model, with the memory and the counters of all its generations.
        """
        model, memory, counts = served
        spec = model.bundle.manifest.generate
        assert spec is not None, "GENERATE is for generative models"
        #: Place of the generation in the model's `StepMemory`. It is free again after `end`.
        self.place, self._memory = memory.take(), memory
        block, at = memory.locate(self.place)
        super().__init__(connection, ask.request, 1, block, at, at + memory.inputs, kind=kind)
        self.generation = Generation(ask, spec, _chunks(model, spec), counts, now)
        self.number = number
        #: Number of the current step's request, as the scheduler knows it.
        self.id = 0
        #: Hash of the client's id for the generation. The slice's `tag` stays 0, because a search for requests must not find
        #: single steps.
        self.asked_tag = ask.tag
        self._deadline = ask.deadline_ns / 1e9 if ask.deadline_ns else None
        self._priority = ask.priority
        self._model, self._spec = model, spec
        #: Index of the variant for which the memory is laid out, or -1 before the first step.
        self._variant = -1
        #: Views of this variant's tensors in the memory: tokens, lengths, and the returned token.
        self._tokens: npt.NDArray[Any]
        self._lengths: npt.NDArray[Any]
        self._token: npt.NDArray[Any]

    def next_request(self, id: int, *, others_wait: bool) -> ev.Request:
        """Write the next step's inputs, and return its request.

        Only the first request may be refused. Later requests continue an accepted sequence.
        """
        begins, self.id = self.id == 0, id
        chunk = self.generation.next_chunk(others_wait=others_wait)
        if chunk.variant != self._variant:
            self._variant = chunk.variant
            self._lay_out()
        count = len(chunk.tokens)
        self._tokens[0, :count] = chunk.tokens
        self._tokens[0, count:] = 0
        self._lengths[0] = count
        return ev.Request(
            id,
            self._model.key,
            chunk.variant,
            1,
            self._deadline,
            self._priority,
            accepted=not begins,
            tag=self.asked_tag,
            due=self.generation.due(),
        )

    def end(self) -> None:
        """End the generation, and free its memory for others. Call this once."""
        self.generation.end()
        self._memory.give(self.place)

    def _lay_out(self) -> None:
        variant, spec = self._model.interface.variants[self._variant], self._spec
        self._tokens = self._find(variant.inputs, spec.tokens, self.inputs_at)
        self._lengths = self._find(variant.inputs, spec.lengths, self.inputs_at)
        self._token = self._find(variant.outputs, spec.token, self.outputs_at)
        self._find(variant.inputs, spec.sampling, self.inputs_at)[0] = self.generation.sampling

    def _find(self, block: Block, name: str, start: int) -> npt.NDArray[Any]:
        index = next(index for index, tensor in enumerate(block.tensors) if tensor.name == name)
        return view(block, index, self.rows, self.segment, start)

    @property
    def token(self) -> int:
        """The token that the latest step returned."""
        return int(self._token[0])


def _chunks(model: CompiledModel, spec: GenerateSpec) -> Chunks:
    """Return a model's compiled lengths and their measured costs."""
    variants, costs = model.interface.variants, model.program.costs
    return Chunks(
        [next(t.dims[1] for t in variant.inputs.tensors if t.name == spec.tokens) for variant in variants],
        [
            next(seconds / size for (variant, size), seconds in sorted(costs.items()) if variant == index)
            for index in range(len(variants))
        ],
    )
