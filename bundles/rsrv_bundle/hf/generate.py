"""Export of decoders: weights of transformers, the prompt of a chat, and the proof that greedy answers are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from rsrv.hooks.text import PromptTokeniser
from rsrv.progress import steps
from rsrv_bundle.errors import BundleError
from rsrv_bundle.hf.decoder import Array, Decoder
from rsrv_bundle.hf.directory import Directory
from rsrv_bundle.hf.loading import check_tokenizer, load_model, load_tokenizer
from rsrv_bundle.hf.recipe import HubOptions
from rsrv_bundle.hf.samples import read_lines
from rsrv_bundle.hf.template import TEXT, prompt_template, prompts
from rsrv_bundle.numerics import ModuleRunner
from rsrv_bundle.sequence_check import Sequences
from rsrv_bundle.spec import Bundle
from rsrv_bundle.stateful import export_generative

#: Values of model_type with the network of `Decoder`.
KINDS: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma")
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS: Final = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
_CONTEXT, _MAX_TOKENS, _SLOTS = 1024, 256, 8
_BATCH_SIZES = (1, 8)
_CHUNKS = (1, 16, 128)
_QUESTIONS = (
    "What is the capital of France?",
    "Größe und Fußball: ein Satz.",
    "東京はどこですか。",
    "Write x = y + 1 in Python.",
    "Once upon a time there was a cat that sat on a mat and looked at the rain. " * 3,
)
#: Number of tokens of each answer that are compared.
_COMPARED = 12
#: Maximum number of characters of a chat template in the manifest.
_MAX_CHAT = 32_768


def export_decoder(
    directory: Directory, options: HubOptions, work: Path, *, limit: float, **others: Any
) -> dict[str, float]:
    """Write a decoder as the bundle `work`. Return the largest gap between its greedy tokens and the tokens of transformers.

    limit: the largest gap allowed, relative to the largest magnitude of the logits. others: options of `export_generative`.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    kind = directory.config.get("model_type")
    if kind not in KINDS:
        raise BundleError(
            f"config.json: model_type: {kind!r:.40} is none of {', '.join(KINDS)}, which can generate"
        )
    own = read_lines(options.samples)
    model = load_model(AutoModelForCausalLM, directory)
    tokenizer = load_tokenizer(directory)
    decoder = decoder_of(model.config, model.model.rotary_emb, options.context)
    check_tokenizer(tokenizer, decoder.context)
    chat = _chat(tokenizer)
    template = prompt_template(*_parts(chat)) if chat else TEXT
    stop = _stop(directory, model.config, tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    for name, given in (("--lengths", options.lengths), ("--dimensions", options.dimensions)):
        if given:
            raise BundleError(f"{name}: is not for text-generation; leave it out")
    file = work.parent / "tokenizer.json"
    file.write_text(backend.to_str(), encoding="utf-8")
    bundle = export_generative(
        decoder.apply,
        decoder.state(),
        weights_of(model),
        slots=options.slots or _SLOTS,
        context=decoder.context,
        max_tokens=min(_MAX_TOKENS, decoder.context),
        stop=stop,
        chunks=[chunk for chunk in _CHUNKS if chunk <= decoder.context],
        batch_sizes=options.batch_sizes or _BATCH_SIZES,
        tokenizer=file,
        template=template,
        # A longer template does not fit into a manifest.
        chat=chat if len(chat.get("template", "")) <= _MAX_CHAT else None,
        in_place=True,
        out_dir=work,
        **others,
    )
    compared = _prompts(bundle, tokenizer, chat, decoder.context - _COMPARED, own)
    # Remove the options of the directory. Some of them, such as repetition_penalty, would make transformers choose other tokens
    # than the likeliest ones.
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return {"tokens": max(greedy_gaps(bundle, model, compared, _COMPARED, limit))}


def decoder_of(config: Any, rotary: Any, context: int | None) -> Decoder:
    """Return the network of a configuration of transformers. Raises BundleError for parts that `Decoder` lacks."""
    where = "config.json"
    most = int(config.max_position_embeddings)
    if rotary.rope_type not in _ROPE_KINDS:
        raise BundleError(
            f"{where}: rope_parameters: '{rotary.rope_type}' is none of {', '.join(_ROPE_KINDS)}"
        )
    windows = getattr(config, "layer_types", None) or []
    if getattr(config, "sliding_window", None) and ("sliding_attention" in windows or not windows):
        # Inside the window, sliding attention is the same as full attention.
        most = min(most, int(config.sliding_window))
    if context is not None and context > most:
        raise BundleError(f"--context: {context} is more than the {most} tokens that the model reads")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation == "gelu" and config.model_type == "gemma":
        activation = "gelu_pytorch_tanh"
    if activation not in _ACTIVATIONS:
        raise BundleError(f"{where}: hidden_act: '{activation}' is none of {', '.join(_ACTIVATIONS)}")
    gemma = config.model_type == "gemma"
    heads = int(config.num_attention_heads)
    return Decoder(
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        context=context or min(most, _CONTEXT),
        epsilon=float(config.rms_norm_eps),
        frequencies=rotary.inv_freq.numpy().astype(np.float32),
        rope_scale=float(rotary.attention_scaling),
        activation=_ACTIVATIONS[activation],
        one_more=gemma,
        embedding_scale=float(config.hidden_size) ** 0.5 if gemma else 1.0,
    )


def weights_of(model: Any) -> dict[str, Array]:
    """Return a model's weights by name, without the output head if it is the same tensor as the embedding."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {
        name: tensor.detach().numpy()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def _chat(tokenizer: Any) -> dict[str, str]:
    """Return the chat template, and the special tokens that it may use. Empty if there is no template."""
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    if not source:
        return {}
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return {**special, "template": source}


def _parts(chat: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the source of a chat template, and the special tokens that it may use."""
    return chat["template"], {name: token for name, token in chat.items() if name != "template"}


def _stop(directory: Directory, config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer. Raises BundleError if one is not in the vocabulary."""
    file, ends = "generation_config.json", directory.json("generation_config.json").get("eos_token_id")
    if ends is None:
        file, ends = "config.json", config.eos_token_id
    if ends is None:
        file, ends = "tokenizer_config.json", tokenizer.eos_token_id
    several = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [token for token in several if type(token) is not int or not 0 <= token < config.vocab_size]:
        raise BundleError(
            f"{file}: eos_token_id: {wrong[0]!r:.40} is not a token of the {config.vocab_size:,} in the vocabulary; correct it"
        )
    return several


def _prompts(
    bundle: Bundle, tokenizer: Any, chat: Mapping[str, str], most: int, own: Mapping[str, str]
) -> list[list[int]]:
    """Return the tokens of sample questions, as the server makes them.

    own: questions of the user, by name. Raises BundleError if transformers returns different tokens, or if a question of the user
    has more than `most` tokens.
    """
    generate = bundle.manifest.generate
    assert generate is not None
    assert generate.tokenizer is not None
    ours = PromptTokeniser(bundle.path / generate.tokenizer, generate.template)
    questions = {**{question: question for question in _QUESTIONS}, **own}
    plain = list(questions.values())
    texts = prompts(*_parts(chat), plain) if chat else plain
    fitting = []
    for (name, question), text in zip(questions.items(), texts, strict=True):
        tokens = ours.encode(question)
        if tokens != tokenizer(text, add_special_tokens=not chat)["input_ids"]:
            raise BundleError(
                f"rsrv and transformers make different tokens from the prompt '{question:.40}', so the template cannot be served"
            )
        if 0 < len(tokens) <= most:
            fitting.append(tokens)
        elif name in own:
            raise BundleError(f"--samples {name}: has {len(tokens)} tokens; --context leaves room for {most}")
    if not fitting:
        raise BundleError("--context: is too small for the prompts of the proof; give a larger one")
    return fitting


def greedy_gaps(
    bundle: Bundle, model: Any, prompts: Sequence[Sequence[int]], count: int, limit: float
) -> list[float]:
    """Compare greedy answers of `count` tokens with the answers of transformers.

    Rounding may exchange two tokens with nearly equal logits. At the first token that differs, the gap is the difference of the two
    logits, relative to the largest magnitude. The rest of that answer is not compared. Return the gap of each prompt, or 0 for an
    equal answer. Raises BundleError if a gap exceeds `limit`.
    """
    run = ModuleRunner(bundle)
    gaps = []
    with steps(f"prove {bundle.name}", len(prompts)) as progress:
        for prompt in prompts:
            with torch.no_grad():
                answer = model.generate(
                    torch.tensor([list(prompt)]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                    pad_token_id=0,
                    eos_token_id=None,
                )
            gap = 0.0
            logits = np.stack([step[0].float().numpy() for step in answer.logits])
            for step, token in enumerate(_greedy(run, prompt, count)):
                best = int(logits[step].argmax())
                if token == best:
                    continue
                gap = float(logits[step, best] - logits[step, token]) / float(np.abs(logits[step]).max())
                if not gap <= limit:
                    raise BundleError(
                        f"token {step + 1} of an answer is {token}, and transformers' is {best}, whose logit is larger by {gap:.3g}"
                        f" of the largest magnitude; the tolerance is {limit:g}"
                    )
                break
            gaps.append(gap)
            progress.step(f"{len(prompt)} tokens")
    return gaps


def _greedy(run: ModuleRunner, prompt: Sequence[int], count: int) -> list[int]:
    """Return the first `count` tokens of a bundle's greedy answer."""
    manifest = run.bundle.manifest
    generate = manifest.generate
    assert generate is not None
    output = [spec.name for spec in manifest.outputs].index(generate.token)
    sequence = Sequences(run, 1, seed=len(prompt))
    waiting = list(prompt)
    answer: list[int] = []
    while len(answer) < count:
        chunk = next((chunk for chunk in manifest.chunks if chunk >= len(waiting)), manifest.chunks[-1])
        variant = manifest.chunks.index(chunk)
        part, waiting = waiting[:chunk], waiting[chunk:]
        values: Mapping[str, Array] = {
            generate.tokens: np.array([part + [0] * (chunk - len(part))], np.int32),
            generate.lengths: np.array([len(part)], np.int32),
            generate.sampling: np.zeros((1, 4), np.float32),
        }
        inputs = [values[spec.name] for spec in manifest.inputs]
        size = run.sizes(variant)[0]
        token = int(sequence.step((variant, size), inputs)[output][0])
        if not waiting:
            answer.append(token)
            waiting = [token]
    return answer
