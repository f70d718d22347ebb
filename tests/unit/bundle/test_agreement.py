"""`rsrv-bundle check --numerics`: the answers of a bundle compared across batch sizes and with its source."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from rsrv_bundle import Bundle, BundleError, cli, read_bundle
from rsrv_bundle.commands.agreement import Comparison, SourceError, agree
from rsrv_bundle.commands.samples import read_samples, rows_of
from rsrv_bundle.export import export_bundle
from rsrv_bundle.modules import signature_of
from rsrv_bundle.numerics import TOLERANCE, Judge, in_batches
from tests.pages import ROOT
from tests.unit.bundle.forge import GOOD, META, changed, make_bundle, tensor

Array = np.ndarray[Any, Any]
KERNEL = np.arange(6, dtype=np.float32).reshape(3, 2)
MANIFEST = changed(
    GOOD, executable_inputs=[tensor(c=3)], executable_outputs=[tensor("y", c=3)], batching=None
)


def dense(x: Array) -> dict[str, Array]:
    """Map x: [n, 3] to y: [n, 2], the function that `exported` computes."""
    return {"y": x @ KERNEL}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export one layer for 1, 2 and 4 rows."""
    out_dir = tmp_path_factory.mktemp("bundles") / "dense"
    export_bundle(
        lambda p, x: {"y": x @ p},
        KERNEL,
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 2, 4],
        out_dir=out_dir,
    )
    return out_dir


def forged(parent: Path, functions: Mapping[int, Callable[[Any], Any]]) -> Bundle:
    """Return a bundle whose module for each size is another function of x: f32 [n, 3] -> f32 [n, 3]."""
    struct: Any = jax.ShapeDtypeStruct

    def module(size: int) -> bytes:
        lowered = jax.export.export(jax.jit(functions[size]), platforms=["cpu"])(
            struct((size, 3), jnp.float32)
        )
        return bytes(lowered.mlir_module_serialized)

    return read_bundle(
        make_bundle(parent, MANIFEST, modules={f"model.b{size}.mlir": module(size) for size in functions})
    )


def lines_of(bundle: Bundle, comparison: Comparison | None = None) -> list[str]:
    return agree(bundle, comparison or Comparison(), signature_of)


def test_a_good_bundle_has_a_line_per_module_and_exit_code_0(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line has the difference between a batch size and the smallest one. For the smallest size, there is no difference."""
    assert cli.main(["check", "--numerics", str(exported)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"ok {exported}: format 3")
    number = r"\d[\d.e-]*"
    for size, line in zip((2, 4), lines, strict=True):
        pattern = f"model.b{size}: {number} from the smallest batch size, {number} among rows and places"
        assert re.fullmatch(rf"ok {re.escape(str(exported))}: {pattern}", line)


@pytest.mark.parametrize(
    ("functions", "problem"),
    [
        (
            {1: lambda x: x, 4: lambda x: x * 1.001},
            "output 'y': differs from that of batch size 1 by 0.000999 of its largest magnitude; the tolerance for f32 is",
        ),
        ({1: lambda x: x, 4: lambda x: x - x.mean(0)}, "its first row changes when the other rows do, by"),
        (
            {4: lambda x: x * jnp.array([[1], [1], [1], [3]], jnp.float32)},
            "a row changes with its place in the batch, by",
        ),
    ],
)
def test_an_answer_that_depends_on_other_requests_is_found(
    tmp_path: Path, functions: Mapping[int, Callable[[Any], Any]], problem: str
) -> None:
    """A module is refused if the answer for a row depends on the batch size, on the other rows or on the row's position."""
    with pytest.raises(BundleError) as raised:
        lines_of(forged(tmp_path, functions))
    assert any(problem in line for line in raised.value.problems)


def test_the_page_has_the_tolerances_of_the_code() -> None:
    """The table in docs/bundle-tools.md has the tolerance of each element type whose answers may differ."""
    lines = (ROOT / "docs" / "bundle-tools.md").read_text().splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("| f64 |"))
    names, values = ([cell.strip() for cell in lines[row].strip("|").split("|")] for row in (head, head + 2))
    assert {name: float(value) for name, value in zip(names[:-1], values[:-1], strict=True)} == TOLERANCE
    assert (names[-1], values[-1]) == ("integers, bool", "equal")


