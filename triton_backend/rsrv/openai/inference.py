"""Calls of models over KServe v2. Each request has one row, so that the server can batch the rows of all clients."""

import asyncio
import json
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from rsrv.client.signature import from_bytes
from rsrv.openai.errors import ApiError, from_grpc, from_status

T = TypeVar("T")
#: Headers of calls over gRPC.
Metadata = tuple[tuple[str, str], ...]
#: The value of an input: a text, or token ids.
Value = bytes | Sequence[int]

#: Maximum number of requests that one call has in flight.
IN_FLIGHT: Final = 128
#: Wait this many seconds longer than the deadline, because the server itself reports a missed deadline.
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input tensor. `shape` is its shape in a request with one row, with -1 for axes that vary."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TaskModel:
    """A model with a task."""

    name: str
    kind: str
    #: Inputs by role.
    inputs: Mapping[str, InputTensor]
    #: Names of outputs by role.
    outputs: Mapping[str, str]
    labels: Sequence[str] = ()
    #: Lengths to which an embedding may be cut.
    dimensions: Sequence[int] = ()
    #: The chat template in Jinja as `template`, and the texts that it uses; empty if there is no template.
    chat: Mapping[str, str] = field(default_factory=dict)
    #: Unix time at which the model was found.
    created: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """Request id, deadline and priority, which all requests of one call have in common."""

    request_id: str
    #: Deadline on the clock `time.monotonic`, or None without a deadline.
    deadline: float | None = None
    #: Priority, from 1 for the most urgent; None for the server's default.
    priority: int | None = None


