"""Exporting ONNX files, checked against onnxruntime. Needs the extra `export-onnx`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx

from rsrv.extras import install_command
from rsrv_bundle.calling import Results
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.inputs import check_sample_names, sample_count
from rsrv_bundle.interface import LETTERS
from rsrv_bundle.numerics import TOLERANCE, difference
from rsrv_bundle.onnx_import.evaluate import Evaluator
from rsrv_bundle.onnx_import.model import Input, Node, OnnxModel, Weight, graphs_of, read_model
from rsrv_bundle.reader import sha256_of
from rsrv_bundle.spec import Bundle
from rsrv_bundle.writer import free_target

Array = np.ndarray[Any, Any]

#: Provenance key of the changes that an export made, as JSON: inputs that it fixed (`bind`), outputs that it chose
#: (`outputs`), and batch axes of the inputs if each row is computed separately (`rows`).
_CHANGES = "onnx_changes"
#: Operators that scale by the largest value in the whole batch, so that a row would depend on the other rows.
_WHOLE_BATCH = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
#: Largest allowed difference between a row in a batch with a common scale and the same row in a batch of one, relative to the
#: largest magnitude.
_STEPS_OF_SCALE = 0.1
#: Operators that pass an index on unchanged.
_PASS = frozenset({"Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand"})


def export_onnx(
    file: str | os.PathLike[str],
    *,
    out_dir: str | os.PathLike[str],
    batch_sizes: Sequence[int] = (),
    batch_axis: Mapping[str, int] | None = None,
    input_shapes: Sequence[Mapping[str, int]] = (),
    pad: str = "",
    bind: Mapping[str, Any] | None = None,
    outputs: Sequence[str] | None = None,
    samples: Mapping[str, Array] | None = None,
    **options: Any,
) -> Bundle:
    """Write an ONNX model as a bundle, and compare the bundle with onnxruntime at every size and variant.

    file: the path of the model. Its external data must be in its folder. Nothing in it is executed.
    batch_sizes: sizes to compile, in rows. Without it, the model keeps its shapes, and has no batch axis.
    batch_axis: the batch axis of an input, by the input's name. For other inputs, it is the first of these axes that exists:
        1. the axis that has the same name in the file as the first axis of the first input,
        2. the first axis, unless the file gives it a size above 1,
        3. the first axis that has the size 1, or neither size nor name.
    input_shapes: for each variant, the sizes of the other open axes, by their names in the file: `{"sequence": 128}`.
        The name of a nameless axis consists of its input and its index: `{"image_2": 224}`.
        With only one variant, these axes have fixed sizes.
    pad: as for `export_bundle`, with the axis by its name in the file: `sequence=0,mask=attention_mask`.
    bind: values of inputs that the bundle fixes, by name, such as `{"sr": 16000}`. Requests do not have these inputs.
    outputs: values of the graph to return in place of its outputs. Nodes that they do not depend on are dropped.
    samples: inputs for the comparison, by name, in addition to random ones. The first axis of an array counts samples. Its other
        axes are the axes of the input without the batch axis.
    The rest is as for `rsrv_bundle.export.export_bundle`.

    Raises BundleError if the file is damaged or reads data outside of its folder, if an operator cannot be compiled, or if the values of
    a request determine shapes. Also raises the errors of `export_bundle`.
    """
    free_target(out_dir, options.get("overwrite", False))
    path = Path(file)
    with jax.enable_x64(True):
        model = read_model(path)
        evaluator = Evaluator(model, outputs)
        bound = _bound(model, bind or {})
        named_inputs = [
            value for value in (evaluator.inputs if outputs else model.inputs) if value.name not in bound
        ]
        plan = _plan(named_inputs, batch_sizes, batch_axis or {}, input_shapes)
        rows = plan.batch if len(plan.open) < len(plan.batch) or _mixes_rows(model) else {}
        # If the user names the batch axis of the first input in `plan.open`, the batch axes of all inputs are confirmed.
        unproven = [] if (batch_axis or {}).keys() & plan.open[:1] else plan.open
        # A value may be listed twice among the outputs. The bundle returns it once.
        names = list(dict.fromkeys(outputs or model.graph.outputs))
        examples = {value.name: _example(model, value, plan) for value in named_inputs}
        examples |= _sampled(named_inputs, plan, samples or {})

        def call(params: Mapping[str, Any], **inputs: Any) -> dict[str, Any]:
            def evaluate(**arrays: Any) -> dict[str, Any]:
                return evaluator(params, **arrays, **bound)

            return _each_row(model, evaluate, inputs, rows) if rows else evaluate(**inputs)

        return export_bundle(
            call,
            dict(evaluator.weights),
            examples,
            batch_sizes=batch_sizes,
            batch_axis=None,
            out_dir=out_dir,
            axes=plan.axes,
            input_shapes=plan.input_shapes,
            pad=",".join(_by_letter(part, plan.letters) for part in pad.split(",")),
            original=_original(model, names, bound, rows, unproven),
            # `object` belongs to no file, so the provenance gets no commit. The commit of rsrv's own files says nothing about the
            # model.
            **{"code": object, **options},
        )


def eager_onnx(file: str | os.PathLike[str]) -> OnnxSource:
    """Return the model, run by onnxruntime, as a function from numpy arrays by name to numpy arrays."""
    return OnnxSource(Path(file), {})


class OnnxSource:
    """A model that onnxruntime runs, as a function from numpy arrays by name to numpy arrays."""

    def __init__(self, path: Path, provenance: Mapping[str, Any]) -> None:
        self._path = path
        self._changes = json.loads(provenance.get(_CHANGES, "{}"))
        self._original: Original | None = None

    def of(self, provenance: Mapping[str, Any]) -> OnnxSource:
        """Return the model as a bundle's export changed it: with fixed inputs, chosen outputs and separately computed rows."""
        return OnnxSource(self._path, provenance)

    def __call__(self, **inputs: Any) -> Results:
        if self._original is None:
            model = read_model(self._path)
            outputs = self._changes.get("outputs") or list(model.graph.outputs)
            self._original = _original(
                model,
                outputs,
                _bound(model, self._changes.get("bind", {})),
                self._changes.get("rows", {}),
                (),
            )
        return self._original.eager(**inputs)


