"""The section `task` of a manifest: the model's task, by the names of the Hugging Face hub, and the roles of its tensors.

A program that knows the task can call the model without knowing its tensors. It finds the section in Triton's model configuration,
as the parameter `task`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rsrv.text import nearest
from rsrv_bundle import dtypes
from rsrv_bundle.spec import Manifest, TaskSpec, TensorSpec
from rsrv_bundle.tensors import Report, is_positive

#: Roles whose tensor has one value in each row, with the element type. A file or a JSON text is one string.
_SINGLE: Final[Mapping[str, str]] = {
    "text": dtypes.BYTES,
    "text_pair": dtypes.BYTES,
    "image": dtypes.BYTES,
    "audio": dtypes.BYTES,
    "entities": dtypes.BYTES,
    "candidates": dtypes.BYTES,
    "detections": dtypes.BYTES,
    "tokens": "i32",
}
#: Roles whose tensor has one axis in each row, with the element type.
_VECTOR: Final[Mapping[str, str]] = {"scores": "f32", "embedding": "f32", "ids": "i32", "bytes": "i32"}


@dataclass(frozen=True, slots=True)
class _Roles:
    """Roles of a kind of task. Each entry of `inputs` and `outputs` lists alternative roles, of which a manifest needs one."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    optional_inputs: tuple[str, ...] = ()
    optional_outputs: tuple[str, ...] = ("tokens",)


_IMAGE, _AUDIO, _TEXT = (("image",),), (("audio",),), (("text",),)
#: All kinds of tasks.
KINDS: Final[Mapping[str, _Roles]] = {
    "feature-extraction": _Roles((("text", "image", "ids"),), (("embedding",),), ("ids",)),
    "text-ranking": _Roles((("text",), ("text_pair",)), (("scores",),)),
    "text-classification": _Roles(_TEXT, (("scores",),), ("text_pair",)),
    "token-classification": _Roles(_TEXT, (("entities",),)),
    "fill-mask": _Roles(_TEXT, (("candidates",),)),
    "image-classification": _Roles(_IMAGE, (("scores",),), (), ()),
    "object-detection": _Roles(_IMAGE, (("detections",),), (), ()),
    "image-segmentation": _Roles(_IMAGE, (("map",),), (), ()),
    "depth-estimation": _Roles(_IMAGE, (("map",),), (), ()),
    "automatic-speech-recognition": _Roles(_AUDIO, _TEXT, (), ()),
    "audio-classification": _Roles(_AUDIO, (("scores",),), (), ()),
    "text-generation": _Roles((("text", "ids", "bytes"),), (("text", "ids", "bytes"),)),
}
#: Kinds whose `scores` have a column for each label.
_LABELLED = ("text-classification", "image-classification", "audio-classification")
#: All kinds that may have labels. Some have no tensor with a column for each label.
_MAY_BE_LABELLED = (*_LABELLED, "token-classification", "object-detection", "image-segmentation")
_MAX_LABELS, _MAX_LABEL, _MAX_DIMENSIONS = 50_000, 1000, 100


def parse_task(section: Any, manifest: Manifest, bad: Report) -> TaskSpec | None:
    """Parse the section `task` of a manifest that is otherwise complete. `bad(key, rule)` is called for each broken rule."""
    if not isinstance(section, dict):
        bad("task", "must be a mapping with kind, inputs and outputs")
        return None
    kind = section.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        hint = nearest(kind, KINDS) if isinstance(kind, str) else ""
        bad("task.kind", f"{kind!r:.40} is not one of {', '.join(KINDS)}{hint}")
        return None
    if (kind == "text-generation") != (manifest.generate is not None):
        bad(
            "task.kind",
            "text-generation is the task of bundles with the section generate, which can have no other task",
        )
        return None
    generate = manifest.generate
    roles = KINDS[kind]
    inputs = _tensors(
        "inputs",
        section,
        generate.client_inputs if generate else manifest.wire_inputs,
        roles.inputs,
        roles.optional_inputs,
        bad,
    )
    outputs = _tensors(
        "outputs",
        section,
        generate.client_outputs if generate else manifest.wire_outputs,
        roles.outputs,
        roles.optional_outputs,
        bad,
    )
    columns = _columns(outputs, manifest)
    if kind == "text-ranking" and columns is not None and columns != 1:
        bad("task.outputs.scores", f"has {columns} numbers in a row; text-ranking needs one")
    labels = _labels(section.get("labels"), kind, columns, bad)
    dimensions = _dimensions(section.get("dimensions"), kind, columns, bad)
    return TaskSpec(kind, inputs, outputs, labels, dimensions)


