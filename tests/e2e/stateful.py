"""Bundles with state for the tests, and clients of streams."""

from __future__ import annotations

import json
import queue
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import tritonclient.grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tritonclient.utils import InferenceServerException

from rsrv_bundle import yaml12
from rsrv_bundle.stateful import export_generative, export_stateful
from tests.e2e.bundles import ensure_made
from tests.e2e.calls import Caller, at_once
from tests.e2e.harness import ROOT, RunningTriton

#: The story, which a storyteller repeats.
STORY = "grüße \N{SNOWMAN} aus dem Wald. "
#: Number of tokens that a storyteller's context holds.
CONTEXT = 1 << 20


def _sums(out_dir: Path) -> None:
    """Write a model of sequences. For each x, it returns the sum of all values of the sequence up to this x."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        y = state["total"][:, None] + jnp.cumsum(x, axis=1)
        return {"y": y}, {"total": y[:, -1]}

    export_stateful(
        step,
        {"total": jax.ShapeDtypeStruct((), np.float32)},
        {},
        {"x": jax.ShapeDtypeStruct((1, 1), np.float32)},
        slots=64,
        axes={"x": "nt"},
        input_shapes=[{"t": 1}, {"t": 4}, {"t": 16}],
        batch_sizes=[1, 4],
        out_dir=out_dir,
    )


def _storyteller(
    out_dir: Path, *, slots: int, sizes: Sequence[int], chunks: Sequence[int], context: int = CONTEXT
) -> None:
    """Write a storyteller. It continues the story from the position that is the length of the prompt in bytes."""
    letters = bytes_tokenizer()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    file = out_dir.parent / f"{out_dir.name}.json"
    letters.save(str(file))
    table = jnp.asarray(letters.encode(STORY).ids, jnp.int32)

    def step(params: Any, state: Any, position: jax.Array, tokens: jax.Array, lengths: jax.Array) -> Any:
        at = position + lengths
        return 10.0 * jax.nn.one_hot(table[at % len(table)], 256), {"read": at}

    export_generative(
        step,
        {"read": jax.ShapeDtypeStruct((), np.int32)},
        {},
        slots=slots,
        context=context,
        max_tokens=context,
        chunks=chunks,
        batch_sizes=sizes,
        tokenizer=file,
        out_dir=out_dir,
    )
    file.unlink()


def _tokens(out_dir: Path, *, teller: str) -> None:
    """Write a copy of a storyteller without its tokenizer. Clients send and receive tokens."""
    shutil.copytree(out_dir.with_name(teller), out_dir)
    manifest = yaml12.parse((out_dir / "manifest.yaml").read_text())
    del manifest["generate"]["tokenizer"], manifest["generate"]["template"]
    manifest["task"] |= {"inputs": {"ids": "tokens"}, "outputs": {"ids": "tokens"}}
    (out_dir / "manifest.yaml").write_text(yaml12.dump(manifest))


def with_chat(out_dir: Path, template: str, teller: Path) -> None:
    """Write a copy of a storyteller with a chat template."""
    shutil.copytree(teller, out_dir)
    manifest = yaml12.parse((out_dir / "manifest.yaml").read_text())
    manifest["generate"]["chat"] = {"template": template}
    (out_dir / "manifest.yaml").write_text(yaml12.dump(manifest))


def ensure() -> Path:
    """Return the folder of these bundles, built if necessary. `alone` is a storyteller with one slot."""
    makers: dict[str, Callable[[Path], None]] = {
        "sums": _sums,
        "teller": partial(_storyteller, slots=8, sizes=[1, 4], chunks=[1, 16]),
        "alone": partial(_storyteller, slots=1, sizes=[1], chunks=[1]),
        "tokens": partial(_tokens, teller="teller"),
    }
    return ensure_made(ROOT / "build" / "stateful_bundles", makers, [Path(__file__)])


def ensure_brief() -> Path:
    """Return the folder of two storytellers with short answers, built if necessary. One takes text, the other takes tokens."""
    makers: dict[str, Callable[[Path], None]] = {
        "brief": partial(_storyteller, slots=4, sizes=[1, 4], chunks=[1, 16], context=64),
        "brief_tokens": partial(_tokens, teller="brief"),
    }
    return ensure_made(ROOT / "build" / "brief_bundles", makers, [Path(__file__)])


def told(prompt: bytes, tokens: int) -> str:
    """Return the expected answer of a storyteller. If the limit of tokens cuts the last character, the answer lacks it."""
    whole = STORY.encode() * (2 + tokens // len(STORY))
    at = len(prompt) % len(STORY.encode())
    return whole[at : at + tokens].decode(errors="replace").rstrip("\N{REPLACEMENT CHARACTER}")


def bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: id for id, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sums(
    call: Caller,
    id: int | str,
    values: list[float],
    *,
    start: bool = False,
    end: bool = False,
    **options: Any,
) -> list[float]:
    """Send one chunk of a sequence to `sums`. Return the sum of the sequence up to each value."""
    x = np.asarray([values], np.float32)
    answer = call("sums", {"x": x}, sequence_id=id, sequence_start=start, sequence_end=end, **options)
    return [float(value) for value in answer["y"][0]]


class Stream:
    """The answer of a generate_stream request, read line by line."""

    def __init__(self, server: RunningTriton, model: str, *, buffer_bytes: int = 0, **fields: Any) -> None:
        """Send the request. `buffer_bytes`: size of the kernel's buffer for data that is not read yet, or 0 for the default."""
        self._connection = HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        self._connection.sock = socket.socket()
        self._connection.sock.settimeout(60)
        if buffer_bytes:
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._connection.sock.connect(("127.0.0.1", server.http_port))
        self._connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(fields))
        self._answer = self._connection.getresponse()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._answer:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()


