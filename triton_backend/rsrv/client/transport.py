"""Single attempts to send a request over gRPC or HTTP. A failure raises `AttemptFailed`; `rsrv.client.client` repeats attempts.

The messages for gRPC are from tritonclient. tritonclient's own `infer` would encode the tensors again for each attempt, so this
module encodes them once.
"""

import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from rsrv.address import parse_address
from rsrv.client.errors import InputError
from rsrv.client.retries import Code, Failure
from rsrv.client.signature import Array, from_bytes

#: Matches gRPC's error texts about failed connections. The code UNAVAILABLE is not enough, because servers also send it.
_NO_ANSWER = re.compile(
    r"(?i)failed to connect|errors resolving|socket closed|connection reset|recvmsg|sendmsg|goaway|broken pipe|"
    r"ping timeout|transport closed"
)
#: The parts of smaller HTTP bodies are joined, and sent with one write.
JOINED_BYTES = 128 << 10
LATE = "no answer before the deadline"


@dataclass(frozen=True)
class RegionPart:
    """Bytes in a region of shared memory that the server knows."""

    region: str
    size: int
    offset: int

    def __len__(self) -> int:
        return self.size

    @property
    def parameters(self) -> dict[str, str | int]:
        """Parameters of a request's tensor that lies in this part."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_byte_size": self.size,
            "shared_memory_offset": self.offset,
        }


@dataclass(frozen=True)
class InferTensor:
    """An input or output in the form that is sent. `content` is empty for an output in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: bytes | memoryview | RegionPart

    def array(self) -> Array:
        """Return an output as an array."""
        assert not isinstance(self.content, RegionPart)
        return from_bytes(self.datatype, self.shape, self.content)


@dataclass(frozen=True)
class InferRequest:
    """A request, which may be sent several times."""

    model: str
    inputs: Sequence[InferTensor]
    #: Outputs that the server writes to a region. If this is empty, the server sends all outputs.
    outputs: Mapping[str, RegionPart] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def repeatable(self) -> bool:
        """False for a step of a sequence, because a repetition would do its work twice."""
        return "sequence_id" not in self.parameters


#: The answers to one request of a model that streams.
Answers = AsyncGenerator[Sequence[InferTensor], None]


class AttemptFailed(Exception):
    """An attempt has failed."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.failure = Failure(code, text)


class ServerConnection(Protocol):
    """A connection to a server."""

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]: ...

    def encode(self, message: InferRequest) -> Any:
        """Encode a request for `infer` or `stream`, which may send it several times."""

    async def infer(self, request: Any, timeout_s: float) -> Sequence[InferTensor]: ...

    def stream(self, request: Any, timeout_s: float) -> Answers: ...

    async def regions(self, timeout_s: float) -> Sequence[str]: ...

    async def register(self, region: str, key: str, size: int, timeout_s: float) -> None: ...

    async def unregister(self, region: str, timeout_s: float) -> None: ...

    async def close(self) -> None: ...


def connect(
    url: str, headers: Mapping[str, str], root_certificates: str | os.PathLike[str] | None
) -> ServerConnection:
    """Return a connection for the scheme of `url`. Without a scheme, `url` is HOST:PORT for gRPC. Raises ValueError."""
    scheme, _, address = url.rpartition("://")
    if scheme in ("", "grpc", "grpcs"):
        return _Grpc(address, headers, scheme == "grpcs" or root_certificates is not None, root_certificates)
    if scheme in ("http", "https"):
        return _Http(url.rstrip("/"), headers, root_certificates)
    raise ValueError(f"{url!r} has an unknown scheme: write HOST:PORT for gRPC, or http://HOST:PORT")


def is_local(url: str) -> bool:
    """Return whether the server's address is a loopback address."""
    try:
        return parse_address(urlsplit(url if "://" in url else f"grpc://{url}").netloc).is_loopback
    except ValueError:
        return False


