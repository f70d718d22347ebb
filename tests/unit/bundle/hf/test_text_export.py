"""Directories with models for texts become bundles whose whole answers are those of transformers and sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from rsrv.hooks import BadInput
from rsrv.hooks.loader import load_hooks
from rsrv_bundle import Bundle, BundleError
from rsrv_bundle.hf.directory import open_directory
from rsrv_bundle.hf.export import export_hf, recipe_of
from rsrv_bundle.hf.proof import ServedBundle, prove
from rsrv_bundle.hf.recipe import HubOptions, row
from rsrv_bundle.spec import PadSpec
from tests.unit.bundle.hf import directories

pytestmark = pytest.mark.long

#: Options with one length and one batch size, because each module takes seconds.
QUICK = HubOptions(lengths=(64,), batch_sizes=(2,))
Make = Callable[[Path], Path]


def export(directory: Path, options: HubOptions = QUICK, **others: Any) -> Bundle:
    return export_hf(directory, out_dir=directory.with_name("bundle"), options=options, **others)


def based(directory: Path) -> Path:
    """Change config.json so that it names only the encoder, although the weights include a head."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["RobertaModel"]}))
    return directory


DIRECTORIES: dict[str, tuple[str, Make]] = {
    "BERT": ("feature-extraction", directories.bert),
    "RoBERTa": ("feature-extraction", directories.roberta),
    "DistilBERT": ("feature-extraction", directories.distilbert),
    "RoBERTa of a masked model, without its pooler": (
        "feature-extraction",
        lambda f: based(directories.roberta(f, "RobertaForMaskedLM")),
    ),
    "mean": ("feature-extraction", lambda f: directories.sentence_transformer(f, "mean")),
    "cls and dense": ("feature-extraction", lambda f: directories.sentence_transformer(f, "cls", dense=True)),
    "last": (
        "feature-extraction",
        lambda f: directories.sentence_transformer(f, "lasttoken", normalise=False),
    ),
    "BERT ranks": (
        "text-ranking",
        lambda f: directories.bert(f, "BertForSequenceClassification", num_labels=1),
    ),
    "RoBERTa ranks": (
        "text-ranking",
        lambda f: directories.roberta(f, "RobertaForSequenceClassification", num_labels=1),
    ),
    "DistilBERT ranks": (
        "text-ranking",
        lambda f: directories.distilbert(f, "DistilBertForSequenceClassification", ("yes",)),
    ),
    "BERT classifies": (
        "text-classification",
        lambda f: directories.bert(f, "BertForSequenceClassification", ("a", "b", "c")),
    ),
    "RoBERTa classifies": (
        "text-classification",
        lambda f: directories.roberta(
            f, "RobertaForSequenceClassification", ("a", "b"), problem_type="multi_label_classification"
        ),
    ),
    "DistilBERT classifies": (
        "text-classification",
        lambda f: directories.distilbert(f, "DistilBertForSequenceClassification", ("NEGATIVE", "POSITIVE")),
    ),
    "BERT tags": (
        "token-classification",
        lambda f: directories.bert(f, "BertForTokenClassification", directories.LABELS),
    ),
    "RoBERTa tags": (
        "token-classification",
        lambda f: directories.roberta(f, "RobertaForTokenClassification", directories.LABELS),
    ),
    "DistilBERT tags": (
        "token-classification",
        lambda f: directories.distilbert(f, "DistilBertForTokenClassification", directories.LABELS),
    ),
    "BERT fills": ("fill-mask", lambda f: directories.bert(f, "BertForMaskedLM")),
    "RoBERTa fills": ("fill-mask", lambda f: directories.roberta(f, "RobertaForMaskedLM")),
    "DistilBERT fills": ("fill-mask", lambda f: directories.distilbert(f, "DistilBertForMaskedLM")),
}


@pytest.mark.parametrize(("kind", "make"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_a_directory_becomes_a_bundle(kind: str, make: Make, tmp_path: Path) -> None:
    """The directory decides the task. For all samples, the bundle gives the framework's answers."""
    manifest = export(make(tmp_path / "model")).manifest
    assert manifest.task is not None
    assert manifest.task.kind == kind
    errors = manifest.numerics["answers"]
    assert isinstance(errors, dict)
    assert 0 <= max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (HubOptions(), "the embedding is the mean of the token vectors; rsrv-bundle export --pooling cls"),
        (HubOptions(pooling="cls"), ""),
    ],
)
def test_a_pooling_that_nobody_chose_is_announced(options: HubOptions, note: str, tmp_path: Path) -> None:
    """The export announces which pooling it has chosen for a plain encoder, unless the user chose one.

    The directory does not name a pooling, and another pooling would give other embeddings.
    """
    checked = open_directory(directories.bert(tmp_path / "model"))
    assert recipe_of(checked, "feature-extraction", options).note.startswith(note)
    assert bool(recipe_of(checked, "feature-extraction", options).note) is bool(note)


def test_texts_of_every_length_share_a_padded_axis(tmp_path: Path) -> None:
    """The hooks pad only the rows of one request to one length. A text that is too long is cut to the longest length."""
    bundle = export(directories.bert(tmp_path / "model"), HubOptions(lengths=(16, 64), batch_sizes=(1, 4)))
    assert bundle.manifest.pad == PadSpec(
        "l", {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0}, "attention_mask"
    )
    assert [array.shape for array in _rows(bundle, "a cat")] == [(1, 4)] * 3
    served = ServedBundle(bundle)
    together = served({"text": np.array([[b"a cat"], [b"the cat on " * 40], [b"x"]], object)})
    assert together["tokens"].tolist() == [4, 64, 3]
    alone = served(row(text="a cat"))
    np.testing.assert_allclose(alone["embedding"][0], together["embedding"][0], atol=1e-5)