def generate(server: RunningTriton, model: str, **fields: Any) -> dict[str, Any]:
    """Send a request without a stream, and return its only response."""
    connection = HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/generate", json.dumps({"stream": False, **fields}))
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


class GrpcStreams:
    """Answers over one gRPC stream. Request ids identify them."""

    def __init__(self, server: RunningTriton, reads: threading.Event | None = None) -> None:
        """Open the stream. With `reads`, the client reads only the first response until this event is set."""
        self._client = tritonclient.grpc.InferenceServerClient(server.server.grpc_url)
        self._came: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        self._reads = reads
        self._client.start_stream(self._keep)

    def _keep(self, result: Any, error: InferenceServerException | None) -> None:
        self._came.put((result, error))
        if self._reads is not None:
            self._reads.wait()

    def ask(self, model: str, id: str, prompt: bytes, **options: Any) -> None:
        tensor = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.asarray([prompt], object))
        self._client.async_stream_infer(
            model, [tensor], request_id=id, enable_empty_final_response=True, **options
        )

    def next(self) -> tuple[str, Mapping[str, Any], bool]:
        """Return the id and the outputs of the next response, and True if it is the last one. Raises InferenceServerException."""
        result, error = self._came.get(timeout=60)
        if error is not None:
            raise error
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return response.id, outputs, bool(response.parameters["triton_final_response"].bool_param)

    def failure(self) -> str:
        """Skip all responses, and return the error that ends the stream."""
        try:
            while True:
                self.next()
        except InferenceServerException as error:
            return str(error.message())

    def close(self, *, cancel: bool = False) -> None:
        if self._reads is not None:
            self._reads.set()
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@contextmanager
def grpc_streams(server: RunningTriton, reads: threading.Event | None = None) -> Iterator[GrpcStreams]:
    made = GrpcStreams(server, reads)
    try:
        yield made
    finally:
        made.close(cancel=True)


#: Fields of requests. Some of them are wrong.
_ODD: list[dict[str, Any]] = [
    {}, {}, {"max_tokens": 3}, {"max_tokens": 0}, {"temperature": 1.5, "seed": 3}, {"temperature": "nan"}, {"stop": "Wald"},
    {"stop": ["a"]}, {"stop": "["}, {"top_k": 10**30}, {"unknown": 1}, {"stream": False, "max_tokens": 9}, {"rsrv_run": "7"},
    {"rsrv_deadline_unix_ns": 1}, {"sequence_id": 7}, {"text_input": 7}, {"text_input": ["a", "b"]}, {"text_input": "\ud800"},
]  # fmt: skip


def close_streams(server: RunningTriton, model: str, *, clients: int, each: int) -> None:
    """Send requests to a storyteller over both protocols, some of them wrong.

    Clients leave before, between or after the pieces of an answer.
    """

    def strike(caller: Caller, number: int) -> None:
        rng = random.Random(number)
        for _ in range(each):
            pieces, text = rng.choice((0, 0, 1, 2, 5, 30)), "x" * rng.choice((1, 20, 300))
            if rng.random() < 0.5:
                with Stream(server, model, **{"text_input": text, **rng.choice(_ODD)}) as stream:
                    for _ in zip(range(pieces), stream, strict=False):
                        pass
            else:
                with grpc_streams(server) as streams, suppress(InferenceServerException):
                    streams.ask(model, "x", text.encode(), parameters={"max_tokens": 20})
                    for _ in range(pieces):
                        if streams.next()[2]:
                            break

    at_once(server, clients, strike)
