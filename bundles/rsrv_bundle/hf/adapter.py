"""LoRA adapters of peft, merged into the weights of their base.

peft would import modules that adapter_config.json names, and the arithmetic is simple. So this module merges without peft.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from rsrv_bundle.errors import BundleError
from rsrv_bundle.hf.directory import PICKLES, Directory, open_directory, read_documents, weigh
from rsrv_bundle.hf.loading import load_model

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
#: Classes of transformers by the task_type in adapter_config.json. Without a task_type, config.json of the base names the class.
_CLASSES: Final[Mapping[str, str]] = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
}
#: Entries of adapter_config.json that the merge reads, or that do not change it. Others must be empty.
_KNOWN: Final = (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
)
#: Values of init_lora_weights with which peft does not change the weights of the base.
_BEGINNINGS: Final = (None, True, False, "gaussian", "orthogonal")
#: Rank of adapters without the entry r, as in peft.
_RANK = 8
#: Largest allowed lora_alpha.
_MOST_ALPHA = 1e9


def merged(base: Directory, adapter: Path, folder: Path) -> Directory:
    """Write a copy of the base model with the adapter merged into its weights. Return the copy.

    `folder` must not exist.

    Raises BundleError for an adapter that is not a LoRA, that breaks a rule of `rsrv_bundle.hf.directory`, or that does not fit
    the base.
    """
    config = _config(adapter)
    weights = adapter / _WEIGHTS
    if not weights.is_file():
        raise BundleError(f"{adapter}: has no {_WEIGHTS}; save the adapter with save_pretrained")
    weigh(_WEIGHTS, weights)
    try:
        stored = load_file(weights)
    except SafetensorError as e:
        raise BundleError(f"{_WEIGHTS}: cannot be read: {e}") from None
    tensors = {
        name.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor for name, tensor in stored.items()
    }
    model = load_model(_class(base, config), base, unused="pooler", given=tensors)
    _merge(model, tensors, config)

    def unneeded(where: str, names: list[str]) -> list[str]:
        at_root = Path(where) == base.path
        return [name for name in names if at_root and (".safetensors" in name or name.endswith(PICKLES))]

    shutil.copytree(base.path, folder, ignore=unneeded)
    model.save_pretrained(folder)
    return open_directory(folder)


def _config(adapter: Path) -> Mapping[str, Any]:
    """Return adapter_config.json. Raises BundleError for an adapter that this module cannot merge correctly."""
    if not (adapter / _CONFIG).is_file():
        raise BundleError(f"--adapter: {adapter} has no {_CONFIG}; name a directory that peft wrote")
    config = read_documents(adapter.resolve())[adapter.resolve() / _CONFIG]
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise BundleError(
            f"{_CONFIG}: peft_type: {kind!r:.40} is not LORA; merge the adapter with peft first"
        )
    if strange := sorted(key for key, entry in config.items() if entry and key not in _KNOWN):
        raise BundleError(f"{_CONFIG}: {strange[0]:.60}: is not supported; merge the adapter with peft first")
    if config.get("init_lora_weights") not in _BEGINNINGS:
        raise BundleError(
            f"{_CONFIG}: init_lora_weights: {config['init_lora_weights']!r:.40} may change the weights of the base; merge the"
            " adapter with peft first"
        )
    return config


def _class(base: Directory, config: Mapping[str, Any]) -> Any:
    import transformers

    kind = config.get("task_type")
    if kind is not None and (not isinstance(kind, str) or kind not in _CLASSES):
        raise BundleError(f"{_CONFIG}: task_type: {kind!r:.40} is none of {', '.join(_CLASSES)}")
    model_class = getattr(transformers, _CLASSES[kind] if kind else base.architecture, None)
    if kind is None and not (
        isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    ):
        raise BundleError(
            f"config.json: architectures: '{base.architecture:.100}' is not a model of transformers"
        )
    return model_class


def _merge(model: Any, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Add the products of an adapter's matrices to a model's weights.

    Replace the weights that the adapter stores whole.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(map(id, parameters.values()))
    alpha = config.get("lora_alpha", _RANK)
    if not isinstance(alpha, int | float) or not abs(alpha) < _MOST_ALPHA:
        raise BundleError(f"{_CONFIG}: lora_alpha: {alpha!r:.40} is not a number below {_MOST_ALPHA:.0e}")
    if not any(".lora_" in name for name in tensors):
        raise BundleError(f"{_WEIGHTS}: has no matrices of LoRA; save the adapter with save_pretrained")
    for name, tensor in tensors.items():
        path, _, part = name.partition(".lora_")
        target = parameters.get(f"{path}.weight" if part else name)
        other = tensors.get(f"{path}.lora_{'B' if part == 'A.weight' else 'A'}.weight")
        if target is None or part not in ("", "A.weight", "B.weight") or (part and other is None):
            raise BundleError(
                f"{_WEIGHTS}: {name:.200}: the base has no weight for it; name the adapter's own base"
            )
        if uses[id(target)] > 1:
            raise BundleError(
                f"{_WEIGHTS}: {name:.200}: is for a weight that the base uses in several places; merge the adapter with peft first"
            )
        if part == "B.weight":
            continue
        pair = None if other is None else _checked(name, model.get_submodule(path), tensor, other, config)
        shape = list(tensor.shape) if pair is None else [len(pair[0]), pair[1].shape[1]]
        if shape != list(target.shape):
            raise BundleError(
                f"{_WEIGHTS}: {name:.200}: has the shape {shape}, and the base's weight {list(target.shape)}; name the"
                " adapter's own base, with the labels of the adapter in its config.json"
            )
        rank = len(tensor) if pair else 1
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        with torch.no_grad():
            target.copy_(tensor if pair is None else target + scale * (pair[0] @ pair[1]))


def _checked(
    name: str, layer: nn.Module, inner: torch.Tensor, outer: torch.Tensor, config: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two matrices of LoRA in the order in which their product has the shape of the layer's weight.

    Raises BundleError if the layer or the matrices are not supported.
    """
    from transformers.pytorch_utils import Conv1D

    if not isinstance(layer, nn.Linear | Conv1D) or outer.ndim != 2 or inner.ndim != 2:
        raise BundleError(f"{_WEIGHTS}: {name:.200}: only matrices of linear layers can be merged")
    rank = len(inner)
    if (
        not rank
        or outer.shape[1] != rank
        or not (config.get("rank_pattern") or rank == config.get("r", _RANK))
    ):
        raise BundleError(
            f"{_WEIGHTS}: {name:.200}: has the rank {rank}, which is not that of its other matrix and of r in {_CONFIG}"
        )
    # Conv1D stores the transposed weight. Decide by the layer's class. Ignore the entry fan_in_fan_out, which peft also corrects
    # by the class.
    if isinstance(layer, Conv1D):
        return inner.float().T, outer.float().T
    return outer.float(), inner.float()
