"""Bundles as data: the content of a manifest and of the files beside it, after every rule has been checked.

All shapes are in row-major order, as in numpy, in StableHLO and on the wire, even if the bundle has another format version. This
module reads no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rsrv_bundle import dtypes
from rsrv_bundle.compatibility import Feature

Kind = Literal["model", "meta"]
#: Treatment of a further sequence while every slot is taken.
WhenFull = Literal["wait", "refuse", "host"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output."""

    name: str
    #: Element type token: f16 f32 f64 bf16 f8_e5m2 f8_e4m3 i8 i16 i32 i64 u8 u16 u32 u64 bool.
    dtype: str
    #: Number of elements along each axis, row-major. It is -1 for the batch axis and for variable axes, and positive for others.
    dims: tuple[int, ...]
    #: Index into `dims`, or None for a tensor without a batch axis.
    batch_axis: int | None
    #: One ASCII letter per axis, in the order of `dims`. `n` or `b` is the batch axis.
    letters: str

    @property
    def variable_axes(self) -> tuple[int, ...]:
        """Indices into `dims` of the axes without a fixed size, except the batch axis."""
        return tuple(i for i, d in enumerate(self.dims) if d == -1 and i != self.batch_axis)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight, an argument of every module after the inputs."""

    name: str
    dtype: str
    #: Row-major shape, as the modules take the weight. In format 2.0, the weights file has the reversed shape.
    shape: tuple[int, ...]
    nbytes: int
    #: Position of the weight's first byte in the weights file.
    offset: int


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One state tensor of one slot."""

    name: str
    dtype: str
    #: Fixed sizes. The pool of all slots has the shape (slots, *dims).
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.dims) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State that a model keeps on the device for each sequence.

    Every module of the model takes the slot of each row, i32 [n], after its inputs, and one pool for each state tensor after the
    weights. The module returns the pools after its outputs. A row with the slot `k` continues the sequence in slot k. A row with
    the slot `~k` begins a new sequence in slot k. A row whose slot is the number of slots is padding: the module reads zeros for
    it, and writes nothing.
    """

    #: Maximum number of sequences on the device at the same time.
    slots: int
    #: State tensors in the order of the modules' arguments.
    tensors: tuple[StateTensor, ...]
    #: A sequence without a request for this many seconds is dropped.
    idle_timeout_s: float
    when_full: WhenFull

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """Generation of tokens with a model that has state. The runtime feeds each token back until an answer ends."""

    #: Name of the input i32 [n, t] with a chunk of tokens of each sequence, and zeros after the last token.
    tokens: str
    #: Name of the input i32 [n] with the number of valid tokens in each chunk.
    lengths: str
    #: Name of the input f32 [n, 4] with the temperature (0: greedy), top_k (0: off), top_p (1: off) and seed (0 to 2**24 - 1).
    sampling: str
    #: Name of the output i32 [n] with the next token, or -1 if the logits were not finite.
    token: str
    #: Maximum number of tokens of a sequence, prompt and answer together.
    context: int
    #: Token ids that end an answer.
    stop: tuple[int, ...]
    #: Maximum number of tokens of an answer if the client sets no limit.
    max_tokens: int
    #: Relative path of a file of the bundle, or None if clients send and get tokens instead of text.
    tokenizer: str | None
    #: Template of the prompt, in which the client's text replaces {text}.
    template: str
    #: Chat template in Jinja, under the key `template`, and the texts that it uses, such as `bos_token`. Empty if there is none.
    chat: Mapping[str, str] = field(default_factory=dict)

    @property
    def client_inputs(self) -> tuple[TensorSpec, ...]:
        """Tensors that a client sends, in addition to the request's parameters."""
        return (self._pieces("text_input"),)

    @property
    def client_outputs(self) -> tuple[TensorSpec, ...]:
        """Tensors that a client gets. Each response has the first tensor. Only the last response has the others."""
        return (self._pieces("text_output"), *_USAGE)

    def _pieces(self, name: str) -> TensorSpec:
        if self.tokenizer is None:
            return TensorSpec("tokens", "i32", (-1,), None, "t")
        return TensorSpec(name, dtypes.BYTES, (1,), None, "k")