# --- inputs -----------------------------------------------------------------------------------------------


class _Axes:
    """The bundle's axes, planned from the axes in the file."""

    def __init__(self) -> None:
        self.axes: dict[str, str] = {}
        self.input_shapes: list[dict[str, int]] = []
        #: Letters of the open axes by their names in the file.
        self.letters: dict[str, str] = {}
        #: Example shapes by input.
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: Batch axes by input. Empty without batch sizes.
        self.batch: dict[str, int] = {}
        #: Inputs whose batch axis has no fixed size in the file.
        self.open: list[str] = []


def _plan(
    inputs: Sequence[Input],
    batch_sizes: Sequence[int],
    batch_axis: Mapping[str, int],
    input_shapes: Sequence[Mapping[str, int]],
) -> _Axes:
    plan = _Axes()
    if unknown := sorted(batch_axis.keys() - {value.name for value in inputs}):
        raise BundleError(f"batch_axis: the model has no input '{unknown[0]}'")
    #: Letters of open axes. The key is an axis's name, and how many earlier axes of the same input have this name.
    letters: dict[tuple[str, int], str] = {}
    free = iter(LETTERS)
    batch = _batch_name(inputs)
    for value in inputs:
        dims = _dims(value)
        axis = _batch_axis_of(value, dims, batch, batch_axis) if batch_sizes else None
        shape, own, seen = [], [], dict[str, int]()
        for at, dim in enumerate(dims):
            if at == axis:
                plan.batch[value.name] = at
                if not isinstance(dim, int):
                    plan.open.append(value.name)
                shape.append(1)
                own.append("n")
            elif isinstance(dim, int):
                shape.append(dim)
                own.append(next(free))
            else:
                name = _axis_name(value, at)
                size = _size(name, value, at, input_shapes, bool(batch_sizes))
                key = (name, seen.get(name, 0))
                seen[name] = key[1] + 1
                if key not in letters:
                    letters[key] = next(free)
                shape.append(size)
                own.append(letters[key])
        plan.shapes[value.name] = tuple(shape)
        plan.axes[value.name] = "".join(own)
    plan.letters = {name: letter for (name, _), letter in letters.items()}
    for sizes in input_shapes:
        if unknown := sorted(sizes.keys() - plan.letters.keys()):
            raise BundleError(
                f"input_shapes: no open axis is called '{unknown[0]}'; the open ones are"
                f" {', '.join(sorted(plan.letters)) or 'none'}"
            )
    if len(input_shapes) > 1:
        plan.input_shapes = [
            {letter: sizes[name] for (name, _), letter in letters.items()} for sizes in input_shapes
        ]
    return plan


