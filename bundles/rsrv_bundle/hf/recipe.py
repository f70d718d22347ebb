"""Recipes for the export of a directory: the module to export, the bundle's hooks, and the reference answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Tensors of one request by name, one row each.
Request = dict[str, Array]


@dataclass(frozen=True, slots=True)
class HubOptions:
    """The user's choices. The directory decides choices that are None or empty."""

    task: str | None = None
    #: Directory of a LoRA adapter of peft.
    adapter: Path | None = None
    #: Lengths to compile for: numbers of tokens in a row, or of samples in a sound.
    lengths: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    #: Method that makes an embedding from the token vectors if the directory names none: mean, cls or last.
    pooling: str | None = None
    #: Whether a text with too many tokens is cut or refused.
    too_long: str | None = None
    #: Lengths to which an embedding may be cut.
    dimensions: tuple[int, ...] = ()
    #: Height and width to which pictures are resized if the directory keeps their proportions.
    image_size: tuple[int, ...] = ()
    #: Maximum number of tokens in a generation, prompt and answer together.
    context: int | None = None
    #: Number of generations on the device at once.
    slots: int | None = None
    #: Files with further samples for the comparison with the framework.
    samples: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class HubRecipe:
    """Arguments of `export_torch`, and of the comparison with the framework. A client's tensor has the name of its role in the task."""

    kind: str
    #: Module in evaluation mode, which returns the outputs by name.
    module: Any
    #: Letters of the axes of inputs, and of outputs that need certain letters.
    axes: Mapping[str, str]
    #: Text of model.py. Its `preprocess` makes the executable inputs of a sample.
    hooks: str
    #: Names of the inputs that clients send. Each input has one string per row.
    inputs: tuple[str, ...]
    #: Names of the outputs that clients get. If the hooks have a `postprocess`, these outputs are strings, except `tokens`.
    outputs: tuple[str, ...]
    #: Requests of one row. The keys are names for errors.
    samples: Mapping[str, Request]
    #: Function that returns the framework's answer to a request of one row, by client output. In place of a string of JSON, the
    #: answer has its parsed content.
    reference: Callable[[Request], Mapping[str, Any]]
    input_shapes: Sequence[Mapping[str, int]] = ()
    #: Padded axis of the inputs, as `export_bundle` takes it.
    pad: str = ""
    #: Text of model.py that is used if padding changes an answer. It only makes inputs of the compiled lengths.
    unpadded_hooks: str = ""
    labels: Sequence[str] = ()
    dimensions: Sequence[int] = ()
    #: Text of tokenizer.json.
    tokenizer: str | None = None
    #: Pictures of the comparison are scaled to this height and width, because the framework scales its answer to the size of the
    #: picture. None if pictures of any size can be compared.
    picture_size: tuple[int, int] | None = None
    #: Name of the framework that computes the reference, for errors.
    source: str = "transformers.pipeline"
    #: Largest errors of the modules by element type, where they differ from `numerics.TOLERANCE`.
    tolerance: Mapping[str, float] = field(default_factory=dict)
    #: A choice that the directory does not state and that the user did not make, with the option that changes it, or an empty text.
    note: str = ""

    @property
    def task(self) -> dict[str, Any]:
        """Section `task` of the manifest."""
        lists = {"labels": list(self.labels), "dimensions": list(self.dimensions)}
        return {
            "kind": self.kind,
            "inputs": {name: name for name in self.inputs},
            "outputs": {name: name for name in self.outputs},
            **{key: values for key, values in lists.items() if values},
        }

    @property
    def client_inputs(self) -> list[dict[str, Any]]:
        return [_entry(name) for name in self.inputs]

    @property
    def client_outputs(self) -> list[dict[str, Any]] | None:
        """Return the entries of the manifest's `outputs`, or None if clients get the module's outputs."""
        return [_entry(name) for name in self.outputs] if "def postprocess(" in self.hooks else None


def _entry(name: str) -> dict[str, Any]:
    return {"name": name, "dtype": "i32" if name == "tokens" else "bytes", "shape": "n"}


def row(**values: str | bytes) -> Request:
    """Return a request of one row with strings."""
    coded = {name: value.encode() if isinstance(value, str) else value for name, value in values.items()}
    return {name: np.array([[value]], object) for name, value in coded.items()}


def value(request: Request, name: str) -> bytes:
    """Return the string of a request's only row."""
    content: bytes = request[name].reshape(-1)[0]
    return content


def label_scores(classes: Iterable[Any], labels: Sequence[str]) -> Array:
    """Return the scores of a pipeline's answer to one row, in the order of `labels`.

    `classes` has a label and a score for each class.
    """
    scores = {each["label"]: each["score"] for each in classes}
    return np.array([scores[label] for label in labels], np.float32)
