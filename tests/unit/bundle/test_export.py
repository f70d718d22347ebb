"""`export_bundle`: what it writes, and what it refuses."""

from __future__ import annotations

import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rsrv_bundle import BundleError, load_weights, numerics, read_bundle
from rsrv_bundle.errors import TargetError
from rsrv_bundle.export import Original, export_bundle
from rsrv_bundle.modules import as_exported, check_signatures, module_file
from rsrv_bundle.numerics import difference

X = {"x": np.zeros((1, 3), np.float32)}
KERNEL = np.arange(6, dtype=np.float32).reshape(3, 2)


def dense(params: Any, x: jax.Array) -> Any:
    """Map x: [n, 3] to [n, 2]."""
    return x @ params["kernel"]


def export(out_dir: Path, fn: Any = dense, params: Any = None, inputs: Any = None, **options: Any) -> Any:
    """Call export_bundle with defaults for all arguments that a test does not set."""
    return export_bundle(
        fn,
        {"kernel": KERNEL} if params is None else params,
        X if inputs is None else inputs,
        out_dir=out_dir,
        **{"batch_sizes": [1, 4], **options},
    )


def test_a_bundle_holds_what_the_function_does(tmp_path: Path) -> None:
    """An export writes names, sizes, numerics and provenance, and no other file."""
    bundle = export(tmp_path / "dense", description="One layer.")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    assert bundle.manifest.description == "One layer."
    assert bundle.manifest.compiled_batch_sizes == (1, 4)
    assert [(spec.name, spec.dims, spec.letters) for spec in bundle.manifest.wire_outputs] == [
        ("output", (-1, 2), "na")
    ]
    exact, close = pytest.approx(0, abs=0), pytest.approx(0, abs=1e-6)
    assert bundle.manifest.numerics == {
        "max_abs_error": exact,
        "max_rel_error": exact,
        "source": {"model.b1": exact, "model.b4": exact},
        "buckets": {"model.b4": close},
        "rows": {"model.b4": close},
    }
    assert bundle.manifest.provenance["platform"] == "cpu"
    assert bundle.manifest.provenance["jax"] == jax.__version__
    assert set(check_signatures(bundle)) == {(0, 1), (0, 4)}


def test_equal_exports_have_equal_digests(tmp_path: Path) -> None:
    """Two exports of one function have the same digest, because no date, path or random order is in the bundle."""
    assert export(tmp_path / "a" / "m").digest == export(tmp_path / "b" / "m").digest
    assert b"test_export" not in (tmp_path / "a" / "m" / "model.b1.mlir").read_bytes()


def test_every_element_type_survives(tmp_path: Path) -> None:
    """An export keeps the element types of weights, inputs and outputs. Only weights can have f8, which clients cannot send."""
    params = {
        "bf": np.array([1.5, -2], ml_dtypes.bfloat16),
        "f8": np.array([0.5, 448], ml_dtypes.float8_e4m3fn),
        "half": np.array([0.25, 3], np.float16),
        "i8": np.array([-7, 7], np.int8),
        "mask": np.array([True, False]),
        "scalar": np.array(3, np.uint8),
    }

    def fn(p: Any, bf: Any, half: Any, i8: Any, mask: Any) -> Any:
        return {
            "bf": bf * p["bf"] + p["f8"].astype(jnp.bfloat16),
            "half": half + p["half"],
            "i8": i8 + p["i8"],
            "mask": mask ^ p["mask"],
            "u8": jnp.where(mask, p["scalar"], p["scalar"] + 1),
        }

    types = {"bf": ml_dtypes.bfloat16, "half": np.float16, "i8": np.int8, "mask": np.bool_}
    bundle = export(
        tmp_path / "m", fn, params, {name: np.zeros((1, 2), kind) for name, kind in types.items()}
    )
    assert [spec.dtype for spec in bundle.manifest.inputs] == ["bf16", "f16", "i8", "bool"]
    assert [spec.dtype for spec in bundle.manifest.outputs] == ["bf16", "f16", "i8", "bool", "u8"]
    loaded = dict(zip((weight.name for weight in bundle.weights), load_weights(bundle), strict=True))
    for name, value in params.items():
        assert loaded[name].dtype == value.dtype
        np.testing.assert_array_equal(loaded[name], value)


