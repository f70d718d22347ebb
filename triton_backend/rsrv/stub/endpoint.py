"""A model as its callers see it: the checks of requests, the hooks, and the inputs and outputs of the compiled module."""

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rsrv.front.parts import RowRange
from rsrv.front.rules import (
    BATCH_AXIS,
    LONGER_CAP,
    NO_INPUT,
    NO_VARIANT,
    OTHER_SIZE,
    ROWS_DIFFER,
    THE_REQUEST,
    TOO_MANY_ROWS,
    UNKNOWN_INPUT,
    WRONG_LENGTH,
    WRONG_SHAPE,
)
from rsrv.hooks import BadInput
from rsrv.hooks.loader import Hook, Hooks
from rsrv.logs import of_request, request_name, shorten
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.replies import CallError, RequestFailure, invalid
from rsrv.stub.tensors import BYTES, CLIENT_DTYPES, Array, Tensors, as_array, encode_strings
from rsrv.stub.tracing import OpenSpan
from rsrv.wire.frames import Status
from rsrv.wire.layout import NUMPY, Block, Interface, Tensor, Variant

log = logging.getLogger(__name__)

#: Maximum number of combinations of shapes whose plans are kept.
_MAX_PLANS = 1024
#: Maximum number of characters of a hook's message to a client.
_MAX_MESSAGE = 1000
#: A hook is assumed to take this many seconds until it is measured. If the preprocess hook takes at least this long for the
#: requests of a batch, the sender threads call it instead of the thread of execute().
SLOW_HOOK_S = 0.001
#: Weight of the latest call in the learned duration of a hook.
_HOOK_WEIGHT = 0.1


@dataclass(eq=False)
class Elsewhere:
    """A stand-in for a tensor that is not in this process."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor of a client's request or answer."""

    name: str
    dtype: str
    #: Extents with the batch axis. -1 on axes that vary.
    dims: tuple[int, ...]


def fits(dims: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Return whether a shape has these extents, where -1 stands for any."""
    if len(shape) != len(dims):
        return False
    for expected, extent in zip(dims, shape, strict=True):  # noqa: SIM110 - a generator costs twice as much
        if expected not in (-1, extent):
            return False
    return True


@dataclass(slots=True)
class LearnedDuration:
    """An estimate of a duration, learned from measurements.

    A measurement can be far too long, because it includes the time of waiting for a processor. It is never shorter than the
    work itself. So a shorter measurement may get a larger weight. A longer measurement is limited to `cap` times the estimate.
    """

    #: The estimate, in seconds.
    seconds: float
    #: Weight of a shorter measurement.
    fall: float
    #: Weight of a longer measurement.
    rise: float
    cap: float = LONGER_CAP

    def learn(self, seconds: float) -> None:
        weight = self.fall if seconds < self.seconds else self.rise
        self.seconds += weight * (min(seconds, self.cap * self.seconds) - self.seconds)


# --- shapes: which compiled variant, and how many rows -------------------------------------------------------


class PlannedTensor(NamedTuple):
    """A tensor of a request in shared memory."""

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    #: Offset in bytes from the start of the request's inputs, or of its outputs.
    offset: int


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How requests with certain shapes are executed, and where their tensors lie in shared memory."""

    variant: int
    rows: int
    #: The largest compiled size. Requests with more rows are submitted in parts.
    largest: int
    inputs: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedTensor, ...]
    input_bytes: int
    output_bytes: int
    #: Length of the request's tensors along the padded axis. 0: the model has no padded axis.
    length: int


def rows_of(planned: PlannedTensor, part: RowRange) -> tuple[slice, ...]:
    """Return the index of a part's rows in a tensor of the whole request."""
    axis = planned.tensor.batch_axis
    assert axis is not None, "a request is submitted in parts only if each tensor has rows"
    return (*[slice(None)] * axis, slice(part.first, part.first + part.rows))


#: Text for clients whose request executed in two versions of a model.
OTHER_VERSION = "the model was replaced by a version with other inputs or outputs during this request; send the request again"


