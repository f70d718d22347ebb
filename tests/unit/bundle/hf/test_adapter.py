"""LoRA adapters are merged into their base, or refused with the entry that would make the merge wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rsrv_bundle import BundleError
from rsrv_bundle.hf.adapter import merged
from rsrv_bundle.hf.directory import open_directory
from rsrv_bundle.hf.export import export_hf
from rsrv_bundle.hf.proof import ServedBundle
from rsrv_bundle.hf.recipe import HubOptions, row
from tests.unit.bundle.hf import directories

RANK = 4
CONFIG: dict[str, Any] = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": RANK, "lora_alpha": 6}
IDS = torch.arange(5, 25).reshape(2, 10)
Tensors = dict[str, torch.Tensor]


def pair(path: str, inner: int, outer: int) -> Tensors:
    """Return the matrices of an adapter for a linear layer."""
    return {
        f"base_model.model.{path}.lora_A.weight": torch.randn(RANK, inner) / inner**0.5,
        f"base_model.model.{path}.lora_B.weight": torch.randn(outer, RANK),
    }


def adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Write an adapter as peft writes it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def base(folder: Path) -> Path:
    return directories.bert(folder, "BertForSequenceClassification", ("a", "b", "c"))


def apart(model: Any, tensors: Tensors, scale: float) -> Any:
    """Return the logits of a base model whose layers add the adapter's outputs to their own, as in training."""
    for name, module in model.named_modules():
        if (inner := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            outer = tensors[f"base_model.model.{name}.lora_B.weight"]
            module.register_forward_hook(
                lambda _, inputs, output, inner=inner, outer=outer: (
                    output + scale * (inputs[0] @ inner.T @ outer.T)
                )
            )
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("stable", [False, True])
def test_a_merged_model_answers_as_its_base_with_the_adapter_apart(stable: bool, tmp_path: Path) -> None:
    """The product of an adapter's matrices is scaled by alpha / rank or alpha / sqrt(rank), and is added to the base's weight.

    The adapter also has a complete classifier and a complete bias. They replace those of the base.
    """
    folder = base(tmp_path / "base")
    query = "bert.encoder.layer.0.attention.self.query"
    tensors = pair(query, 32, 32) | pair("bert.encoder.layer.1.intermediate.dense", 32, 48)
    # With the option `bias`, peft also writes the biases of the layers.
    head, bias = torch.randn(3, 32), torch.randn(32)
    whole = {
        "base_model.model.classifier.weight": head,
        f"base_model.model.{query}.base_layer.bias": bias,
    }
    made = adapter(tmp_path / "adapter", tensors | whole, use_rslora=stable, modules_to_save=["classifier"])
    network: Any = transformers.BertForSequenceClassification
    plain = network.from_pretrained(folder)
    plain.classifier.weight.data = head
    plain.bert.encoder.layer[0].attention.self.query.bias.data = bias
    expected = apart(plain, tensors, 6 / (RANK**0.5 if stable else RANK))

    directory = merged(open_directory(folder), made, tmp_path / "merged")
    with torch.no_grad():
        logits = network.from_pretrained(directory.path).eval()(IDS).logits
    torch.testing.assert_close(logits, expected)
    assert directory.labels == ["a", "b", "c"]
    assert directory.has("tokenizer.json")


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_layers_with_turned_weights_are_merged(fan_in_fan_out: bool, tmp_path: Path) -> None:
    """The first axis of the weights of GPT-2's layers is the input. They are merged right, even if `fan_in_fan_out` is wrong."""
    folder = directories.gpt2(tmp_path / "base", ("a", "b"))
    tensors = pair("transformer.h.0.attn.c_attn", 32, 96) | pair("transformer.h.0.attn.c_proj", 32, 32)
    made = adapter(tmp_path / "adapter", tensors, fan_in_fan_out=fan_in_fan_out)
    network: Any = transformers.GPT2ForSequenceClassification
    expected = apart(network.from_pretrained(folder), tensors, 6 / RANK)
    directory = merged(open_directory(folder), made, tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(network.from_pretrained(directory.path).eval()(IDS).logits, expected)


@pytest.mark.long
def test_a_directory_is_exported_with_an_adapter(tmp_path: Path) -> None:
    """A directory is exported with and without an adapter. The two bundles give different scores."""
    folder = base(tmp_path / "base")
    made = adapter(tmp_path / "adapter", pair("bert.encoder.layer.0.attention.self.value", 32, 32))
    options = HubOptions(lengths=(64,), batch_sizes=(2,))
    text = row(text="a cat")
    alone, both = (
        ServedBundle(export_hf(folder, out_dir=tmp_path / name, options=chosen))(text)["scores"]
        for name, chosen in (
            ("alone", options),
            ("merged", HubOptions(lengths=(64,), batch_sizes=(2,), adapter=made)),
        )
    )
    assert abs(alone - both).max() > 1e-3


def matrices(
    inner: torch.Tensor, outer: torch.Tensor, path: str = "bert.encoder.layer.0.attention.self.query"
) -> Tensors:
    """Return the two matrices of an adapter for a layer, by their names in the file."""
    return {
        f"base_model.model.{path}.lora_{name}.weight": matrix for name, matrix in (("A", inner), ("B", outer))
    }


REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "another kind": ({"peft_type": "IA3"}, {}, "peft_type: 'IA3' is not LORA"),
    "DoRA": ({"use_dora": True}, {}, "use_dora: is not supported"),
    "a module by name": ({"megatron_config": {"a": 1}}, {}, "megatron_config: is not supported"),
    "scales by pattern": ({"alpha_pattern": {"query": 3}}, {}, "alpha_pattern: is not supported"),
    "a base that training changed": (
        {"init_lora_weights": "pissa"},
        {},
        "may change the weights of the base",
    ),
    "another task": ({"task_type": "SEQ_2_SEQ_LM"}, {}, "task_type: 'SEQ_2_SEQ_LM' is none of"),
    "code": ({"auto_map": {"a": "b"}}, {}, "auto_map: names Python code"),
    "text as a scale": ({"lora_alpha": "6"}, {}, "lora_alpha: '6' is not a number"),
    "another base": ({}, pair("bert.encoder.layer.7.output.dense", 48, 32), "the base has no weight for it"),
    "another size": ({}, pair("bert.encoder.layer.0.output.dense", 32, 32), "has the shape"),
    "an embedding": (
        {},
        {"base_model.model.bert.embeddings.word_embeddings.lora_embedding_A": torch.ones(4, 400)},
        "the base has no weight for it",
    ),
    "half": (
        {},
        {"base_model.model.bert.encoder.layer.0.output.dense.lora_A.weight": torch.ones(4, 48)},
        "the base has no weight for it",
    ),
    "a task that is not text": ({"task_type": {}}, {}, "task_type: {} is none of"),
    "a scale that is not finite": ({"lora_alpha": float("nan")}, {}, "lora_alpha: nan is not a number"),
    "a scale beyond floats": ({"lora_alpha": 10**400}, {}, "lora_alpha: 1000.* is not a number"),
    "nothing": ({}, {}, "has no matrices of LoRA"),
    "no rank": ({}, matrices(torch.ones(0, 32), torch.ones(32, 0)), "has the rank 0"),
    "another rank": ({"r": 8}, matrices(torch.ones(4, 32), torch.ones(32, 4)), "has the rank 4"),
    "a number as a matrix": ({}, matrices(torch.tensor(1.0), torch.ones(32, 4)), "only matrices of linear"),
    "a product beyond any memory": (
        {"r": 1},
        matrices(torch.ones(1, 10**6), torch.ones(10**6, 1)),
        "has the shape",
    ),
    "no linear layer": (
        {},
        matrices(torch.ones(4, 32), torch.ones(400, 4), "bert.embeddings.word_embeddings"),
        "only matrices of linear",
    ),
}


@pytest.mark.parametrize(("config", "tensors", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_would_be_merged_wrongly_is_refused(
    config: dict[str, Any], tensors: Tensors, reason: str, tmp_path: Path
) -> None:
    """An adapter that rsrv cannot merge correctly is refused. The error names the entry of the configuration, or the tensor."""
    made = adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises(BundleError, match=reason):
        merged(open_directory(base(tmp_path / "base")), made, tmp_path / "merged")


def test_a_weight_that_the_base_uses_twice_is_refused(tmp_path: Path) -> None:
    """An adapter with trained embeddings is refused if the head of the base shares the embeddings."""
    folder = directories.bert(tmp_path / "base", "BertForMaskedLM")
    name = "base_model.model.bert.embeddings.word_embeddings.weight"
    tensors = pair("bert.encoder.layer.0.attention.self.query", 32, 32) | {name: torch.ones(400, 32)}
    made = adapter(tmp_path / "adapter", tensors, task_type=None)
    with pytest.raises(BundleError, match="uses in several places"):
        merged(open_directory(folder), made, tmp_path / "merged")


def test_weights_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    """If the safetensors library cannot read a file, the error names the file."""
    made = adapter(tmp_path / "adapter", {})
    header = json.dumps({"a": {"dtype": "X1", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (made / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BundleError, match=r"adapter_model\.safetensors: cannot be read"):
        merged(open_directory(base(tmp_path / "base")), made, tmp_path / "merged")


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    """A directory without an adapter is refused, and so is an adapter whose weights are a pickle."""
    folder = open_directory(directories.plain(tmp_path / "base"))
    with pytest.raises(BundleError, match=r"has no adapter_config\.json"):
        merged(folder, folder.path, tmp_path / "merged")
    made = adapter(tmp_path / "adapter", {})
    (made / "adapter_model.safetensors").rename(made / "adapter_model.bin")
    with pytest.raises(BundleError, match=r"has no adapter_model\.safetensors"):
        merged(folder, made, tmp_path / "merged")