def test_64_bit_types_need_jax_to_keep_them(tmp_path: Path) -> None:
    """An f64 input is refused while jax would narrow it, and is exported if jax keeps 64 bits."""
    inputs = {"x": np.zeros((1, 3))}
    with pytest.raises(BundleError, match=re.escape("x: is f64, which jax narrows to 32 bits")):
        export(tmp_path / "m", inputs=inputs)
    with pytest.raises(BundleError, match="params: kernel: is f64"):
        export(tmp_path / "m", params={"kernel": KERNEL.astype(np.float64)})
    with jax.enable_x64(True):
        bundle = export(tmp_path / "m", params={"kernel": KERNEL.astype(np.float64)}, inputs=inputs)
    assert bundle.manifest.outputs[0].dtype == "f64"


def test_a_model_without_a_batch_axis_is_one_module(tmp_path: Path) -> None:
    """A model without a batch axis is exported as one module, even if all its inputs are scalars."""
    bundle = export(
        tmp_path / "m",
        lambda p, a, b: {"sum": a + b * p},
        np.float32(2),
        {"a": np.float32(0), "b": jax.ShapeDtypeStruct((), jnp.float32)},
        batch_sizes=[],
        batch_axis=None,
    )
    assert [path.name for path in bundle.modules.values()] == ["model.mlir"]
    assert [weight.name for weight in bundle.weights] == ["params"]
    assert set(check_signatures(bundle)) == {(0, 1)}
    assert bundle.manifest.inputs[0].dims == ()


def test_a_model_without_weights_has_no_weights_file(tmp_path: Path) -> None:
    """A model without weights has no weights file, as format 3 allows."""
    bundle = export(tmp_path / "m", lambda p, x: x * 2, {})
    assert bundle.weights_file is None
    assert load_weights(bundle) == []


def test_unused_inputs_and_weights_stay_arguments(tmp_path: Path) -> None:
    """Unused inputs and weights stay arguments, because the positions of the other arguments depend on them."""
    bundle = export(
        tmp_path / "m",
        lambda p, x, unused: x + p[1],
        [np.ones(3, np.int32), np.ones(3, np.float32)],
        {**X, "unused": np.zeros((1, 7), np.int32)},
    )
    (signature, _) = check_signatures(bundle).values()
    assert signature.inputs == (("f32", (1, 3)), ("i32", (1, 7)), ("i32", (3,)), ("f32", (3,)))
    assert [weight.name for weight in bundle.weights] == ["0", "1"]


def test_inputs_keep_the_given_order_and_axes(tmp_path: Path) -> None:
    """Inputs keep the given order, and may have different batch axes. The function gets them by name."""

    def fn(params: Any, a: Any, z: Any) -> Any:
        return {"q": z.T - a, "b": z[None] * 1}

    inputs = {"z": np.zeros((2, 1), np.float32), "a": np.zeros((1, 2), np.float32)}
    bundle = export(tmp_path / "m", fn, {}, inputs, batch_axis={"z": 1})
    assert [(spec.name, spec.batch_axis) for spec in bundle.manifest.inputs] == [("z", 1), ("a", 0)]
    assert [(spec.name, spec.letters) for spec in bundle.manifest.outputs] == [("q", "na"), ("b", "acn")]


