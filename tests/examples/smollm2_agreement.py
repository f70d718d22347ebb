"""Compare SmolLM2's greedy tokens with those of transformers on the same file: 50 prompts, 64 tokens each.

    python -m tests.examples.smollm2_agreement BUNDLE

transformers computes eagerly, in f32, with its own reader of the file. The command fails at the first token that transformers does not
choose, unless the logits of the two tokens are nearly equal: the order of additions then decides.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from examples.smollm2 import published
from rsrv_bundle import read_bundle
from rsrv_bundle.hf.generate import greedy_gaps

TOKENS = 64
#: Largest difference of two nearly equal logits, relative to the largest magnitude.
LIMIT = 1e-4
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


def model_of(path: Path) -> Any:
    """Return the network of the published file in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # `from_pretrained` reads such files only if the package accelerate is installed.
    load: Any = load_gguf_checkpoint
    config: Any = LlamaConfig
    network: Any = LlamaForCausalLM
    model = network(config(**load(path)["config"], attn_implementation="eager")).eval()
    loaded = load(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)
    model.tie_weights()
    return model


def main(folder: Path) -> None:
    """Compare the tokens that the bundle chooses with the tokens that transformers chooses.

    Where two tokens differ, the gap is the difference of their logits, relative to the largest magnitude. Print the largest
    gap. Raises BundleError if a gap exceeds the limit.
    """
    bundle = read_bundle(folder)
    generate = bundle.manifest.generate
    assert generate is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = [tokenizer.encode(generate.template.replace("{text}", prompt)).ids for prompt in prompts()]
    with tempfile.TemporaryDirectory() as room:
        model = model_of(published.file(Path(room)))
    gap = max(greedy_gaps(bundle, model, encoded, TOKENS, LIMIT))
    print(
        f"{len(encoded)} prompts: equal tokens, up to logits that differ by {gap:.2g} of the largest magnitude"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
