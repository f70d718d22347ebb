"""SmolLM2 in a runtime, over its socket and without Triton, compared with transformers: tokens per second.

    make bench-smollm2 BENCH=BUNDLE

BUNDLE is `smollm2` as `bundles/examples/build.py` builds it. transformers computes eagerly, in f32, with its cache of keys and
values, and with the same number of threads. The sides take turns. The time of each side includes the prompt.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from examples.smollm2 import published
from rsrv.stub.connection import RuntimeConnection, greet
from rsrv.wire.frames import Status
from rsrv.wire.generation import Generate, pack_generate
from rsrv.wire.socket import connect, send
from tests.bench.bare_runtime import bare_runtime
from tests.examples.smollm2_agreement import model_of, prompts

_TOKENS, _CLIENTS, _ROUNDS = 64, 8, 7


def main(bundle: Path) -> int:
    """Measure, and print the figures."""
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    with bare_runtime() as (path, _), tempfile.TemporaryDirectory() as room:
        connection = RuntimeConnection(greet(connect(path)))
        described = connection.register({"model": "smollm2", "bundle": str(bundle)})["models"][0]
        template = described["generate"]["template"]
        encoded = [
            tokenizer.encode(template.replace("{text}", prompt)).ids
            for prompt in prompts()[10 : 10 + _CLIENTS]
        ]
        original = model_of(published.file(Path(room)))
        sides: dict[str, Callable[[], object]] = {
            "transformers": lambda: _continue(original, encoded[0]),
            "one client": lambda: _generate(connection, encoded[:1]),
            "eight clients": lambda: _generate(connection, encoded),
            "eight clients, top_p 0.9": lambda: _generate(connection, encoded, temperature=0.7, top_p=0.9),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        # The first round fills the caches, and is not counted.
        for number in range(_ROUNDS + 1):
            for side, run in sides.items():
                started = time.perf_counter()
                run()
                times[side].append(time.perf_counter() - started)
            print(
                f"round {number}: {', '.join(f'{side} {took[-1]:.1f} s' for side, took in times.items())}",
                flush=True,
            )
    for side, seconds in times.items():
        tokens = _TOKENS * (_CLIENTS if side.startswith("eight") else 1)
        rates = [tokens / elapsed for elapsed in seconds[1:]]
        print(f"{side}: {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})")
    one, eight = times["one client"], times["eight clients"]
    print(f"one client against transformers: {_ratio(times['transformers'], one)}")
    print(f"eight clients against one: {_ratio([_CLIENTS * seconds for seconds in one], eight)}")
    print(f"time of drawn tokens against greedy ones: {_ratio(times['eight clients, top_p 0.9'], eight)}")
    return 0


def _ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Return the ratio of the times in the same round: its median and its range."""
    ratios = [numerator / denominator for numerator, denominator in zip(above[1:], below[1:], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)"


def _generate(connection: RuntimeConnection, encoded: Sequence[Sequence[int]], **sampling: Any) -> None:
    """Let the runtime answer all prompts at the same time."""
    live = set(connection.next_ids(len(encoded)))
    for number, prompt in zip(sorted(live), encoded, strict=True):
        send(
            connection.sock,
            pack_generate(Generate(number, prompt, _TOKENS, stop=[], seed=number, **sampling)),
        )
    received = 0
    while live:
        for done in connection.receive(600):
            assert done.status is Status.OK, done.text
            live.remove(done.request)
        received += sum(1 for _ in connection.take_tokens())
    assert received == len(encoded) * _TOKENS, received


def _continue(model: Any, prompt: Sequence[int]) -> None:
    """Answer one prompt with only the network of transformers. Its method `generate` would add work of its own."""
    import torch

    tokens, cache = torch.tensor([list(prompt)]), None
    with torch.no_grad():
        for _ in range(_TOKENS):
            output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