def test_variants_share_weights_and_open_the_axes_that_vary(tmp_path: Path) -> None:
    """Variants share weights; an axis whose extent depends on the variant is -1, also in outputs."""

    def fn(params: Any, image: Any) -> Any:
        return image @ params, image.mean((1, 2))

    bundle = export(
        tmp_path / "m",
        fn,
        KERNEL,
        {"image": np.zeros((1, 4, 5, 3), np.float32)},
        axes={"image": "nhwc"},
        input_shapes=[{"h": 4, "w": 5}, {"h": 6, "w": 5}],
        output_names=["pixels", "mean"],
        batch_sizes=[2],
    )
    assert bundle.manifest.inputs[0].dims == (-1, -1, -1, 3)
    assert [spec.dims for spec in bundle.manifest.outputs] == [(-1, -1, 5, 2), (-1, 3)]
    assert sorted(path.name for path in bundle.modules.values()) == ["model.v0.b2.mlir", "model.v1.b2.mlir"]
    assert bundle.variant_of([(2, 6, 5, 3)]) == 1
    signatures = check_signatures(bundle)
    blob = module_file(bundle, (1, 2)).read_bytes()
    image = np.ones((2, 6, 5, 3), np.float32)
    pixels, _ = jax.jit(as_exported(blob, signatures[1, 2]).call)(image, *load_weights(bundle))
    np.testing.assert_array_equal(pixels, image @ KERNEL)


def test_hooks_and_client_specs_are_written(tmp_path: Path) -> None:
    """Hooks are given as text or as a file, and the client specs are written with them."""
    text = "def postprocess(outputs):\n    return outputs\n"
    (tmp_path / "hooks.py").write_text(text)
    clients = [{"name": "label", "dtype": "i64", "shape": "nk", "dims": {"k": 1}}]
    for name, hooks in (("a", text), ("b", tmp_path / "hooks.py")):
        bundle = export(tmp_path / name, hooks=hooks, client_outputs=clients)
        assert bundle.hooks is not None
        assert bundle.hooks.read_text() == text
        assert [spec.name for spec in bundle.manifest.wire_outputs] == ["label"]