def _by_letter(part: str, letters: Mapping[str, str]) -> str:
    """Replace the name of an axis in a part of `pad` by the letter of the axis."""
    name, equals, value = part.partition("=")
    return f"{letters.get(name.strip(), name)}{equals}{value}"


def _dims(value: Input) -> tuple[int | str | None, ...]:
    if value.dims is None:
        raise BundleError(
            f"input '{value.name}': the file does not say how many axes it has; write its shape into the file"
        )
    return value.dims


def _axis_name(value: Input, axis: int) -> str:
    return str(_dims(value)[axis] or f"{value.name}_{axis}")


def _batch_name(inputs: Sequence[Input]) -> str | None:
    first = inputs[0].dims if inputs else None
    return first[0] if first and isinstance(first[0], str) else None


def _batch_axis_of(
    value: Input, dims: Sequence[int | str | None], batch: str | None, given: Mapping[str, int]
) -> int:
    if not dims:
        raise BundleError(
            f"input '{value.name}': has no axes, so it cannot differ between the rows of a batch; fix it with --bind"
            f" {value.name}=VALUE, or leave out the batch sizes"
        )
    if value.name in given:
        axis = given[value.name]
        if not 0 <= axis < len(dims):
            raise BundleError(f"batch_axis: input '{value.name}' has axes 0 to {len(dims) - 1}, not {axis}")
    elif batch in dims:
        axis = dims.index(batch)
    elif isinstance(dims[0], int) and dims[0] != 1:
        # The first axis is not the batch. It counts something else, such as the layers of a state.
        axis = next((at for at, dim in enumerate(dims) if dim in (1, None)), 0)
    else:
        axis = 0
    if isinstance(dims[axis], int) and dims[axis] != 1:
        raise BundleError(
            f"input '{value.name}': its axis {axis} has {dims[axis]} elements in the file, so it is not the batch; name"
            f" the right one with --batch-axis {value.name}=AXIS, or leave out the batch sizes"
        )
    return axis


def _size(name: str, value: Input, at: int, input_shapes: Sequence[Mapping[str, int]], batched: bool) -> int:
    if not input_shapes or any(name not in sizes for sizes in input_shapes):
        raise BundleError(
            f"input '{value.name}': its axis {at} has no fixed size in the file; give one with --input-shape {name}=SIZE,"
            " several times for several variants"
            + ("" if batched or at else ", or make it the batch with --batch-sizes 1,8")
        )
    return input_shapes[0][name]


def _bound(model: OnnxModel, bind: Mapping[str, Any]) -> dict[str, Array]:
    bound = {}
    for name, value in bind.items():
        spec = next((value for value in model.inputs if value.name == name), None)
        if spec is None:
            raise BundleError(
                f"bind: the model has no input '{name}'; it has {', '.join(value.name for value in model.inputs)}"
            )
        array = np.asarray(value)
        if array.dtype.kind == "f" and spec.dtype.kind in "iu" and (array != np.trunc(array)).any():
            raise BundleError(f"bind: input '{name}' is {spec.dtype}, so its value must be a whole number")
        shape = [dim if isinstance(dim, int) else 1 for dim in spec.dims or ()]
        bound[name] = (
            np.broadcast_to(array, shape).astype(spec.dtype) if array.ndim == 0 else array.astype(spec.dtype)
        )
    return bound