def copy_rows(
    results: Mapping[str, Array], part: RowRange, plan: ExecutionPlan, outputs: Mapping[str, Array]
) -> None:
    """Copy the results of a part into the outputs of the whole request.

    Raises RequestFailure if the results come from another version of the model, which has other outputs.
    """
    for planned in plan.outputs:
        name = planned.tensor.name
        rows, result = outputs[name][rows_of(planned, part)], results.get(name)
        if result is None or (result.shape, result.dtype) != (rows.shape, rows.dtype):
            raise RequestFailure(Status.RUNTIME_DOWN, OTHER_VERSION)
        rows[...] = result


class BadShape(Exception):
    """No compiled variant takes these shapes; the message names the input and both shapes."""


class WrongAxis(BadShape):
    """An axis of fixed size has another size. Neither another number of rows nor another variant would help."""


def resolve(
    interface: Interface, shapes: Sequence[tuple[int, ...]], *, splits: bool = False
) -> ExecutionPlan:
    """Return the plan for the shapes of the module's inputs, in the order of registration. Raises BadShape.

    The number of rows is the extent of the batch axis, which must be equal in all inputs. Without a batch axis, there is one
    row. If `splits` is True, there may be more rows than the largest compiled size has.
    """
    for index, variant in _variants(interface, shapes):
        if all(fits(t.dims, s) for t, s in zip(variant.inputs.tensors, shapes, strict=True)):
            rows = {
                s[t.batch_axis]
                for t, s in zip(variant.inputs.tensors, shapes, strict=True)
                if t.batch_axis is not None
            }
            if len(rows) > 1:
                raise BadShape(ROWS_DIFFER % sorted(rows))
            count = rows.pop() if rows else 1
            _check_rows(count, variant.sizes, interface.exact, splits=splits)
            return _plan(index, variant, count)
    raise _mismatch(interface, shapes)


def _variants(interface: Interface, shapes: Sequence[tuple[int, ...]]) -> Iterable[tuple[int, Variant]]:
    """Return the variants that requests of these shapes may match, with their indices."""
    if not interface.longest:
        return enumerate(interface.variants)
    axes = [tensor.padded_axis for tensor in interface.variants[0].inputs.tensors]
    lengths = {
        shape[axis]
        for shape, axis in zip(shapes, axes, strict=True)
        if axis is not None and axis < len(shape)
    }
    if len(lengths) != 1 or not 0 < max(lengths) <= interface.longest:
        raise BadShape(WRONG_LENGTH % (sorted(lengths), interface.longest))
    return [interface.at_length(lengths.pop())]


def _plan(index: int, variant: Variant, rows: int) -> ExecutionPlan:
    inputs, input_bytes = _planned(variant.inputs, rows)
    outputs, output_bytes = _planned(variant.outputs, rows)
    return ExecutionPlan(
        index, rows, variant.sizes[-1], inputs, outputs, input_bytes, output_bytes, variant.length
    )


def _planned(block: Block, rows: int) -> tuple[tuple[PlannedTensor, ...], int]:
    places = block.places[rows]
    tensors = zip(block.tensors, places.shapes, places.offsets, strict=True)
    return tuple(PlannedTensor(t, shape, NUMPY[t.dtype], at) for t, shape, at in tensors), places.nbytes


def _check_rows(rows: int, sizes: tuple[int, ...], exact: bool, *, splits: bool) -> None:
    compiled = ", ".join(map(str, sizes))
    if rows > sizes[-1] and (exact or not splits):
        raise BadShape(TOO_MANY_ROWS % (rows, compiled))
    if exact and rows not in sizes:
        raise BadShape(OTHER_SIZE % (rows, compiled))


def _mismatch(interface: Interface, shapes: Sequence[tuple[int, ...]]) -> BadShape:
    if len(interface.variants) > 1:
        compiled = "; ".join(
            ", ".join(f"{t.name} {list(t.dims)}" for t in v.inputs.tensors) for v in interface.variants
        )
        came = ", ".join(
            f"{t.name} {list(s)}" for t, s in zip(interface.variants[0].inputs.tensors, shapes, strict=True)
        )
        return BadShape(NO_VARIANT % (came, compiled))
    for tensor, shape in zip(interface.variants[0].inputs.tensors, shapes, strict=True):
        if not fits(tensor.dims, shape):
            batch = "" if tensor.batch_axis is None else BATCH_AXIS % tensor.batch_axis
            return WrongAxis(WRONG_SHAPE % (repr(tensor.name), list(tensor.dims), batch, list(shape)))
    raise AssertionError("called for shapes that fit")


