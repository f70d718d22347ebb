"""Asks one worker over gRPC: Triton whether it answers and what is ready, its control service for figures."""

import asyncio
import logging
import re
from enum import Enum
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.placement.contract import Act, ModelView, WeightsView, Worker, WorkerView
from rsrv_gateway.contacts import Contacts, Control
from rsrv_gateway.probes import DEAD, ActError

log = logging.getLogger("rsrv.gateway")

_SERVICE = "/inference.GRPCInferenceService/"
#: seconds that it may take for its metrics: Prometheus itself waits ten by default
_METRICS = 2.0
#: seconds that a control service may take to note what it is asked for
_SOON = 10.0

#: seconds, of anything that a worker says: decades
_MOST_S = 1e9

#: what Triton says to who has not the right key, with the name of that
_RESTRICTED = re.compile("restricted, expecting header 'triton-grpc-protocol-([^']*)'")

_WEIGHTS = {pb.WEIGHTS_LOADING: WeightsView.LOADING, pb.WEIGHTS_RESIDENT: WeightsView.RESIDENT}


class _Late(Enum):
    """There was no answer in time."""

    LATE = "late"


_LATE: Final = _Late.LATE


class GrpcProber:
    """A worker that takes longer than `timeout` seconds gets a new connection: the old one may be open on one side only."""

    def __init__(self, worker: Worker, contacts: Contacts, timeout: float) -> None:
        self._worker = worker
        self._contacts = contacts
        self._timeout = timeout
        self._ready: frozenset[str] = frozenset()
        #: why it did not tell what is ready, when it was asked last
        self._refused = ""
        self._triton = contacts.open(worker.grpc)
        self._control = None if worker.control is None else contacts.open(worker.control)
        self._closing: set[asyncio.Task[None]] = set()

    async def look(self) -> WorkerView:
        alive, ready, load = await asyncio.gather(self._alive(), self._index(), self._load())
        if alive is _LATE:
            self._close(self._triton)
            self._triton = self._contacts.open(self._worker.grpc)
        if load is _LATE and self._worker.control is not None:
            self._close(self._control)
            self._control = self._contacts.open(self._worker.control)
        if alive is not True:
            return DEAD
        if isinstance(ready, str):
            self._refuse(ready)
            ready = frozenset()
        elif not isinstance(ready, _Late):
            self._refused = ""
        # Triton may be slow to list models while it loads some, and serves the others as before.
        self._ready = self._ready if isinstance(ready, _Late) else ready
        if isinstance(load, pb.GetLoadResponse) and _is_sane(load):
            return _view(self._ready, load)
        return WorkerView(True, self._ready)

    async def act(self, act: Act, model: str) -> None:
        if self._control is None:
            raise ActError("it has no control service that is known")
        stub: Any = control_pb2_grpc.ControlStub(self._control)
        try:
            match act:
                case Act.PREFETCH:
                    await stub.Prefetch(pb.PrefetchRequest(model=model), **self._terms(_SOON))
                case Act.EVICT:
                    await stub.Evict(pb.EvictRequest(target=pb.Target(model=model)), **self._terms(_SOON))
        except grpc.RpcError as error:
            raise ActError(_said(error)) from None

    async def metrics(self) -> str | None:
        if self._control is None:
            return None
        stub: Any = control_pb2_grpc.ControlStub(self._control)
        try:
            answer = await stub.GetMetrics(pb.GetMetricsRequest(), **self._terms(_METRICS))
        except grpc.RpcError:
            return None
        return None if answer is None else str(answer.text)  # None: no such message

    def control(self) -> Control | None:
        if self._control is None:
            return None
        return Control(control_pb2_grpc.ControlStub(self._control), self._contacts.metadata)

    async def close(self) -> None:
        """What is under way is cancelled."""
        for task in self._closing:
            task.cancel()
        channels = (self._triton, self._control)
        await asyncio.gather(*(channel.close() for channel in channels if channel is not None))

    def _close(self, channel: Any) -> None:
        """In the background: errands that are under way on it end by themselves."""
        task = asyncio.create_task(channel.close(_SOON))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _terms(self, timeout: float) -> dict[str, Any]:
        return {"timeout": timeout, "metadata": self._contacts.metadata}

    async def _alive(self) -> bool | _Late:
        """Whether it answers at all: while it starts, loads or ends it is not ready, and the index says what there is."""
        try:
            await self._triton.unary_unary(_SERVICE + "ServerReady")(b"", timeout=self._timeout)
        except grpc.RpcError as error:
            return _LATE if _is_late(error) else False
        return True

    async def _index(self) -> frozenset[str] | str | _Late:
        """Names of what is ready; a text: why it refuses to say."""
        call = self._triton.unary_unary(
            _SERVICE + "RepositoryIndex",
            request_serializer=service_pb2.RepositoryIndexRequest.SerializeToString,
            response_deserializer=service_pb2.RepositoryIndexResponse.FromString,
        )
        try:
            index = await call(
                service_pb2.RepositoryIndexRequest(ready=True),
                timeout=self._timeout,
                metadata=self._contacts.repository_metadata,
            )
        except grpc.RpcError as error:
            return _LATE if _is_late(error) else _refusal(error)
        if index is None:  # no such message: gRPC has logged that
            return frozenset()
        return frozenset(model.name for model in index.models if model.state == "READY")

    def _refuse(self, reason: str) -> None:
        """Says so once, for nothing goes to a worker that does not tell what it has."""
        if reason != self._refused:
            key = _RESTRICTED.search(reason)
            remedy = ""
            if key is not None:
                remedy = (
                    f"; its repository is restricted: set gateway.worker_repository_key to {key[1]}, and "
                    "gateway.worker_repository_value_file to a file with the value that it wants"
                )
            log.warning(
                "worker %s answers, but does not tell which models are ready, and gets no requests: %s%s",
                self._worker.name,
                reason,
                remedy,
            )
        self._refused = reason

    async def _load(self) -> pb.GetLoadResponse | _Late | None:
        """None: there is no control service, or it has no runtime to ask."""
        if self._control is None:
            return None
        stub: Any = control_pb2_grpc.ControlStub(self._control)
        try:
            load: pb.GetLoadResponse = await stub.GetLoad(pb.GetLoadRequest(), **self._terms(self._timeout))
        except grpc.RpcError as error:
            return _LATE if _is_late(error) else None
        return load