@pytest.mark.parametrize("kind", ["RoBERTa fills", "RoBERTa tags", "DistilBERT ranks", "last"])
def test_each_task_has_a_padded_axis(kind: str, tmp_path: Path) -> None:
    """Models that fill masks, tag tokens, rank pairs or embed texts get a padded axis. Padding does not change their answers."""
    bundle = export(DIRECTORIES[kind][1](tmp_path / "model"), HubOptions(lengths=(40, 72), batch_sizes=(2,)))
    assert bundle.manifest.pad is not None


def test_positions_before_the_first_token_count_for_no_length(tmp_path: Path) -> None:
    """RoBERTa's positions begin after the id of its padding. So a table of 80 positions is enough for only 78 tokens."""
    directory = directories.roberta(tmp_path / "model")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 1000}))
    with pytest.raises(BundleError, match="79 is more than the 78 tokens"):
        export(directory, HubOptions(lengths=(79,), batch_sizes=(2,)))


def test_a_model_that_reads_its_padding_gets_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2 finds the end of a text by the padding's id, and ignores the mask. So it gets a variant for each length and no padded axis."""
    bundle = export(
        directories.gpt2(tmp_path / "model", ("a", "b")), HubOptions(lengths=(16, 64), batch_sizes=(2,))
    )
    assert "bundle: gets no padded axis" in capsys.readouterr().err
    assert bundle.manifest.pad is None
    assert [array.shape for array in _rows(bundle, "a cat")] == [(1, 16)] * 2
    assert ServedBundle(bundle)(row(text="a" * 40))["tokens"].tolist() == [42]


def _rows(bundle: Bundle, text: str) -> list[Any]:
    """Return the executable inputs that the hooks of a bundle make of a text."""
    preprocess = load_hooks(bundle.path / "model.py").preprocess
    assert preprocess is not None
    return list(preprocess(row(text=text)).values())


def test_a_text_is_cut_at_the_side_of_the_tokenizer(tmp_path: Path) -> None:
    """With `truncation_side: left`, a long text keeps its end, as in the pipeline."""
    model = directories.bert(tmp_path / "model")
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation_side": "left"}))
    ids, *_ = _rows(export(model), "x " * 5000 + "cat")
    assert ids.shape == (1, 64)
    assert ids[0, -2] == Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("cat")


def test_a_longer_text_is_refused_where_the_directory_cuts_none(tmp_path: Path) -> None:
    """If the tokenizer has no truncation, a text that is too long is refused, unless the user asks for cuts."""
    model = directories.bert(tmp_path / "model", "BertForSequenceClassification", ("a", "b"))
    with pytest.raises(BadInput, match="text 0 has 122 tokens; the model reads at most 64"):
        ServedBundle(export(model))(row(text="a " * 120))
    cut = export(model, HubOptions(lengths=(64,), batch_sizes=(2,), too_long="cut"), overwrite=True)
    assert ServedBundle(cut)(row(text="a " * 120))["tokens"].tolist() == [64]


def test_a_text_without_its_mask_is_refused(tmp_path: Path) -> None:
    """A text for fill-mask without a mask, or with two masks, is refused."""
    served = ServedBundle(export(directories.bert(tmp_path / "model", "BertForMaskedLM")))
    for text in ("no mask", "[MASK] and [MASK]"):
        with pytest.raises(BadInput, match="the mask exactly once"):
            served(row(text=text))


def test_an_embedding_may_be_cut(tmp_path: Path) -> None:
    """The task lists the lengths of a Matryoshka embedding, from the configuration or from the user."""
    model = directories.bert(tmp_path / "model", matryoshka_dimensions=[8, 16])
    task = export(model).manifest.task
    assert task is not None
    assert task.dimensions == (8, 16, 32)
    with pytest.raises(BundleError, match="dimensions: 64 is not a length from 1 to 32"):
        export(model, HubOptions(dimensions=(64,)), overwrite=True)


def test_answers_that_differ_are_refused(tmp_path: Path) -> None:
    """If an answer differs from the framework's answer, the export fails. The error names the sample."""
    bundle = export(directories.bert(tmp_path / "model"))
    sample = row(text="a cat")
    right = ServedBundle(bundle)(sample)["embedding"][0]
    for wrong in (right * 1.001, right[:8], -right):
        recipe: Any = SimpleNamespace(
            samples={"cat": sample}, reference=lambda _, wrong=wrong: {"embedding": wrong}, source="it"
        )
        with pytest.raises(BundleError, match="sample 'cat': embedding differs from it by"):
            prove(bundle, recipe, 1e-4)
    recipe = SimpleNamespace(samples={"cat": sample}, reference=lambda _: {"embedding": right}, source="it")
    assert prove(bundle, recipe, 1e-4) == {"embedding": 0.0}


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Errors name a head without weights, a configuration of another size, a huge size, and an unknown type of model."""
    model = directories.bert(tmp_path / "model")
    with pytest.raises(BundleError, match="have no weight 'classifier"):
        export(model, HubOptions(task="text-classification"))
    config = json.loads((model / "config.json").read_text())
    for change, reason in (
        ({"intermediate_size": 64}, "transformers cannot load it|does not have the shape"),
        ({"vocab_size": 5_000_000}, "describes a model of 16"),
        ({"model_type": "unknown"}, "transformers cannot make a model of it"),
    ):
        (model / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(BundleError, match=reason):
            export(model)
