"""An asynchronous client, and a synchronous one that runs it on a thread."""

import asyncio
import atexit
import inspect
import json
import os
import random
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np

from rsrv.client.errors import InputError, RequestError
from rsrv.client.in_flight import InFlightLimit
from rsrv.client.retries import Code, Failure, decide
from rsrv.client.rows import RowBatch, RowGrouping, batches, size_of
from rsrv.client.shared_memory import LEAST_BYTES, Placement, Regions
from rsrv.client.signature import Array, ModelSignature, to_bytes
from rsrv.client.transport import Answers, AttemptFailed, InferRequest, InferTensor, connect, is_local

#: Default limit in seconds for a request with all its attempts.
TIMEOUT_S = 60.0

#: With `ordered`, an answer waits until all earlier rows are answered. While this many answers wait for each request that may be
#: in flight, the client sends no further request.
EARLY = 4
#: While the rows in flight and the waiting answers have at least this many bytes, the client sends no further request.
HELD_BYTES = 256 << 20

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Outputs(dict[str, Array]):
    """The outputs of a request by name. The roles of the model's task are also valid names."""

    def __init__(self, outputs: Mapping[str, Array], signature: ModelSignature) -> None:
        super().__init__(outputs)
        self._signature = signature

    @classmethod
    def read(cls, outputs: Sequence[InferTensor], signature: ModelSignature) -> Self:
        """Return the outputs of an answer."""
        return cls({output.name: output.array() for output in outputs}, signature)

    def __missing__(self, role: str) -> Array:
        tensor = self._signature.task.outputs.get(role, role)
        if tensor == role:
            raise KeyError(role)
        return self[tensor]

    def labels(self) -> list[str]:
        """Return for each row the label with the largest score. Raises InputError if the model's task names no labels."""
        labels = self._signature.task.labels
        if not labels:
            raise InputError(f"{self._signature.model} has no labels: the task of its bundle names none")
        best = np.atleast_2d(self["scores"]).argmax(1)
        return [labels[column] for column in best]

    def parsed(self, role: str) -> list[Any]:
        """Parse an output of JSON texts, such as the entities of a text. Return one value for each row."""
        return [json.loads(value) for value in self[role].reshape(-1)]

    def row(self, at: int) -> "Outputs":
        """Return the outputs of one row."""
        return Outputs({name: array[at] for name, array in self.items()}, self._signature)


class Answered(NamedTuple):
    """The answer to the rows from `start` up to, but not including, `stop`."""

    start: int
    stop: int
    #: Arrays with an axis of rows, even if the model's tensors have no such axis.
    outputs: Outputs

    def rows(self) -> Iterator[tuple[int, Outputs]]:
        """Yield each row's number and outputs."""
        for number in range(self.start, self.stop):
            yield number, self.outputs.row(number - self.start)


