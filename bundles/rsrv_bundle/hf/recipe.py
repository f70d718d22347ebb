"""What a directory becomes: the module to export, the bundle's hooks and files, and what the answers are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Tensors of one request by name, one row each.
Request = dict[str, Array]


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Choices of the user; None and empty choices are made from the directory."""

    task: str | None = None
    #: Tokens in a row, or samples of a sound, to compile for.
    lengths: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    #: How an embedding is made of token vectors if the directory does not say it: mean, cls or last.
    pooling: str | None = None
    #: Whether a text with too many tokens is cut or refused.
    too_long: str | None = None
    #: Lengths to which an embedding may be cut.
    dimensions: tuple[int, ...] = ()
    #: Height and width to which pictures are resized if the directory keeps their proportions.
    image_size: tuple[int, ...] = ()
    #: Most tokens of a generation, prompt and answer together, and the number of generations on the device at once.
    context: int | None = None
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class HubRecipe:
    """Arguments of `export_torch`, and the proof."""

    #: In evaluation mode; returns the outputs by name.
    module: Any
    #: Executable inputs by name, as hooks make them of a sample.
    examples: Mapping[str, Array]
    axes: Mapping[str, str]
    input_shapes: Sequence[Mapping[str, int]]
    #: Text of model.py.
    hooks: str
    #: Text of other files by name.
    files: Mapping[str, str]
    client_inputs: Sequence[Mapping[str, Any]]
    client_outputs: Sequence[Mapping[str, Any]]
    task: Mapping[str, Any]
    #: Requests of one row, by a name for errors.
    samples: Mapping[str, Request]
    #: Function from a row to the framework's answer, by client output. Strings are parsed JSON, or text.
    reference: Callable[[Request], Mapping[str, Any]]
    #: Framework that gives the reference, for the manifest.
    source: str = "transformers.pipeline"
    #: Element type -> largest error of the modules, where it is not `numerics.TOLERANCE`.
    tolerance: Mapping[str, float] = field(default_factory=dict)


def strings(name: str) -> dict[str, Any]:
    """Return the manifest's entry of a tensor with one string in a row."""
    return {"name": name, "dtype": "bytes", "shape": "n"}


def numbers(name: str, dtype: str, letters: str = "", sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Return the manifest's entry of a tensor with a batch axis and axes of these sizes."""
    return {
        "name": name,
        "dtype": dtype,
        "shape": f"n{letters}",
        "dims": dict(zip(letters, sizes, strict=True)),
    }


def row(**values: str | bytes) -> Request:
    """Return a request of one row with strings."""
    coded = {name: value.encode() if isinstance(value, str) else value for name, value in values.items()}
    return {name: np.array([[value]], object) for name, value in coded.items()}


def value(request: Request, name: str) -> bytes:
    """Return the string of a request's only row."""
    found: bytes = request[name].reshape(-1)[0]
    return found


def label_scores(classes: Iterable[Any], labels: Sequence[str]) -> Array:
    """Return the scores of a pipeline's answer to one row, in the order of `labels`. `classes`: a label and a score each."""
    scores = {each["label"]: each["score"] for each in classes}
    return np.array([scores[label] for label in labels], np.float32)