def test_files_of_the_hooks_are_copied(tmp_path: Path) -> None:
    """Modules that model.py imports and files that it reads travel with the bundle, without Python's caches."""
    package = tmp_path / "words"
    (package / "__pycache__").mkdir(parents=True)
    for name in ("words/__init__.py", "words/__pycache__/a.pyc", "vocabulary.txt"):
        (tmp_path / name).write_text(name)
    text = "import words\ndef preprocess(inputs):\n    return inputs\n"

    bundle = export(tmp_path / "m", hooks=text, files=[package, tmp_path / "vocabulary.txt"])

    assert [path.name for path in (bundle.path / "words").iterdir()] == ["__init__.py"]
    assert (bundle.path / "vocabulary.txt").read_text() == "vocabulary.txt"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"files": [Path(__file__).parent / "manifest.yaml"]},
            "the bundle already has a file named manifest.yaml",
        ),
        ({"params": {"kernel": [[1.0]]}}, "params: kernel/0/0: is a float; make it an array"),
        ({"params": {"a": {"b": KERNEL}, "a/b": KERNEL}}, "params: a/b: two leaves have this path"),
        ({"inputs": {"x": [1.0]}}, "x: is a list; give an array"),
        ({"inputs": {"x": np.zeros((1, 3), np.complex64)}}, "x: has the element type complex64"),
        ({"batch_sizes": []}, "batch_sizes: is empty"),
        *(
            ({"batch_sizes": [size]}, "is not a number of rows; give whole numbers from 1 on")
            for size in (-1, 0, 1.5, "2")
        ),
        ({"batch_axis": None}, "batch_sizes: no input has a batch axis, so it must be empty"),
        ({"batch_axis": 2}, "x: has 2 axes, so axis 2 cannot be its batch axis"),
        ({"axes": {"x": "nab"}}, "axes: x: 'nab' names 3 axes"),
        *(({"axes": {"x": letters}}, f"'{letters}' uses a letter twice") for letters in ("nn", "nb", "aa")),
        (
            {"axes": {"output": "cn"}},
            "axes: output: 'cn' does not fit the output's shape (1, 2), whose batch axis is 0",
        ),
        (
            {
                "fn": lambda p, x: x.sum(),
                "batch_axis": None,
                "batch_sizes": (),
                "axes": {"output": "n"},
            },
            "axes: output: 'n' does not fit the output's shape (), which has no batch axis",
        ),
        ({"input_shapes": [{"h": 2}]}, "input_shapes: h: no input has such an axis"),
        ({"outputs": ["b"]}, "outputs: b: the model has no such output; it returns output"),
        (
            {"output_names": ["a", "b"]},
            "outputs: the model returns 1 arrays, but output_names are ['a', 'b']",
        ),
        (
            {"fn": lambda p, x: {"a": x}, "output_names": ["b"]},
            "outputs: the model returns ['a'], but output_names are ['b']",
        ),
        ({"fn": lambda p, x: x.sum()}, "outputs: output: has 0 axes that grow with the batch"),
        ({"fn": lambda p, x: x @ x.T}, "outputs: output: has 2 axes that grow with the batch"),
        ({"fn": lambda p, x: x.reshape(-1)}, "outputs: output: axis 0 changes with the batch size"),
        ({"fn": lambda p, x: x * 1j}, "outputs: output: has the element type complex64"),
        (
            {"fn": lambda p, x: x.reshape(1, 3), "batch_sizes": [1]},
            "by tracing size 2, which fails (TypeError)",
        ),
        ({"fn": lambda p, x: x - x.mean(0)}, "its first row changes when"),
        ({"hooks": "x = 1\n"}, "model.py: defines no hook; define preprocess or postprocess"),
        ({"hooks": "def f(:\n"}, "model.py: is not valid Python"),
        ({"client_outputs": [{"name": "y"}]}, "client_outputs: only hooks can change what clients see"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """An unservable function is refused, and nothing is written."""
    with pytest.raises(BundleError, match=re.escape(message)):
        export(tmp_path / "m", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "size", "name"), [(np.float32, 12000, "f32"), (np.complex64, 24000, "complex<f32>")]
)
def test_large_captured_constants_are_refused(tmp_path: Path, dtype: Any, size: int, name: str) -> None:
    """Large captured constants are refused: every module would repeat them. A broadcast value is allowed."""

    def product(table: Any) -> Any:
        return lambda p, x: (x @ table.astype(dtype)).real

    table = np.random.default_rng(0).standard_normal((3, 1000))
    message = rf"captures {size} bytes of constants \(largest: tensor<3x1000x{name}>\)"
    with pytest.raises(BundleError, match=message):
        export(tmp_path / "m", product(table), {}, max_constant_bytes=10_000)
    export(tmp_path / "m", product(np.ones((3, 1000))), {}, max_constant_bytes=10_000)


def test_integers_keep_the_structure_of_the_example(tmp_path: Path) -> None:
    """The comparison makes integer inputs by rotating the rows of the example. It replaces zeros by other integers that work.

    Integers are often indices. Only the model's author knows which ones are valid, and how they are related.
    """
    seen: list[Any] = []

    def eager(ids: Any, more: Any) -> Any:
        seen.append((ids, more))
        return ids.sum(2) + np.arange(10)[more]

    bundle = export_bundle(
        lambda params, ids, more: ids.sum(2) + more,
        {},
        {"ids": np.array([[[7, 300], [8, 200]]], np.int32), "more": np.zeros((1, 2), np.int32)},
        batch_sizes=[3],
        out_dir=tmp_path / "m",
        original=Original(eager),
    )
    ids, more = seen[-1]
    assert ids.tolist() == [[[7, 300], [8, 200]], [[8, 200], [7, 300]], [[7, 300], [8, 200]]]
    assert set(np.unique(more)) == {0, 1}
    assert bundle.manifest.numerics["source"] == {"model.b3": 0.0}