def _example(model: OnnxModel, value: Input, plan: _Axes) -> Any:
    """Return example values of an input of integers, or the shape and type of another input.

    If the integers index a table, they are valid indices of the table.
    """
    shape = plan.shapes[value.name]
    if value.dtype.kind not in "iu":
        return jax.ShapeDtypeStruct(shape, value.dtype)
    low = 0
    size = _table_size(model, value.name)
    if size is not None:
        top = size
    elif len(shape) == 1 and plan.axes[value.name] == "n":
        # An input with one number per row probably holds lengths. None of them exceeds the longest axis of the other inputs.
        longest = [
            size
            for input_name, sizes in plan.shapes.items()
            for letter, size in zip(plan.axes[input_name], sizes, strict=True)
            if letter != "n" and input_name != value.name
        ]
        low, top = 1, max(longest, default=1) + 1
    elif value.dtype.itemsize == 1:
        # Integers of 8 bits are probably pixels.
        top = np.iinfo(value.dtype).max + 1
    else:
        # Other integers are probably a mask, or token types. Draw 0 and 1.
        top = 2
    # Draw 64 rows, because one row would have few of the possible values.
    drawn_shape = [
        64 if letter == "n" else size for letter, size in zip(plan.axes[value.name], shape, strict=True)
    ]
    top = max(min(top, np.iinfo(value.dtype).max), low + 1)
    return np.random.default_rng(0).integers(low, top, drawn_shape).astype(value.dtype)


def _table_size(model: OnnxModel, name: str) -> int | None:
    """Return the size of the smallest table that an input indexes, or None if it indexes no table."""
    same = {name}
    smallest: int | None = None
    stored = model.graph.stored()

    def constant(value: str) -> Array | None:
        array = stored.get(value)
        array = model.weights[array.name] if isinstance(array, Weight) else array
        return array if isinstance(array, np.ndarray) and array.size else None

    for node in model.graph.nodes:
        if node.inputs and node.inputs[0] in same and node.op in _PASS:
            same.update(node.outputs)
            continue
        # Ignore a damaged node here. The evaluation of the graph reports it.
        with suppress(IndexError, OverflowError, TypeError, ValueError):
            if (count := _values_of_index(node, same, constant)) is not None:
                smallest = count if smallest is None else min(smallest, count)
    return smallest


def _values_of_index(node: Node, same: set[str], constant: Callable[[str], Array | None]) -> int | None:
    """Return how many values an index may have in a node, or None if the node does not use one of `same` as an index."""
    if node.op == "Gather" and node.inputs[1] in same:
        table = constant(node.inputs[0])
        axis = int(node.attributes.get("axis", 0))
        return None if table is None or not -table.ndim <= axis < table.ndim else int(table.shape[axis])
    if node.op == "EmbedLayerNormalization":
        at = next((at for at in (0, 1) if node.inputs[at] in same), None)
        table = None if at is None else constant(node.inputs[2 * at + 2])
        return None if table is None or not table.ndim else len(table)
    if node.op == "OneHot" and node.inputs[0] in same:
        depth = constant(node.inputs[1])
        return None if depth is None else int(depth.reshape(-1)[0])
    if node.op == "Equal" and not same.isdisjoint(node.inputs):
        # TensorFlow compares an index with the numbers of all classes. A comparison with a single number, such as the padding's
        # id, does not limit an index.
        numbers = next((array for name in node.inputs if (array := constant(name)) is not None), None)
        limits = numbers is not None and numbers.size > 1 and numbers.dtype.kind in "iu"
        return int(numbers.max()) + 1 if limits and numbers is not None else None
    return None


def _sampled(inputs: Sequence[Input], plan: _Axes, samples: Mapping[str, Array]) -> dict[str, Array]:
    """Return samples as example inputs."""
    if not samples:
        return {}
    check_sample_names(samples, [value.name for value in inputs])
    examples = {}
    for value in inputs:
        array = samples[value.name]
        axis = plan.batch.get(value.name)
        sizes = list(_dims(value))
        if axis is not None:
            del sizes[axis]
        fits = array.ndim == len(sizes) + 1 and all(
            size == own for size, own in zip(array.shape[1:], sizes, strict=True) if isinstance(own, int)
        )
        if array.dtype != value.dtype or not fits or not len(array):
            shape = ", ".join("any" if size is None else str(size) for size in ("samples", *sizes))
            raise BundleError(
                f"samples: {value.name}: is {array.dtype}{list(array.shape)}; the model takes {value.dtype}[{shape}]"
            )
        examples[value.name] = array[0] if axis is None else np.moveaxis(array, 0, axis)
    sample_count(samples.values())
    return examples


