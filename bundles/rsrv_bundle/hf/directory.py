"""Rules for a directory of Hugging Face: the files that are read, their maximum sizes, and files that are refused.

A directory comes from strangers, so it is untrusted. Its files must not contain code, name code, or refer to files outside of the
directory. These rules are checked before transformers or sentence-transformers read the directory:

- Weights are in safetensors files. Pickles are never opened.
- No JSON file has `auto_map`, which names Python files of the directory.
- Classes that sentence-transformers would import by name are in a fixed list.
- Links stay within the directory, or within the cache of the hub that the directory belongs to.
- JSON files are small, and the weights' files hold as many numbers as the configuration asks for.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsrv.text import amount
from rsrv_bundle.errors import BundleError

#: Maximum number of files and folders.
MAX_FILES = 10_000
#: Maximum number of bytes of a JSON file.
MAX_JSON = 4 * 2**20
#: Maximum number of bytes of a tokenizer's file.
MAX_TOKENIZER = 256 * 2**20
#: Maximum number of bytes of a safetensors header, and of all JSON files together. Tokenizers have a limit of their own.
MAX_HEADER = 64 * 2**20
#: Largest number in a configuration, such as the number of heads or channels.
_MAX_SIZE = 10**7
#: Largest number of layers in a configuration. Some networks, such as ALBERT, have one layer and call it that many times.
_MAX_LAYERS = 1000
_LAYERS = ("layer", "repeat")
#: Largest number of classes. transformers makes two names for each class without a name.
_MAX_LABELS = 100_000
#: Maximum number of entries of a list in a configuration.
_MAX_LIST = 10_000
#: Files whose keys may be words of a vocabulary. No library imports modules that these files name.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "merges.json")
#: Other files that the libraries read as a whole.
_READ = (".jinja", ".txt", ".model", ".tiktoken")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
#: Entries of sentence_bert_config.json that contain options for transformers' loaders.
_OPTIONS = (
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
)
#: Options that a directory may set. None of them is a path, a repository or code.
_HARMLESS = (
    "attn_implementation",
    "dtype",
    "local_files_only",
    "max_length",
    "model_max_length",
    "padding_side",
    "torch_dtype",
    "trust_remote_code",
    "truncation_side",
    "use_safetensors",
)
#: Classes that sentence-transformers may import, by the last part of their names.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU", "SiLU", "Softmax")


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that has passed all checks."""

    path: Path
    #: Content of config.json.
    config: Mapping[str, Any]
    #: Types in modules.json, such as Pooling, in order. Empty if sentence-transformers did not write the directory.
    modules: tuple[str, ...]
    #: Number of elements in all safetensors files in the folder of config.json.
    parameters: int

    @property
    def architecture(self) -> str:
        """Name of the model's class, or an empty text if config.json names no class."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def labels(self) -> list[str]:
        """Names of the classes in the order of the columns. Raises BundleError if two names are equal, or if one is missing."""
        labels = self.label_list()
        if len(set(labels)) < len(labels):
            raise BundleError("config.json: id2label: two classes have the same name; rename one")
        return labels

    def label_list(self) -> list[str]:
        """Return the names of the classes. Some of them may be equal. Raises BundleError if a name is missing."""
        given = self.config.get("id2label")
        names = given if isinstance(given, dict) else {}
        labels = [names.get(str(index)) for index in range(len(names))]
        if not labels or not all(isinstance(label, str) for label in labels):
            raise BundleError(
                "config.json: id2label: must name each class by its number from 0 on; add the missing ones"
            )
        return [str(label) for label in labels]

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the object in a JSON file of the directory, or an empty object without the file."""
        content = _read_json(self.path, self.path / name) if (self.path / name).is_file() else {}
        return content if isinstance(content, dict) else {}

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()