def _is_late(error: Any) -> bool:
    return bool(error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)


def _refusal(error: Any) -> frozenset[str] | str:
    """Nothing is ready on a server that starts or ends; the others that do not answer have a reason."""
    starts_or_ends = error.code() is grpc.StatusCode.UNAVAILABLE and not _RESTRICTED.search(
        error.details() or ""
    )
    return frozenset() if starts_or_ends else _said(error)


def _said(error: Any) -> str:
    return f"{error.code().name}: {error.details() or 'no reason given'}"


def _is_sane(load: pb.GetLoadResponse) -> bool:
    """One worker's figures that are none, or absurd, would spoil the sums over all workers, or be too large for them."""
    numbers = [load.backlog_s]
    for model in load.models:
        numbers += model.cost_s, model.device_seconds
    return all(0 <= number <= _MOST_S for number in numbers)


def _view(ready: frozenset[str], load: pb.GetLoadResponse) -> WorkerView:
    return WorkerView(
        alive=True,
        ready=ready,
        instance=load.instance or None,
        budget_bytes=load.budget_bytes if load.HasField("budget_bytes") else None,
        backlog_s=load.backlog_s,
        models={model.name: _model(model) for model in load.models},
        calls={meta.name: frozenset(meta.models) for meta in load.metas},
    )


def _model(load: pb.ModelLoad) -> ModelView:
    told = load.HasField("batch_input")
    return ModelView(
        bytes=load.bytes,
        weights=_WEIGHTS.get(load.weights, WeightsView.ABSENT),
        pinned=load.pinned,
        item_s=load.cost_s if load.HasField("cost_s") else None,
        queued=load.queued,
        executing=load.executing,
        requests=load.requests,
        items=load.rows,
        device_seconds=load.device_seconds,
        misses=load.misses,
        max_items=load.max_rows if told else 0,
        batch_input=(load.batch_input.name, load.batch_input.axis) if told else None,
    )
