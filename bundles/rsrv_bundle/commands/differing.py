"""Differences and shared tensors of two bundles: for `rsrv-bundle diff`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsrv_bundle.errors import Problems
from rsrv_bundle.manifest import FILE
from rsrv_bundle.padding import section_of
from rsrv_bundle.reader import list_files
from rsrv_bundle.spec import Bundle, Manifest, TensorSpec
from rsrv_bundle.state_sections import sections_of
from rsrv_bundle.task_section import task_entry
from rsrv_bundle.weights import FILE as WEIGHTS_FILE
from rsrv_bundle.weights import TensorKey, tensor_keys

#: Weight of a bundle: (name, identity, bytes).
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
    """Compare weights by type, shape and content, as the server does, and not by name."""
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
    lines = [
        f"{name}: {left!r} in A, {right!r} in B"
        for name, left, right in (
            (name, getattr(a, name), getattr(b, name))
            for name in (
                "format_version",
                "kind",
                "description",
                "internal",
                "meta_restartable",
                "compiled_batch_sizes",
            )
        )
        if left != right
    ]
    for name, specs_a, specs_b in (
        ("executable input", a.inputs, b.inputs),
        ("executable output", a.outputs, b.outputs),
        ("client input", a.client_inputs or (), b.client_inputs or ()),
        ("client output", a.client_outputs or (), b.client_outputs or ()),
    ):
        lines += _tensor_differences(name, specs_a, specs_b)
    lines += [
        f"{name}: {list(left)} in A, {list(right)} in B"
        for name, left, right in (
            ("input_shapes", a.input_shapes, b.input_shapes),
            ("meta.calls", a.meta_calls, b.meta_calls),
            ("meta.external", a.meta_external, b.meta_external),
        )
        if left != right
    ]
    sections = [
        sections_of(manifest.state, manifest.generate)
        | section_of(manifest.pad)
        | ({} if manifest.task is None else {"task": task_entry(manifest.task)})
        for manifest in (a, b)
    ]
    return [
        *lines,
        *(
            line
            for key in ("state", "generate", "pad", "task")
            for line in _mapping(key, *(section.get(key, {}) for section in sections))
        ),
        *_mapping("provenance", a.provenance, b.provenance),
        *_mapping("numerics", a.numerics, b.numerics),
    ]


def _tensor_differences(kind: str, a: tuple[TensorSpec, ...], b: tuple[TensorSpec, ...]) -> list[str]:
    by_name_a, by_name_b = ({spec.name: spec for spec in specs} for specs in (a, b))
    lines = []
    for name in {**by_name_a, **by_name_b}:
        left, right = by_name_a.get(name), by_name_b.get(name)
        if left != right:
            lines.append(f"{kind} '{name}': {_spec(left)} in A, {_spec(right)} in B")
    if not lines and a != b:
        lines.append(f"{kind}s: {', '.join(by_name_a)} in A, {', '.join(by_name_b)} in B")
    return lines


def _spec(spec: TensorSpec | None) -> str:
    return "none" if spec is None else f"{spec.dtype} {spec.letters} {list(spec.dims)}"


def _mapping(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [
        f"{section}.{key}: {a.get(key, 'none')} in A, {b.get(key, 'none')} in B"
        for key in {**a, **b}
        if a.get(key) != b.get(key)
    ]


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