def open_directory(path: Path) -> Directory:
    """Check a directory, and return it. Raises BundleError with the broken rule, OSError."""
    if not path.is_dir():
        raise BundleError(
            f"{path}: this is not a directory; name one that save_pretrained or sentence-transformers wrote"
        )
    path = path.resolve()
    if not (path / "config.json").is_file():
        raise BundleError(f"{path}: has no config.json; name a directory that save_pretrained wrote")
    documents = read_documents(path)
    config = documents[path / "config.json"]
    if not isinstance(config, dict):
        raise BundleError("config.json: must be an object; save the model again")
    modules = _modules(path, documents)
    for folder in {path, *(path / str(entry.get("path") or "") for entry in modules)}:
        _check_weights(path, folder, documents)
    return Directory(
        path,
        config,
        tuple(str(entry["type"]).rpartition(".")[2] for entry in modules),
        sum(weigh(file.name, file) for file in path.glob("*.safetensors")),
    )


def read_documents(path: Path) -> dict[Path, Any]:
    """Return the content of each JSON file below a directory. Raises BundleError if any file breaks a rule."""
    files = list(_files(path))
    for file in files:
        if (file.suffix in _READ or file.name in _VOCABULARIES) and file.stat().st_size > MAX_TOKENIZER:
            raise BundleError(
                f"{_name(path, file)}: is larger than {amount(MAX_TOKENIZER)}; remove it if the model does not need it"
            )
    read = [file for file in files if file.suffix == ".json" and file.name not in _VOCABULARIES]
    if (size := sum(file.stat().st_size for file in read)) > MAX_HEADER:
        raise BundleError(
            f"{path}: its JSON files have {amount(size)}; {amount(MAX_HEADER)} are allowed: remove those that the model does not need"
        )
    documents = {file: _read_json(path, file) for file in read}
    for file, document in documents.items():
        _refuse_code(_name(path, file), document)
        if file.name == "config.json" and isinstance(document, dict):
            _check_config(_name(path, file), document)
        if file.name == "tokenizer_config.json" and isinstance(document, dict):
            _check_files(path, _name(path, file), document)
        if file.name.startswith("sentence_") and isinstance(document, dict):
            _check_options(_name(path, file), document)
    return documents


