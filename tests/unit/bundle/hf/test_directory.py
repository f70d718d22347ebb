"""Hostile directories of Hugging Face: each is refused before a library reads it, and the error names the fault."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from rsrv_bundle import BundleError
from rsrv_bundle.hf.directory import MAX_JSON, open_directory
from tests.unit.bundle.hf.directories import plain

CONFIG = {"architectures": ["BertModel"], "model_type": "bert"}
#: Verbs by which an error says what the user can do.
ACTION = re.compile(r"\b(?:convert|copy|correct|export|leave|must|name|pass|remove|save)\b")
POOLING = "sentence_transformers.models.Pooling"


def pickled(folder: Path) -> Path:
    """Return a directory whose weights are a pickle."""
    made = plain(folder, **{"pytorch_model.bin": b"cos\nsystem\n"})
    (made / "model.safetensors").unlink()
    return made


def linked(folder: Path) -> Path:
    """Return a directory with a link to a file outside."""
    made = plain(folder)
    (made / "tokenizer.json").symlink_to("/etc/passwd")
    return made


def linked_folder(folder: Path) -> Path:
    """Return a directory with a link to itself."""
    made = plain(folder)
    (made / "deeper").symlink_to(made)
    return made


def piped(folder: Path) -> Path:
    """Return a directory with a pipe, whose reader would wait forever."""
    made = plain(folder)
    os.mkfifo(made / "tokenizer.json")
    return made


def configured(**entries: object) -> Callable[[Path], Path]:
    return lambda folder: plain(folder, **{"config.json": json.dumps({**CONFIG, **entries})})


def modules(*types: str, path: str = "") -> Callable[[Path], Path]:
    entries = [{"type": kind, "path": path} for kind in types]
    return lambda folder: plain(folder, **{"modules.json": json.dumps(entries)})


def files(**contents: str | bytes) -> Callable[[Path], Path]:
    named = {name.replace("__", "/").replace("_json", ".json"): content for name, content in contents.items()}
    return lambda folder: plain(folder, **named)


def headed(shape: list[object], tensors: int = 1) -> Callable[[Path], Path]:
    """Return a maker of directories whose weights have tensors of this shape. All tensors use the same bytes of the file."""
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    header = json.dumps({f"w{n}": entry for n in range(tensors)}).encode()
    file = struct.pack("<Q", len(header)) + header + bytes(4)
    return lambda folder: plain(folder, **{"model.safetensors": file})


HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "pickle": (pickled, "pytorch_model.bin: is a format that can run code"),
    "link": (linked, "tokenizer.json: is a link out of the directory"),
    "link to a folder": (linked_folder, "deeper: is a link to a folder"),
    "pipe": (piped, "tokenizer.json: is neither a file nor a folder"),
    "auto_map": (
        configured(auto_map={"AutoModel": "evil.Model"}),
        "config.json: auto_map: names Python code",
    ),
    "auto_map below": (configured(text_config={"auto_map": {"a": "b"}}), "config.json: auto_map"),
    "auto_map of a tokenizer": (
        files(tokenizer_config_json='{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}'),
        "tokenizer_config.json: auto_map",
    ),
    "auto_map in a folder": (files(a__b_json='{"auto_map": "x"}'), "a/b.json: auto_map"),
    "module": (modules("os.system"), r"modules.json: \[0\].type: 'os.system' is none of"),
    "module of a user": (modules("sentence_transformers.models.CNN"), "CNN' is none of"),
    "module outside": (modules(POOLING, path="../other"), r"modules.json: \[0\].path: '../other' must be"),
    "activation": (
        files(a__config_json='{"activation_function": "torch.hub.load"}'),
        "a/config.json: activation_function: 'torch.hub.load' is none of",
    ),
    "huge": (configured(hidden_size=10**9), "config.json: hidden_size: 1000000000 is more than"),
    "classes": (configured(num_labels=10**7), "config.json: num_labels: 10000000 is more than 100,000"),
    "beyond floats": (configured(hidden_size=10**400), "config.json: hidden_size: 10+ is more than"),
    "layers": (configured(num_hidden_layers=10**6), "config.json: num_hidden_layers: 1000000 is more"),
    "repeated layers": (configured(block_repeats=[1, 5000]), "config.json: block_repeats: 5000 is more"),
    "long list": (configured(conv_dim=[1] * 10_001), "config.json: conv_dim: has 10,001 entries"),
    "huge in a folder": (files(a__config_json='{"out_features": 1000000000}'), "a/config.json: out_features"),
    "options": (
        files(sentence_bert_config_json='{"model_args": {"gguf_file": "/etc/passwd"}}'),
        "sentence_bert_config.json: model_args.gguf_file: is not supported",
    ),
    "kernels": (
        files(sentence_bert_config_json='{"model_kwargs": {"attn_implementation": "evil/kernel"}}'),
        "sentence_bert_config.json: model_kwargs.attn_implementation: is not supported",
    ),
    "pickle behind another file": (
        files(
            modules_json=json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]),
            **{"2_Dense/x.safetensors": b"x", "2_Dense/pytorch_model.bin": b"cos\nsystem\n"},
        ),
        "2_Dense: pytorch_model.bin: is a format that can run code",
    ),
    "many files": (
        files(**{f"{index}.json": b" " * MAX_JSON for index in range(17)}),
        "its JSON files have 71.3 MB; 67.1 MB are allowed",
    ),
    "quantised": (
        configured(quantization_config={"quant_method": "awq"}),
        "quantised weights are not supported",
    ),
    "deep": (files(a_json="[" * 100_000), "a.json: is not valid JSON"),
    "long": (files(a_json=" " * (MAX_JSON + 1)), "a.json: has 4.19 MB; 4.19 MB are allowed"),
    "no object": (lambda folder: plain(folder, **{"config.json": "[]"}), "config.json: must be an object"),
    "index outside": (
        lambda folder: plain(
            folder, **{"model.safetensors.index.json": '{"weight_map": {"w": "../x.safetensors"}}'}
        ),
        "weight_map: must name safetensors files in the same folder",
    ),
    "header": (
        lambda folder: plain(folder, **{"model.safetensors": b"\xff" * 64}),
        "model.safetensors: is not a safetensors file",
    ),
    "text as a shape": (headed(["a", 4 * 10**9]), "a tensor has the shape"),
    "shape beyond the file": (headed([20, 20]), "a tensor has the shape"),
    "tensors in the same bytes": (
        headed([300], 9),
        "its tensors have 2,700 elements, for which the file is too",
    ),
    "half of a character": (
        configured(id2label={"0": "\ud800"}),
        "config.json: is not valid JSON .UnicodeEncodeError",
    ),
    "vocabulary outside": (
        files(tokenizer_config_json='{"vocab_file": "/etc/passwd"}'),
        "tokenizer_config.json: vocab_file: leads to a file outside",
    ),
    "vocabulary above": (
        files(tokenizer_config_json='{"merges_file": "../../../../../../../../../../etc/passwd"}'),
        "tokenizer_config.json: merges_file: leads to a file outside",
    ),
    "adapter": (
        files(**{"adapter_model.bin": b"x"}),
        "adapter_model.bin: belongs to an adapter of peft; pass its base to --hf",
    ),
    "nothing": (lambda folder: folder, "is not a directory"),
}


@pytest.mark.parametrize(("make", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_directory_is_refused(make: Callable[[Path], Path], reason: str, tmp_path: Path) -> None:
    """A directory that has code, leads outside, or is too large is refused. The error names the fault, and says what to do."""
    with pytest.raises(BundleError, match=reason) as caught:
        open_directory(make(tmp_path / "model"))
    assert ACTION.search(str(caught.value)), f"does not say what to do: {caught.value}"


def test_a_plain_directory_is_read(tmp_path: Path) -> None:
    """A directory without faults opens. Pickles beside safetensors files are not read."""
    # The base of rotated positions may be a large whole number, and a class may have any name.
    config = json.dumps({**CONFIG, "rope_theta": 10**9, "label2id": {"record player": 13_000}})
    # Old versions of transformers wrote paths in the cache of the model's author.
    cached = json.dumps({"special_tokens_map_file": "/nowhere/map.json", "tokenizer_file": None})
    contents: dict[str, str | bytes] = {
        "pytorch_model.bin": b"cos\nsystem\n",
        "config.json": config,
        "tokenizer_config.json": cached,
    }
    directory = open_directory(plain(tmp_path / "model", **contents))
    assert (directory.architecture, directory.modules, directory.parameters) == ("BertModel", (), 1)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot in the hub's cache has links to blobs of the same model. These links are followed, and entries may name them."""
    names = {"vocab.txt": "a", "tokenizer_config.json": '{"vocab_file": "vocab.txt"}'}
    blobs = plain(tmp_path / "models--a--b" / "blobs", **names)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    assert open_directory(snapshot).parameters == 1
    (tmp_path / "models--a--b" / "notes.txt").write_text("private")
    (snapshot / "merges.txt").symlink_to("../../notes.txt")
    with pytest.raises(BundleError, match=r"merges\.txt: is a link out of the directory"):
        open_directory(snapshot)