class _Grpc:
    def __init__(
        self, address: str, headers: Mapping[str, str], tls: bool, ca: str | os.PathLike[str] | None
    ) -> None:
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        parse_address(address)
        self._grpc, self._pb = grpc, service_pb2
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # Disable gRPC's own retries, because `rsrv.client.client` decides which requests are repeated.
            ("grpc.enable_retries", 0),
            # Find a restarted server within a second.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if is_local(address):
            # A proxy that the environment names cannot reach this machine's loopback addresses.
            options.append(("grpc.enable_http_proxy", 0))
        if tls:
            content = None
            if ca is not None:
                with open(ca, "rb") as file:
                    content = file.read()
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(content), options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        from google.protobuf.json_format import MessageToDict

        answer = await self._call("ModelConfig", self._pb.ModelConfigRequest(name=model), timeout_s)
        config: dict[str, Any] = MessageToDict(answer.config, preserving_proto_field_name=True)
        return config

    async def infer(self, request: Any, timeout_s: float) -> Sequence[InferTensor]:
        request.parameters["timeout"].int64_param = max(1, int(timeout_s * 1e6))
        return _grpc_outputs(await self._call("ModelInfer", request, timeout_s))

    async def stream(self, request: Any, timeout_s: float) -> Answers:
        request.parameters["timeout"].int64_param = max(1, int(timeout_s * 1e6))
        # With this header, Triton ends the stream with a gRPC status if an error occurs.
        metadata = (*self._metadata, ("triton_grpc_error", "true"))
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s, metadata=metadata)
        try:
            async for answer in call:
                if answer.error_message:
                    raise AttemptFailed(Code.OTHER, answer.error_message)
                if answer.infer_response.outputs:
                    yield _grpc_outputs(answer.infer_response)
        except self._grpc.aio.AioRpcError as error:
            raise self._failed(error) from None
        finally:
            call.cancel()

    def encode(self, message: InferRequest) -> Any:
        request = self._pb.ModelInferRequest(model_name=message.model, id=message.id)
        for tensor in message.inputs:
            added = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            if isinstance(tensor.content, RegionPart):
                _set(added.parameters, tensor.content.parameters)
            else:
                request.raw_input_contents.append(bytes(tensor.content))
        for name, part in message.outputs.items():
            _set(request.outputs.add(name=name).parameters, part.parameters)
        _set(request.parameters, message.parameters)
        return request

    async def regions(self, timeout_s: float) -> Sequence[str]:
        request = self._pb.SystemSharedMemoryStatusRequest()
        return list((await self._call("SystemSharedMemoryStatus", request, timeout_s)).regions)

    async def register(self, region: str, key: str, size: int, timeout_s: float) -> None:
        request = self._pb.SystemSharedMemoryRegisterRequest(name=region, key=key, byte_size=size)
        await self._call("SystemSharedMemoryRegister", request, timeout_s)

    async def unregister(self, region: str, timeout_s: float) -> None:
        request = self._pb.SystemSharedMemoryUnregisterRequest(name=region)
        await self._call("SystemSharedMemoryUnregister", request, timeout_s)

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        except self._grpc.aio.AioRpcError as error:
            raise self._failed(error) from None

    def _failed(self, error: Any) -> AttemptFailed:
        code, text = error.code(), error.details() or error.code().name
        if code is self._grpc.StatusCode.UNAVAILABLE and _NO_ANSWER.search(text):
            return AttemptFailed(Code.CONNECTION, text)
        if code is self._grpc.StatusCode.DEADLINE_EXCEEDED:
            text = LATE
        return AttemptFailed(getattr(Code, code.name, Code.OTHER), text)

    async def close(self) -> None:
        await self._channel.close()


def _grpc_outputs(answer: Any) -> list[InferTensor]:
    raw = iter(answer.raw_output_contents)
    return [
        InferTensor(output.name, output.datatype, tuple(output.shape), next(raw, b""))
        for output in answer.outputs
    ]


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    """Set parameters of a message."""
    for name, value in values.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}
        setattr(parameters[name], kind.get(type(value), "string_param"), value)


#: gRPC's code for each status of HTTP. Triton sends 400 for most of its errors.
_CODES = {
    400: Code.INVALID_ARGUMENT,
    404: Code.NOT_FOUND,
    429: Code.UNAVAILABLE,
    499: Code.CANCELLED,
    500: Code.INTERNAL,
    502: Code.CONNECTION,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}


