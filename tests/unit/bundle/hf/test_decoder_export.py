"""Directories with decoders become bundles that generate transformers' greedy tokens. Hostile chat templates are stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from rsrv_bundle import BundleError
from rsrv_bundle.hf.export import export_hf
from rsrv_bundle.hf.generate import greedy_gaps
from rsrv_bundle.hf.recipe import HubOptions
from rsrv_bundle.hf.template import prompt_template, prompts
from tests.unit.bundle.hf.directories import decoder

CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
#: Options with one batch size, because each module takes seconds.
QUICK = HubOptions(batch_sizes=(2,), slots=3, context=200)
Make = Callable[[Path], Path]

FAMILIES: dict[str, Make] = {
    "Llama, tied, scaled positions": lambda f: decoder(
        f,
        "Llama",
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "Mistral, a window": lambda f: decoder(f, "Mistral", sliding_window=220),
    "Qwen2, a chat": lambda f: decoder(f, "Qwen2", CHAT),
    "Qwen3": lambda f: decoder(f, "Qwen3", head_dim=16),
    "Gemma": lambda f: decoder(f, "Gemma", head_dim=16),
}


@pytest.mark.long
@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_greedy_tokens_are_those_of_transformers(make: Make, tmp_path: Path) -> None:
    """For 200 random prompts of many lengths, the bundle generates the tokens that transformers generates."""
    made = make(tmp_path / "model")
    bundle = export_hf(made, out_dir=tmp_path / "bundle", options=QUICK)
    assert bundle.manifest.task is not None
    assert bundle.manifest.task.kind == "text-generation"
    model = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, rng.integers(1, 150)).tolist() for _ in range(200)]
    assert max(greedy_gaps(bundle, model, prompts, 8, limit=1e-5)) <= 1e-5


@pytest.mark.long
def test_a_decoder_has_its_chat_and_its_stop_tokens(tmp_path: Path) -> None:
    """The manifest has the prompt of one question, and the stop tokens of generation_config.json."""
    made = decoder(tmp_path / "model", "Llama", CHAT)
    # Other options of the file would change the tokens that transformers chooses.
    options = {"eos_token_id": [2, 7], "repetition_penalty": 1.9, "num_beams": 4, "max_length": 10**12}
    (made / "generation_config.json").write_text(json.dumps(options))
    generate = export_hf(made, out_dir=tmp_path / "bundle", options=QUICK).manifest.generate
    assert generate is not None
    assert (generate.template, generate.stop) == ("<s>user\n{text}</s>\n<s>assistant\n", (2, 7))
    assert (generate.context, generate.max_tokens) == (200, 200)
    assert (generate.chat["template"], generate.chat["eos_token"]) == (CHAT, "</s>")


@pytest.mark.long
def test_networks_that_are_not_known_are_refused(tmp_path: Path) -> None:
    """A decoder of an unknown family, a context that exceeds the model's, and an unknown type of rotary embedding are refused.

    Each error names the entry or the option.
    """
    made = decoder(tmp_path / "gemma2", "Gemma2", head_dim=16)
    with pytest.raises(BundleError, match="model_type: 'gemma2' is none of llama, mistral"):
        export_hf(made, out_dir=tmp_path / "bundle")
    made = decoder(tmp_path / "llama", "Llama")
    with pytest.raises(BundleError, match="--context: 300 is more than the 256 tokens"):
        export_hf(made, out_dir=tmp_path / "bundle", options=HubOptions(context=300))
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    made = decoder(tmp_path / "scaled", "Llama", rope_parameters=scaled)
    with pytest.raises(BundleError, match="rope_parameters: 'dynamic' is none of"):
        export_hf(made, out_dir=tmp_path / "bundle")


def test_a_chat_template_becomes_the_prompt_of_one_question() -> None:
    """The template is rendered with jinja2's sandbox, as transformers renders it."""
    prompt = prompt_template("{{ bos_token }}" + CHAT + "{# \n #}", {"bos_token": "<b>"})
    assert prompt == "<b><s>user\n{text}</s>\n<s>assistant\n"


def test_prompts_are_those_of_transformers() -> None:
    """The process with limits renders a template to the same texts as transformers."""
    source = "{{ bos_token }}" + CHAT + "{{ messages | tojson }}{% if tools %}tools{% endif %}"
    questions = ["Größe und 東京", "<b>a\n</b>"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    expected = render_jinja_template(
        chats, chat_template=source, add_generation_prompt=True, bos_token="<b>"
    )[0]
    assert list(expected) == prompts(source, {"bos_token": "<b>"}, questions)


@pytest.mark.parametrize("tokens", ["x", [2, 400], -1, True, {"a": 1}])
def test_stop_tokens_outside_the_vocabulary_are_refused(tokens: object, tmp_path: Path) -> None:
    """Wrong stop tokens are refused before any compilation, and the error names the file."""
    made = decoder(tmp_path / "model", "Llama")
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    with pytest.raises(
        BundleError, match=r"generation_config.json: eos_token_id: .* is not a token of the 400"
    ):
        export_hf(made, out_dir=tmp_path / "bundle", options=QUICK)


BOMBS = {
    "a loop without end": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "fails",
    ),
    "memory": ("{{ 'x' * 10 ** 10 }}", "fails in jinja2's sandbox"),
    "much text": ("{{ messages[0].content }}{{ 'x' * 20000 }}", "makes more than 16,384 characters"),
    "private": ("{{ messages.__class__.__mro__ }}{{ messages[0].content }}", "SecurityError"),
    "an import": ("{% include '/etc/passwd' %}", "fails"),
    "an error": ("{{ raise_exception('only pictures') }}", "only pictures"),
    "the date": ("{{ strftime_now('%Y') }}{{ messages[0].content }}", "the template asks for the date"),
    "no question": ("hello", "contains the question 0 times"),
    "the question twice": (
        "{{ messages[0].content }}{{ messages[0].content }}",
        "contains the question 2 times",
    ),
    "a long source": ("x" * 300_000, "262,144 are allowed"),
    "no template": ("{% if %}", "TemplateSyntaxError"),
}


def test_a_bomb_for_certain_questions_is_refused() -> None:
    """A template that is harmless for the first question is refused if it explodes for another one."""
    source = "{% if 'cat' in messages[0].content %}{{ 'x' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"
    assert prompt_template(source, {}) == "{text}"
    with pytest.raises(BundleError, match="fails in jinja2's sandbox"):
        prompts(source, {}, ["a dog", "a cat"])


@pytest.mark.parametrize(("source", "reason"), BOMBS.values(), ids=BOMBS)
def test_a_template_that_is_a_bomb_is_refused(source: str, reason: str) -> None:
    """A hostile template is refused. It takes some seconds at most, and little memory."""
    with pytest.raises(BundleError, match=reason):
        prompt_template(source, {})
