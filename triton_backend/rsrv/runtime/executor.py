"""Executions: gather the inputs, launch, read, scatter the outputs; on the loop or on threads."""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rsrv.runtime.activity import Activity, ActivitySlot, Phase
from rsrv.runtime.allocation import aligned
from rsrv.runtime.device import Array, Buffer, Device, Launched, OutOfMemory, Piece
from rsrv.runtime.models import Model, about
from rsrv.runtime.runs import Kept, Run, view
from rsrv.runtime.threads import Inbox, Worker
from rsrv.runtime.transport import Connection
from rsrv.wire.layout import Block, Tensor
from rsrv.wire.memory import Bytes
from rsrv_bundle.dtypes import numpy_dtype


@dataclass(slots=True, eq=False)
class RequestSlice:
    """One request's share: whose it is, where its inputs lie and where its outputs go."""

    connection: Connection
    request: int  # the connection's own id
    rows: int
    segment: Bytes
    inputs_at: int
    outputs_at: int
    run: Run | None = None
    tag: int = 0  # stands for the client's id of it; 0: it has none

    def start(self, outputs: bool) -> int:
        return self.outputs_at if outputs else self.inputs_at

    def source(self, index: int, block: Block) -> Array:
        """An input in shared memory."""
        return self._view(index, block, self.inputs_at)

    def target(self, index: int, block: Block) -> Array:
        """The place of an output in shared memory."""
        return self._view(index, block, self.outputs_at)

    def _view(self, index: int, block: Block, start: int) -> Array:
        return view(block.tensors[index], self.rows, self.segment, start + block.places(self.rows)[0][index])


@dataclass(slots=True, eq=False)
class CallSlice:
    """The share of a meta model's sub-call: each tensor is wherever it is."""

    connection: Connection
    request: int
    rows: int
    run: Run
    sources: Sequence[Array | Kept]
    #: None: nobody wants it on the host
    targets: Sequence[Array | None]
    #: output -> the number that the run keeps it by, on the device
    keep: Mapping[int, int]
    #: what it keeps, by number: left here by the execution, for the loop to give to the run
    made: dict[int, Kept] = field(default_factory=dict)

    def source(self, index: int, block: Block) -> Array | Kept:
        return self.sources[index]

    def target(self, index: int, block: Block) -> Array | None:
        return self.targets[index]

    def settle(self, *, well: bool) -> None:
        """On the loop: an execution of it is over, after which it may be tried again if that did not go well."""
        if well:
            self.run.kept |= self.made
            self.give_up()
        self.made.clear()

    def give_up(self) -> None:
        """On the loop: it will keep nothing any more."""
        for number in self.keep.values():
            self.run.promised.pop(number, None)


AnySlice = RequestSlice | CallSlice


@dataclass(frozen=True, slots=True)
class Job:
    """An `Execute` instruction with everything that carrying it out needs."""

    dispatch: int
    model: Model
    variant: int
    size: int
    rows: int
    requests: tuple[int, ...]
    parts: tuple[AnySlice, ...]
    #: whether some of it are sub-calls of meta models
    calls: bool = False

    @property
    def block(self) -> Block:
        return self.model.interface.variants[self.variant].inputs

    @property
    def results(self) -> Block:
        return self.model.interface.variants[self.variant].outputs

    def kept(self, index: int) -> list[Kept | None] | None:
        """What of an input is on the device already, by part; None: nothing."""
        if not self.calls:
            return None
        sources = [part.sources[index] if isinstance(part, CallSlice) else None for part in self.parts]
        kept = [source if isinstance(source, Kept) else None for source in sources]
        return kept if any(kept) else None

    @property
    def unread(self) -> Collection[int]:
        """Outputs that nobody wants on the host."""
        if not self.calls:
            return ()
        outputs = range(len(self.results.tensors))
        return {index for index in outputs if all(p.target(index, self.results) is None for p in self.parts)}

    @property
    def merges(self) -> bool:
        """Whether its inputs have to be put together on the device, for which something may have to be compiled."""
        inputs = range(len(self.block.tensors))
        return any(kept and not self.covered(index, kept) for index in inputs if (kept := self.kept(index)))

    def covered(self, index: int, kept: Sequence[Kept | None]) -> bool:
        """Whether one tensor on the device is this input as it is: everybody's rows are where they should be."""
        first, at = kept[0], 0
        if first is None or first.size != (
            self.size if self.block.tensors[index].batch_axis is not None else 1
        ):
            return False
        for part, one in zip(self.parts, kept, strict=True):
            if one is None or one.buffer is not first.buffer or one.first != at:
                return False
            at += part.rows
        return True


