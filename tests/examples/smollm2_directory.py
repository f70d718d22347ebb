"""Export SmolLM2 from a Hugging Face directory, and compare its answers to 200 prompts with the answers of transformers.

    python -m tests.examples.smollm2_directory

The script writes the published file as a directory, as `save_pretrained` does. `rsrv-bundle export --hf` exports it with its
default options. Half of the prompts are questions of a chat. At the first token that differs, the logits of both tokens must be
nearly equal. If they are not for some answer, the command exits with 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.smollm2 import published
from rsrv.hooks.text import PromptTokeniser
from rsrv_bundle import read_bundle
from rsrv_bundle.hf.generate import greedy_gaps

_TOKENS = 16
#: Largest difference of two logits in a near tie, relative to the largest magnitude.
_TIE = 1e-5
_SUBJECTS = (
    "the sea",
    "prime numbers",
    "coffee",
    "Python",
    "honest work",
    "Paris",
    "cats",
    "trains",
    "a rainy day in November",
    "x = y + 1",
    "Größe und Fußball",
    "la santé des abeilles",
    "железная дорога",
    "η φιλοσοφία",
    "東京の地下鉄",
    "人工智能",
    "서울의 날씨",
    "القهوة العربية",
    "हिन्दी साहित्य",
    "🙂🚀 emojis",
)
_TEXTS = (
    "{}",
    "What is {}?",
    "Write a poem about {}.",
    "Tell a child why people talk about {}, in one sentence.",
    "List three facts about {}.",
    "Was weiß man über {}? Antworte kurz.",
    'def describe(topic: str = \'{}\') -> str:\n    """Return 1 + 2 = 3 facts."""\n',
    "2026-11-29, 17:05 - notes on {} (page 1/12):\n\n- ",
    "I have 17 minutes. Explain what an expert would say about {}, and what most people get wrong. " * 3,
    "Once upon a time there was a book about {}. Nobody had read it to the end, and everybody praised it. "
    * 6,
)


def prompts() -> list[str]:
    """Return 200 different texts of up to 350 tokens."""
    return [text.replace("{}", subject) for text in _TEXTS for subject in _SUBJECTS]


def save(content: published.Published, folder: Path) -> None:
    """Write the model, its tokenizer and its chat template as `save_pretrained` does."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config: Any = LlamaConfig
    network: Any = LlamaForCausalLM
    model = network(config(**content.config))
    weights = {name: torch.from_numpy(array) for name, array in content.weights.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(
        tokenizer_object=Tokenizer.from_str(content.tokenizer), chat_template=content.chat, **content.special
    ).save_pretrained(folder)


def compare(directory: Path, folder: Path) -> int:
    """Compare a bundle with the directory that it was exported from. Return the exit status."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bundle = read_bundle(folder)
    generate = bundle.manifest.generate
    assert generate is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chat, plain = (
        PromptTokeniser(folder / "tokenizer.json", template) for template in (generate.template, "{text}")
    )
    encoded = []
    for index, prompt in enumerate(prompts()):
        # The subjects alternate, so that each script and each length is in both halves.
        if (index + index // len(_SUBJECTS)) % 2:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            tokens, expected = chat.encode(prompt), tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            tokens, expected = plain.encode(prompt), tokenizer(prompt)["input_ids"]
        assert tokens == expected, prompt
        encoded.append(tokens)
    gaps = greedy_gaps(bundle, model, encoded, _TOKENS, limit=float("inf"))
    for index, gap in enumerate(gaps):
        if gap:
            print(f"prompt {index}: the logits of the first different token differ by {gap:.2g}")
    equal = sum(not gap for gap in gaps)
    print(f"{equal} of {len(gaps)} answers have equal tokens; the largest difference is {max(gaps):.2g}")
    return int(max(gaps) > _TIE)


def main() -> int:
    """Fetch, export and compare. Return the exit status."""
    with tempfile.TemporaryDirectory() as room:
        directory, bundle = Path(room, "smollm2"), Path(room, "bundles", "smollm2")
        save(published.fetched(), directory)
        command = ["export", "--hf", str(directory), "-o", str(bundle)]
        subprocess.run([sys.executable, "-P", "-m", "rsrv_bundle.cli", *command], check=True)
        return compare(directory, bundle)


if __name__ == "__main__":
    sys.exit(main())