# --- conversion of requests and results -----------------------------------------------------------------------


class Endpoint:
    """Turns a request's tensors into the module's inputs, and the module's results into the client's tensors.

    `preprocess` and `postprocess` are the learned durations of the hooks. 0: the model has no such hook.
    """

    def __init__(
        self,
        interface: Interface,
        hooks: Hooks,
        guard: HookGuard,
        measure: Callable[[str, float], None],
        *,
        splits: bool = False,
    ) -> None:
        """`measure` takes a hook's name in metrics and the seconds of one call. `splits` is as in `resolve`."""
        self.hooks = hooks
        self._splits = splits
        self._measure = measure
        self._guard = guard
        self._interface = interface
        self._plans: dict[tuple[tuple[int, ...], ...], ExecutionPlan] = {}
        self.preprocess, self.postprocess = (
            LearnedDuration(SLOW_HOOK_S if hook else 0.0, _HOOK_WEIGHT, _HOOK_WEIGHT, cap=math.inf)
            for hook in (hooks.preprocess, hooks.postprocess)
        )

    def prepare(
        self,
        arrays: Mapping[str, Array | Elsewhere],
        client_id: str,
        span: OpenSpan | None = None,
        rows: int | None = None,
    ) -> tuple[list[Any], ExecutionPlan]:
        """Return the module's inputs, in its order, and their plan. Raises RequestFailure.

        The preprocess hook's span becomes a child of `span`. `rows` is the number of rows of the client's tensors, or None if
        the model is not batched.
        """
        if self.hooks.preprocess is not None:
            hook = partial(_on_copies, self.hooks.preprocess)
            arrays, seconds = self._run("preprocess", "pre", hook, arrays, client_id, span)
            self.preprocess.learn(seconds)
        inputs, plan = self._plan(arrays, client_id)
        # A preprocess hook may change the number of rows only if a postprocess hook can restore it.
        if rows not in (None, plan.rows) and self.hooks.preprocess and not self.hooks.postprocess:
            raise self._wrong_input(f"has {plan.rows} rows for a request of {rows}", client_id)
        return inputs, plan

    def _plan(
        self, arrays: Mapping[str, Array | Elsewhere], client_id: str
    ) -> tuple[list[Any], ExecutionPlan]:
        inputs: list[Any] = []
        extents: list[tuple[int, ...]] = []
        for spec in self._interface.variants[0].inputs.tensors:
            array = arrays.get(spec.name)
            if array is None:
                raise self._wrong_input(NO_INPUT % repr(spec.name), client_id)
            if array.dtype != NUMPY[spec.dtype]:
                raise self._wrong_input(
                    f"has {spec.name!r} of {array.dtype}, expected {spec.dtype}", client_id
                )
            inputs.append(array)
            extents.append(array.shape)
        shapes = tuple(extents)
        return inputs, self._plans.get(shapes) or self._resolve(shapes, client_id)

    def refuse_rows(self, plan: ExecutionPlan) -> RequestFailure:
        """Return the failure of a request with more rows than the largest compiled size."""
        sizes = self._interface.variants[plan.variant].sizes
        return invalid(TOO_MANY_ROWS % (plan.rows, ", ".join(map(str, sizes))))

    def plan_again(
        self, arrays: Mapping[str, Array | Elsewhere], client_id: str
    ) -> tuple[list[Any], ExecutionPlan]:
        """Return inputs that were prepared before, in the module's order, and their plan for one execution.

        The next runtime may have another version of the model. Raises RequestFailure if that version takes other inputs.
        """
        inputs, plan = self._plan(arrays, client_id)
        if len(inputs) < len(arrays):
            raise RequestFailure(Status.RUNTIME_DOWN, OTHER_VERSION)
        if plan.rows > plan.largest:
            raise self.refuse_rows(plan)
        return inputs, plan

    def _resolve(self, shapes: tuple[tuple[int, ...], ...], client_id: str) -> ExecutionPlan:
        try:
            plan = resolve(self._interface, shapes, splits=self._splits)
        except BadShape as error:
            if isinstance(error, WrongAxis) and self.hooks.preprocess is not None:
                raise self._wrong_input(f"does not fit: {error}", client_id) from None
            raise invalid(str(error)) from None
        if len(self._plans) < _MAX_PLANS:
            self._plans[shapes] = plan
        return plan

    def _wrong_input(self, problem: str, client_id: str) -> RequestFailure:
        if self.hooks.preprocess is None:
            return invalid(THE_REQUEST + problem)
        return hook_failed("preprocess", f"its result {problem}", client_id)

    def results(
        self,
        arrays: Mapping[str, Array],
        outputs: Sequence[WireTensor],
        rows: int | None,
        client_id: str,
        span: OpenSpan | None = None,
    ) -> list[Array]:
        """Return the client's tensors, made of the module's outputs and checked by `check_results`. Raises RequestFailure."""
        if self.hooks.postprocess is not None:
            arrays, seconds = self._run(
                "postprocess", "post", self.hooks.postprocess, arrays, client_id, span
            )
            self.postprocess.learn(seconds)
        return check_results(arrays, outputs, rows, "postprocess", client_id)

    def _run(
        self,
        name: str,
        short: str,
        hook: Hook,
        arrays: Mapping[str, Any],
        client_id: str,
        span: OpenSpan | None,
    ) -> tuple[dict[str, Array], float]:
        """Call a hook. Return its result and its seconds, which count in the metrics even if the hook fails."""
        started, error = time.perf_counter(), ""
        try:
            result = run_hook(name, hook, arrays, client_id, self._guard)
        except RequestFailure as failure:
            error = failure.text
            raise
        finally:
            seconds = time.perf_counter() - started
            self._measure(short, seconds)
            if span is not None:
                span.add_child(name, started, error)
        return result, seconds


