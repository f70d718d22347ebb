"""Processes of `rsrv openai` for tests, and small models for them.

`expected_embedding` and `expected_score` compute the models' answers in NumPy.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import cohere
import httpx
import jax.numpy as jnp
import numpy as np
import openai

from local_triton import LOOPBACK, free_ports
from rsrv_bundle.export import export_bundle
from tests.e2e.bundles import Array, ensure_made
from tests.e2e.harness import ROOT
from tests.waiting import wait_until

WIDTH, DIMENSIONS = 16, [4, 8]
LABELS = ["short", "long"]
#: A text that the hooks refuse, and a text that makes them slow.
BAD, SLOW = "a bad text", "a slow text"

_TEXT = {"name": "text", "dtype": "bytes", "shape": "n"}
_PAIR = {"name": "text_pair", "dtype": "bytes", "shape": "n"}
_COUNT = {"name": "tokens", "dtype": "i32", "shape": "n"}
_HOOKS = f"""
import time

import numpy as np

from rsrv.hooks import BadInput


def features(text):
    if text == {BAD.encode()!r}:
        raise BadInput("this text is bad")
    if text == {SLOW.encode()!r}:
        time.sleep(0.5)
    return np.bincount(np.frombuffer(text, np.uint8) % {WIDTH}, minlength={WIDTH}).astype(np.float32)
"""
_ONE = (
    _HOOKS
    + """

def preprocess(inputs):
    return {
        "x": np.stack([features(text) for text in inputs["text"]]),
        "tokens": np.array([len(text) for text in inputs["text"]], np.int32),
    }
"""
)
_TWO = (
    _HOOKS
    + """

def preprocess(inputs):
    pairs = list(zip(inputs["text"], inputs["text_pair"]))
    return {
        "x": np.stack([features(first) * features(second) for first, second in pairs]),
        "tokens": np.array([len(first) + len(second) for first, second in pairs], np.int32),
    }
"""
)


def kernel() -> Array:
    return np.random.default_rng(7).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def features(text: str) -> Array:
    return np.bincount(np.frombuffer(text.encode(), np.uint8) % WIDTH, minlength=WIDTH).astype(np.float32)


def expected_embedding(text: str) -> Array:
    """Return the embedding of a text. Its length is 1."""
    numbers = features(text) @ kernel() + 1
    scaled: Array = numbers / np.linalg.norm(numbers)
    return scaled


def expected_score(first: str, second: str) -> float:
    return float((features(first) * features(second)).sum())


def write_bundles(folder: Path) -> None:
    """Write the bundles `embed`, `embed_ids`, `rank` and `classify`, exported if necessary."""
    made = ensure_made(ROOT / "build" / "openai_bundles", {"all": _export}, [Path(__file__)])
    shutil.copytree(made / "all", folder)


def _export(folder: Path) -> None:
    example = {"x": np.ones((1, WIDTH), np.float32), "tokens": np.zeros(1, np.int32)}

    def embed(params: Any, x: Any, tokens: Any) -> Any:
        vectors = x @ params["kernel"] + 1
        return {"embedding": vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True), "tokens": tokens}

    def write(name: str, function: Any, hooks: str, inputs: list[Any], task: dict[str, Any]) -> None:
        output, size = {"feature-extraction": ("embedding", WIDTH), "text-ranking": ("scores", 1)}.get(
            task["kind"], ("scores", len(LABELS))
        )
        export_bundle(
            function,
            {"kernel": kernel()},
            example,
            batch_sizes=[1, 8, 32],
            out_dir=folder / name,
            hooks=hooks,
            client_inputs=inputs,
            client_outputs=[{"name": output, "dtype": "f32", "shape": "nd", "dims": {"d": size}}, _COUNT],
            task={**task, "outputs": {output: output, "tokens": "tokens"}},
        )

    # A model without hooks. If a text has four bytes, the embedding of its bytes is the embedding of the text.
    export_bundle(
        lambda params, ids: {
            "embedding": embed(params, jnp.eye(WIDTH, dtype=np.float32)[ids % WIDTH].sum(1), None)[
                "embedding"
            ]
        },
        {"kernel": kernel()},
        {"ids": np.zeros((1, 4), np.int32)},
        batch_sizes=[1, 8],
        out_dir=folder / "embed_ids",
        task={
            "kind": "feature-extraction",
            "inputs": {"ids": "ids"},
            "outputs": {"embedding": "embedding"},
        },
    )
    text, pair = {"text": "text"}, {"text": "text", "text_pair": "text_pair"}
    write(
        "embed",
        embed,
        _ONE,
        [_TEXT],
        {"kind": "feature-extraction", "inputs": text, "dimensions": DIMENSIONS},
    )
    write(
        "rank",
        lambda params, x, tokens: {"scores": x.sum(1, keepdims=True), "tokens": tokens},
        _TWO,
        [_TEXT, _PAIR],
        {"kind": "text-ranking", "inputs": pair},
    )
    write(
        "classify",
        lambda params, x, tokens: {
            "scores": jnp.stack([x.sum(1) < 5, x.sum(1) >= 5], 1).astype(np.float32),
            "tokens": tokens,
        },
        _ONE,
        [_TEXT],
        {"kind": "text-classification", "inputs": text, "labels": LABELS},
    )


class RunningOpenai:
    """A process of `rsrv openai`, with clients."""

    def __init__(self, port: int, metrics_port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self.metrics_port, self.process = port, metrics_port, process
        #: Clients that are open.
        self.clients = ExitStack()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def openai(self, key: str = "none", **options: Any) -> Any:
        """Return OpenAI's own client, without retries."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)
        return self.clients.enter_context(client)

    def cohere(self) -> Any:
        """Return Cohere's own client."""
        http = self.clients.enter_context(httpx.Client())
        return cohere.ClientV2(api_key="none", base_url=self.url, httpx_client=http)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Post a body. Return the status, the body and the headers of the answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask("POST", path, content, {"Content-Type": "application/json", **headers})

    def get(self, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
        return self._ask("GET", path, b"", headers)

    def _ask(
        self, verb: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, Any, dict[str, str]]:
        connection = HTTPConnection(LOOPBACK, self.port, timeout=60)
        try:
            connection.request(verb, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), dict(answer.getheaders())
        finally:
            connection.close()

    def metrics(self) -> str:
        connection = HTTPConnection(LOOPBACK, self.metrics_port, timeout=60)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()


@contextmanager
def running_openai(grpc_port: int, *arguments: str, models: Sequence[str] = ()) -> Iterator[RunningOpenai]:
    """Run `rsrv openai` until the block ends. Yield it when it lists `models`, or when it asks for a key."""
    port, metrics_port = free_ports(2)
    words = [f"--server={LOOPBACK}:{grpc_port}", f"--listen={LOOPBACK}:{port}"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rsrv.cli.main",
            "openai",
            *words,
            f"--metrics={LOOPBACK}:{metrics_port}",
            *arguments,
        ]
    )
    running = RunningOpenai(port, metrics_port, process)

    def serves() -> bool:
        assert process.poll() is None, "rsrv openai has ended"
        try:
            status, listed, _ = running.get("/v1/models")
        except OSError:
            return False
        return status == 401 or {*models} <= {model["id"] for model in listed["data"]}

    try:
        wait_until(serves, 600, what="rsrv openai")
        with running.clients:
            yield running
    finally:
        process.terminate()
        if process.wait(60):
            raise RuntimeError(f"rsrv openai has ended with {process.returncode}")
