"""Bad requests to `rsrv openai`, and honest ones. The process and the server survive, and honest requests are answered right."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from local_triton import LOOPBACK
from rsrv.openai.app import ENDPOINTS
from tests.e2e import openais, stateful
from tests.e2e.harness import RunningTriton, is_alive, make_repository, running_triton
from tests.e2e.openais import RunningOpenai, running_openai
from tests.fuzz.manifests import VALUES
from tests.fuzz.sending import judged, over_http
from tests.fuzz.watched import Verdict

#: Number of bad requests between two checks with honest ones.
_BATCH = 32
_USER = {"role": "user", "content": "Once"}
#: A right body for each path.
_HONEST: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {
        "model": "embed",
        "input": ["one", "two"],
        "encoding_format": "base64",
        "dimensions": 4,
    },
    "/v1/rerank": {"model": "rank", "query": "a", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/v1/score": {"model": "rank", "text_1": "a", "text_2": ["b", "c"]},
    "/v1/classify": {"model": "classify", "input": ["short"]},
    "/v1/completions": {"model": "brief", "prompt": "Once", "max_tokens": 9, "stop": ["x"], "stream": True},
    "/v1/chat/completions": {
        "model": "talker",
        "messages": [_USER],
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
    },
    "/tokenize": {"model": "brief", "prompt": "Once"},
    "/detokenize": {"model": "brief", "tokens": [79, 110]},
}
_TEXTS = (
    "", "x" * 70_000, "\0", "\ufdd0", "<|im_end|>", "\u202e", "../../etc/passwd", "http://169.254.169.254/", "{{ 7 * 7 }}",
    "embed\r\nX: y", "[rsrv:INTERNAL] x", openais.BAD,
)  # fmt: skip
_FIELDS = (
    "tools",
    "n",
    "logprobs",
    "response_format",
    "input",
    "prompt",
    "messages",
    "stream_options",
    "constructor",
    "model",
)
_DEEP = b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def request(seed: int) -> tuple[bytes, bool]:
    """Return the bytes of a bad request, and True if its client closes its side early."""
    rng = random.Random(seed)
    path = rng.choice([path for paths, *_ in ENDPOINTS for path in paths if path in _HONEST])
    body = json.loads(json.dumps(_HONEST[path]))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        _change(rng, body)
    data = json.dumps(body).encode()
    headers = {"Host": LOOPBACK, "Content-Type": "application/json", "Connection": "close"}
    cut = False
    match rng.randrange(12):
        case 0:
            data = data[: rng.randrange(len(data))]
        case 1:
            data = bytes(rng.randrange(256) if rng.random() < 0.05 else byte for byte in data)
        case 2:
            data = rng.choice((_DEEP, b"", b"null", b"[]", b'"\\ud800"', b"\xff\xfe{}", b"{" * 1000))
        case 3:
            headers["Content-Encoding"] = rng.choice(("gzip", "deflate", "br", "x", "gzip, gzip"))
            data = gzip.compress(data * rng.choice((1, 1, 1000))) if rng.random() < 0.7 else data
        case 4:
            headers[rng.choice(("X-Timeout-S", "X-Request-Id", "Content-Type"))] = rng.choice(
                ("nan", "-1", "1e-9", "inf", "x" * 5000, "é", "0.001", "")
            )
        case 5:
            headers["Authorization"] = rng.choice(("Bearer", "Bearer \xff", "Basic eDp5", "x" * 7000))
        case 6:
            cut = True
    length = len(data) + (rng.choice((-1, 1, 10**6, 10**12)) if rng.random() < 0.05 else 0)
    cut = cut or length > len(data)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode("latin-1") + data, cut


def _change(rng: random.Random, body: dict[str, Any]) -> None:
    """Change, add or remove a field at a random depth."""
    values = (*VALUES, *_TEXTS, ["x"] * 3000, [1, 2], [[1], "a"], {"text": 1}, -1, 2**64, 1e308, 0.5)
    where: Any = body
    while True:
        keys = list(where) if isinstance(where, dict) else range(len(where))
        key = (
            rng.choice(list(keys) or [0])
            if rng.random() < 0.8 or isinstance(where, list)
            else rng.choice(_FIELDS)
        )
        inner = where[key] if key in keys else None
        if isinstance(inner, dict | list) and inner and rng.random() < 0.6:
            where = inner
            continue
        if key in keys and rng.random() < 0.2:
            del where[key]
        elif isinstance(where, dict) or key in keys:
            where[key] = copy.deepcopy(rng.choice(values))
        return


def check_openai(seeds: Sequence[int], scratch: Path) -> Iterator[Verdict]:
    """Send a request for every seed."""
    if not seeds:
        return
    folder = scratch / "openai"
    openais.write_bundles(folder / "bundles")
    brief = stateful.ensure_brief() / "brief"
    stateful.with_chat(
        folder / "bundles" / "talker", "{% for one in messages %}{{ one.content }}{% endfor %}", brief
    )
    with ExitStack() as stack:
        repository = make_repository(folder, folder / "bundles", brief)
        server = stack.enter_context(running_triton(repository, folder / "server.log", expected=None))
        api = stack.enter_context(running_openai(server.grpc_port, models=("embed", "brief", "talker")))
        pids = [server.pid, api.process.pid, *server.stub_pids()]
        remaining = iter(seeds)
        while batch := list(itertools.islice(remaining, _BATCH)):
            for seed in batch:
                began = time.monotonic()
                answer = judged(over_http(api.port, *request(seed)))
                yield Verdict(seed, answer.outcome, answer.said[:300], time.monotonic() - began)
            if dead := [pid for pid in pids if not is_alive(pid)]:
                yield Verdict(
                    batch[0], "crash", f"{len(dead)} processes died from seed {batch[0]} to {batch[-1]}"
                )
                return
            for problem in _harm(server, api):
                yield Verdict(batch[0], "harm", f"during seeds {batch[0]} to {batch[-1]}: {problem}")


def _harm(server: RunningTriton, api: RunningOpenai) -> Iterator[str]:
    """Send honest requests, and yield texts about wrong answers."""
    status, answer, _ = api.post("/v1/embeddings", {"model": "embed", "input": ["one", "two"]})
    if status != 200 or not np.allclose(
        [entry["embedding"] for entry in answer["data"]],
        [openais.expected_embedding(text) for text in ("one", "two")],
        atol=1e-5,
    ):
        yield f"embeddings: {status}"
    status, answer, _ = api.post("/v1/completions", {"model": "brief", "prompt": "hello", "max_tokens": 20})
    if status != 200 or answer["choices"][0]["text"] != stateful.told(b"hello", 20):
        yield f"a completion: {status} {answer}"
    if not server.server.is_ready():
        yield "the server is not ready"
