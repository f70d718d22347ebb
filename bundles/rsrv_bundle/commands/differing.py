"""`rsrv-bundle diff`: find the differences and the shared tensors of two bundles."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsrv_bundle.errors import Problems
from rsrv_bundle.keys import TENSOR_SECTIONS
from rsrv_bundle.manifest import FILE
from rsrv_bundle.reader import list_files
from rsrv_bundle.spec import Bundle, Manifest
from rsrv_bundle.weights import FILE as WEIGHTS_FILE
from rsrv_bundle.weights import TensorKey, tensor_keys
from rsrv_bundle.writer import document_of

#: Weight of a bundle: (name, identity, number of bytes).
Tensor = tuple[str, TensorKey, int]


@dataclass(frozen=True, slots=True)
class WeightDifferences:
    """Shared and different weights of two bundles, A and B."""

    #: Pairs (weight in A, its names in B) of the same tensor, which a server with both bundles stores once.
    shared: tuple[tuple[Tensor, tuple[str, ...]], ...]
    #: Pairs (weight in A, weight in B) with the same name and different tensors.
    changed: tuple[tuple[Tensor, Tensor], ...]
    only_a: tuple[Tensor, ...]
    only_b: tuple[Tensor, ...]
    #: Bytes of both bundles' weights together.
    total: int
    #: Bytes of the distinct tensors.
    distinct: int
    #: Bytes of the shared tensors.
    common: int


def relate(a: list[Tensor], b: list[Tensor]) -> WeightDifferences:
    """Compare the weights of two bundles.

    As on a server, two weights are the same tensor if their types, shapes and contents are equal. Their names do not matter.
    """
    keys_a, keys_b = ({key: nbytes for _, key, nbytes in side} for side in (a, b))
    named_b = {tensor[0]: tensor for tensor in b if tensor[1] not in keys_a}
    names_b: dict[TensorKey, list[str]] = {}
    for name, key, _ in b:
        names_b.setdefault(key, []).append(name)
    alone = [tensor for tensor in a if tensor[1] not in keys_b]
    changed = [(tensor, named_b[tensor[0]]) for tensor in alone if tensor[0] in named_b]
    both = {tensor[0] for tensor, _ in changed}
    return WeightDifferences(
        shared=tuple((tensor, tuple(names_b[tensor[1]])) for tensor in a if tensor[1] in keys_b),
        changed=tuple(changed),
        only_a=tuple(tensor for tensor in alone if tensor[0] not in both),
        only_b=tuple(tensor for tensor in named_b.values() if tensor[0] not in both),
        total=sum(tensor[2] for tensor in (*a, *b)),
        distinct=sum({**keys_a, **keys_b}.values()),
        common=sum(nbytes for key, nbytes in keys_a.items() if key in keys_b),
    )


def weights_of(bundle: Bundle) -> list[Tensor]:
    """Return the weights in argument order. Raises BundleError if the file has changed since it was read."""
    return [
        (weight.name, key, weight.nbytes)
        for weight, key in zip(bundle.weights, tensor_keys(bundle), strict=True)
    ]


def manifest_differences(a: Manifest, b: Manifest) -> list[str]:
    """Return a line for each difference in meaning between two manifests."""
    first, second = _entries(a), _entries(b)
    return [
        f"{key}: {first.get(key, 'none')} in A, {second.get(key, 'none')} in B"
        for key in {**first, **second}
        if first.get(key) != second.get(key)
    ]


def _entries(manifest: Manifest) -> dict[str, Any]:
    """Return the content of a manifest by key: the order of tensors, each tensor, and each entry of other sections."""
    entries: dict[str, Any] = {}
    for key, value in document_of(manifest, {}).items():
        if key in TENSOR_SECTIONS:
            entries[key] = ", ".join(entry["name"] for entry in value)
            entries |= {f"{key}.{entry['name']}": _tensor(entry) for entry in value}
        elif isinstance(value, dict):
            entries |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            entries[key] = value
    entries["format_version"] = manifest.format_version
    return entries


def _tensor(entry: Mapping[str, Any]) -> str:
    sizes = (f"{letter}={size}" for letter, size in entry["dims"].items())
    return " ".join([entry["dtype"], entry["shape"], *sizes])


def file_differences(a: Bundle, b: Bundle) -> list[str]:
    """Return a line for each file whose bytes differ, except the weights and the manifest."""
    digests = [_digests(bundle) for bundle in (a, b)]
    lines = []
    for name in sorted({**digests[0], **digests[1]}):
        left, right = (side.get(name) for side in digests)
        if left != right:
            lines.append(
                f"{name}: {'only in B' if left is None else 'only in A' if right is None else 'differs'}"
            )
    return lines


def _digests(bundle: Bundle) -> dict[str, str]:
    files: dict[str, Path] = list_files(bundle.path, Problems())
    digests = {}
    for name, path in files.items():
        if name not in (FILE, WEIGHTS_FILE):
            with path.open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