def test_a_module_for_another_device_is_not_compared(tmp_path: Path) -> None:
    """A module for CUDA is refused with the compiler's message, because CUDA's libraries are missing on this machine."""
    lowered = jax.export.export(jax.jit(jnp.linalg.qr), platforms=["cuda"])(np.zeros((3, 3), np.float32))
    square = {"name": "x", "dtype": "f32", "shape": "ac", "dims": {"a": 3, "c": 3}}
    document = changed(
        MANIFEST, executable_inputs=[square], executable_outputs=[{**square, "name": name} for name in "qr"]
    )
    modules = {"model.mlir": bytes(lowered.mlir_module_serialized)}
    bundle = read_bundle(make_bundle(tmp_path, document, modules=modules))
    with pytest.raises(BundleError, match=r"model\.mlir: cannot be compiled for this machine: "):
        lines_of(bundle, Comparison(lambda x: (x, x)))


def test_a_source_is_asked_by_name(exported: Path) -> None:
    """The source is called once, by name, with the largest module's rows. It may return a mapping, a tuple or an array."""
    bundle = read_bundle(exported)
    shapes: list[tuple[int, ...]] = []

    def source(x: Array) -> tuple[Array]:
        shapes.append(x.shape)
        return (x @ KERNEL,)

    for function in (dense, source, lambda x: x @ KERNEL):
        lines = lines_of(bundle, Comparison(function))
        assert [line.partition(":")[0] for line in lines] == ["model.b1", "model.b2", "model.b4"]
        assert all("from its source" in line for line in lines)
    assert shapes == [(4, 3)]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (lambda x: x, "returns 'y' as [4, 3], but the bundle returns [-1, 2]"),
        (lambda x: {"z": x}, "the source: outputs: y: the model has no such output; it returns z"),
        (lambda x: (), "the source: outputs: the model returns 0 arrays, but output_names are ['y']"),
        (lambda z: z, "raised TypeError: "),
    ],
)
def test_a_source_that_fails_is_not_held_against_the_bundle(
    exported: Path, source: Callable[..., Any], problem: str
) -> None:
    """An error of the source is reported as the source's, with its message."""
    with pytest.raises(SourceError, match=re.escape(problem)):
        lines_of(read_bundle(exported), Comparison(source))