# --- rows -------------------------------------------------------------------------------------------------


def _mixes_rows(model: OnnxModel) -> bool:
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    return any(
        node.op in _WHOLE_BATCH for graph in graphs for inner in graphs_of(graph) for node in inner.nodes
    )


def _each_row(
    model: OnnxModel,
    evaluate: Callable[..., Mapping[str, Any]],
    inputs: Mapping[str, Any],
    axes: Mapping[str, int],
) -> dict[str, Any]:
    """Evaluate a model separately for each row of a batch. `axes` are the batch axes of the inputs."""
    places: dict[str, int | None] = {}

    def row(arrays: Mapping[str, Any]) -> dict[str, Any]:
        single = {name: jnp.expand_dims(value, axes[name]) for name, value in arrays.items()}
        outputs = evaluate(**single)
        for name, value in outputs.items():
            places[name] = _row_axis(model, name, value.shape, axes, single)
        return {
            name: value if (axis := places[name]) is None else jnp.squeeze(value, axis)
            for name, value in outputs.items()
        }

    outputs = jax.vmap(row, in_axes=({name: axes[name] for name in inputs},))(dict(inputs))
    return {name: jnp.moveaxis(value, 0, places[name] or 0) for name, value in outputs.items()}


def _row_by_row(
    model: OnnxModel,
    outputs: Sequence[str],
    ask: Callable[[Mapping[str, Array]], list[Array]],
    inputs: Mapping[str, Array],
    axes: Mapping[str, int],
) -> dict[str, Array]:
    """Run onnxruntime separately on each row, and join the outputs as `_each_row` does."""
    count = next(array.shape[axes[name]] for name, array in inputs.items())
    singles = [
        {name: np.take(array, [row], axes[name]) for name, array in inputs.items()} for row in range(count)
    ]
    joined = {}
    for name, values in zip(outputs, zip(*map(ask, singles), strict=True), strict=True):
        axis = _row_axis(model, name, values[0].shape, axes, singles[0])
        joined[name] = np.stack(values) if axis is None else np.concatenate(values, axis)
    return joined


def _row_axis(
    model: OnnxModel, output: str, shape: tuple[int, ...], axes: Mapping[str, int], inputs: Mapping[str, Any]
) -> int | None:
    """Return the batch axis of an output for one row, or None if the output has no such axis. Callers then add one in front.

    If the file gives an axis the name of the batch, this is the batch axis. The state of a recurrent model has the shape of an
    input, and the same batch axis. In other outputs, the first axis of size 1 is the batch.
    """
    names = {value.dims[axes[value.name]] for value in model.inputs if value.dims and value.name in axes}
    dims = model.output_dims.get(output, ())
    if len(dims) == len(shape):
        for axis, dim in enumerate(dims):
            if isinstance(dim, str) and dim in names and shape[axis] == 1:
                return axis
    for name, axis in axes.items():
        if name in inputs and tuple(inputs[name].shape) == shape:
            return axis
    return shape.index(1) if 1 in shape else None