def read_inputs(tensors: Tensors, request: Any, wires: Mapping[str, WireTensor]) -> dict[str, Array]:
    """Return a Triton request's tensors by name; they are valid while the request is held. Raises RequestFailure."""
    arrays = {}
    for tensor in request.inputs():
        try:
            name = tensor.name()
            wire = wires[name]
        except (UnicodeDecodeError, KeyError):
            raise invalid(UNKNOWN_INPUT) from None
        try:
            array = tensors.read(tensor, wire.dtype)
        except ValueError as error:
            raise invalid(f"input {name!r} {error}") from None
        if array.ndim == len(wire.dims) + 1 and array.shape[-1] == 1:
            # In Triton, a tensor needs an axis after the batch axis, so [N] is sent as [N, 1].
            array = array.reshape(array.shape[:-1])
        # Triton checks the number of axes as well, unless the product of the extents exceeds 64 bits.
        if array.ndim != len(wire.dims):
            raise invalid(WRONG_SHAPE % (repr(name), list(wire.dims), "", list(array.shape)))
        arrays[name] = array
    return arrays


def check_results(
    arrays: Mapping[str, Array], outputs: Sequence[WireTensor], rows: int | None, hook: str, client_id: str
) -> list[Array]:
    """Check tensors that the function `hook` of model.py has returned, and return them in the order of the interface.

    `rows` is the expected number of rows of each tensor, or None for any number. `client_id` is the request's id. Raises
    RequestFailure if a tensor is missing or does not match the interface.
    """
    checked = []
    for wire in outputs:
        array = arrays.get(wire.name)
        if array is None:
            raise hook_failed(hook, f"its result has no {wire.name!r}", client_id)
        if array.ndim == len(wire.dims) - 1:
            array = array.reshape(*array.shape, 1)
        if wire.dtype == BYTES:
            try:
                strings = encode_strings(array)
            except Exception as error:  # noqa: BLE001 - such as MemoryError
                raise hook_failed(hook, f"its result has {wire.name!r}: {error!r}", client_id) from None
            if strings is None:
                why = (
                    f"its result has {wire.name!r} of {array.dtype} elements that are neither bytes nor text"
                )
                raise hook_failed(hook, why, client_id)
            array = strings
        if array.dtype != CLIENT_DTYPES[wire.dtype] or not fits(wire.dims, array.shape):
            raise hook_failed(
                hook,
                f"its result has {wire.name!r} of {array.dtype} {list(array.shape)}, "
                f"expected {wire.dtype} {list(wire.dims)}",
                client_id,
            )
        if rows is not None and len(array) != rows:
            raise hook_failed(
                hook, f"its result has {wire.name!r} of {len(array)} rows for a request of {rows}", client_id
            )
        checked.append(array)
    return checked