def test_the_source_of_the_command_line_is_a_function_in_the_working_directory(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--source` imports a function from the working directory, and exits 2 if the import fails."""
    (tmp_path / "source_of_dense.py").write_text("def doubled(x):\n    return x[:, :2] * 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def check(against: str) -> int:
        return cli.main(["check", "--numerics", "--against", against, str(exported)])

    assert check("source_of_dense:doubled") == 1
    assert "differs from its source" in capsys.readouterr().out
    assert check("source_of_dense:halved") == 2
    assert "has no 'halved'; known are doubled" in capsys.readouterr().err


def test_a_source_may_be_what_the_exporter_takes(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--jax` takes a model as the exporter does: here a function of parameters and inputs."""
    text = "import numpy as np\ndef model():\n    k = np.arange(6, dtype='f4').reshape(3, 2)\n"
    (tmp_path / "jax_of_dense.py").write_text(f"{text}    return lambda p, x: {{'y': x @ p}}, k\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert cli.main(["check", "--numerics", "--jax", "jax_of_dense:model", str(exported)]) == 0
    assert " from its source" in capsys.readouterr().out


def test_random_indices_are_those_of_the_examples(tmp_path: Path) -> None:
    """Random indices are drawn from the samples. If there are no samples, they are drawn from the source's examples.

    Zeros pad a batch.
    """
    table = np.arange(8, dtype=np.float32)[:, np.newaxis]
    bundle = export_bundle(
        lambda p, i: {"y": p[i]},
        table,
        {"i": np.array([3, 7], np.int32)},
        batch_sizes=[1, 4],
        out_dir=tmp_path / "table",
    )
    seen: set[int] = set()

    def source(i: Array) -> Array:
        seen.update(i.tolist())
        return table[i]

    with pytest.raises(
        SourceError,
        match=r"IndexError: .*; if the model accepts only some integers, let the factory also return example inputs",
    ):
        lines_of(bundle, Comparison(source))
    for examples, samples in (({"i": [3, 7]}, None), ({"i": [99]}, {"i": np.array([1, 5], np.int32)})):
        seen.clear()
        lines_of(bundle, Comparison(source, samples, examples))
        assert seen <= ({0, 1, 5} if samples else {3, 7})


def test_what_is_nan_on_random_inputs_is_compared_on_examples_or_samples(tmp_path: Path) -> None:
    """If random inputs give NaN, examples or samples are compared. If there are none, the check fails."""
    bundle = forged(tmp_path, {size: lambda x: jnp.log(x - 5) for size in (1, 4)})

    def source(x: Array) -> Any:
        return np.log(x - 5)

    example = np.array([[6, 7, 8]], np.float32)
    for comparison in (
        Comparison(),
        Comparison(source),
        Comparison(source, examples={"x": jax.ShapeDtypeStruct((1, 3), jnp.float32)}),
        Comparison(source, examples={"x": torch.ones((1, 3), dtype=torch.bfloat16)}),
    ):
        with (
            np.errstate(invalid="ignore"),
            pytest.raises(BundleError, match="'y': no finite value to compare"),
        ):
            lines_of(bundle, comparison)
    with np.errstate(invalid="ignore", divide="ignore"):
        assert len(lines_of(bundle, Comparison(source, examples={"x": torch.tensor(example)}))) == 2
        assert len(lines_of(bundle, Comparison(source, {"x": example}))) == 2


def test_what_was_found_is_stored_on_request(exported: Path, tmp_path: Path) -> None:
    """`--store` adds the differences to the manifest and keeps its comments. A failed check stores nothing."""
    manifest = exported / "manifest.yaml"
    copy = tmp_path / "dense"
    copy.mkdir()
    for file in exported.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "manifest.yaml").write_text("# By hand.\n" + manifest.read_text() + "  # To the end.\n")
    before = read_bundle(copy)
    lines_of(before, Comparison(lambda x: 1.001 * (x @ KERNEL), tolerance={"f32": 0.01}, store=True))
    after = read_bundle(copy)
    assert after.manifest.numerics["source"] == pytest.approx(
        dict.fromkeys(("model.b1", "model.b2", "model.b4"), 1e-3), rel=0.01
    )
    assert after.manifest.numerics["max_rel_error"] == pytest.approx(1e-3, rel=0.01)
    assert after.manifest.provenance == before.manifest.provenance
    assert (copy / "manifest.yaml").read_text().startswith("# By hand.\n")
    with pytest.raises(BundleError):
        lines_of(after, Comparison(lambda x: 2 * (x @ KERNEL), store=True))
    assert read_bundle(copy).digest == after.digest


def test_the_largest_error_of_several_comparisons_is_stored(exported: Path) -> None:
    """A later comparison of a module with a smaller error does not replace a larger error."""
    judge = Judge(read_bundle(exported), {"f32": 1.0})
    expected = np.ones((1, 2), np.float32)
    for error in (0.25, 0.5, 0.125):
        judge.source((0, 1), [expected + error], [expected])
        judge.bucket((0, 2), [expected + error], [expected], 1)

    assert judge.numerics() == {
        "max_abs_error": 0.5,
        "max_rel_error": 0.5,
        "source": {"model.b1": 0.5},
        "buckets": {"model.b2": 0.5},
    }


@pytest.mark.parametrize("text", ["", "numerics:\n", "numerics: {rows: {model.b1: 1}, other: 2} # Kept.\n"])
def test_numbers_are_added_to_any_manifest(tmp_path: Path, text: str) -> None:
    """Storing keeps the other keys of the manifest, and the differences that were not measured again."""
    bundle = forged(tmp_path, {1: lambda x: x, 2: lambda x: x})
    with (bundle.path / "manifest.yaml").open("a") as file:
        file.write(text)
    before = read_bundle(bundle.path)
    lines_of(before, Comparison(store=True))
    after = read_bundle(bundle.path).manifest
    zeros = {"model.b2": 0.0}
    assert after.numerics == {**before.manifest.numerics, "buckets": zeros, "rows": zeros}
    assert after.inputs == before.manifest.inputs


def test_format_2_has_no_place_for_numbers(tmp_path: Path) -> None:
    """Differences cannot be stored in a manifest of format 2. The message names the command convert."""
    bundle = read_bundle(
        make_bundle(tmp_path, changed(GOOD, format_version="2.0"), weights=b"\2\0\0\0\0\0\0\0{}")
    )
    with pytest.raises(BundleError, match="rsrv-bundle convert"):
        lines_of(bundle, Comparison(store=True))


def test_a_meta_model_has_nothing_to_run(tmp_path: Path) -> None:
    """The check of a meta model says that it has no modules of its own."""
    meta = make_bundle(tmp_path, META, modules=(), hooks="def run(inputs, call): ...\n")
    assert lines_of(read_bundle(meta)) == ["has no modules of its own"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--store"], "need --numerics"),
        (["--numerics", "--no-signatures"], "leave out --no-signatures"),
        (["--numerics", "--tolerance", "f33=1"], "no element type 'f33'"),
        (["--numerics", "--tolerance", "f32"], "'f32': write TYPE=ERROR, e.g. f32=1e-3"),
        (["--numerics", "--tolerance", "f32=x"], "'f32=x': write TYPE=ERROR"),
        (["--numerics", "--tolerance", "f32=-1"], "'f32=-1': the error is a finite number of at least 0"),
        (["--numerics", "--tolerance", "f32=inf"], "the error is a finite number"),
        (["--numerics", "--samples", "none.npz"], "--samples none.npz: "),
        (["--numerics", "--samples", __file__], "is not a .npz file"),
        (["--numerics", "--against", "nobody:nothing"], "No module named 'nobody'"),
        (["--numerics", "--torch", "nothing"], "write package.module:factory"),
        (["--torch", "nobody:nothing"], "need --numerics"),
        (["--numerics", "--jax", "a:b", "--torch", "a:b"], "not allowed with"),
    ],
)
def test_wrong_flags_exit_2(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong combination of flags exits 2 with a message that says what is wrong."""
    assert cli.main(["check", *flags, "bundle"]) == 2
    assert problem in capsys.readouterr().err


# Samples.


def test_samples_are_asked_as_well(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples of any number of rows are compared, independent of the compiled batch sizes."""
    np.savez(tmp_path / "samples.npz", x=np.full((5, 3), 1e38, np.float32))
    flags = ["--numerics", "--samples", str(tmp_path / "samples.npz")]
    assert cli.main(["check", *flags, str(exported)]) == 0
    pools = rows_of(read_bundle(exported), read_samples(tmp_path / "samples.npz"))
    assert {variant: [rows.shape for rows in pool] for variant, pool in pools.items()} == {0: [(5, 3)]}


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [({}, "holds no array"), ({"x": np.zeros((0, 3), np.float32)}, "x: the first axis counts the samples")],
)
def test_samples_that_are_none_are_refused(
    exported: Path,
    arrays: Mapping[str, Array],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command exits 2 if the file has no samples, because a comparison without samples proves nothing."""
    file = tmp_path / "samples.npz"
    np.savez(file, **arrays)  # type: ignore[arg-type] # numpy's own keyword
    assert cli.main(["check", "--numerics", "--samples", str(file), str(exported)]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert captured.out == ""


HOOKS = """
import numpy as np

def preprocess(inputs):
    \"\"\"Text of any length to its length and first character, twice.\"\"\"
    text = inputs["text"]
    assert text.shape[0] == 1
    return {"x": np.array([[text.size, text[0, 0], 0]] * 2, np.float32)}
"""


def test_samples_of_clients_go_through_the_hook(tmp_path: Path) -> None:
    """If samples have the names of client inputs, each sample passes the hook as one request.

    If samples have the names of executable inputs, they do not pass the hook.
    """
    document = changed(MANIFEST, client_inputs=[tensor("text", "u8", c=-1)])
    bundle = read_bundle(make_bundle(tmp_path, document, modules=["model.b1.mlir"], hooks=HOOKS))
    (rows,) = rows_of(bundle, {"text": np.array([[65, 66], [67, 68], [69, 70]], np.uint8)})[0]
    assert rows.tolist() == [[2, 65, 0], [2, 65, 0], [2, 67, 0], [2, 67, 0], [2, 69, 0], [2, 69, 0]]
    (rows,) = rows_of(bundle, {"x": np.zeros((2, 3), np.float32)})[0]
    assert rows.shape == (2, 3)
    with pytest.raises(BundleError, match=r"model\.py: preprocess raised IndexError"):
        rows_of(bundle, {"text": np.zeros((1, 0), np.uint8)})


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ({"z": np.zeros(3)}, "samples: are z; the model takes x"),
        ({"x": np.zeros((2, 3))}, "samples: x: is float64, but the model takes f32"),
        ({"x": np.float32(1)}, "samples: x: has no axes"),
        (
            {"x": np.zeros((2, 4), np.float32)},
            "input 'x': a sample is float32 [1, 4]; the model takes f32 nc [-1, 3]",
        ),
    ],
)
def test_samples_that_do_not_fit_are_refused(tmp_path: Path, samples: dict[str, Array], problem: str) -> None:
    """Samples with a wrong name, type or shape are refused. The error has the expected name, type or shape."""
    bundle = read_bundle(make_bundle(tmp_path, MANIFEST, modules=["model.b1.mlir"]))
    with pytest.raises(BundleError, match=re.escape(problem)):
        rows_of(bundle, {name: np.asarray(array) for name, array in samples.items()})


def test_samples_may_have_types_that_numpy_has_no_name_for(tmp_path: Path) -> None:
    """Samples of a type without a numpy name, such as bf16, are read from their raw bytes."""
    document = changed(MANIFEST, executable_inputs=[tensor("x", "bf16", "cn", c=2)])
    bundle = read_bundle(make_bundle(tmp_path, document, modules=["model.b1.mlir"]))
    samples = np.array([[1, 2], [3, 4], [5, 6]], ml_dtypes.bfloat16)
    np.savez(tmp_path / "samples.npz", x=samples)
    (rows,) = rows_of(bundle, read_samples(tmp_path / "samples.npz"))[0]
    assert rows.dtype == samples.dtype
    assert rows.tolist() == samples.tolist()


def test_each_sample_goes_to_its_variant(tmp_path: Path) -> None:
    """The shape that the hook returns decides which variant a sample belongs to."""
    document = changed(
        MANIFEST,
        executable_inputs=[tensor(c=-1)],
        client_inputs=[tensor("text", "f32", c=2)],
        input_shapes=[{"c": 2}, {"c": 3}],
    )
    hooks = "def preprocess(i):\n    t = i['text']\n    return {'x': t if t[0, 0] else t[:, [0, 1, 1]]}\n"
    modules = ["model.v0.b1.mlir", "model.v1.b1.mlir"]
    bundle = read_bundle(make_bundle(tmp_path, document, modules=modules, hooks=hooks))
    pools = rows_of(bundle, {"text": np.array([[1, 2], [0, 3], [4, 5]], np.float32)})
    assert {variant: rows[0].tolist() for variant, rows in pools.items()} == {
        0: [[1, 2], [4, 5]],
        1: [[0, 3, 3]],
    }


def test_rows_find_their_way_through_batches_of_any_size(tmp_path: Path) -> None:
    """Rows are batched along any batch axis, and the last batch is padded with zeros."""
    document = changed(
        MANIFEST,
        executable_inputs=[tensor("x", "f32", "cn", c=3)],
        executable_outputs=[tensor("y", "f32", "n")],
    )
    bundle = read_bundle(make_bundle(tmp_path, document, modules=["model.b1.mlir"]))
    rows = [np.arange(15, dtype=np.float32).reshape(5, 3)]
    for size in (1, 2, 5, 8):
        batches: list[Array] = []

        def ask(inputs: list[Array], received: list[Array] = batches) -> list[Array]:
            received.append(inputs[0])
            return [inputs[0].sum(0)]

        (sums,) = in_batches(bundle, size, rows, ask)
        assert sums.tolist() == rows[0].sum(1).tolist()
        assert {array.shape for array in batches} == {(3, size)}
        assert len(batches) == -(-5 // size)
    assert batches[0][:, 5:].tolist() == [[0, 0, 0]] * 3


def test_a_source_may_return_more_than_the_bundle_keeps(tmp_path: Path) -> None:
    """A bundle has only some of its source's outputs. Only these outputs are compared, even if the source does not name them."""
    example = {"x": np.ones((1, 2), np.float32)}
    for name, model, output in (
        ("named", lambda x: {"a": x, "b": 2 * x}, "b"),
        ("numbered", lambda x: (x, 2 * x), "output_1"),
    ):
        bundle = export_bundle(
            lambda _, x, model=model: model(x),
            {},
            example,
            batch_sizes=[1],
            out_dir=tmp_path / name,
            outputs=[output],
        )
        assert [spec.name for spec in bundle.manifest.outputs] == [output]
        assert len(lines_of(bundle, Comparison(model))) == 1