def _name(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


def _is_inside(root: Path, file: Path) -> bool:
    """Return True if a path, after all links, is in the directory.

    A snapshot in the hub's cache has links to the folder `blobs` of its model. This folder is accepted as well.
    """
    inside = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    return any(map(file.resolve().is_relative_to, inside))


def _files(root: Path) -> Iterator[Path]:
    """Yield every file below a directory. Raises BundleError for devices, pipes, sockets, and links out of the directory."""
    count = 0
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            file = Path(folder, name)
            count += 1
            if count > MAX_FILES:
                raise BundleError(f"{root}: has more than {MAX_FILES} files; name the model's own directory")
            if file.is_symlink() and not _is_inside(root, file):
                raise BundleError(
                    f"{_name(root, file)}: is a link out of the directory; copy the file instead"
                )
            if file.is_symlink() and file.is_dir():
                raise BundleError(f"{_name(root, file)}: is a link to a folder; copy the folder instead")
            mode = file.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise BundleError(f"{_name(root, file)}: is neither a file nor a folder; remove it")
        yield from (Path(folder, name) for name in sorted(names))


def _read_json(root: Path, file: Path) -> Any:
    name, size = _name(root, file), file.stat().st_size
    limit = MAX_HEADER if file.name.endswith(".index.json") else MAX_JSON
    if size > limit:
        raise BundleError(
            f"{name}: has {amount(size)}; {amount(limit)} are allowed: remove it if the model does not need it"
        )
    try:
        document = json.loads(file.read_bytes())
        # Half of a surrogate pair is not text, and could not be written into a bundle.
        json.dumps(document, ensure_ascii=False).encode()
        return document
    except (ValueError, RecursionError) as e:
        raise BundleError(
            f"{name}: is not valid JSON ({type(e).__name__}: {e!s:.200}); save the model again"
        ) from None


def _refuse_code(name: str, document: Any) -> None:
    """Raise BundleError if a document names code, at any depth. The module json reads no document deeper than 1,000 levels."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key in ("auto_map", "custom_pipelines"):
                if value.get(key):
                    raise BundleError(
                        f"{name}: {key}: names Python code of the directory, which rsrv does not run; export the model"
                        " with rsrv_bundle.from_torch.export_torch in a program of yours, after reading that code"
                    )
            for key in ("activation_function", "activation_fn", "sbert_ce_default_activation_function"):
                _check_activation(f"{name}: {key}", value.get(key))
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _check_activation(where: str, value: Any) -> None:
    """Raise BundleError if a dotted name is not one of torch's _ACTIVATIONS. A plain name, such as gelu, imports nothing."""
    if not isinstance(value, str) or "." not in value:
        return
    prefix, _, name = value.rpartition(".")
    if not prefix.startswith("torch.nn.modules.") or name not in _ACTIVATIONS:
        raise BundleError(
            f"{where}: '{value:.100}' is none of torch's {', '.join(_ACTIVATIONS)}; name one of them"
        )


def _check_options(file: str, document: Mapping[str, Any]) -> None:
    """Raise BundleError for options of transformers' loaders that may name other files, repositories or code."""
    for key in _OPTIONS:
        options = document.get(key)
        for name, value in options.items() if isinstance(options, dict) else ():
            if name not in _HARMLESS or (isinstance(value, str) and "/" in value):
                raise BundleError(f"{file}: {key}.{name:.60}: is not supported; leave it out")


def _check_files(root: Path, name: str, document: Mapping[str, Any]) -> None:
    """Raise BundleError for entries that lead a tokenizer to files outside of the directory.

    Old versions of transformers wrote the paths of files in a cache. Such an entry is harmless if the file does not exist.
    """
    for key, value in document.items():
        if not key.endswith("_file") or not isinstance(value, str):
            continue
        try:
            file = root / value
            outside = file.exists() and not _is_inside(root, file)
        except (OSError, ValueError):
            outside = True
        if outside:
            raise BundleError(
                f"{name}: {key:.60}: leads to a file outside of the directory; remove the entry"
            )


def _check_config(file: str, config: Mapping[str, Any]) -> None:
    """Raise BundleError for numbers and lists that would make a library build for hours, or take all memory."""
    if config.get("quantization_config"):
        raise BundleError(
            f"{file}: quantization_config: quantised weights are not supported; save the model without it"
        )
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend((f"{key}.{inner}", item) for inner, item in value.items())
        elif isinstance(value, list):
            if len(value) > _MAX_LIST:
                raise BundleError(
                    f"{file}: {key}: has {len(value):,} entries; {_MAX_LIST:,} are allowed: correct it"
                )
            waiting.extend((key, item) for item in value)
        elif isinstance(value, int) and key.endswith("num_labels") and value > _MAX_LABELS:
            raise BundleError(
                f"{file}: {key}: {value!s:.20} is more than {_MAX_LABELS:,}, and no model needs that; correct it"
            )
        elif (
            isinstance(value, int)
            and abs(value) > _MAX_SIZE
            and not key.endswith(("max_length", "_id", "theta"))
        ):
            raise BundleError(
                f"{file}: {key}: {value!s:.20} is more than {_MAX_SIZE:,}, and no model needs that; correct it"
            )
        elif (
            isinstance(value, int)
            and value > _MAX_LAYERS
            and not key.startswith("label2id.")
            and any(word in key.rpartition(".")[2] for word in _LAYERS)
        ):
            raise BundleError(
                f"{file}: {key}: {value} is more than the {_MAX_LAYERS:,} that are allowed; correct it"
            )


def _modules(root: Path, documents: Mapping[Path, Any]) -> list[dict[str, Any]]:
    """Return the entries of modules.json. Raises BundleError for a type or a folder that is not allowed."""
    document = documents.get(root / "modules.json")
    if document is None:
        return []
    if not isinstance(document, list) or not all(isinstance(entry, dict) for entry in document):
        raise BundleError("modules.json: must be a list of objects; save the model again")
    for index, entry in enumerate(document):
        kind, folder = entry.get("type"), entry.get("path", "")
        package, _, name = kind.rpartition(".") if isinstance(kind, str) else ("", "", "")
        if package.partition(".")[0] != "sentence_transformers" or name not in _MODULES:
            raise BundleError(
                f"modules.json: [{index}].type: {kind!r:.100} is none of sentence-transformers'"
                f" {', '.join(_MODULES)}; rsrv imports no others; export the model with"
                " rsrv_bundle.from_torch.export_torch in a program of yours"
            )
        if not isinstance(folder, str) or "/" in folder or "\\" in folder or folder.startswith("."):
            raise BundleError(
                f"modules.json: [{index}].path: {folder!r:.100} must be the name of a folder next to modules.json"
            )
        if folder and not (root / folder).is_dir() and name in ("Pooling", "Dense"):
            raise BundleError(
                f"modules.json: [{index}].path: there is no folder {folder!r:.100}; copy it into the directory"
            )
    return document


def _check_weights(root: Path, folder: Path, documents: Mapping[Path, Any]) -> None:
    """Raise BundleError if a folder has weights only as pickles, if it is an adapter, or if its index names other folders."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    where = f"{_name(root, folder)}: " if folder != root else ""
    if adapters := sorted(name for name in names if name.startswith("adapter_")):
        raise BundleError(
            f"{where}{adapters[0]}: belongs to an adapter of peft; pass its base to --hf, and its own directory to --adapter"
        )
    # For its own modules, sentence-transformers reads only the file model.safetensors. If this file is missing, it
    # reads a pickle.
    end = ".safetensors" if folder == root else "model.safetensors"
    if not any(name.endswith(end) for name in names):
        if pickles := sorted(name for name in names if name.endswith(PICKLES)):
            raise BundleError(
                f"{where}{pickles[0]}: is a format that can run code when it is read; rsrv reads safetensors only. If you"
                " trust the file, convert it: AutoModel.from_pretrained(DIR).save_pretrained(NEW), with the model's"
                " class in place of AutoModel"
            )
        if folder == root:
            raise BundleError(f"{root}: has no *.safetensors; save the weights with save_pretrained")
    for name in names:
        if not name.endswith(".safetensors.index.json"):
            continue
        index = documents.get(folder / name)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(
            isinstance(shard, str) and shard in names and shard.endswith(".safetensors")
            for shard in shards.values()
        ):
            raise BundleError(
                f"{where}{name}: weight_map: must name safetensors files in the same folder; save the weights again"
            )


def weigh(name: str, file: Path) -> int:
    """Return the number of elements of all tensors in a safetensors file, from its header."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"its header has {amount(length)}")
            header = json.loads(stream.read(length))
        # Elements have at least half a byte.
        most = file.stat().st_size * 2
        total = sum(_product(entry["shape"], most) for key, entry in header.items() if key != "__metadata__")
        if total > most:
            raise ValueError(f"its tensors have {total:,} elements, for which the file is too small")
        return total
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as e:
        raise BundleError(f"{name}: is not a safetensors file ({e!s:.200}); save the weights again") from None


def _product(shape: Any, most: int) -> int:
    """Return the number of elements of a tensor of this shape. Raises ValueError if the shape is wrong, or above `most` elements."""
    total = 1
    for size in shape:
        # Python repeats a string that is multiplied by a number, which could take all memory.
        if type(size) is not int or size < 0 or (total := total * size) > most:
            raise ValueError(f"a tensor has the shape {shape!s:.60}, for which the file is too small")
    return total
