"""The bundle as data: the content of a manifest and of the files beside it, after every rule has been checked.

All shapes here are in row-major order, as numpy, StableHLO and the wire have them, whichever format version the
bundle is written in. Nothing in this file reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["model", "meta"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output."""

    name: str
    #: Element type token: f16 f32 f64 bf16 f8_e5m2 f8_e4m3 i8 i16 i32 i64 u8 u16 u32 u64 bool.
    dtype: str
    #: Elements along each axis, row-major; -1 on the batch axis and on variable axes, else positive.
    dims: tuple[int, ...]
    #: Index into `dims`, or None for a tensor without a batch axis.
    batch_axis: int | None
    #: One ASCII letter per axis, in the order of `dims`. `n` or `b` is the batch axis.
    letters: str

    @property
    def variable_axes(self) -> tuple[int, ...]:
        """Indices into `dims` of the axes (the batch axis aside) whose size the manifest leaves open."""
        return tuple(i for i, d in enumerate(self.dims) if d == -1 and i != self.batch_axis)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight, an argument of every module after the inputs."""

    name: str
    dtype: str
    #: Row-major, as the modules take it: in format 2.0 the reverse of the shape the weights file records.
    shape: tuple[int, ...]
    nbytes: int
    #: Where its bytes start, counted from the start of the weights file.
    offset: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of `manifest.yaml`."""

    #: "2.0", "3.0" or "3.1".
    format_version: str
    description: str
    kind: Kind
    #: tensors of the modules; may be empty for a meta model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: tensors of the clients if the hooks change them; None if they are those of the modules
    client_inputs: tuple[TensorSpec, ...] | None
    client_outputs: tuple[TensorSpec, ...] | None
    #: Rows, ascending, no duplicates; may be empty (one module of a fixed size).
    compiled_batch_sizes: tuple[int, ...]
    #: One entry per variant: the sizes of `variable_axes`, in that order. Empty without variants.
    input_shapes: tuple[tuple[int, ...], ...]
    #: Names of the bundles that a meta model may call, in the manifest's order.
    meta_calls: tuple[str, ...]
    #: free form
    provenance: Mapping[str, Any]
    #: measurements of the written bundle: max_abs_error and the like, or such numbers by module; from format 3.0 on; may
    #: be empty
    numerics: Mapping[str, float | Mapping[str, float]]
    #: File name -> SHA-256, hexadecimal, of its content: of the weights and of every module in format 3.1, else empty.
    sha256: Mapping[str, str] = field(default_factory=dict)
    #: Names of the models of Triton, none of them a bundle, that a meta model may call, in the manifest's order.
    meta_external: tuple[str, ...] = ()
    #: a meta model's `run` may begin again if a runtime dies
    meta_restartable: bool = False
    #: only meta models may call it; clients may not
    internal: bool = False

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
        """True if every client tensor has its batch axis first: then Triton can gather requests."""
        return all(spec.batch_axis == 0 for spec in (*self.wire_inputs, *self.wire_outputs))

    @property
    def variable_axes(self) -> tuple[tuple[int, int], ...]:
        """(input index, axis) of every variable axis of the executable inputs: by input, then by axis."""
        return tuple((i, axis) for i, spec in enumerate(self.inputs) for axis in spec.variable_axes)

    @property
    def batched(self) -> bool:
        """True if the executable inputs have a batch axis (all of them have, or none)."""
        return any(spec.batch_axis is not None for spec in self.inputs)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose manifest, file names and weights header keep every rule that needs no compiler."""

    #: The directory's name; the model's name everywhere.
    name: str
    #: Absolute.
    path: Path
    manifest: Manifest
    #: `model.py`, or None.
    hooks: Path | None
    #: (variant, batch size) -> file. Size 0 marks an unsuffixed file, whose batch size only the module knows.
    modules: Mapping[tuple[int, int], Path]
    weights_file: Path | None
    #: In argument order.
    weights: tuple[WeightSpec, ...]
    #: SHA-256, hexadecimal, over every file's relative name and content; empty if it was not asked for.
    digest: str
    #: `rsrv_bundle.weights.stamp` of the file that `weights` describes; empty if there is none
    weights_stamp: tuple[int, ...] = ()

    @property
    def summed_files(self) -> tuple[Path, ...]:
        """Files with checksums in format 3.1: the weights and every module."""
        weights = () if self.weights_file is None else (self.weights_file,)
        return (*dict.fromkeys(self.modules.values()), *weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights together."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def variants(self) -> int:
        """Number of sets of input sizes that the bundle is compiled for; 1 without `input_shapes`."""
        return max(1, len(self.manifest.input_shapes))

    def output_names(self, count: int) -> tuple[str, ...]:
        """Return names for `count` results of a module: the declared ones, then `output_{k}` for results beyond them."""
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
        """Return the variant that executable inputs of these shapes select: an exact match or None.

        Only the variable axes decide; the caller compares the fixed axes. None also if the number of inputs or a rank
        is wrong.
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