def _on_copies(hook: Hook, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Call a hook with copies of its inputs. A hook may write to them, and a retry or an alias's shadow needs the originals."""
    return hook({name: array.copy() for name, array in arrays.items()})


def hook_failed(hook: str, why: str, client_id: str) -> RequestFailure:
    """Log a hook's fault, and return the failure of the request `client_id`."""
    log.error(
        "%s: model.py: %s: %s", request_name(client_id), hook, why, extra=of_request(client_id, hook=hook)
    )
    text = f"the model's {hook} hook failed; the server's log says why"
    return RequestFailure(Status.INTERNAL, text, f"{hook}: {why}")


def run_hook(
    name: str, hook: Hook, arrays: Mapping[str, Any], client_id: str, guard: HookGuard
) -> dict[str, Array]:
    """Call a function of model.py for the request `client_id`. Raises nothing but RequestFailure."""
    try:
        with guard.within(name, client_id):
            result = hook(dict(arrays))
            return {key: as_array(value) for key, value in result.items()}
    except BaseException as error:  # noqa: BLE001 - logged by hook_raised
        # An uncaught SystemExit would also end the whole batch, or the sender thread.
        try:
            raise hook_raised(name, error, client_id, guard) from None
        finally:
            # Drop the traceback: its frames hold arrays, and frames of asyncio refer to the error, so this cycle would stay.
            error.__traceback__ = None


def hook_raised(name: str, error: BaseException, client_id: str, guard: HookGuard) -> RequestFailure:
    """Return the failure of the request `client_id` for a hook's error. Call this while `error` is handled."""
    if isinstance(error, CallError):
        return RequestFailure(error.status, message_of(error))
    if isinstance(error, RequestFailure):  # There was no memory for a buffer of `run`.
        return error.copy()
    if isinstance(error, BadInput):
        return invalid(message_of(error))
    if isinstance(error, MemoryError):
        guard.out_of_memory(error)
        log.error(
            "%s: model.py: %s needs more memory than its limit (stub.memory_limit_bytes): %s",
            request_name(client_id),
            name,
            error,
            extra=of_request(client_id, hook=name),
        )
        return RequestFailure(Status.INTERNAL, f"the model's {name} hook needs more memory than its limit")
    if guard.out_of_descriptors(error):
        log.error(
            "%s: model.py: %s opens more files than its process is allowed to (ulimit -n): %s",
            request_name(client_id),
            name,
            error,
            extra=of_request(client_id, hook=name),
        )
        return RequestFailure(
            Status.INTERNAL,
            f"the model's {name} hook opens more files than its process is allowed to (ulimit -n)",
        )
    log.exception(
        "%s: model.py: %s raised", request_name(client_id), name, extra=of_request(client_id, hook=name)
    )
    # The failure's `blame` does not have the error's text, because that text may contain the request's contents.
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename.endswith("/model.py")]
    where = f" at line {lines[-1]} of model.py" if lines else ""
    text = f"the model's {name} hook failed; the server's log says why"
    return RequestFailure(Status.INTERNAL, text, f"{name} raised {type(error).__name__}{where}")


def message_of(error: BaseException) -> str:
    """Return the text of an error that a hook raised for the client, in a form that Triton can send."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - the error's class is the hook's own
        text = ""
    text = shorten(text, _MAX_MESSAGE).encode(errors="backslashreplace").decode()
    return text or "the model refuses this request and gives no reason"