@dataclass(slots=True)
class Staging:
    """Memory that batches are assembled in: a block for each execution that may still read its own.

    Blocks serve all models, and grow with the largest batch. Used by the loop and the executor's threads: what they
    share is touched in single steps only.
    """

    #: blocks that nobody uses
    _idle: list[Array] = field(default_factory=list)

    def take(self, nbytes: int) -> Array:
        try:
            block = self._idle.pop()
        except IndexError:
            return aligned(nbytes)
        return block if block.nbytes >= nbytes else aligned(nbytes)

    def give(self, block: Array) -> None:
        """Back for the next batch: the execution is over."""
        self._idle.append(block)

    def clear(self) -> None:
        """Give the memory back; the next batches take what they need."""
        self._idle.clear()


class ContiguousRun:
    """`count` parts of `rows` rows each, `stride` bytes apart."""

    __slots__ = ("_inputs_at", "_outputs_at", "count", "first", "rows", "stride")

    def __init__(self, first: AnySlice) -> None:
        self.first = first
        self.rows = first.rows
        self.count = 1
        self.stride = 0
        if isinstance(first, RequestSlice):
            self._inputs_at = first.inputs_at
            self._outputs_at = first.outputs_at

    def take(self, part: AnySlice) -> bool:
        """Whether the part continues the stretch; then it belongs to it."""
        if not isinstance(part, RequestSlice) or not isinstance(self.first, RequestSlice):
            return False
        stride = part.inputs_at - self._inputs_at
        if (
            part.rows != self.rows
            or part.segment is not self.first.segment
            or stride <= 0
            or (self.count > 1 and stride != self.stride)
            or part.outputs_at - self._outputs_at != stride
        ):
            return False
        self.stride = stride
        self.count += 1
        self._inputs_at, self._outputs_at = part.inputs_at, part.outputs_at
        return True

    def copy(self, batch: Array, at: int, index: int, block: Block, *, outputs: bool) -> int:
        """Between rows `at` and following of `batch` (rows first) and the parts' tensors; returns where it ends."""
        tensor, part = block.tensors[index], self.first
        first = part.target(index, block) if outputs else part.source(index, block)
        end = at + self.count * self.rows
        if not isinstance(first, np.ndarray):
            return end  # on the device, or not wanted
        rows = batch[at:end]
        if self.count == 1:
            parts = _rows_first(first, tensor)
        else:
            assert isinstance(part, RequestSlice)
            shape, strides = (self.count, *first.shape), (self.stride, *first.strides)
            start = part.start(outputs) + block.places(self.rows)[0][index]
            parts = np.ndarray(shape, first.dtype, part.segment, start, strides)
            if tensor.batch_axis:
                parts = np.moveaxis(parts, tensor.batch_axis + 1, 1)
            rows = rows.reshape(self.count, self.rows, *rows.shape[1:])
        if outputs:
            parts[...] = rows
        else:
            rows[...] = parts
        return end


