"""Triton's repository API: the states of models, loads and unloads."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

import rsrv
from rsrv.address import Address
from rsrv.triton_command_line import Options, listening, read_command_line, restriction, restrictions
from rsrv.wire.paths import start_time

#: Values of tritonserver's option --model-control-mode.
Mode = Literal["none", "poll", "explicit"]

#: State of a model in Triton. `dismissed` means unloaded on request. `other` means loading, unloading, or failed.
State = Literal["ready", "dismissed", "other"]

HOW_TO_START = "start tritonserver with --model-control-mode=explicit --load-model=* --exit-on-error=false"

#: Seconds that calls other than loads may take.
_TIMEOUT_S = 10.0
#: Seconds that the call for statistics may take. The time is short because missing statistics do little harm.
_STATISTICS_S = 2.0
#: Config of a placeholder, a model that is loaded in place of a failed model before the failed model is unloaded.
_PLACEHOLDER_CONFIG = (
    '{"backend": "python", "instance_group": [{"kind": "KIND_CPU", "count": 1}],'
    ' "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],'
    ' "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]}'
)
_PLACEHOLDER_CODE = b"class TritonPythonModel:\n    def execute(self, requests): return []\n"


class TritonError(Exception):
    """A call of tritonserver failed. The text is the reason."""


@dataclass(frozen=True, slots=True)
class TritonEndpoint:
    """The address of tritonserver's repository API, and the options that affect its callers."""

    #: HOST:PORT.
    address: str = "127.0.0.1:8001"
    mode: Mode = "none"
    #: True if Triton ends when a model cannot be loaded at its start. Otherwise it serves the other models.
    exits_on_error: bool = True
    #: Number of models that Triton loads concurrently.
    load_threads: int = 4
    #: Headers that a restricted repository API requires. They are secret: do not show them.
    metadata: tuple[tuple[str, str], ...] = ()
    #: Reason why Triton cannot be called. Empty: it can be called.
    trouble: str = ""
    #: HOST:PORT of Triton's HTTP front end. Empty if there is none.
    http: str = "127.0.0.1:8000"


def read_endpoint(arguments: Sequence[str]) -> TritonEndpoint:
    """Read tritonserver's command line."""
    options = Options(arguments)
    mode = options.last("model-control-mode", "none").lower()
    trouble = ""
    if not options.is_on("allow-grpc", default=True):
        trouble = "tritonserver was started with --allow-grpc=false, but rsrv manages its models over gRPC"
    elif options.is_on("grpc-use-ssl", default=False) or options.is_on("grpc-use-ssl-mutual", default=False):
        trouble = (
            "tritonserver's gRPC port requires TLS, which the control process does not support; "
            "serve gRPC without TLS on an address of this machine, behind a proxy that ends TLS"
        )
    return TritonEndpoint(
        _reached(options, "grpc"),
        mode if mode in get_args(Mode) else "none",  # type: ignore[arg-type]  # mypy does not narrow it
        options.is_on("exit-on-error", default=True),
        int(threads) if (threads := options.last("model-load-thread-count", "")).isdecimal() else 4,
        _repository_headers(options),
        trouble,
        _reached(options, "http") if options.is_on("allow-http", default=True) else "",
    )


def _reached(options: Options, front: str) -> str:
    """Return the address at which this machine reaches a front end of Triton, or "" if the options have no valid address."""
    try:
        address = listening(options, front)
    except ValueError:
        return ""
    return str(Address(address.local, address.port))


def facts(pid: int) -> dict[str, Any]:
    """Return the facts about the tritonserver with this process id that the live page shows."""
    options = Options(read_command_line(pid))
    doors = {}
    for name, front in (("gRPC", "grpc"), ("HTTP", "http")):
        if options.is_on(f"allow-{front}", default=True):
            with contextlib.suppress(ValueError):
                doors[name] = str(listening(options, front))
    return {
        "name": socket.gethostname(),
        "pid": pid,
        "version": rsrv.__version__,
        "started": _started_ns(pid) / 1e9,
        "endpoints": doors,
    }


def _started_ns(pid: int) -> int:
    """Return the Unix time at which a process started."""
    since_boot = start_time(pid) * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot


def _repository_headers(options: Options) -> tuple[tuple[str, str], ...]:
    """Return the headers that the repository API requires."""
    key_and_value = restrictions(options, "grpc").get("model-repository")
    return () if key_and_value is None else (restriction(*key_and_value),)


def _state(state: str, reason: str) -> State:
    if state == "READY":
        return "ready"
    # Triton reports UNLOADING until the model's stub has ended. The model counts as dismissed even before that.
    dismissed = state == "UNLOADING" or (state, reason) == ("UNAVAILABLE", "unloaded")
    return "dismissed" if dismissed else "other"


_TRITONS_WORDS = re.compile(r"^load failed for model '[^']*': version [0-9]+ is at UNAVAILABLE state: \w+: ")


def _reason(name: str, text: str) -> str:
    """Return a stub's error without the text that Triton puts around it."""
    # Keep the type of any exception other than TritonModelException, because that is an error of the user's model.py.
    own = _TRITONS_WORDS.sub("", text).removeprefix("TritonModelException: ").partition("\n\nAt:\n")[0]
    return own.removeprefix(f"{name}: ").strip()


