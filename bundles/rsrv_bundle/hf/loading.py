"""Load models, tokenizers and processors of a checked directory.

Nothing is downloaded, and no code of the directory runs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from rsrv_bundle.errors import BundleError, summary
from rsrv_bundle.hf.directory import Directory
from rsrv_bundle.hf.tokenizer_trial import try_tokenizer

#: Largest ratio of a model's elements to the elements in its files. Buffers and tensors with two uses are not in the files.
_SLACK = 1.3
#: Largest number of parts of a model.
_MAX_MODULES = 100_000
#: Largest number of characters that a tokenizer may make of one character. Otherwise, a text of some kilobytes could
#: take all memory.
_MAX_GROWTH = 64
#: Largest number of characters of a token. An answer of a few tokens could otherwise take all memory.
_MAX_TOKEN = 4096


@contextmanager
def offline() -> Iterator[None]:
    """Stop the libraries of Hugging Face from using the network and from printing."""
    variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    from transformers.utils import logging as transformers_logging

    library: Any = transformers_logging
    level = library.get_verbosity()
    library.set_verbosity_error()
    library.disable_progress_bar()
    root = logging.getLogger("sentence_transformers")
    root_level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(root_level)
        library.set_verbosity(level)
        library.enable_progress_bar()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def load_model(
    auto: Any, directory: Directory, *, unused: str | None = None, given: Container[str] = ()
) -> Any:
    """Return the model in evaluation mode, with 32-bit floats.

    auto: a class of transformers, such as AutoModel.
    unused: the name of a part whose weights may be missing.
    given: weights that may be missing because an adapter has them.

    Raises BundleError if the weights do not fit the configuration.
    """
    from transformers import AutoConfig

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(str(directory.path), **options)
        # First build the model on the device meta, which allocates no memory. config.json may describe a model that does not fit
        # here.
        with torch.device("meta"), _few_modules():
            shape = (
                auto.from_config(config, trust_remote_code=False)
                if hasattr(auto, "from_config")
                else auto(config)
            )
        needed = sum(tensor.numel() for tensor in shape.parameters())
        # Some models keep masks of all positions, one byte each.
        needed += sum(constant.nbytes for constant in shape.buffers()) // 4
    except BundleError:
        raise
    except Exception as e:
        raise BundleError(f"config.json: transformers cannot make a model of it: {summary(e)}") from e
    if needed > directory.parameters * _SLACK + 10_000_000:
        raise BundleError(
            f"config.json: describes a model of {needed:,} parameters and constants, and the safetensors files have"
            f" {directory.parameters:,}; save the model again"
        )
    try:
        model, report = auto.from_pretrained(
            str(directory.path),
            **options,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except Exception as e:
        raise BundleError(f"{directory.path.name}: transformers cannot load it: {summary(e)}") from e
    if missing := sorted(
        key for key in report["missing_keys"] if key.split(".")[0] != unused and key not in given
    ):
        raise BundleError(
            f"the safetensors files have no weight {missing[0]!r:.200} ({len(missing)} are missing), which"
            f" {type(model).__name__} needs; choose another --task, or save the whole model"
        )
    if report.get("mismatched_keys"):
        raise BundleError(
            f"the weight {min(report['mismatched_keys'])!s:.200} does not have the shape that follows from config.json; save the model again"
        )
    return model.eval()


@contextmanager
def _few_modules() -> Iterator[None]:
    """Raise BundleError as soon as a model has too many parts. A few numbers of config.json could make its construction endless."""
    count = 0

    def check(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > _MAX_MODULES:
            raise BundleError(
                f"config.json: describes a model of more than {_MAX_MODULES:,} parts; correct its numbers of layers"
            )

    handle = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def load_tokenizer(directory: Directory) -> Any:
    """Return the tokenizer. Raises BundleError if there is none that the package tokenizers can run."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory.path), local_files_only=True, trust_remote_code=False
        )
    except Exception as e:
        raise BundleError(
            f"{directory.path.name}: transformers finds no tokenizer in it: {summary(e)}"
        ) from e
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise BundleError(
            f"{directory.path.name}: its tokenizer {type(tokenizer).__name__} is not one of the package tokenizers"
        )
    return tokenizer


def check_tokenizer(tokenizer: Any, longest: int) -> None:
    """Raise BundleError if a tokenizer may make a short text very long, has a very long token, or is too slow for some texts.

    longest: number of tokens of the longest row.
    """
    file = tokenizer.backend_tokenizer.to_str()
    document = json.loads(file)
    for part in ("normalizer", "decoder"):
        if (growth := growth_of(document.get(part))) > _MAX_GROWTH:
            raise BundleError(
                f"tokenizer.json: {part}: may make {growth:,} characters of one character; {_MAX_GROWTH} are allowed: shorten the replacements"
            )
    longest_token = max(map(len, tokenizer.get_vocab()), default=0)
    if longest_token > _MAX_TOKEN:
        raise BundleError(
            f"tokenizer.json: has a token of {longest_token:,} characters; {_MAX_TOKEN:,} are allowed: remove it"
        )
    try_tokenizer(file, longest)


def growth_of(part: Any) -> int:
    """Return the largest number of characters that a normalizer or a decoder (as JSON) makes of one character.

    The factors of consecutive replacements multiply.
    """
    growth, waiting = 1, [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            waiting.extend(step.get("normalizers") or step.get("decoders") or ())
            if step.get("type") == "Replace":
                growth *= max(1, len(step["content"]))
    return growth
