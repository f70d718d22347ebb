"""All calls except inference. A call concerns the gateway, one model, or all workers. gRPC and HTTP share this code."""

from collections.abc import Collection, Mapping
from typing import Any, Generic, Protocol, TypeVar

from rsrv_gateway import fanout
from rsrv_gateway.fanout import Answer, Ask, Merge, ask_all, first
from rsrv_gateway.outcomes import Refusal, no_worker, unsupported
from rsrv_gateway.traffic import Traffic

T = TypeVar("T")

#: Operation of each method of gRPC, as `http_protocol.Target` names it.
OPERATIONS: Mapping[str, str] = {
    "ServerLive": "live",
    "ServerReady": "server ready",
    "ServerMetadata": "server",
    "ModelReady": "ready",
    "ModelMetadata": "model",
    "ModelConfig": "config",
    "ModelStatistics": "stats",
    "RepositoryIndex": "index",
    "RepositoryModelLoad": "load",
    "RepositoryModelUnload": "unload",
    "TraceSetting": "trace/setting",
    "LogSettings": "logging",
    **{
        f"{kind}SharedMemory{verb}": verb.lower()
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    },
}
#: Operations that any worker with the model can answer.
ABOUT_A_MODEL = frozenset(["ready", "model", "config"])
#: Operations that take as long as loading a model, so that the default timeout does not apply.
CHANGES = frozenset(["load", "unload"])
#: Operations that all workers answer, with the functions that merge the answers.
_MERGED: Mapping[str, Merge] = {"stats": fanout.merge_statistics, "index": fanout.merge_index}


class AnswerForm(Protocol[T]):
    """Form of the answers over one protocol, gRPC or HTTP."""

    def yes(self) -> T: ...

    def is_yes(self, answer: T) -> bool: ...

    def parse(self, operation: str, answer: T) -> Answer:
        """Return an answer as a message of `service_pb2`, or a refusal if the answer cannot be parsed."""

    def render(self, operation: str, message: Any) -> T: ...


class Inquiries(Generic[T]):
    def __init__(self, traffic: Traffic, workers: Collection[str], form: AnswerForm[T]) -> None:
        """`workers` is a live view: it always contains the workers that are connected now."""
        self._traffic = traffic
        self._workers = workers
        self._form = form

    async def answer(self, operation: str, model: str, ask: Ask[T]) -> T | Refusal:
        """Answer an operation. `model` is empty if the operation concerns no model."""
        form = self._form
        if operation == "live":
            return form.yes()
        if operation == "server ready":
            return await self._ready(ask)
        if operation == "server":
            return await first(self._workers, ask)
        if operation in ABOUT_A_MODEL:
            workers = await self._traffic.workers_for(model)
            return await first(workers, ask, form.is_yes if operation == "ready" else None)
        if operation in CHANGES:
            answers = await ask_all(self._workers, ask)
            # Refresh the table, because the client may use the change as soon as it gets this answer.
            await self._traffic.brain.refresh(sure=True)
            changed: T | Refusal = fanout.all_succeeded(answers)
            return changed
        if operation not in _MERGED:
            return unsupported()
        answers = await ask_all(self._workers, ask)
        merged = _MERGED[operation](
            {
                worker: answer if isinstance(answer, Refusal) else form.parse(operation, answer)
                for worker, answer in answers.items()
            }
        )
        return merged if isinstance(merged, Refusal) else form.render(operation, merged)

    async def _ready(self, ask: Ask[T]) -> T | Refusal:
        """Answer whether any worker is ready. If a worker serves a model, answer yes without asking the workers."""
        if self._traffic.serves:
            return self._form.yes()
        answers = (await ask_all(self._workers, ask)).values()
        for answer in answers:
            if not isinstance(answer, Refusal) and self._form.is_yes(answer):
                return answer
        return next(iter(answers), no_worker())