def find_contiguous_runs(parts: Sequence[AnySlice]) -> list[ContiguousRun]:
    """Parts that lie in one segment at equal distances with equally many rows, as those of one execute() do.

    A stretch is copied at once, which for small tensors is what makes a large batch cheap.
    """
    stretches: list[ContiguousRun] = []
    stretch: ContiguousRun | None = None
    for part in parts:
        if stretch is None or not stretch.take(part):
            stretch = ContiguousRun(part)
            stretches.append(stretch)
    return stretches


@dataclass(slots=True, eq=False)
class Flight:
    """A job that the device was given."""

    job: Job
    launched: Launched
    #: where its inputs were assembled; None: they are read in place
    staged: Array | None


def launch(job: Job, device: Device, staging: Staging) -> Flight:
    """Give the device a job's inputs."""
    weights = job.model.weights
    assert weights is not None, "the scheduler executes on resident weights only"
    alone = len(job.parts) == 1 and job.rows == job.size
    staged = None if alone else staging.take(job.block.places(job.size)[1])
    inputs = gather(job, staged, device)
    executable = job.model.executables[job.variant, job.size]
    launched = device.launch(executable, weights, inputs, job.unread)
    if job.calls:
        _keep(job, launched, device)
    return Flight(job, launched, staged)


def _keep(job: Job, launched: Launched, device: Device) -> None:
    """Have those outputs stay on the device that runs asked for."""
    first = 0
    for part in job.parts:
        if isinstance(part, CallSlice):
            for index, number in part.keep.items():
                tensor = job.results.tensors[index]
                batched = tensor.batch_axis is not None
                at, size = (first, job.size) if batched else (0, 1)
                part.made[number] = Kept(device.keep(launched, index), tensor, at, part.rows, size)
        first += part.rows


def finish(flight: Flight, device: Device, staging: Staging) -> float:
    """Wait for the outputs; they are in shared memory when this returns. Returns the execution's seconds."""
    outputs, seconds = device.read(flight.launched)
    scatter(flight.job, outputs)
    # Not after a failure: who knows then whether the device is done with them.
    if flight.staged is not None:
        staging.give(flight.staged)
    return seconds


def gather(job: Job, staged: Array | None, device: Device) -> list[Array | Buffer]:
    """The inputs at the compiled size: read in place if one request fills it, else stacked and padded with zeros."""
    stretches = [] if staged is None else find_contiguous_runs(job.parts)
    return [_input(job, index, staged, stretches, device) for index in range(len(job.block.tensors))]


def _input(
    job: Job, index: int, staged: Array | None, stretches: list[ContiguousRun], device: Device
) -> Array | Buffer:
    block = job.block
    kept = job.kept(index)
    if kept is not None and job.covered(index, kept):
        assert kept[0] is not None
        return kept[0].buffer
    if staged is None or block.tensors[index].batch_axis is None:
        # Those of a request that has the execution for itself, here or on the device as a part of something larger.
        source = job.parts[0].source(index, block)
        if isinstance(source, np.ndarray):
            return source
    if staged is None:
        stacked = np.zeros(block.tensors[index].shape(job.size), numpy_dtype(block.tensors[index].dtype))
    else:
        stacked = _stack(job, index, stretches, staged)
    if kept is None:
        return stacked
    pieces, at = [], 0
    for part, one in zip(job.parts, kept, strict=True):
        if one is not None:
            pieces.append(Piece(one.buffer, one.first, part.rows, at))
        at += part.rows
    return device.merge(stacked, block.tensors[index].batch_axis or 0, pieces)


def _stack(job: Job, index: int, stretches: list[ContiguousRun], staged: Array) -> Array:
    tensor = job.block.tensors[index]
    target = job.block.places(job.size)[0][index]
    stacked: Array = np.ndarray(tensor.shape(job.size), numpy_dtype(tensor.dtype), staged, target)
    rows_first = _rows_first(stacked, tensor)
    at = 0
    for stretch in stretches:
        at = stretch.copy(rows_first, at, index, job.block, outputs=False)
    if at < job.size:
        rows_first[at:] = 0
    return stacked


