"""A model as its callers see it: checks of what they send, hooks, and what the compiled module gets of it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rsrv.hooks import BadInput
from rsrv.logs import of_request, shorten
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.hooks import Hook, Hooks
from rsrv.stub.replies import RequestFailure
from rsrv.stub.tensors import Tensors
from rsrv.stub.tracing import Trace
from rsrv.wire.frames import Status
from rsrv.wire.layout import NUMPY, Interface, Tensor, Variant

log = logging.getLogger("rsrv.stub")

Array = npt.NDArray[Any]

_MAX_SHAPES = 1024
_EMA = 0.1
#: characters of what a hook may say to a client
_MOST_TOLD = 1000


class Value(Protocol):
    """A tensor of a request: an array, or a stand-in for one that is elsewhere."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor that clients send or get."""

    name: str
    dtype: str
    #: with the batch axis; -1 on axes that vary
    dims: tuple[int, ...]

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.dims) and all(
            want in (-1, got) for want, got in zip(self.dims, shape, strict=True)
        )


# --- shapes: which compiled variant, and how many rows -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How requests of certain shapes are executed, and how much memory one takes; worked out once."""

    index: int  # of the variant
    rows: int
    inputs: tuple[tuple[Tensor, int], ...]  # with each one's offset in the inputs' block, in bytes
    outputs: tuple[tuple[Tensor, int], ...]
    input_bytes: int
    output_bytes: int


class BadShape(Exception):
    """No execution takes these shapes; the message names the input, what was expected and what came."""


class WrongAxis(BadShape):
    """An axis that the model fixes differs: never the number of rows or a choice among variants."""


def resolve(interface: Interface, shapes: Sequence[tuple[int, ...]]) -> ExecutionPlan:
    """The plan for the executable inputs' shapes, in the order of registration. Raises BadShape.

    Rows are the extent of the batch axis, the same in every input; 1 where there is none.
    """
    for index, variant in enumerate(interface.variants):
        if all(_fits(t, s) for t, s in zip(variant.inputs.tensors, shapes, strict=True)):
            rows = {
                s[t.batch_axis]
                for t, s in zip(variant.inputs.tensors, shapes, strict=True)
                if t.batch_axis is not None
            }
            if len(rows) > 1:
                raise BadShape(f"the inputs disagree on the number of rows: {sorted(rows)}")
            count = rows.pop() if rows else 1
            _check_rows(count, variant.sizes, interface.exact)
            return _plan(index, variant, count)
    raise _mismatch(interface, shapes)


def _plan(index: int, variant: Variant, rows: int) -> ExecutionPlan:
    input_offsets, input_bytes = variant.inputs.places(rows)
    output_offsets, output_bytes = variant.outputs.places(rows)
    return ExecutionPlan(
        index,
        rows,
        tuple(zip(variant.inputs.tensors, input_offsets, strict=True)),
        tuple(zip(variant.outputs.tensors, output_offsets, strict=True)),
        input_bytes,
        output_bytes,
    )


