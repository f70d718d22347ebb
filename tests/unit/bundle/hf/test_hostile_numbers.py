"""Numbers in the files of a model that would take all memory, or never end: each is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from rsrv_bundle import BundleError
from rsrv_bundle.hf import loading
from rsrv_bundle.hf.directory import open_directory
from rsrv_bundle.hf.export import recipe_of
from rsrv_bundle.hf.loading import check_tokenizer, growth_of, load_model, load_tokenizer
from rsrv_bundle.hf.recipe import HubOptions
from tests.unit.bundle.hf.directories import PATCHES, bert, picture, plain, save, wordpiece
from tests.unit.bundle.hf.test_audio_export import listener
from tests.unit.bundle.hf.test_image_export import SQUARE


def changed(folder: Path, file: str, **entries: object) -> Path:
    """Change entries of a JSON file of a directory, and return the directory."""
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return folder


def sound(folder: Path) -> Path:
    return listener(folder, "Wav2Vec2ForSequenceClassification", num_labels=2)


def seen(folder: Path) -> Path:
    return picture(folder, "ViTForImageClassification", "ViT", SQUARE, **PATCHES)


@pytest.mark.parametrize(
    ("task", "make", "file", "entries", "reason"),
    [
        (
            "audio-classification",
            sound,
            "preprocessor_config.json",
            {"sampling_rate": 10**9},
            "sampling_rate: 1000000000 must be from 1 to 192,000",
        ),
        (
            "audio-classification",
            sound,
            "config.json",
            {"conv_stride": [5, -4, 2]},
            "less than the model needs",
        ),
        (
            "image-classification",
            seen,
            "preprocessor_config.json",
            {"size": {"height": 32, "width": 10**6}},
            "size: 1000000 pixels must be from 1 to 4,096",
        ),
        (
            "image-classification",
            seen,
            "preprocessor_config.json",
            {"resample": 99},
            "cannot be read as a model for",
        ),
        (
            "image-classification",
            seen,
            "preprocessor_config.json",
            {"do_pad": True, "pad_size": {"height": 10**5, "width": 10**5}},
            "pad_size: 100000 pixels must be from 1 to 4,096",
        ),
        (
            "image-classification",
            seen,
            "preprocessor_config.json",
            {"size_divisor": 7},
            "size_divisor: all sides must be multiples of 7, but 32,32 are not",
        ),
    ],
)
def test_a_hostile_number_is_refused(
    task: str,
    make: Callable[[Path], Path],
    file: str,
    entries: dict[str, object],
    reason: str,
    tmp_path: Path,
) -> None:
    """A hostile number is refused before any compilation, and the error names the number or says what cannot be read."""
    folder = changed(make(tmp_path / "model"), file, **entries)
    with pytest.raises(BundleError, match=reason):
        recipe_of(open_directory(folder), task, HubOptions())


def test_endless_layers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The construction of a model stops when it has too many parts, whichever entry asks for them."""
    monkeypatch.setattr(loading, "_MAX_MODULES", 500)
    folder = changed(bert(tmp_path / "model"), "config.json", num_hidden_layers=200)
    with pytest.raises(BundleError, match="more than 500 parts; correct its numbers of layers"):
        recipe_of(open_directory(folder), "feature-extraction", HubOptions())


def test_a_tokenizer_that_makes_much_of_a_character_is_refused(tmp_path: Path) -> None:
    """Replacements that multiply the length of a text are refused. Usual ones, which keep the length, pass."""
    folder = plain(tmp_path / "model")
    wordpiece(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    usual = normalizers.Sequence([normalizers.Replace(" ", "\u2581"), normalizers.NFKC()])
    assert growth_of(json.loads(usual.__getstate__())) == 1
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("a", "a" * 9), normalizers.Replace("a", "a" * 8)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(BundleError, match="normalizer: may make 72 characters of one"):
        check_tokenizer(load_tokenizer(open_directory(folder)), longest=64)
    tokenizer.normalizer = usual
    tokenizer.decoder = decoders.Sequence([decoders.Replace("a", "a" * 99), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(BundleError, match="decoder: may make 99 characters of one"):
        check_tokenizer(load_tokenizer(open_directory(folder)), longest=64)


def test_a_giant_token_is_refused(tmp_path: Path) -> None:
    """A giant token is refused, because a client would get it for a prompt of a few bytes."""
    folder = plain(tmp_path / "model")
    wordpiece(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["x" * 5000])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(BundleError, match="has a token of 5,000 characters; 4,096 are allowed"):
        check_tokenizer(load_tokenizer(open_directory(folder)), longest=64)


def test_a_tokenizer_that_takes_hours_is_refused_before_it_is_used(tmp_path: Path) -> None:
    """A regular expression that would take hours ends in an error, and not in a panic of the package."""
    folder = bert(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(\w|_)+(?<!.)"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(BundleError, match=r"tokenizer\.json: fails with"):
        recipe_of(open_directory(folder), "feature-extraction", HubOptions())


def test_masks_of_all_positions_are_not_weights(tmp_path: Path) -> None:
    """GPT-Neo keeps a mask with a byte for each pair of positions in each layer. The model loads, although no file has the masks."""
    config = transformers.GPTNeoConfig(
        vocab_size=100,
        hidden_size=16,
        num_layers=8,
        num_heads=2,
        attention_types=[[["global", "local"], 4]],
        max_position_embeddings=2048,
    )
    made = save(tmp_path / "model", transformers.GPTNeoModel(config))
    masks = sum(mask.nbytes for mask in load_model(transformers.AutoModel, open_directory(made)).buffers())
    assert masks == 8 * 2048**2