def scatter(job: Job, outputs: Sequence[Array]) -> None:
    """Each request's rows into its place; an output without rows goes to everyone."""
    stretches = find_contiguous_runs(job.parts)
    unread = job.unread
    for index, tensor in enumerate(job.results.tensors):
        if index in unread:
            continue
        if tensor.batch_axis is None:
            for part in job.parts:
                target = part.target(index, job.results)
                if target is not None:
                    target[...] = outputs[index]
            continue
        result = _rows_first(outputs[index], tensor)
        at = 0
        for stretch in stretches:
            at = stretch.copy(result, at, index, job.results, outputs=True)


def _rows_first(array: Array, tensor: Tensor) -> Array:
    """The batch axis in front: then one slice per request says where its rows go."""
    return np.moveaxis(array, tensor.batch_axis, 0) if tensor.batch_axis else array


log = logging.getLogger("rsrv.executor")

#: seconds of wall time above which an execution on the loop is slow: forty times what the loop expects at most
SLOW_S = 0.02
#: seconds that a model's slow executions may take together within WINDOW_S seconds; more ban it for BAN_S seconds
BLOCKED_S = 0.1
WINDOW_S = 10.0
BAN_S = 60.0


class LoopBans:
    """Bans of models from the loop: their executions there took far longer than predicted.

    Some models' costs depend on their inputs, and while the loop executes, it notices no deadline, cancellation or arrival.
    But a descheduled CPU makes any single execution slow. So what counts is for how long a model's slow executions blocked
    the loop recently: one that takes a tenth of a second is evidence enough, one of 30 ms is not. And a ban expires.
    Times are in seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        #: bans since the start, of all models
        self.count = 0
        #: by the model's key: when its latest slow executions ended, and how long they took; and when its ban ends
        self._slow: dict[str, deque[tuple[float, float]]] = {}
        self._until: dict[str, float] = {}

    def banned(self, model: str, now: float) -> bool:
        return now < self._until.get(model, now)

    def executed(self, model: str, seconds: float, now: float) -> bool:
        """Note an execution on the loop; return whether it bans the model."""
        if seconds <= SLOW_S:
            return False
        slow = self._slow.setdefault(model, deque())
        slow.append((now, seconds))
        while now - slow[0][0] > WINDOW_S:
            slow.popleft()
        if sum(took for _, took in slow) < BLOCKED_S:
            return False
        del self._slow[model]
        self._until[model] = now + BAN_S
        self.count += 1
        return True

    def forget(self, model: str) -> None:
        self._slow.pop(model, None)
        self._until.pop(model, None)


#: seconds of expected execution below which the loop executes by itself: handing over to a thread and back
#: costs about 0.1 ms, and reading sockets that much later does no harm
_SHORT = 0.0005


class Failure(NamedTuple):
    """Why an execution failed."""

    error: str
    #: whether another try may succeed when there is more room
    out_of_memory: bool = False


class Executor:
    """`executed(job, seconds, failure)` is called on the loop, once per job, in the order of the launches."""

    def __init__(
        self,
        inbox: Inbox,
        executed: Callable[[Job, float, Failure | None], None],
        activity: Activity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._executed = executed
        self._activity = activity
        self._clock = clock
        self._launcher = Worker("launch")
        self._reader = Worker("read")
        self._staging = Staging()
        #: a job that is the loop's own, and, when it has run, the message that it ended in
        self._short: tuple[Job, Device, float] | None = None
        self._ended: Callable[[], None] | None = None
        self.bans = LoopBans()

    def start(self, job: Job, device: Device, *, seconds: float, depth: int, contended: bool) -> None:
        """`seconds`: expected; `contended`: somebody else uses the device, so that the loop must not wait for it."""
        if depth > 1:
            self._launcher.put(lambda: self._launch(job, device, seconds))
        elif seconds <= _SHORT and not contended and not self.bans.banned(job.model.key, self._clock()):
            self._short = job, device, seconds
        else:
            slot = self._activity.launch
            self._launcher.put(lambda: self._inbox.post(self._execute(job, device, seconds, slot)))

    def forget(self, model: str) -> None:
        """A model is gone, and nothing of it executes."""
        self._staging.clear()
        self.bans.forget(model)

    # --- on the loop --------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the loop has an execution of its own, or is to hear how that ended."""
        return self._short is not None or self._ended is not None

    def run_short(self) -> Job | None:
        """Execute the loop's own job, if there is one; how it ended is for `tell`."""
        if self._short is None:
            return None
        (job, device, seconds), self._short = self._short, None
        started = self._clock()
        self._ended = self._execute(job, device, seconds, self._activity.short)
        now = self._clock()
        if self.bans.executed(job.model.key, now - started, now):
            log.warning(
                "%s: slow executions took more than %.0f ms within %.0f s, though less than 1 ms was expected of each. A thread "
                "executes the model for the next %.0f s. Either its cost depends on its inputs, or the CPUs are overloaded",
                job.model.key,
                1e3 * BLOCKED_S,
                WINDOW_S,
                BAN_S,
                extra=about(job.model),
            )
        return job

    def tell(self) -> bool:
        """Call `executed` for the loop's own job, if it has run; whether it had."""
        if self._ended is None:
            return False
        ended, self._ended = self._ended, None
        ended()
        return True

    # --- on whichever thread ------------------------------------------------------------------------------

    def _execute(self, job: Job, device: Device, seconds: float, slot: ActivitySlot) -> Callable[[], None]:
        """From the inputs to the outputs; returns what the loop is to do about it."""
        slot.begin(Phase.EXECUTING, job.model.key, job.size, seconds)
        ended = self._end(job, device, self._begin(job, device))
        slot.end()
        return ended

    def _launch(self, job: Job, device: Device, seconds: float) -> None:
        """On the launching thread: the reading one does the rest, even of failures, so that jobs end in order."""
        slot = self._activity.launch
        number = slot.begin(Phase.EXECUTING, job.model.key, job.size, seconds)
        flight = self._begin(job, device)
        slot.end()
        self._reader.put(lambda: self._read(job, device, flight, seconds, number))

    def _read(self, job: Job, device: Device, flight: Flight | Failure, seconds: float, number: int) -> None:
        slot = self._activity.read
        slot.begin(Phase.EXECUTING, job.model.key, job.size, seconds, number)
        ended = self._end(job, device, flight)
        slot.end()
        self._inbox.post(ended)

    def _begin(self, job: Job, device: Device) -> Flight | Failure:
        try:
            return launch(job, device, self._staging)
        except Exception as error:  # noqa: BLE001 - logged by _failure
            return _failure(job, error)

    def _end(self, job: Job, device: Device, flight: Flight | Failure) -> Callable[[], None]:
        seconds, failure = 0.0, None
        if isinstance(flight, Failure):
            failure = flight
        else:
            try:
                seconds = finish(flight, device, self._staging)
            except Exception as error:  # noqa: BLE001 - logged by _failure
                failure = _failure(job, error)
        return lambda: self._executed(job, seconds, failure)


def _failure(job: Job, error: Exception) -> Failure:
    """To be called while the error is handled."""
    if isinstance(error, OutOfMemory):
        # As text: whoever keeps the record would with the error keep the execution's tensors, just now.
        why = str(error)
        log.warning(
            "%s: no memory on the device for an execution of %d rows: %s",
            job.model.key,
            job.size,
            why,
            extra=about(job.model, rows=job.size),
        )
        return Failure(str(error), out_of_memory=True)
    log.exception("%s: execution failed", job.model.key, extra=about(job.model, rows=job.size))
    return Failure(f"{type(error).__name__}: {error}")