def test_a_bundle_that_is_not_what_its_author_runs_is_refused(tmp_path: Path) -> None:
    """A bundle that differs from the author's function is refused: here two inputs were swapped."""
    with pytest.raises(
        BundleError, match=r"model\.b2\.mlir: output 'output': differs from the original model by"
    ):
        export_bundle(
            lambda params, a, b: a - b,
            {},
            {"a": X["x"], "b": X["x"]},
            batch_sizes=[2],
            out_dir=tmp_path / "m",
            original=Original(lambda a, b: b - a),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_result_beyond_its_tolerance_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check executes the written bundle. In this test, the reader returns weights that are a tenth too large, so it fails."""
    monkeypatch.setattr(
        numerics, "load_weights", lambda bundle: [w * np.float32(1.1) for w in load_weights(bundle)]
    )
    with pytest.raises(
        BundleError,
        match=r"model\.b1\.mlir: output 'output': differs from the original model by 0\.0\d+ of its",
    ):
        export(tmp_path / "m")
    bundle = export(tmp_path / "m", tolerance={"f32": 0.2})
    assert bundle.manifest.numerics["max_rel_error"] == pytest.approx(0.1, rel=1e-3)


def test_integers_may_differ_by_a_tolerance_that_is_given(tmp_path: Path) -> None:
    """Integers may differ by a given tolerance. Without a tolerance, they must be equal.

    The model rounds to integers: a small difference before the rounding changes few results, and each by a whole number.
    """

    def model(params: Any, x: Any) -> Any:
        return jnp.round(jax.nn.sigmoid(x) * 200).astype(jnp.uint8)

    def one_more(x: Any) -> Any:
        return np.asarray(model({}, x)) + np.uint8(1)

    options: Any = {"fn": model, "params": {}, "original": Original(one_more)}
    with pytest.raises(
        BundleError,
        match=r"by 0\.00\d+ of its largest magnitude; u8 must be equal, unless you give a tolerance for u8",
    ):
        export(tmp_path / "m", **options)
    errors = export(tmp_path / "m", **options, tolerance={"u8": 0.01}).manifest.numerics
    assert errors["max_abs_error"] == 1
    assert 0.005 < errors["max_rel_error"] < 0.01


def test_an_infinite_error_is_beyond_every_tolerance(tmp_path: Path) -> None:
    """An infinite difference is refused at every tolerance."""
    with pytest.raises(BundleError, match="differs from the original model by inf"):
        export(tmp_path / "m", original=Original(lambda x: x[:, :2] * np.inf), tolerance={"f32": np.inf})


def log(params: Any, x: Any) -> Any:
    """Map x: [n, 3] to [n]. A row with an element below 5 gives NaN, so almost all rows of the normal distribution do."""
    return jnp.log(x - 5).sum(-1)


@pytest.mark.parametrize("example", [np.zeros((1, 3)), np.full((2, 3), 6)])
def test_what_is_nan_everywhere_proves_nothing(tmp_path: Path, example: Any) -> None:
    """A bundle that gives only NaN on random inputs is refused. An example in which all elements are equal does not help."""
    with pytest.raises(BundleError) as raised:
        export(tmp_path / "m", log, {}, {"x": example.astype(np.float32)})
    [line] = raised.value.problems
    assert line.startswith("model.b1.mlir: output 'output': no finite value to compare")
    assert "give example inputs" in line


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_floats_of_the_example_are_compared_as_well(tmp_path: Path, rows: int) -> None:
    """In addition to random floats, the floats of the example are compared, repeated or cut to the batch size."""
    seen: list[Any] = []

    def eager(x: Any) -> Any:
        seen.append(x)
        return np.asarray(log({}, x))

    example = 6 + np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    bundle = export(tmp_path / "m", log, {}, {"x": example}, original=Original(eager))
    assert [len(x) for x in seen] == [1, 1, 4, 4]
    np.testing.assert_array_equal(seen[3], example[np.arange(4) % rows])
    assert bundle.manifest.numerics["max_rel_error"] < 1e-4


def test_a_foreign_platform_is_lowered_for_but_not_run(tmp_path: Path) -> None:
    """A module for a foreign platform is exported but not run, and the manifest has no numerics."""
    bundle = export(tmp_path / "m", platform="tpu")
    assert bundle.manifest.numerics == {}
    assert bundle.manifest.provenance["platform"] == "tpu"


def test_a_bundle_is_replaced_only_on_request(tmp_path: Path) -> None:
    """An existing bundle of any name is replaced only with `overwrite`, and then as a whole."""
    target = tmp_path / "replaced"
    export(target, batch_sizes=[1, 8])
    with pytest.raises(FileExistsError, match="exists; pass overwrite=True to replace it"):
        export(target)
    assert set(export(target, overwrite=True).modules) == {(0, 1), (0, 4)}
    shutil.rmtree(target)
    target.touch()
    with pytest.raises(TargetError, match="is not a directory"):
        export(target, untraced, overwrite=True)


def untraced(params: Any, x: Any) -> Any:
    raise AssertionError("there was no need to look at the model")


def test_an_interrupted_replacement_leaves_the_old_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old bundle is restored after an export that was interrupted between its two renames."""
    old = export(tmp_path / "m", batch_sizes=[1, 8])
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> Path:
        if to == tmp_path / "m":
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "m", overwrite=True)
    assert read_bundle(tmp_path / "m").digest == old.digest


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        ([1.0, 2.5], [1.0, 2.0], (0.5, 0.25)),
        ([np.nan, np.inf], [np.nan, np.inf], (0.0, 0.0)),
        ([1.0], [np.nan], (np.inf, np.inf)),
        ([np.inf], [-np.inf], (np.inf, np.inf)),
        ([0.5], [0.0], (0.5, 0.5)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_difference_is_relative_to_the_largest_magnitude(
    got: list[float], want: list[float], expected: tuple[float, float]
) -> None:
    """A difference is relative to the largest magnitude, because elementwise ratios explode near zero."""
    assert difference(np.array(got), np.array(want)) == expected


def test_neighbouring_large_integers_differ() -> None:
    """Large neighbouring integers differ, although they are equal as floats."""
    assert difference(np.array([2**62 + 1]), np.array([2**62])) == (1.0, 2.0**-62)


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float32", 0.01)])
def test_an_output_that_is_small_by_chance_is_not_refused(tmp_path: Path, dtype: str, scale: float) -> None:
    """The rounding error of an output is relative to the output's magnitude over several rows.

    It is not relative to the compared value, which may be near zero by chance.
    """
    seed = zlib.crc32(b"x/0/1")
    compared = np.float32(np.random.default_rng(seed).standard_normal((1, 1))[0, 0])

    def step(error: float) -> Any:
        return lambda x: (jnp.asarray(x) - compared + 0.01 * scale + error * scale).astype(dtype)

    def export(error: float) -> dict[str, Any]:
        bundle = export_bundle(
            lambda _, x: step(0)(x),
            {},
            {"x": np.zeros((1, 1), np.float32)},
            batch_sizes=[1],
            out_dir=tmp_path / f"m{error}",
            original=Original(step(error)),
        )
        return dict(bundle.manifest.numerics)

    assert 1e-4 * scale < export(0.002)["max_rel_error"] < 1e-2 * scale
    with pytest.raises(BundleError, match="differs from the original model"):
        export(0.2)


def test_outputs_that_are_tiny_for_random_inputs_need_larger_ones(tmp_path: Path) -> None:
    """For a tiny output, even a small rounding error is relatively large. The error asks for inputs with a larger output."""

    def export(example: Any) -> Any:
        return export_bundle(
            lambda _, x: x * 1e-8,
            {},
            {"x": example},
            batch_sizes=[1],
            out_dir=tmp_path / "m",
            original=Original(lambda x: x * 1e-8 + 1e-10),
        )

    with pytest.raises(BundleError, match=r"this magnitude is only \de-08, so .* or --samples$"):
        export(jax.ShapeDtypeStruct((1, 3), np.float32))
    export(np.array([[1e8, 2e8, 0]], np.float32))