_USAGE = tuple(
    TensorSpec(name, dtype, (1,), None, "k")
    for name, dtype in (
        ("finish_reason", dtypes.BYTES),
        ("prompt_tokens", "i32"),
        ("completion_tokens", "i32"),
        ("first_token_s", "f32"),
        ("token_s", "f32"),
    )
)


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Task of a model, and the tensors that clients send and get for this task."""

    #: A pipeline tag of the Hugging Face hub, one of `rsrv_bundle.task_section.KINDS`.
    kind: str
    #: Role -> name of a tensor that clients send.
    inputs: Mapping[str, str]
    #: Role -> name of a tensor that clients get.
    outputs: Mapping[str, str]
    #: Names of the classes. In a classification task, one name for each column of `scores`.
    labels: tuple[str, ...] = ()
    #: Lengths to which an embedding may be cut, ascending.
    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PadSpec:
    """A variable axis along which a server pads requests. The variants are its lengths, ascending."""

    #: Letter of the axis in the inputs, and in the outputs that the server cuts back to a request's length.
    axis: str
    #: Padding value of each input with the axis, by the input's name.
    values: Mapping[str, float]
    #: Input that marks the padding, or None if there is none. The model ignores the other inputs' values in the padding.
    mask: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of `manifest.yaml`."""

    #: Either "3" or "2.0".
    format_version: str
    description: str
    kind: Kind
    #: Tensors of the modules. They may be empty for a meta model.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Tensors that clients send and receive if hooks convert them, or None if clients use the tensors of the modules.
    client_inputs: tuple[TensorSpec, ...] | None
    client_outputs: tuple[TensorSpec, ...] | None
    #: Compiled numbers of rows, ascending, without duplicates. Empty if there is one module of a fixed size.
    compiled_batch_sizes: tuple[int, ...]
    #: For each variant, the sizes of `variable_axes`, in the same order. Empty without variants.
    input_shapes: tuple[tuple[int, ...], ...]
    #: Names of the bundles that a meta model may call, in the manifest's order.
    meta_calls: tuple[str, ...]
    #: Facts about the export, in free form.
    provenance: Mapping[str, Any]
    #: Errors that the exporter measured, such as max_abs_error, or mappings from a module to its error. Empty in format 2.0.
    numerics: Mapping[str, float | Mapping[str, float]]
    #: SHA-256, hexadecimal, of the weights and of every module, by file name. Empty in format 2.0.
    sha256: Mapping[str, str] = field(default_factory=dict)
    #: Names of the models of other Triton backends that a meta model may call, in the manifest's order. They have no bundle.
    meta_external: tuple[str, ...] = ()
    #: True if a meta model's `run` may begin again after a runtime dies.
    meta_restartable: bool = False
    #: True if only meta models may call the model.
    internal: bool = False
    state: StateSpec | None = None
    #: How the model generates tokens, or None. Only a model with `state` can generate tokens.
    generate: GenerateSpec | None = None
    task: TaskSpec | None = None
    pad: PadSpec | None = None
    features: frozenset[Feature] = frozenset()

    @property
    def chunks(self) -> tuple[int, ...]:
        """Number of tokens in a chunk, for each variant of a model that generates tokens.

        The length of the chunk is the only variable axis of such a model.
        """
        return tuple(sizes[0] for sizes in self.input_shapes if sizes)

    def padded_axis(self, spec: TensorSpec) -> int | None:
        """Return the axis of an executable tensor that a server pads or cuts, or None if it has none."""
        return spec.variable_axes[0] if self.pad is not None and spec.variable_axes else None

    @property
    def wire_inputs(self) -> tuple[TensorSpec, ...]:
        """Tensors that a client sends."""
        return self.inputs if self.client_inputs is None else self.client_inputs

    @property
    def wire_outputs(self) -> tuple[TensorSpec, ...]:
        """Tensors that a client gets."""
        return self.outputs if self.client_outputs is None else self.client_outputs

    @property
    def rows_first(self) -> bool:
        """True if every client tensor has its batch axis first, so that Triton can batch requests."""
        return all(spec.batch_axis == 0 for spec in (*self.wire_inputs, *self.wire_outputs))

    @property
    def coalesces(self) -> bool:
        """True if every tensor of the modules has rows.

        The rows of several requests may then share an execution, and a large request may be split into several executions.
        """
        return bool(self.inputs) and all(
            spec.batch_axis is not None for spec in (*self.inputs, *self.outputs)
        )

    @property
    def variable_axes(self) -> tuple[tuple[int, int], ...]:
        """The pair (input index, axis) of every variable axis of the executable inputs, in the order of inputs and axes."""
        return tuple((i, axis) for i, spec in enumerate(self.inputs) for axis in spec.variable_axes)

    @property
    def batched(self) -> bool:
        """True if the executable inputs have a batch axis. Either all inputs have one, or none has."""
        return any(spec.batch_axis is not None for spec in self.inputs)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose manifest, file names and weights header follow every rule that can be checked without a compiler."""

    #: Name of the directory, which is also the model's name.
    name: str
    #: Absolute path of the directory.
    path: Path
    manifest: Manifest
    #: Path of `model.py`, or None without hooks.
    hooks: Path | None
    #: Files by variant and batch size. The batch size is 0 if the file's name has none, so that only the module contains it.
    modules: Mapping[tuple[int, int], Path]
    weights_file: Path | None
    #: Weights in argument order.
    weights: tuple[WeightSpec, ...]
    #: SHA-256, hexadecimal, over every file's relative name and content. Empty if it was not requested.
    digest: str
    #: `rsrv_bundle.weights.stamp` of the file that `weights` describes. Empty without such a file.
    weights_stamp: tuple[int, ...] = ()

    @property
    def summed_files(self) -> tuple[Path, ...]:
        """Paths of the files that have checksums in format 3: the weights and every module."""
        weights = () if self.weights_file is None else (self.weights_file,)
        return (*dict.fromkeys(self.modules.values()), *weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights together."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def variants(self) -> int:
        """Number of sets of input sizes for which the bundle is compiled. It is 1 without `input_shapes`."""
        return max(1, len(self.manifest.input_shapes))

    def output_names(self, count: int) -> tuple[str, ...]:
        """Return names for `count` results of a module: the declared names, and `output_{k}` for further results."""
        declared = [spec.name for spec in self.manifest.outputs[:count]]
        return (*declared, *(f"output_{k}" for k in range(len(declared), count)))

    def input_shape(self, index: int, variant: int, rows: int) -> tuple[int, ...]:
        """Return the concrete shape of executable input `index` for a variant and a batch of `rows` rows.

        Raises IndexError for an input or a variant that does not exist.
        """
        spec = self.manifest.inputs[index]
        dims = list(spec.dims)
        if spec.batch_axis is not None:
            dims[spec.batch_axis] = rows
        if self.manifest.input_shapes:
            sizes = self.manifest.input_shapes[variant]
            for (owner, axis), size in zip(self.manifest.variable_axes, sizes, strict=True):
                if owner == index:
                    dims[axis] = size
        elif variant != 0:
            raise IndexError(f"bundle {self.name} has one variant, not {variant + 1}")
        return tuple(dims)

    def variant_of(self, shapes: Sequence[tuple[int, ...]]) -> int | None:
        """Return the variant with exactly these shapes of executable inputs, or None.

        Only the variable axes are compared; the caller compares the fixed axes. Also return None if the number of inputs or a rank is
        wrong.
        """
        specs = self.manifest.inputs
        if len(shapes) != len(specs) or any(
            len(shape) != len(spec.dims) for shape, spec in zip(shapes, specs, strict=True)
        ):
            return None
        if not self.manifest.input_shapes:
            return 0
        key = tuple(shapes[i][axis] for i, axis in self.manifest.variable_axes)
        try:
            return self.manifest.input_shapes.index(key)
        except ValueError:
            return None