class _Http:
    def __init__(self, url: str, headers: Mapping[str, str], ca: str | os.PathLike[str] | None) -> None:
        self._url, self._headers, self._ca = url, dict(headers), ca
        self._session: Any = None

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        content, _ = await self._request(f"models/{quote(model, '')}/config", timeout_s)
        return dict(json.loads(content))

    def encode(self, message: InferRequest) -> Any:
        contents: list[bytes | memoryview] = []
        header: dict[str, Any] = {"id": message.id} if message.id else {}
        header["parameters"] = {**message.parameters, "binary_data_output": True}
        header["inputs"] = inputs = []
        for tensor in message.inputs:
            if isinstance(tensor.content, RegionPart):
                parameters = tensor.content.parameters
            else:
                parameters = {"binary_data_size": len(tensor.content)}
                contents.append(tensor.content)
            inputs.append(
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": tensor.shape,
                    "parameters": parameters,
                }
            )
        if message.outputs:
            header["outputs"] = [
                {"name": name, "parameters": part.parameters} for name, part in message.outputs.items()
            ]
        return f"models/{quote(message.model, '')}/infer", header, contents

    async def infer(self, request: Any, timeout_s: float) -> Sequence[InferTensor]:
        path, header, contents = request
        parameters = {**header["parameters"], "timeout": max(1, int(timeout_s * 1e6))}
        begin = json.dumps({**header, "parameters": parameters}).encode()
        size = len(begin) + sum(map(len, contents))
        headers = {"Inference-Header-Content-Length": str(len(begin)), "Content-Length": str(size)}

        async def body() -> AsyncIterator[bytes | memoryview]:
            yield begin
            for content in contents:
                yield content

        # One write is faster than several, unless many bytes would be copied for it.
        data = b"".join((begin, *contents)) if size < JOINED_BYTES else body()
        return _outputs(*await self._request(path, timeout_s, data, headers))

    def stream(self, request: Any, timeout_s: float) -> Answers:
        raise InputError("streams need gRPC: give the client the server's gRPC port, as HOST:PORT")

    async def regions(self, timeout_s: float) -> Sequence[str]:
        content, _ = await self._request("systemsharedmemory/status", timeout_s)
        return [region["name"] for region in json.loads(content)]

    async def register(self, region: str, key: str, size: int, timeout_s: float) -> None:
        body = json.dumps({"key": key, "offset": 0, "byte_size": size}).encode()
        await self._request(f"systemsharedmemory/region/{region}/register", timeout_s, body)

    async def unregister(self, region: str, timeout_s: float) -> None:
        await self._request(f"systemsharedmemory/region/{region}/unregister", timeout_s, b"")

    async def _request(
        self, path: str, timeout_s: float, data: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, int]:
        """Return the body of the answer, and the length of the JSON at its beginning. Raises AttemptFailed."""
        import aiohttp

        if self._session is None:
            # `client` already limits the requests in flight.
            connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl())
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        try:
            async with self._session.request(
                "GET" if data is None else "POST",
                f"{self._url}/v2/{path}",
                data=data,
                headers=headers,
                # For aiohttp, 0 means no limit.
                timeout=aiohttp.ClientTimeout(total=max(timeout_s, 0.001)),
            ) as answer:
                content = await answer.read()
        except TimeoutError:
            raise AttemptFailed(Code.DEADLINE_EXCEEDED, LATE) from None
        except aiohttp.ClientError as error:
            raise AttemptFailed(Code.CONNECTION, str(error) or type(error).__name__) from None
        if answer.status != 200:
            raise AttemptFailed(_CODES.get(answer.status, Code.OTHER), _error_text(content, answer.status))
        return content, int(answer.headers.get("Inference-Header-Content-Length", len(content)))

    def _ssl(self) -> Any:
        import ssl

        return ssl.create_default_context(cafile=self._ca) if self._url.startswith("https") else True

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _error_text(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP status {status}: {content[:200].decode(errors='replace')}"


def _outputs(content: bytes, length: int) -> list[InferTensor]:
    """Read the body of an answer, whose first `length` bytes are JSON."""
    outputs, at = [], length
    for output in json.loads(content[:length])["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
        size = output.get("parameters", {}).get("binary_data_size", 0)
        outputs.append(InferTensor(name, datatype, shape, memoryview(content)[at : at + size]))
        at += size
    return outputs