class Triton:
    """The repository API of one tritonserver. Belongs to one event loop."""

    def __init__(self, endpoint: TritonEndpoint, started_ns: int = 0, program: str | None = None) -> None:
        """Make the API of a tritonserver.

        Args:
            endpoint: Address and options of the server.
            started_ns: Unix time at which the server began to load its first models, in nanoseconds. 0: unknown.
            program: Path of the server's program, or None if it is unknown.
        """
        self.started_ns = started_ns
        self.program = program
        self.mode: Mode = endpoint.mode
        self.address, self.http = endpoint.address, endpoint.http
        self.trouble = endpoint.trouble
        self.exits_on_error = endpoint.exits_on_error
        self.load_threads = endpoint.load_threads
        self._metadata = endpoint.metadata
        self._channel = grpc.aio.insecure_channel(
            endpoint.address,
            # Use no proxy, because the server is on this machine. Reconnect after short pauses, to find a starting server soon.
            options=[("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 1000)],
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the API of the tritonserver with this process id."""
        return cls(read_endpoint(read_command_line(pid)), _started_ns(pid), f"/proc/{pid}/exe")

    async def states(self) -> Mapping[str, State]:
        """Return the states of all models that Triton has ever been told to serve. Raises TritonError."""
        reply = await self._call(self._stub.RepositoryIndex, service_pb2.RepositoryIndexRequest())
        return {model.name: _state(model.state, model.reason) for model in reply.models if model.state}

    async def tensors(self, name: str) -> dict[str, Any]:
        """Return a model's inputs and outputs as JSON, and whether it streams and takes sequences. Empty if it is not loaded."""
        try:
            metadata = await self._call(self._stub.ModelMetadata, service_pb2.ModelMetadataRequest(name=name))
            config_request = service_pb2.ModelConfigRequest(name=name)
            config = (await self._call(self._stub.ModelConfig, config_request)).config
        except TritonError:
            return {}
        optional = {tensor.name for tensor in config.input if tensor.optional}
        tensors = {
            kind: [
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": list(tensor.shape),
                    "optional": tensor.name in optional,
                }
                for tensor in several
            ]
            for kind, several in (("inputs", metadata.inputs), ("outputs", metadata.outputs))
        }
        streams = config.model_transaction_policy.decoupled
        return {**tensors, "streams": streams, "sequence": config.HasField("sequence_batching")}

    async def queues(self) -> Mapping[str, tuple[int, float]]:
        """Return, by model, how many requests have left the queue, and their total time in it in seconds. Raises TritonError."""
        reply = await self._call(
            self._stub.ModelStatistics, service_pb2.ModelStatisticsRequest(), timeout=_STATISTICS_S
        )
        counts: dict[str, tuple[int, float]] = {}
        for statistics in reply.model_stats:  # one for each version
            count, seconds = counts.get(statistics.name, (0, 0.0))
            queue = statistics.inference_stats.queue
            counts[statistics.name] = count + queue.count, seconds + queue.ns / 1e9
        return counts

    async def load(self, name: str) -> None:
        """Load the current version of a model from the repository. Return when that version serves. Raises TritonError.

        An older version serves until then, and continues to serve after an error. If nothing in the model's directory has
        changed, Triton does nothing. In the mode poll, Triton loads models by itself, and this returns at once.
        """
        if self.mode != "poll":
            # There is no time limit, because the load compiles.
            request = service_pb2.RepositoryModelLoadRequest(model_name=name)
            try:
                await self._call(self._stub.RepositoryModelLoad, request, timeout=None)
            except TritonError as error:
                raise TritonError(_reason(name, str(error))) from None

    async def unload(self, name: str) -> None:
        """Unload a model. Return when Triton refuses new requests. Requests in flight are answered. Raises TritonError.

        In the mode poll, Triton unloads models by itself, and this does nothing.
        """
        if self.mode != "poll":
            # Triton's index leaves out a model without a directory. Treat it as failed, because it may have failed.
            if (await self.states()).get(name, "other") == "other":
                await self._load_placeholder(name)
            await self.dismiss(name)

    async def dismiss(self, name: str) -> None:
        """Unload a loaded model. Return at the same time as `unload`. Raises TritonError."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        await self._call(self._stub.RepositoryModelUnload, request)

    async def remaining(self) -> dict[str, bool]:
        """Return the models that are not unloaded. The value is True if the model is ready. Raises TritonError."""
        reply = await self._call(self._stub.RepositoryIndex, service_pb2.RepositoryIndexRequest())
        loaded = ("READY", "LOADING", "UNLOADING")
        return {model.name: model.state == "READY" for model in reply.models if model.state in loaded}

    async def request_count(self) -> int:
        """Return the number of requests that have left Triton's queues since its start. Raises TritonError."""
        return sum(count for count, _ in (await self.queues()).values())

    async def _load_placeholder(self, name: str) -> None:
        """Load a model that does nothing in place of a model that failed.

        With --strict-readiness, Triton 24.10 is not ready if a model's last load failed, even if that model is unloaded.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        request.parameters["config"].string_param = _PLACEHOLDER_CONFIG
        request.parameters["file:1/model.py"].bytes_param = _PLACEHOLDER_CODE
        with contextlib.suppress(TritonError):  # Only the server's readiness depends on it.
            await self._call(self._stub.RepositoryModelLoad, request)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, timeout: float | None = _TIMEOUT_S) -> Any:
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise TritonError(error.details() or error.code().name) from None