def _fits(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(tensor.dims) and all(
        want in (-1, got) for want, got in zip(tensor.dims, shape, strict=True)
    )


def _check_rows(rows: int, sizes: tuple[int, ...], exact: bool) -> None:
    compiled = ", ".join(map(str, sizes))
    if rows > sizes[-1]:
        raise BadShape(
            f"{rows} rows exceed the largest compiled batch size; compiled are {compiled}. Send fewer rows a request"
        )
    if exact and rows not in sizes:
        raise BadShape(f"{rows} rows: this model runs at its compiled batch sizes only: {compiled}")


def _mismatch(interface: Interface, shapes: Sequence[tuple[int, ...]]) -> BadShape:
    if len(interface.variants) > 1:
        compiled = "; ".join(
            ", ".join(f"{t.name} {list(t.dims)}" for t in v.inputs.tensors) for v in interface.variants
        )
        came = ", ".join(
            f"{t.name} {list(s)}" for t, s in zip(interface.variants[0].inputs.tensors, shapes, strict=True)
        )
        return BadShape(f"no module is compiled for {came}; compiled are {compiled} (-1 is the batch)")
    for tensor, shape in zip(interface.variants[0].inputs.tensors, shapes, strict=True):
        if not _fits(tensor, shape):
            batch = "" if tensor.batch_axis is None else f" (axis {tensor.batch_axis} is the batch)"
            return WrongAxis(
                f"input {tensor.name!r}: expected shape {list(tensor.dims)}{batch}, got {list(shape)}"
            )
    raise AssertionError("called for shapes that fit")


# --- the model ------------------------------------------------------------------------------------------------


class Endpoint:
    """Turns one request's tensors into those of the module, and the module's results into what clients get.

    `preprocess_seconds` and `postprocess_seconds` are what the hooks take of late.
    """

    def __init__(
        self, interface: Interface, hooks: Hooks, guard: HookGuard, measure: Callable[[str, float], None]
    ) -> None:
        """`measure` is told how long each hook took, by its name in metrics; seconds."""
        self.hooks = hooks
        self._measure = measure
        self._guard = guard
        self._interface = interface
        self._plans: dict[tuple[tuple[int, ...], ...], ExecutionPlan] = {}
        self.preprocess_seconds = 0.0
        self.postprocess_seconds = 0.0

    def prepare(
        self, arrays: Mapping[str, Value], who: str, trace: Trace | None = None
    ) -> tuple[list[Any], ExecutionPlan]:
        """The module's inputs, in its order, and how they are executed; hooks are parts of `trace`. Raises RequestFailure."""
        if self.hooks.preprocess is not None:
            arrays, seconds = self._run("preprocess", "pre", self.hooks.preprocess, arrays, who, trace)
            self.preprocess_seconds += _EMA * (seconds - self.preprocess_seconds)
        inputs: list[Any] = []
        for spec in self._interface.variants[0].inputs.tensors:
            array = arrays.get(spec.name)
            if array is None:
                raise self._wrong_input(f"has no tensor {spec.name!r}", who)
            if array.dtype != NUMPY[spec.dtype]:
                raise self._wrong_input(f"has {spec.name!r} of {array.dtype}, expected {spec.dtype}", who)
            inputs.append(array)
        return inputs, self._resolve(tuple([array.shape for array in inputs]), who)

    def _resolve(self, shapes: tuple[tuple[int, ...], ...], who: str) -> ExecutionPlan:
        plan = self._plans.get(shapes)
        if plan is None:
            try:
                plan = resolve(self._interface, shapes)
            except BadShape as error:
                if isinstance(error, WrongAxis) and self.hooks.preprocess is not None:
                    raise self._wrong_input(f"does not fit: {error}", who) from None
                raise RequestFailure(Status.INVALID, str(error)) from None
            if len(self._plans) < _MAX_SHAPES:
                self._plans[shapes] = plan
        return plan

    def _wrong_input(self, what: str, who: str) -> RequestFailure:
        if self.hooks.preprocess is None:
            return RequestFailure(Status.INVALID, f"the request {what}")
        return hook_failed("preprocess", f"its result {what}", who)

    def results(
        self, arrays: Mapping[str, Array], who: str, trace: Trace | None = None
    ) -> Mapping[str, Array]:
        """What clients get of the module's outputs. Raises RequestFailure."""
        if self.hooks.postprocess is None:
            return arrays
        arrays, seconds = self._run("postprocess", "post", self.hooks.postprocess, arrays, who, trace)
        self.postprocess_seconds += _EMA * (seconds - self.postprocess_seconds)
        return arrays

    def _run(
        self, name: str, short: str, hook: Hook, arrays: Mapping[str, Any], who: str, trace: Trace | None
    ) -> tuple[dict[str, Array], float]:
        """Its result, and the seconds that it took, which is measured also when it raises RequestFailure."""
        started, error = time.perf_counter(), ""
        try:
            result = run_hook(name, hook, arrays, who, self._guard)
        except RequestFailure as failure:
            error = failure.text
            raise
        finally:
            seconds = time.perf_counter() - started
            self._measure(short, seconds)
            if trace is not None:
                trace.part(name, started, error)
        return result, seconds


def read_inputs(tensors: Tensors, request: Any, wires: Mapping[str, WireTensor]) -> dict[str, Array]:
    """A Triton request's tensors by name; valid while the request is held. Raises RequestFailure."""
    arrays = {}
    for tensor in request.inputs():
        try:
            name = tensor.name()
            wire = wires[name]
        except (UnicodeDecodeError, KeyError):
            raise RequestFailure(
                Status.INVALID, "the request has an input that the model does not have"
            ) from None
        array = tensors.read(tensor, wire.dtype)
        if array.ndim == len(wire.dims) + 1 and array.shape[-1] == 1:
            # Triton has no tensors without an axis of their own: [N] travels as [N, 1].
            array = array.reshape(array.shape[:-1])
        if array.ndim != len(wire.dims):  # Triton has looked, but not at a product of extents beyond 64 bits
            text = f"input {name!r}: expected shape {list(wire.dims)}, got {list(array.shape)}"
            raise RequestFailure(Status.INVALID, text)
        arrays[name] = array
    return arrays


def check_results(
    arrays: Mapping[str, Array], outputs: Sequence[WireTensor], rows: int | None, hook: str, who: str
) -> list[Array]:
    """The tensors for clients, in order, as the interface has them; `rows`: as many as each must have.

    Raises RequestFailure: the function `hook` of model.py made something else for the request `who`.
    """
    checked = []
    for wire in outputs:
        array = arrays.get(wire.name)
        if array is None:
            raise hook_failed(hook, f"its result has no {wire.name!r}", who)
        if array.ndim == len(wire.dims) - 1:
            array = array.reshape(*array.shape, 1)
        if array.dtype != NUMPY[wire.dtype] or not wire.fits(array.shape):
            raise hook_failed(
                hook,
                f"its result has {wire.name!r} of {array.dtype} {list(array.shape)}, "
                f"expected {wire.dtype} {list(wire.dims)}",
                who,
            )
        if rows is not None and len(array) != rows:
            raise hook_failed(
                hook, f"its result has {wire.name!r} of {len(array)} rows for a request of {rows}", who
            )
        checked.append(array)
    return checked


def hook_failed(hook: str, why: str, who: str) -> RequestFailure:
    """What the client of the request `who` hears of a hook's fault; the log says why."""
    log.error("request %r: model.py: %s: %s", who, hook, why, extra=of_request(who, hook=hook))
    return RequestFailure(Status.INTERNAL, f"the model's {hook} hook failed; the server's log says why")


def run_hook(
    name: str, hook: Hook, arrays: Mapping[str, Any], who: str, guard: HookGuard
) -> dict[str, Array]:
    """Call a hook of model.py for the request `who`. Raises RequestFailure, whatever the hook does."""
    try:
        with guard.within(name, who):
            result = hook(dict(arrays))
            return {key: np.asarray(value) for key, value in result.items()}
    except BaseException as error:  # noqa: BLE001 - logged by hook_raised
        # sys.exit(), too, would end the whole batch, or one of the sending threads for good.
        raise hook_raised(name, error, who, guard) from None


def hook_raised(name: str, error: BaseException, who: str, guard: HookGuard) -> RequestFailure:
    """What the client of the request `who` is told of what a hook raised. To be called while that is handled."""
    if isinstance(error, BadInput):
        return RequestFailure(Status.INVALID, told(error))
    if isinstance(error, MemoryError):
        guard.out_of_memory(error)
        log.error(
            "request %r: model.py: %s wants more memory than it may have (stub.memory_limit_bytes): %s",
            who,
            name,
            error,
            extra=of_request(who, hook=name),
        )
        return RequestFailure(Status.INTERNAL, f"the model's {name} hook wants more memory than it may have")
    log.exception("request %r: model.py: %s raised", who, name, extra=of_request(who, hook=name))
    return RequestFailure(Status.INTERNAL, f"the model's {name} hook failed; the server's log says why")


def told(error: BaseException) -> str:
    """What a client hears of an exception that a hook has made for it: some text, which Triton can pass on."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - it is the hook's own, and so is the exception
        text = ""
    text = shorten(text, _MOST_TOLD).encode(errors="backslashreplace").decode()
    return text or "the model does not take this request; it does not say why"