def read_task(config: Any, created: int) -> TaskModel | None:
    """Return the model that Triton's ModelConfig describes, or None if it has no task that this module can read."""
    try:
        task = json.loads(config.parameters["task"].string_value)
        inputs = {tensor.name: tensor for tensor in config.input}
        batched = (1,) if config.max_batch_size else ()
        return TaskModel(
            config.name,
            str(task["kind"]),
            {role: _input(inputs[name], batched) for role, name in task["inputs"].items()},
            dict(task["outputs"]),
            tuple(task.get("labels", ())),
            tuple(task.get("dimensions", ())),
            json.loads(config.parameters["chat"].string_value or "{}"),
            created,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _input(config: Any, batched: tuple[int, ...]) -> InputTensor:
    datatype = model_config_pb2.DataType.Name(config.data_type).removeprefix("TYPE_")
    return InputTensor(config.name, "BYTES" if datatype == "STRING" else datatype, (*batched, *config.dims))


def request_for(model: TaskModel, values: Mapping[str, Value], terms: Terms, suffix: str = "") -> Any:
    """Return the message for one row. `values` has a value for each role of the model's inputs.

    Raises:
        ApiError: the deadline has passed.
    """
    message = service_pb2.ModelInferRequest(model_name=model.name, id=terms.request_id + suffix)
    for role, value in values.items():
        tensor = model.inputs[role]
        if isinstance(value, bytes):
            raw, length = struct.pack("<I", len(value)) + value, 1
        else:
            raw, length = np.asarray(value, "<i4").tobytes(), len(value)
        shape = [length if size == -1 else size for size in tensor.shape]
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        message.raw_input_contents.append(raw)
    if terms.priority is not None:
        message.parameters["rsrv_priority"].int64_param = terms.priority
    if terms.deadline is not None:
        left = terms.deadline - time.monotonic()
        if left <= 0:
            raise ApiError(504, "DEADLINE", "the deadline passed before the request was sent")
        # Triton itself reads this parameter, in microseconds.
        message.parameters["timeout"].int64_param = max(1, int(left * 1e6))
    return message


def read_outputs(response: Any) -> dict[str, Any]:
    """Return the values of an answer's outputs by name: an array, or a list of texts as bytes. Raises ApiError."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        array = from_bytes(tensor.datatype, (-1,), raw)
        if tensor.datatype == "BYTES":
            values[tensor.name] = array.tolist()
            continue
        values[tensor.name] = array
        if not np.isfinite(array).all():
            raise ApiError(500, "INTERNAL", "the model's answer has numbers that are not finite")
    return values


#: Triton's states of a model that can be called, and of a model that is starting.
READY, LOADING = "READY", "LOADING"


class Backend:
    """A server, or a gateway. Only one event loop may use it."""

    def __init__(self, address: str, operator: Metadata = ()) -> None:
        """`operator` are the headers that the server's repository API requires. `rsrv serve` restricts that API."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.address = address
        self._channel = grpc.aio.insecure_channel(
            address, [*options, ("grpc.max_reconnect_backoff_ms", 1000)]
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._operator = operator

    async def index(self) -> dict[str, str]:
        """Return the states of the models of the repository, in Triton's words. Raises ApiError."""
        request = service_pb2.RepositoryIndexRequest()
        reply = await _answer(self._stub.RepositoryIndex(request, timeout=10, metadata=self._operator))
        # While a model is replaced, both versions may be listed. The state READY then overrides the other state.
        models = sorted(reply.models, key=lambda model: model.state == READY)
        return {model.name: model.state for model in models}

    async def task(self, name: str) -> TaskModel | None:
        """Return a model, or None if it has no task. Raises ApiError."""
        request = service_pb2.ModelConfigRequest(name=name)
        reply = await _answer(self._stub.ModelConfig(request, timeout=10))
        return read_task(reply.config, int(time.time()))

    async def infer(
        self, model: TaskModel, values: Mapping[str, Value], terms: Terms, suffix: str = ""
    ) -> dict[str, Any]:
        """Return the outputs of one row by role. `suffix` is the end of the request's id. Raises ApiError."""
        message = request_for(model, values, terms, suffix)
        for name in model.outputs.values():
            message.outputs.add(name=name)
        response = await _answer(self._stub.ModelInfer(message, timeout=_limit(terms)))
        outputs = read_outputs(response)
        try:
            return {role: outputs[name] for role, name in model.outputs.items()}
        except KeyError as missing:
            raise ApiError(502, "INTERNAL", f"the answer has no output {missing}") from None

    async def stream(
        self, model: TaskModel, value: Value, parameters: Mapping[str, Any], terms: Terms
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the outputs, by name, of each response to a generation. Raises ApiError."""
        (role,) = model.inputs
        message = request_for(model, {role: value}, terms)
        for name, parameter in parameters.items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(parameter)]
            setattr(message.parameters[name], kind, parameter)
        # With this header, Triton ends a stream that fails with the gRPC status of the error.
        call = self._stub.ModelStreamInfer(
            iter([message]), timeout=_limit(terms), metadata=(("triton_grpc_error", "true"),)
        )
        try:
            async for response in call:
                if response.error_message:
                    raise from_status("INTERNAL", response.error_message)
                if response.infer_response.outputs:
                    yield read_outputs(response.infer_response)
        except grpc.RpcError as error:
            raise from_grpc(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


def _limit(terms: Terms) -> float | None:
    return None if terms.deadline is None else max(0.0, terms.deadline - time.monotonic()) + _GRACE_S


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise from_grpc(error) from None


async def each(field: str, items: Sequence[Any], job: Callable[[int, Any], Awaitable[T]]) -> list[T]:
    """Return the results of `job(index, item)` for all items, `IN_FLIGHT` at a time.

    Raises:
        ApiError: an item failed. The message names `field` and the item's index. The work for the other items is cancelled.
    """
    places = asyncio.Semaphore(IN_FLIGHT)

    async def work(index: int, item: Any) -> T:
        async with places:
            try:
                return await job(index, item)
            except ApiError as error:
                raise (error.at(f"{field}[{index}]") if len(items) > 1 else error) from None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(index, item)) for index, item in enumerate(items)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