class AsyncClient:
    """A client for asyncio. Use each client in only one event loop."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
        root_certificates: str | os.PathLike[str] | None = None,
        shared_memory: bool = True,
    ) -> None:
        """Make a client. It connects with its first request.

        Args:
            url: HOST:PORT or grpc://HOST:PORT for gRPC, grpcs:// for gRPC with TLS, http:// or https:// for HTTP.
            timeout_s: limit in seconds for each request with all its attempts.
            headers: sent with each request, such as {"authorization": "Bearer TOKEN"}.
            root_certificates: file of the authorities to trust (PEM). For gRPC, it also switches TLS on.
            shared_memory: True to use shared memory for large requests if the server is on this machine and allows it.
        """
        self.url = url
        self.timeout_s = timeout_s
        self._connection = connect(url, headers or {}, root_certificates)
        unusable = "" if is_local(url) else "the server is not on this machine"
        self._regions = Regions(self._connection, unusable if shared_memory else "shared_memory=False")
        self._signatures: dict[str, ModelSignature] = {}
        #: True once the server has answered anything.
        self._reached = False
        #: Models that the server has served to this client.
        self._served: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, and unregister the memory that the server shares with this client."""
        await self._regions.close()
        await self._connection.close()

    @property
    def transport(self) -> str:
        """Transport of large requests: `shared memory`, or `bytes (REASON)`."""
        return "shared memory" if self._regions.is_used else f"bytes ({self._regions.reason})"

    async def probe(self) -> str:
        """Try shared memory, unless an earlier attempt has shown that it is unusable. Return `transport`."""
        if region := await self._regions.take(LEAST_BYTES):
            self._regions.give_back(region)
        return self.transport

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    async def signature(self, model: str, *, timeout_s: float | None = None) -> ModelSignature:
        """Return the inputs and outputs of a model. Raises RequestError.

        The client requests the signature once. After a refused request, it requests the signature again, because the model may have
        changed.
        """
        if model not in self._signatures:
            config = await self._repeat(
                model, lambda seconds: self._connection.config(model, seconds), self._deadline(timeout_s)
            )
            self._signatures[model] = ModelSignature.from_config(config)
            self._served.add(model)
        return self._signatures[model]

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        timeout_s: float | None = None,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        **arrays: Any,
    ) -> Outputs:
        """Send one request, and return its outputs. Raises InputError before anything is sent, or RequestError.

        Args:
            model: name of the model.
            inputs: the inputs by name. Use it for inputs whose names are also arguments of this method.
            timeout_s: limit in seconds for the request with all its attempts; default: the client's limit.
            parameters: the request's parameters, such as {"rsrv_priority": 1}. With `sequence_id`, the request is a step of a
            sequence.
            request_id: name under which `rsrv why` finds the request.
            arrays: the inputs by name.
        """
        deadline = self._deadline(timeout_s)
        signature = await self.signature(model, timeout_s=timeout_s)
        if signature.streams:
            raise InputError(f"{model} streams its answers: call stream()")
        request = infer_request(signature, {**(inputs or {}), **arrays}, parameters, request_id)
        return await self._exchange(signature, request, deadline)

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        timeout_s: float | None = None,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        **arrays: Any,
    ) -> AsyncGenerator[Outputs, None]:
        """Send one request over gRPC, and yield the outputs of each answer. Raises InputError or RequestError, as `infer` does.

        The arguments are those of `infer`. `timeout_s` limits the time until the last answer. The client repeats a failed request only
        before its first answer.
        """
        deadline = self._deadline(timeout_s)
        signature = await self.signature(model, timeout_s=timeout_s)
        request = infer_request(signature, {**(inputs or {}), **arrays}, parameters, request_id)
        encoded = self._connection.encode(request)

        async def begin(seconds: float) -> tuple[Answers, Sequence[InferTensor] | None]:
            answers = self._connection.stream(encoded, seconds)
            return answers, await anext(answers, None)

        answers, outputs = await self._repeat(model, begin, deadline, repeatable=request.repeatable)
        async with aclosing(answers):
            while outputs is not None:
                yield Outputs.read(outputs, signature)
                try:
                    outputs = await anext(answers, None)
                except AttemptFailed as error:
                    raise RequestError(
                        model, error.failure, 1, "not repeated, because the answer had begun"
                    ) from None

    def map(
        self,
        model: str,
        rows: Any,
        *,
        rows_per_request: int | None = None,
        in_flight: int | None = None,
        ordered: bool = True,
        timeout_s: float | None = None,
        first_row: int = 0,
    ) -> "AsyncMapResults":
        """Send all rows of a data set, and return their answers. The client sends further rows while the caller reads answers.

        Args:
            model: name of the model.
            rows: columns (a mapping of arrays or lists, or a data frame), an array or a file (.npy, .npz, .parquet) for
                the only input, or an iterable of rows, also an asynchronous one. A row is a mapping, or the value of the only
                input. Paths and pictures of Pillow in rows are sent as files.
            rows_per_request: rows of a request; default: as many as the model takes, up to some megabytes.
            in_flight: maximum number of requests at a time; default: the client increases it while the throughput grows.
            ordered: True for answers in the order of the rows, False for answers in the order in which they arrive.
            timeout_s: limit in seconds for each request with all its attempts; default: the client's limit.
            first_row: leave out the rows of columns before this one.
        """

        async def requests() -> AsyncIterator[RowBatch]:
            signature = await self.signature(model, timeout_s=timeout_s)
            if isinstance(rows, AsyncIterable):
                grouping = RowGrouping(signature, rows_per_request)
                async for row in rows:
                    if batch := grouping.add(row):
                        yield batch
                if batch := grouping.flush():
                    yield batch
                return
            if isinstance(rows, (Mapping, np.ndarray)):
                for batch in batches(signature, rows, rows_per_request, first_row):
                    yield batch
                return
            # A file or an iterable may be slow. Read it on a thread, so that nothing else in the loop waits for it.
            read = partial(asyncio.get_running_loop().run_in_executor, None)
            made = await read(batches, signature, rows, rows_per_request, first_row)
            while (batch := await read(next, made, None)) is not None:
                yield batch

        return AsyncMapResults(self._map(model, requests(), in_flight, ordered, timeout_s))

    async def _map(
        self,
        model: str,
        requests: AsyncIterator[RowBatch],
        in_flight: int | None,
        ordered: bool,
        timeout_s: float | None,
    ) -> AsyncGenerator[Answered, None]:
        """Send the requests, and yield their answers. `map` describes the arguments."""
        if in_flight is not None and in_flight < 1:
            raise InputError(f"in_flight is {in_flight}, but must be at least 1")
        limit = InFlightLimit(time.monotonic(), in_flight)
        #: Tasks that have ended: tasks of requests, and the task that reads the next rows.
        ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        #: Requests whose answers were not yielded yet, in the order of the rows. The value is the size of the request's rows in
        #: bytes, and later the size of its answer.
        held: dict[asyncio.Task[Answered], int] = {}
        #: Number of requests in flight.
        running = 0
        reading: asyncio.Task[RowBatch | None] | None = None
        exhausted = False
        #: Error of the source of rows. The caller gets it after the answers to all earlier rows.
        failure: Exception | None = None

        def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
            task = asyncio.create_task(work)
            task.add_done_callback(ended.put_nowait)
            return task

        try:
            while True:
                # Read further rows only below these limits. They bound the memory of requests and of waiting answers.
                if (
                    not (reading or exhausted)
                    and running < limit.limit
                    and len(held) - running < EARLY * limit.limit
                    and sum(held.values()) < HELD_BYTES
                ):
                    reading = start(_next(requests))
                if not (reading or running):
                    break
                task = await ended.get()
                if task is reading:
                    reading = batch = None
                    try:
                        batch = task.result()
                    except Exception as error:  # noqa: BLE001  the caller's iterable may raise anything
                        failure = error
                    if batch is None:
                        exhausted = True
                        continue
                    request = start(self._answer(model, batch, limit, timeout_s))
                    held[request] = size_of(batch.values)
                    running += 1
                    continue
                running -= 1
                answered: Answered = task.result()
                limit.answered(answered.stop - answered.start, time.monotonic())
                if not ordered:
                    del held[task]
                    yield answered
                    continue
                # If the task is not in `held`, the loop below has already yielded its answer.
                if task in held:
                    held[task] = size_of(answered.outputs)
                while held and (first := next(iter(held))).done():
                    del held[first]
                    yield first.result()
            if failure is not None:
                raise failure
        finally:
            tasks = [*held, *([reading] if reading else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(
        self, model: str, batch: RowBatch, limit: InFlightLimit, timeout_s: float | None
    ) -> Answered:
        """Return the answer to a part of a data set."""
        deadline = self._deadline(timeout_s)
        try:
            signature = await self.signature(model, timeout_s=timeout_s)
            request = infer_request(signature, batch.values)
            outputs = await self._exchange(signature, request, deadline, limit)
        except InputError as error:
            raise InputError(f"rows {batch.start} to {batch.stop - 1}: {error}") from None
        except RequestError as error:
            error.add_rows(batch.start, batch.stop)
            raise
        if not signature.max_rows:
            outputs = Outputs({name: array[None] for name, array in outputs.items()}, signature)
        return Answered(batch.start, batch.stop, outputs)

    async def _exchange(
        self,
        signature: ModelSignature,
        request: InferRequest,
        deadline: float,
        limit: InFlightLimit | None = None,
    ) -> Outputs:
        """Send a request, in shared memory if that works, and return the outputs. Raises RequestError."""
        placement = Placement(signature, request)
        region = await self._regions.take(placement.size, deadline - time.monotonic())
        encoded = self._connection.encode(placement.write(region) if region else request)
        #: False while an attempt runs, and after an attempt without an answer: the server may then still use the region.
        is_free = True

        async def attempt(seconds: float) -> Sequence[InferTensor]:
            nonlocal region, encoded, is_free
            was_free, is_free = is_free, False
            try:
                outputs = await self._connection.infer(encoded, seconds)
            except AttemptFailed as error:
                is_free = was_free and error.failure.is_answer
                if region is None or "shared memory region" not in str(error):
                    raise
            else:
                is_free = was_free
                return placement.read(outputs, region) if region else outputs
            # The server has restarted and lost its regions. It refused the request without working on it, so even a step of a
            # sequence may be sent again.
            self._regions.forget(region)
            region, encoded = None, self._connection.encode(request)
            return await self._connection.infer(encoded, deadline - time.monotonic())

        try:
            outputs = await self._repeat(
                signature.model, attempt, deadline, repeatable=request.repeatable, limit=limit
            )
        finally:
            if region:
                self._regions.give_back(region, is_free=is_free)
        return Outputs.read(outputs, signature)

    async def _repeat(
        self,
        model: str,
        attempt: Callable[[float], Awaitable[T]],
        deadline: float,
        *,
        repeatable: bool = True,
        limit: InFlightLimit | None = None,
    ) -> T:
        """Call `attempt` until it succeeds, and return its result. Raise RequestError if a failure is not worth another attempt.

        The argument of `attempt` is the number of seconds until the deadline.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                result = await attempt(deadline - time.monotonic())
            except AttemptFailed as error:
                failure = error.failure
                self._reached = self._reached or failure.code is not Code.CONNECTION
            else:
                self._reached = True
                return result
            now = time.monotonic()
            next_at = decide(
                failure,
                attempts,
                now,
                deadline,
                repeatable=repeatable,
                reached=self._reached,
                served=model in self._served,
                chance=random.random(),
            )
            if isinstance(next_at, str):
                self._signatures.pop(model, None)
                if not self._reached:
                    hint = "check that the server runs; HOST:PORT is for Triton's gRPC port, http://HOST:PORT for its HTTP port"
                    failure = Failure(failure.code, f"no connection to {self.url}: {failure.text}; {hint}")
                raise RequestError(model, failure, attempts, next_at)
            if limit is not None and failure.tag == "QUEUE_FULL":
                limit.refused(now)
            await asyncio.sleep(next_at - now)


def infer_request(
    signature: ModelSignature,
    values: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    request_id: str = "",
) -> InferRequest:
    """Return the request with these inputs. Raises InputError if they do not fit the model."""
    inputs = [
        InferTensor(name, spec.datatype, array.shape, to_bytes(spec, array))
        for name, array in signature.check(values).items()
        for spec in (signature.inputs[name],)
    ]
    return InferRequest(signature.model, inputs, parameters=parameters or {}, id=request_id)


class AsyncMapResults:
    """The answers to a data set. Iterate over it once: it yields each row's number and outputs."""

    def __init__(self, answers: AsyncGenerator[Answered, None]) -> None:
        self._answers = answers

    def batches(self) -> AsyncGenerator[Answered, None]:
        """Return the answers request by request."""
        return self._answers

    async def __aiter__(self) -> AsyncIterator[tuple[int, Outputs]]:
        async for answered in self._answers:
            for row in answered.rows():
                yield row

    async def arrays(self) -> dict[str, Array]:
        """Return all rows of each output as one array."""
        return joined([answered async for answered in self._answers])


class MapResults:
    """The answers to a data set. Iterate over it once: it yields each row's number and outputs."""

    def __init__(self, client: "Client", results: AsyncMapResults) -> None:
        self._client = client
        self._results = results

    def batches(self) -> Iterator[Answered]:
        """Yield the answers request by request."""
        return self._client._iterate(self._results.batches())

    def __iter__(self) -> Iterator[tuple[int, Outputs]]:
        for answered in self.batches():
            yield from answered.rows()

    def arrays(self) -> dict[str, Array]:
        """Return all rows of each output as one array."""
        return joined(list(self.batches()))


async def _next(values: AsyncIterator[T]) -> T | None:
    return await anext(values, None)


async def _ended(answers: AsyncGenerator[Any, None]) -> None:
    """Close the generator `answers`. If Ctrl-C has cancelled a call of the generator, first wait until that call has ended."""
    while inspect.isasyncgen(answers) and answers.ag_running:
        await asyncio.sleep(0.001)
    await answers.aclose()


def joined(answers: Sequence[Answered]) -> dict[str, Array]:
    """Return all rows of each output as one array, in the order of the rows."""
    parts = [answered.outputs for answered in sorted(answers, key=lambda answered: answered.start)]
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _synchronous(
    method: Callable[Concatenate[AsyncClient, P], R], waiting: Callable[["Client", R], T]
) -> Callable[Concatenate["Client", P], T]:
    """Return a method of Client that calls `method` of AsyncClient, and waits for its result with `waiting`."""

    @wraps(method)
    def call(self: "Client", /, *arguments: P.args, **options: P.kwargs) -> T:
        return waiting(self, method(self._client, *arguments, **options))

    return call


class Client:
    """A client for programs without asyncio. Threads may share it. It has the methods of AsyncClient."""

    def __init__(self, url: str, **options: Any) -> None:
        """Make a client. The arguments are those of AsyncClient."""
        #: True from the beginning of `close`.
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rsrv.client", daemon=True)
        self._thread.start()

        async def connected() -> AsyncClient:
            return AsyncClient(url, **options)

        try:
            self._client = self._wait(connected())
        except BaseException:
            self._end()
            raise
        # If the program ends without closing the client, close it then, so that the server unmaps the shared memory.
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and end the thread. Calls of other threads are cancelled."""

        async def closed() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()

        if self._thread.is_alive():
            self._is_closed = True
            atexit.unregister(self.close)
            self._wait(closed())
            self._end()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the thread, and return its result. Ctrl-C cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, values: AsyncGenerator[T, None]) -> Iterator[T]:
        """Run a generator on the thread, and yield its values."""
        try:
            while (value := self._wait(_next(values))) is not None:
                yield value
        finally:
            # If the client is closed, do nothing: `close` has cancelled the generator's tasks, and the loop no longer runs tasks.
            if not self._is_closed:
                self._wait(_ended(values))

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def transport(self) -> str:
        """Transport of large requests, as in AsyncClient.transport."""
        return self._client.transport

    signature = _synchronous(AsyncClient.signature, _wait)
    probe = _synchronous(AsyncClient.probe, _wait)
    infer = _synchronous(AsyncClient.infer, _wait)
    stream = _synchronous(AsyncClient.stream, _iterate)
    map = _synchronous(AsyncClient.map, MapResults)
