"""Narrow a bundle: store its weights in a narrower type, make its modules widen them, and compare it with the wide bundle."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import jax  # noqa: F401 - imported before jaxlib's parts, because it keeps their log quiet
import numpy as np

from rsrv.progress import steps
from rsrv.text import amount
from rsrv_bundle import dtypes, writer
from rsrv_bundle.compatibility import Feature, refusal
from rsrv_bundle.dtypes import is_whole
from rsrv_bundle.errors import BundleError, Problems, TargetError
from rsrv_bundle.half_modules import computed_in
from rsrv_bundle.inputs import example_inputs, integers_of, random_inputs
from rsrv_bundle.manifest import FILE
from rsrv_bundle.modules import SignatureReader, module_file, signature_of
from rsrv_bundle.narrow_modules import Change, narrowed, shared_axes
from rsrv_bundle.narrowing import (
    BOUNDS,
    KEEP,
    PROVENANCE,
    TASK_BOUNDS,
    Narrow,
    WeightTypes,
    kept_because,
    narrow,
)
from rsrv_bundle.numerics import Array, ModuleRunner, Rows, answers, difference, label
from rsrv_bundle.reader import read_bundle, sha256_of
from rsrv_bundle.spec import Bundle, WeightSpec
from rsrv_bundle.weights import FILE as WEIGHTS_FILE
from rsrv_bundle.weights import WeightsFile, as_array

#: Text in front of the number, for each figure of a task.
_MEANING = {
    "cosine": "1 minus the smallest cosine of an embedding and its wide one is",
    "top1": "the share of samples with another best score is",
}
#: For a generation, each module is compared on at least this many tokens, and on at least this many steps of each text, unless
#: the context is shorter.
_TOKENS, _STEPS = 256, 16
_CURE = "Keep the type of some weights, choose a wider type, or accept the error with --tolerance"


@dataclass(frozen=True, slots=True)
class NarrowedBundle:
    """Result of narrowing a bundle."""

    bundle: Bundle
    #: Bytes of the weights before narrowing.
    bytes_before: int
    #: Reasons why weights keep their type, by name.
    kept: Mapping[str, str]
    #: Module's name -> error relative to the wide module.
    errors: Mapping[str, float]
    #: Figures of the task, by the names in TASK_BOUNDS.
    task: Mapping[str, float]
    #: Largest error that the type of the weights allows.
    bound: float

    def __str__(self) -> str:
        """Return a one-line summary for the user."""
        size = self.bundle.weight_bytes
        share = f"{amount(self.bytes_before)} of weights -> {amount(size)}"
        error = f"at most {max(self.errors.values(), default=0.0):.3g} from the wide model; the bound is {self.bound:g}"
        figures = "".join(f"; {_MEANING[figure]} {value:.3g}" for figure, value in self.task.items())
        return f"{share}, {error}{figures}" + (f". {_summary(self.kept)}" if self.kept else "")


def narrow_bundle(
    directory: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    weights: str = KEEP,
    compute: str | None = None,
    samples: Callable[[Bundle], Mapping[int, Rows]] = lambda _: MappingProxyType({}),
    tolerance: Mapping[str, float] = MappingProxyType({}),
    overwrite: bool = False,
    read_signature: SignatureReader = signature_of,
) -> NarrowedBundle:
    """Write the bundle in `directory` to `out_dir` with narrow weights. Compare the two bundles, and return the errors.

    weights: the type of the weights, and types of weights whose names fit a pattern, such as "i8,*.norm*=keep".
    compute: "bf16" or "f16", to compute products in; see `rsrv_bundle.half_modules`.
    samples: a function of the bundle that returns rows by variant for the comparison. Random inputs for other variants take their
        integers from these rows.
    tolerance: bounds that replace the defaults. A key is an element type of outputs, or the name of a figure in TASK_BOUNDS.
    overwrite: True to replace an existing bundle. Otherwise, an existing bundle is an error.
    read_signature: reads each module, old and new, before it is compiled.

    Nothing appears at `out_dir` unless all errors are within their bounds. Raises BundleError with a line for each module and output
    beyond its bound, ValueError for a wrong `weights`, FileExistsError, and TargetError if one directory is inside the other.
    """
    target = writer.free_target(out_dir, overwrite)
    if Path(directory).resolve() in target.resolve().parents:
        raise TargetError(f"{out_dir}: is inside {directory}, which would be copied into itself")
    old = read_bundle(directory)
    if why := refusal(Feature.HALF if weights == KEEP else Feature.NARROW, old.manifest.features):
        raise BundleError(why)
    with writer.scratch_beside(target) as scratch:
        work = Path(scratch, target.name)
        report = narrow_into(
            ModuleRunner(old, read_signature),
            work,
            weights,
            compute,
            samples=samples(old),
            tolerance=tolerance,
            read_signature=read_signature,
        )
        writer.put_in_place(work, target, Path(scratch, ".replaced"))
    return replace(report, bundle=read_bundle(target))


def narrow_into(
    before: ModuleRunner,
    work: Path,
    weights: str = KEEP,
    compute: str | None = None,
    *,
    samples: Mapping[int, Rows] = MappingProxyType({}),
    examples: Mapping[str, Array] = MappingProxyType({}),
    tolerance: Mapping[str, float] = MappingProxyType({}),
    read_signature: SignatureReader = signature_of,
) -> NarrowedBundle:
    """Write a bundle with narrow weights to the directory `work`. This is the main part of `narrow_bundle`.

    work: a directory that does not exist yet.
    before: the bundle's modules, which are compared with the new ones.
    examples: as `numerics.compare` takes them.
    """
    old = read_bundle(before.bundle.path, digest=False)
    weight_types = WeightTypes.parse(weights)
    if unmatched := weight_types.unmatched([weight.name for weight in old.weights]):
        raise BundleError(f"--weights: no weight's name matches {', '.join(unmatched)}")
    shutil.copytree(old.path, work, ignore=shutil.ignore_patterns("__pycache__"))
    choice = chosen(old, weight_types)
    if compute is None and not any(isinstance(tensor, Narrow) for tensor in choice.tensors):
        raise BundleError(f"--weights {weights}: narrows no weight. {_summary(choice.kept)}")
    for file in sorted(set(old.modules.values())):
        (work / file.name).write_bytes(rewritten(old, file, choice, compute))
    if old.weights:
        writer.write_weights(work / WEIGHTS_FILE, choice.stored(old.weights))
    document = writer.document_of(old.manifest, sha256_of(work / file.name for file in old.summed_files))
    document["provenance"][PROVENANCE] = {
        "weights": weights,
        **({} if compute is None else {"compute": compute}),
        "bytes_before": old.weight_bytes,
    }
    types = {change.dtype for tensor in choice.tensors if (change := _change(tensor)) is not None}
    bound = max((BOUNDS[token] for token in types), default=0.0) + (BOUNDS[compute] if compute else 0.0)
    writer.write_manifest(work / FILE, document)
    new = read_bundle(work, digest=False)
    values = {**examples, **integers_of(old, samples)}
    errors = _compared(before, ModuleRunner(new, read_signature), samples, values, tolerance, bound)
    allowed = {spec.dtype: tolerance.get(spec.dtype, bound) for spec in old.manifest.outputs}
    document["numerics"] = {
        **document.get("numerics", {}),
        "narrowed": errors.modules,
        **({"narrowed_task": errors.task} if errors.task else {}),
        "narrowed_tolerance": {token: error for token, error in allowed.items() if not is_whole(token)},
    }
    writer.write_manifest(work / FILE, document)
    return NarrowedBundle(
        read_bundle(work, digest=False), old.weight_bytes, choice.kept, errors.modules, errors.task, bound
    )


def rewritten(old: Bundle, file: Path, tensors: StoredTensors, compute: str | None) -> bytes:
    """Return a module of a bundle, changed so that it takes these tensors and computes products in `compute`."""
    blob, first, changes = file.read_bytes(), _first(old), [_change(tensor) for tensor in tensors.tensors]
    if compute == "f16":
        # Rewrite the products first, so that `narrowed` knows whose results would overflow without the scale.
        return narrowed(computed_in(blob, file.name, compute, first), file.name, first, changes)
    blob = narrowed(blob, file.name, first, changes)
    return blob if compute is None else computed_in(blob, file.name, compute, first)


@dataclass(slots=True)
class StoredTensors:
    """Tensors to store, in argument order, and the reasons why some of them keep their type."""

    tensors: list[Array | Narrow] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def stored(self, weights: Sequence[WeightSpec]) -> list[tuple[str, Array]]:
        """Return names and arrays: all weights, then the scales."""
        names = {weight.name for weight in weights}
        tensors: list[tuple[str, Array]] = []
        scales = []
        for weight, tensor in zip(weights, self.tensors, strict=True):
            tensors.append((weight.name, tensor.values if isinstance(tensor, Narrow) else tensor))
            if isinstance(tensor, Narrow) and tensor.scale is not None:
                name = f"{weight.name}:scale"
                if name in names:
                    raise BundleError(
                        f"weights: {name}: is the name of the scale of {weight.name}; rename it"
                    )
                scales.append((name, tensor.scale))
        return tensors + scales


def chosen(bundle: Bundle, types: WeightTypes) -> StoredTensors:
    """Return all weights, narrowed as `types` requests.

    While it runs, at most one wide tensor that will be narrowed is in memory.
    """
    shared: dict[int, frozenset[int]] = {}
    for file in sorted(set(bundle.modules.values())):
        shared = shared_axes(file.read_bytes(), _first(bundle), len(bundle.weights)) | shared
    choice = StoredTensors([np.empty(0)] * len(bundle.weights))
    with closing(WeightsFile(bundle)) as weights:
        for index, raw in weights.read_all():
            weight = bundle.weights[index]
            array = as_array(raw, weight.dtype, weight.shape)
            kind, named = types.of(weight.name)
            # If `shared_axes` does not know a weight, use one scale for each row, as for tables and for PyTorch's matrices.
            axes = shared.get(index, frozenset({len(weight.shape) - 1}))
            why = kept_because(weight, kind, named, axes)
            tensor = why or narrow(array, kind, axes)
            if isinstance(tensor, str):
                choice.kept[weight.name] = tensor
                choice.tensors[index] = array
            else:
                choice.tensors[index] = tensor
    return choice


def _summary(reason_of: Mapping[str, str]) -> str:
    """Return the reasons why weights keep their type, each with the number of weights."""
    reasons = list(reason_of.values())
    counts = (f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
    return f"Weights that keep their type: {', '.join(counts) or 'none'}"


def _first(bundle: Bundle) -> int:
    """Return the index of the first weight among the arguments of a module."""
    return len(bundle.manifest.inputs) + (bundle.manifest.state is not None)


def _change(tensor: Array | Narrow) -> Change | None:
    if not isinstance(tensor, Narrow):
        return None
    return Change(dtypes.token_of(tensor.values.dtype), None if tensor.scale is None else tensor.scale.shape)


@dataclass(slots=True)
class _Errors:
    """Largest errors of a comparison."""

    #: Module's name -> error of its worst output.
    modules: dict[str, float] = field(default_factory=dict)
    #: Figures of the task, by the names in TASK_BOUNDS.
    task: dict[str, float] = field(default_factory=dict)


def _compared(
    before: ModuleRunner,
    after: ModuleRunner,
    samples: Mapping[int, Rows],
    examples: Mapping[str, Array],
    tolerance: Mapping[str, float],
    bound: float,
) -> _Errors:
    """Compare two bundles at every size and variant.

    Raises BundleError with a line for each module and output beyond its bound, and for each figure of the task.
    """
    bundle, problems = before.bundle, Problems()
    errors = _Errors()
    keys = before.keys()
    with steps(f"compare {bundle.name}", len(keys)) as progress:
        for key in keys:
            name = label(bundle, key)
            worst = [0.0] * len(bundle.manifest.outputs)
            for random, wide, narrow_ in _answers(before, after, key, samples, examples):
                differences = map(error_of, narrow_, wide)
                worst = [max(old, error) for old, error in zip(worst, differences, strict=True)]
                for figure, error in task_figures(bundle, narrow_, wide).items():
                    # Ignore the best scores for random inputs, because rounding often decides which score is the best.
                    if figure != "top1" or not random:
                        errors.task[figure] = max(errors.task.get(figure, 0.0), error)
            errors.modules[name] = max(worst, default=0.0)
            for spec, error in zip(bundle.manifest.outputs, worst, strict=True):
                allowed = tolerance.get(spec.dtype, bound)
                if not error <= allowed:
                    unit = "of its values" if is_whole(spec.dtype) else "of its largest magnitude"
                    rule = f"differs from the wide model by {error:.3g} {unit}; the bound is {allowed:g}"
                    cure = f"{_CURE} {spec.dtype}={_above(error)}"
                    problems.add(module_file(bundle, key).name, f"output '{spec.name}'", f"{rule}. {cure}")
            progress.step(name)
    for figure, error in errors.task.items():
        if error > (allowed := tolerance.get(figure, TASK_BOUNDS[figure])):
            rule = f"{_MEANING[figure]} {error:.3g}; the bound is {allowed:g}"
            problems.add("task", figure, f"{rule}. {_CURE} {figure}={_above(error)}")
    problems.raise_if_any()
    return errors


def _above(error: float) -> str:
    """Return a bound with two digits that is larger than an error."""
    return f"{1.1 * error:.2g}"


def _answers(
    before: ModuleRunner,
    after: ModuleRunner,
    key: tuple[int, int],
    samples: Mapping[int, Rows],
    examples: Mapping[str, Array],
) -> Iterator[tuple[bool, list[Array], list[Array]]]:
    """Yield whether the inputs are random, the wide module's outputs for these inputs, and the narrow module's outputs.

    Samples, or examples with floats, are used in place of random inputs. Many networks amplify differences on noise, which no
    user sends.
    """
    bundle = before.bundle
    if key[0] in samples:
        yield False, answers(before, key, samples[key[0]]), answers(after, key, samples[key[0]])
        return
    chosen_inputs = example_inputs(bundle, *key, examples)
    inputs = random_inputs(bundle, *key, examples) if chosen_inputs is None else chosen_inputs
    if bundle.manifest.generate is None:
        yield chosen_inputs is None, before(key, inputs), after(key, inputs)
    else:
        wide, narrow_ = _texts(before, after, key, inputs)
        yield True, wide, narrow_


def _texts(
    before: ModuleRunner, after: ModuleRunner, key: tuple[int, int], prompts: Sequence[Array]
) -> list[list[Array]]:
    """Return the outputs of two modules after the prompts, and after each further token of a greedy text.

    Both modules read the tokens that the wide module chooses, because one different token would change all later ones. The
    outputs after the prompts alone would not be enough: with a batch of one row, either none or all of the tokens would differ.
    """
    manifest = before.bundle.manifest
    generate, state, size = manifest.generate, manifest.state, key[1]
    assert generate is not None
    assert state is not None
    names = [spec.name for spec in manifest.inputs]
    token = [spec.name for spec in manifest.outputs].index(generate.token)
    steps = min(max(_STEPS, _TOKENS // size), generate.context - manifest.chunks[key[0]] + 1)
    runs, pools = (before, after), [before.pools(0), after.pools(0)]
    texts: list[list[list[Array]]] = [[], []]
    inputs, slots = list(prompts), ~np.arange(size)
    for _ in range(steps):
        for side, run in enumerate(runs):
            outputs, pools[side] = run.step(key, inputs, slots, pools[side])
            # Rows without a slot keep no state.
            texts[side].append([output[: state.slots] for output in outputs])
        chosen = np.zeros(size, np.int32)
        chosen[: state.slots] = texts[0][-1][token]
        by_name = {
            generate.tokens: chosen[:, None],
            generate.lengths: np.ones(size, np.int32),
            generate.sampling: np.zeros((size, 4), np.float32),
        }
        key, inputs, slots = (
            (manifest.chunks.index(1), size),
            [by_name[name] for name in names],
            np.arange(size),
        )
    return [[np.concatenate(parts) for parts in zip(*text, strict=True)] for text in texts]


def task_figures(bundle: Bundle, got: Sequence[Array], expected: Sequence[Array]) -> dict[str, float]:
    """Return how much the embedding or the scores of a task differ. Empty without a task, or if hooks compute the task's outputs."""
    task = bundle.manifest.task
    names = [spec.name for spec in bundle.manifest.outputs]
    figures = {}
    for role in ("embedding", "scores") if task else ():
        name = task.outputs.get(role) if task else None
        if name not in names or expected[names.index(name)].ndim != 2:
            continue
        narrow_array, wide_array = (
            arrays[names.index(name)].astype(np.float64) for arrays in (got, expected)
        )
        if role == "embedding":
            lengths = np.linalg.norm(narrow_array, axis=1) * np.linalg.norm(wide_array, axis=1)
            cosines = (narrow_array * wide_array).sum(1) / np.maximum(lengths, np.finfo(np.float64).tiny)
            figures["cosine"] = 1.0 - float(cosines.min())
        elif narrow_array.shape[1] > 1:
            figures["top1"] = float(np.mean(narrow_array.argmax(1) != wide_array.argmax(1)))
    return figures


def error_of(got: Array, expected: Array) -> float:
    """Return an output's error, relative to its largest magnitude. For integers, return the share of unequal elements."""
    if got.dtype.kind in "iub":
        return float(np.mean(got != expected)) if got.size else 0.0
    return difference(got, expected)[1]
