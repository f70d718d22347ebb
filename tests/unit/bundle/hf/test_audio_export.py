"""Directories with models for sounds become bundles whose whole answers are those of transformers' pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from rsrv_bundle.hf.export import export_hf
from rsrv_bundle.hf.recipe import HubOptions
from tests.unit.bundle.hf.directories import save

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 2],
    "conv_stride": [5, 4, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def listener(folder: Path, model: str, **config: Any) -> Path:
    """Save a model of this class and its feature extractor. If the model answers with text, also save a tokenizer of letters."""
    network: Any = getattr(transformers, model)
    extractor: Any = transformers.Wav2Vec2FeatureExtractor
    extractor(return_attention_mask=config.get("feat_extract_norm") == "layer").save_pretrained(folder)
    if model.endswith("CTC"):
        letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *(chr(code) for code in range(65, 91))]
        (folder / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
        tokenizer: Any = transformers.Wav2Vec2CTCTokenizer
        tokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    return save(folder, network(network.config_class(**SIZES, **config)))


LAYERS = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
DIRECTORIES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "wav2vec2, a norm over the time": (
        "automatic-speech-recognition",
        lambda f: listener(f, "Wav2Vec2ForCTC"),
    ),
    "wav2vec2, norms over channels": (
        "automatic-speech-recognition",
        lambda f: listener(f, "Wav2Vec2ForCTC", **LAYERS),
    ),
    "HuBERT": ("automatic-speech-recognition", lambda f: listener(f, "HubertForCTC")),
    "wav2vec2 classifies": (
        "audio-classification",
        lambda f: listener(f, "Wav2Vec2ForSequenceClassification", num_labels=4),
    ),
    "HuBERT classifies": (
        "audio-classification",
        lambda f: listener(f, "HubertForSequenceClassification", num_labels=3),
    ),
    "WavLM classifies": (
        "audio-classification",
        lambda f: listener(f, "WavLMForSequenceClassification", num_labels=3),
    ),
}


@pytest.mark.parametrize(("kind", "make"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_a_directory_becomes_a_bundle(kind: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    """The directory decides the task. For sounds of all lengths, the bundle gives the pipeline's answers."""
    options = HubOptions(batch_sizes=(2,), lengths=(800, 1600))
    manifest = export_hf(make(tmp_path / "model"), out_dir=tmp_path / "bundle", options=options).manifest
    assert manifest.task is not None
    assert manifest.task.kind == kind
    errors = manifest.numerics["answers"]
    assert isinstance(errors, dict)
    assert 0 <= max(errors.values()) < 1e-5