def _tensors(
    side: str,
    section: Mapping[str, Any],
    specs: tuple[TensorSpec, ...],
    required: tuple[tuple[str, ...], ...],
    optional: tuple[str, ...],
    bad: Report,
) -> Mapping[str, str]:
    """Parse the roles of the inputs or of the outputs: role -> name of a client's tensor."""
    key = f"task.{side}"
    names = section.get(side)
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        bad(key, "must be a mapping from role to the name of a tensor that clients see")
        return {}
    known = [role for alternatives in required for role in alternatives] + list(optional)
    by_name = {spec.name: spec for spec in specs}
    for role, name in list(names.items())[: len(KINDS)]:
        if role not in known:
            bad(f"{key}.{role}", f"unknown role; the kind has {', '.join(dict.fromkeys(known))}")
        elif name not in by_name:
            bad(f"{key}.{role}", f"there is no {side[:-1]} '{name:.40}'; clients see {', '.join(by_name)}")
        elif rule := _wrong_type(role, by_name[name]):
            bad(f"{key}.{role}", f"{name}: {rule}")
    for alternatives in required:
        if not any(role in names for role in alternatives):
            bad(key, f"needs the role {' or '.join(alternatives)}")
    return {role: name for role, name in names.items() if role in known and name in by_name}


def _wrong_type(role: str, spec: TensorSpec) -> str:
    """Return the rule that a tensor breaks in this role, or an empty text."""
    sizes = _row(spec)
    if role in _SINGLE:
        good = spec.dtype == _SINGLE[role] and sizes in ((), (1,))
        return "" if good else f"the role needs {_SINGLE[role]}, one in a row"
    if role in _VECTOR:
        good = spec.dtype == _VECTOR[role] and len(sizes) <= 1
        return "" if good else f"the role needs {_VECTOR[role]} with one axis in a row"
    return (
        ""
        if spec.dtype != dtypes.BYTES and len(sizes) in (2, 3)
        else "the role needs numbers, [h, w] in a row"
    )


def _row(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of one row, without the batch axis."""
    return tuple(size for axis, size in enumerate(spec.dims) if axis != spec.batch_axis)


def _columns(outputs: Mapping[str, str], manifest: Manifest) -> int | None:
    """Return the number of columns of the embedding or of the scores. Return None if it varies or there is no such output."""
    name = outputs.get("embedding", outputs.get("scores"))
    sizes = [_row(spec) for spec in manifest.wire_outputs if spec.name == name]
    if not sizes:
        return None
    columns = sizes[0][0] if sizes[0] else 1
    return None if columns == -1 else columns


def _labels(labels: Any, kind: str, columns: int | None, bad: Report) -> tuple[str, ...]:
    if labels is None:
        if kind in _LABELLED:
            bad("task.labels", f"is missing; {kind} needs a name for each column of scores")
        return ()
    if kind not in _MAY_BE_LABELLED:
        bad("task.labels", f"{kind} has no labels; remove them")
        return ()
    if not isinstance(labels, list) or not 0 < len(labels) <= _MAX_LABELS:
        bad("task.labels", f"must list 1 to {_MAX_LABELS} names")
        return ()
    for label in labels:
        if not isinstance(label, str) or len(label) > _MAX_LABEL:
            bad(
                "task.labels",
                f"names are text of at most {_MAX_LABEL} characters, not {label!r:.40}; use quotes",
            )
            return ()
    if kind in _LABELLED and columns is not None and columns != len(labels):
        bad("task.labels", f"there are {len(labels)} for {columns} columns of scores")
    return tuple(labels)


def _dimensions(dimensions: Any, kind: str, columns: int | None, bad: Report) -> tuple[int, ...]:
    if dimensions is None:
        return ()
    if kind != "feature-extraction":
        bad("task.dimensions", f"{kind} has no embedding to cut; remove it")
        return ()
    if (
        not isinstance(dimensions, list)
        or len(dimensions) > _MAX_DIMENSIONS
        or not all(map(is_positive, dimensions))
    ):
        bad("task.dimensions", f"must list lengths of the embedding, at most {_MAX_DIMENSIONS}")
        return ()
    if dimensions and columns is not None and max(dimensions) > columns:
        bad("task.dimensions", f"{max(dimensions)} is more than the {columns} numbers of the embedding")
    return tuple(sorted(set(dimensions)))


def task_entry(task: TaskSpec) -> dict[str, Any]:
    """Return the section in the form of a manifest."""
    entry: dict[str, Any] = {"kind": task.kind, "inputs": dict(task.inputs), "outputs": dict(task.outputs)}
    if task.labels:
        entry["labels"] = list(task.labels)
    if task.dimensions:
        entry["dimensions"] = list(task.dimensions)
    return entry
