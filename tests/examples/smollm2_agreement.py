"""Compare SmolLM2's greedy tokens with those of transformers on the same file: 50 prompts, 64 tokens each.

    python -m tests.examples.smollm2_agreement BUNDLE

The bundle's modules answer eight prompts at once, read in chunks; transformers computes eagerly, in f32, with its own
reader of the file. The command exits with 1 for a difference where the two tokens' logits differ by more than 1e-3.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.smollm2 import published
from rsrv_bundle import read_bundle
from rsrv_bundle.numerics import ModuleRunner

TOKENS = 64
#: Logits closer than this are a tie: the order of additions decides.
TIE = 1e-3
_SUBJECTS = (
    "the sea",
    "prime numbers",
    "coffee",
    "the moon",
    "Python",
    "honest work",
    "a rainy day",
    "Paris",
    "cats",
    "trains",
)
_QUESTIONS = (
    "What is {}?",
    "Write a poem about {}.",
    "Tell a child why people talk about {}, in one sentence.",
    "List three facts about {}.",
    "I have 17 minutes. Explain what an expert would say about {}, and what most people get wrong. " * 3,
)


def prompts() -> list[str]:
    """Return 50 questions of 10 to 70 words."""
    return [question.format(*[subject] * 3) for question in _QUESTIONS for subject in _SUBJECTS]


class Modules:
    """The bundle's modules, called as the runtime calls them."""

    def __init__(self, folder: Path) -> None:
        self.run = ModuleRunner(read_bundle(folder))
        self.chunks = self.run.bundle.manifest.chunks
        self.rows = max(self.run.sizes(0))
        state = self.run.bundle.manifest.state
        assert state is not None
        self.slots = state.slots
        self.pools = self.run.pools(0)

    def answers(self, asked: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the tokens behind at most as many prompts as the largest batch size has rows."""
        rests = [list(prompt) for prompt in asked]
        found: list[list[int]] = [[] for _ in asked]
        begins = True
        while any(len(answer) < TOKENS for answer in found):
            waiting = max(map(len, rests))
            # The chunks ascend.
            fitting = (index for index, length in enumerate(self.chunks) if length >= waiting)
            variant = next(fitting, len(self.chunks) - 1)
            tokens = self._step(variant, rests, begins)
            begins = False
            for row, rest in enumerate(rests):
                read = min(len(rest), self.chunks[variant])
                del rest[:read]
                if read and not rest:
                    found[row].append(tokens[row])
                    if len(found[row]) < TOKENS:
                        rest.append(tokens[row])
        return found

    def _step(self, variant: int, rests: Sequence[Sequence[int]], begins: bool) -> list[int]:
        """Read a chunk of each rest; return the tokens behind them. A row without a rest does not take part."""
        length = self.chunks[variant]
        tokens = np.zeros((self.rows, length), np.int32)
        lengths = np.zeros(self.rows, np.int32)
        slots = np.full(self.rows, self.slots, np.int32)
        for row, rest in enumerate(rests):
            chunk = rest[:length]
            tokens[row, : len(chunk)] = chunk
            lengths[row] = len(chunk)
            if chunk:
                slots[row] = ~row if begins else row
        inputs = [tokens, lengths, np.zeros((self.rows, 4), np.float32)]
        (found,), self.pools = self.run.step((variant, self.rows), inputs, slots, self.pools)
        return [int(token) for token in found]


class Transformers:
    """The same file in transformers."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        # `from_pretrained` reads such files only beside the package accelerate.
        load: Any = load_gguf_checkpoint
        config: Any = LlamaConfig
        network: Any = LlamaForCausalLM
        self.model = network(config(**load(path)["config"], attn_implementation="eager")).eval()
        loaded = load(path, return_tensors=True, model_to_load=self.model)["tensors"]
        missing, unexpected = self.model.load_state_dict(loaded, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)
        self.model.tie_weights()
        self.torch = torch

    def answers(self, asked: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Any]]:
        """Return for each prompt the greedy tokens, and the logits that each was chosen by, [TOKENS, vocabulary]."""
        longest = max(map(len, asked))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in asked]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asked]
        with self.torch.no_grad():
            found = self.model.generate(
                self.torch.tensor(rows),
                attention_mask=self.torch.tensor(mask),
                do_sample=False,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = self.torch.stack(found.logits, dim=1).numpy()
        return zip(found.sequences[:, longest:].tolist(), logits, strict=True)


def main(folder: Path) -> int:
    """Compare, print a line for each prompt that differs and a summary, and return the exit status."""
    from tokenizers import Tokenizer

    modules = Modules(folder)
    generate = modules.run.bundle.manifest.generate
    assert generate is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    asked = [tokenizer.encode(generate.template.replace("{text}", prompt)).ids for prompt in prompts()]
    with tempfile.TemporaryDirectory() as room:
        original = Transformers(published.file(Path(room)))
    equal = tied = 0
    for first in range(0, len(asked), modules.rows):
        batch = asked[first : first + modules.rows]
        pairs = zip(modules.answers(batch), original.answers(batch), strict=True)
        for index, (ours, (theirs, logits)) in enumerate(pairs, start=first):
            if ours == theirs:
                equal += 1
                continue
            at = next(at for at in range(TOKENS) if ours[at] != theirs[at])
            gap = float(logits[at, theirs[at]] - logits[at, ours[at]])
            tied += gap <= TIE
            print(
                f"prompt {index}, token {at}: {ours[at]}, not {theirs[at]}; their logits differ by {gap:.2g}"
            )
        print(f"{first + len(batch)} prompts: {equal} equal, {tied} differ from a tie on", flush=True)
    return int(equal + tied < len(asked))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