def _check_rows(
    model: OnnxModel,
    outputs: Sequence[str],
    ask: Callable[[Mapping[str, Array]], list[Array]],
    inputs: Mapping[str, Array],
    axes: Mapping[str, int],
    unproven: Sequence[str],
) -> None:
    """Raise BundleError if elements of the batch axes of `unproven` depend on each other, as time steps do.

    The bundle would compute each row separately, which would hide such a dependency. So run the model on the last row alone, and
    on the first row followed by the last row, and compare the results for the last row. Inputs that are not in `unproven` have
    only their last row in both runs.
    """

    def chosen(*rows: int) -> dict[str, Array]:
        return {
            name: np.take(array, rows if name in unproven else rows[-1:], axes[name])
            for name, array in inputs.items()
        }

    alone = ask(chosen(-1))
    try:
        together = ask(chosen(0, -1))
    except Exception:  # noqa: BLE001 - onnxruntime may raise anything
        # The graph takes only one row, for example because a Reshape contains the number 1. So no rows can depend on each other.
        return
    allowed = _STEPS_OF_SCALE if _mixes_rows(model) else TOLERANCE["f16"]
    for output, both, single in zip(outputs, together, alone, strict=True):
        if both.dtype.kind != "f":
            continue
        grown = [axis for axis, size in enumerate(single.shape) if both.shape[axis] != size]
        last = both[(*[slice(None)] * grown[0], slice(-single.shape[grown[0]], None))] if grown else both
        if last.shape == single.shape:
            magnitude = float(np.abs(both[np.isfinite(both)]).max(initial=0))
            if difference(last, single, magnitude)[1] <= allowed:
                continue
        name = unproven[0]
        [value] = [value for value in model.inputs if value.name == name]
        raise BundleError(
            f"input '{name}': output '{output}' at an element of axis {axes[name]} depends on the elements before it, as with time"
            f" steps, so it is not the batch; leave out the batch sizes, and give --input-shape {_axis_name(value, axes[name])}=SIZE; if"
            f" each element is a request of its own, pass --batch-axis {name}={axes[name]}"
        )


# --- onnxruntime ------------------------------------------------------------------------------------------


def _original(
    model: OnnxModel,
    outputs: Sequence[str],
    bound: Mapping[str, Array],
    rows: Mapping[str, int],
    unproven: Sequence[str],
) -> Original:
    """Return the original model of an export, run by onnxruntime.

    `rows` has the batch axes of the inputs if each row is computed separately. `unproven` are the inputs whose batch axis may be
    another axis, such as time.
    """
    sessions: list[Any] = []

    def run(**inputs: Any) -> dict[str, Any]:
        # Start the session here, after the whole graph was lowered. Lowering refuses tensors that are too large, but onnxruntime
        # allocates any tensor that a file asks for.
        if not sessions:
            sessions.append(_session(model, outputs))
        [session] = sessions
        taken = {node.name for node in session.get_inputs()}
        constants = {name: array for name, array in bound.items() if name in taken}
        arrays = {name: np.asarray(value) for name, value in inputs.items() if name in taken}

        def ask(given: Mapping[str, Array]) -> list[Array]:
            return list(session.run(list(outputs), {**given, **constants}))

        if not rows:
            return dict(zip(outputs, ask(arrays), strict=True))
        if unproven:
            _check_rows(model, outputs, ask, arrays, rows, unproven)
        return _row_by_row(model, outputs, ask, arrays, rows)

    facts = {f"onnx_{key}": value for key, value in model.description.items() if key in ("producer", "name")}
    digest = sha256_of([model.path])[model.path.name]
    facts |= {"onnx_file": model.path.name, "onnx_sha256": digest}
    changes: dict[str, Any] = (
        {"bind": {name: array.tolist() for name, array in bound.items()}} if bound else {}
    )
    if rows:
        changes["rows"] = dict(rows)
    if list(outputs) != list(dict.fromkeys(model.graph.outputs)):
        changes["outputs"] = list(outputs)
    return Original(
        run, ("onnx", "onnxruntime"), facts=facts | ({_CHANGES: json.dumps(changes)} if changes else {})
    )


def session_options() -> Any:
    """Return the options of the sessions of onnxruntime with which bundles are compared."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Warnings are about the file, and no user of rsrv can act on them.
    options.log_severity_level = 3
    # Without this entry, sums of two 8-bit products saturate at 16 bits on x86 processors without VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def _session(model: OnnxModel, outputs: Sequence[str]) -> Any:
    try:
        import onnxruntime
    except ImportError as e:
        raise BundleError(
            f"onnxruntime: cannot be imported ({e}); it checks the bundle; run {install_command('export-onnx')}"
        ) from e
    options = session_options()
    source: Any = str(model.path)
    if set(outputs) - set(model.graph.outputs):
        proto = onnx.load_model(model.path, load_external_data=False)
        there = {value.name for value in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs if name not in there)
        source = proto.SerializeToString()
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(model.path.resolve().parent)
        )
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise BundleError(
            f"onnxruntime: cannot load {model.path.name}, so the bundle cannot be compared with it: {str(e).partition(chr(10))[0]}"
        ) from e
