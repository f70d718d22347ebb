"""Narrow weights: the choice of tensors, the rewritten modules, and the comparison that refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv_bundle import Bundle, BundleError, cli, load_weights, read_bundle
from rsrv_bundle.export import export_bundle
from rsrv_bundle.from_onnx import export_onnx
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.modules import check_signatures, parsed
from rsrv_bundle.narrow import narrow_bundle
from rsrv_bundle.narrowing import Narrow, WeightTypes, kept_because, narrow
from rsrv_bundle.numerics import ModuleRunner
from rsrv_bundle.spec import WeightSpec
from rsrv_bundle.stateful import export_stateful
from rsrv_bundle.weights import tensor_keys
from tests.onnx_files import graph, node, write

X = {"x": np.zeros((1, 64), np.float32)}
TOKENS = {"x": np.array([[5, 0, 127, 3]], np.int32)}


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / math.sqrt(shape[0])


def dense(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["a"] + p["bias"]) @ p["b"]


DENSE = {"a": normal(64, 96), "b": normal(96, 80, seed=1), "bias": normal(96)}


def export(out_dir: Path, fn: Any = dense, params: Any = None, inputs: Any = None, **options: Any) -> Bundle:
    """Call export_bundle with defaults for all arguments that a test does not set."""
    options = {"batch_sizes": [1, 4], **options}
    return export_bundle(fn, DENSE if params is None else params, inputs or X, out_dir=out_dir, **options)


def types(bundle: Bundle) -> dict[str, str]:
    return {weight.name: weight.dtype for weight in bundle.weights}


@pytest.mark.parametrize(
    ("kind", "stored", "worst"),
    [("bf16", "bf16", 0.01), ("f16", "f16", 1e-3), ("f8_e4m3fn", "f8_e4m3", 0.1), ("i8", "i8", 0.03)],
)
def test_a_bundle_is_narrowed(tmp_path: Path, kind: str, stored: str, worst: float) -> None:
    """Matrices become narrow and the bias stays. Each size is compared, and the manifest has the errors."""
    old = export(tmp_path / "wide")
    report = narrow_bundle(old.path, tmp_path / "narrow", weights=kind)
    new = read_bundle(tmp_path / "narrow")
    check_signatures(new)
    scales = {"a:scale": "f32", "b:scale": "f32"} if stored in ("i8", "f8_e4m3") else {}
    assert types(new) == {"a": stored, "b": stored, "bias": "f32", **scales}
    assert report.bytes_before == old.weight_bytes == 4 * (64 * 96 + 96 * 80 + 96)
    assert new.weight_bytes < old.weight_bytes * (0.3 if scales else 0.51)
    assert report.kept == {"bias": "vectors or scalars"}
    errors = new.manifest.numerics["narrowed"]
    assert isinstance(errors, dict)
    assert set(errors) == {"model.b1", "model.b4"}
    assert 0 < max(errors.values()) < worst
    assert new.manifest.provenance["narrowed"] == {"weights": kind, "bytes_before": old.weight_bytes}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["narrow", "wide"]


def scan(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"] + x), None), x, None, length=3)[0]


def conv(p: Any, x: Any) -> Any:
    image = x.reshape(-1, 1, 8, 8)
    return jax.lax.conv_general_dilated(image, p["w"], (1, 1), "SAME").reshape(-1, 128 * 64)


def heads(p: Any, x: Any) -> Any:
    return jnp.einsum("nd,dhk->nhk", x, p["w"]).reshape(-1, 128)


def batched(p: Any, x: Any) -> Any:
    return jnp.einsum("nhd,hdk->nhk", x.reshape(-1, 4, 16), p["w"]).reshape(-1, 256)


def tied(p: Any, x: Any) -> Any:
    return jnp.take(p["w"], x, axis=0, mode="clip").mean(1) @ p["w"].T


#: By name: a function, the shape of its weight, its input, and the shape of the scale.
FORMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any, tuple[int, ...]]] = {
    "product": (lambda p, x: x @ p["w"], (64, 96), X, (1, 96)),
    "transposed": (lambda p, x: x @ p["w"].T, (96, 64), X, (96, 1)),
    "left": (lambda p, x: (p["w"] @ x.T).T, (96, 64), X, (96, 1)),
    "heads": (heads, (64, 4, 32), X, (1, 4, 32)),
    "batched": (batched, (4, 16, 64), X, (4, 1, 64)),
    "convolution": (conv, (128, 1, 9, 9), X, (128, 1, 1, 1)),
    "table": (lambda p, x: p["w"][x].reshape(-1, 4 * 64), (128, 64), TOKENS, (128, 1)),
    "tied": (tied, (128, 64), TOKENS, (128, 1)),
    "loop": (scan, (64, 64), X, (1, 64)),
    "elsewhere": (lambda p, x: x[:, None] + p["w"], (64, 64), X, (64, 1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_widens_where_it_uses_the_weight(tmp_path: Path, form: str) -> None:
    """The narrow module computes what the wide module computes with the widened weight.

    The scale multiplies the result of a product or of a lookup, and not the whole weight.
    """
    fn, shape, inputs, scale = FORMS[form]
    old = export(tmp_path / "wide", fn, {"w": normal(*shape)}, inputs, batch_sizes=[4])
    arrays = random_inputs(old, 0, 4, inputs)
    for kind in ("i8", "bf16"):
        new = narrow_bundle(old.path, tmp_path / kind, weights=kind).bundle
        values, *scales = load_weights(new)
        assert [array.shape for array in scales] == ([scale] if kind == "i8" else [])
        wide = values.astype(np.float32) * (scales[0] if scales else 1)
        (got,) = ModuleRunner(new)((0, 4), arrays)
        want = np.asarray(jax.jit(fn)({"w": wide}, *arrays))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
        with parsed(new.modules[0, 4].read_bytes()) as module:
            products = [line for line in str(module).splitlines() if "stablehlo.multiply" in line]
        scaled = f": tensor<{'x'.join(map(str, shape))}xf32>"
        assert any(scaled in line for line in products) == (form == "elsewhere" and kind == "i8")


@pytest.mark.parametrize("kind", ["i8", "f8_e4m3"])
@pytest.mark.parametrize("compute", [None, "f16"])
def test_large_activations_do_not_overflow_f16(tmp_path: Path, kind: str, compute: str | None) -> None:
    """Large activations times unscaled weights would overflow f16, although the scaled product fits. The narrow module avoids this."""
    half = jnp.float16 if compute is None else jnp.float32
    old = export(
        tmp_path / "wide",
        lambda p, x: (x.astype(half) @ p["w"]).astype(jnp.float32),
        {"w": np.abs(normal(64, 96)).astype(half)},
        X,
    )
    new = narrow_bundle(old.path, tmp_path / "narrow", weights=kind, compute=compute).bundle
    inputs = [np.full((4, 64), 1000, np.float32)]
    (got,), (want,) = (ModuleRunner(bundle)((0, 4), inputs) for bundle in (new, old))
    np.testing.assert_allclose(got, want, rtol=0.05)


def test_the_rules_for_single_tensors() -> None:
    """Small tensors, vectors, and tensors of narrow or 64-bit types keep their type.

    A pattern overrides the rule about the size, but not the rule about the type.
    """

    def why(shape: tuple[int, ...], dtype: str = "f32", kind: str = "i8", named: bool = False) -> str | None:
        nbytes = math.prod(shape) * {"f32": 4, "f64": 8, "bf16": 2, "f16": 2, "i8": 1}[dtype]
        weight = WeightSpec("w", dtype, shape, nbytes, 0)
        return kept_because(weight, kind, named, frozenset({0}))

    assert why((64, 64)) is None
    assert why((64, 32)) == "small"
    assert why((64, 32), named=True) is None
    assert why((1, 9000)) == "vectors or scalars"
    assert why((2, 3000)) == "with too many scales"
    assert why((64, 64), kind="keep") == "kept as asked"
    assert why((64, 64), "f64") == "of type f64"
    assert why((64, 64), "i8") == "of type i8"
    assert why((64, 64), "bf16", "f16") == "already narrow"
    assert why((64, 64), "bf16") is None


def test_values_that_no_scale_helps() -> None:
    """Tensors with NaN, infinities or values beyond f16 keep their type. A channel of zeros or tiny values becomes zero."""
    columns = frozenset({0})
    good = normal(64, 8)
    for value in (np.nan, np.inf, -np.inf):
        bad = good.copy()
        bad[3, 5] = value
        assert narrow(bad, "i8", columns) == "with infinite or undefined values"
        assert narrow(bad, "bf16", columns) == "with infinite or undefined values"
    assert narrow(good * 1e6, "f16", columns) == "with values beyond the range of f16"
    good[:, 2] = 0
    good[:, 3] = 1e-39
    for kind in ("i8", "f8_e4m3"):
        tensor = narrow(good, kind, columns)
        assert isinstance(tensor, Narrow)
        assert tensor.scale is not None
        assert tensor.scale[0, 2] == tensor.scale[0, 3] == 1
        values = tensor.values.astype(np.float32)
        assert not values[:, 2:4].any()
        assert np.abs(values).max(0)[[0, 7]].tolist() == [127 if kind == "i8" else 448] * 2


def test_patterns_choose_types_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patterns keep or narrow tensors by name, and the first fitting pattern decides.

    The command prints how many weights keep their type.
    """
    export(tmp_path / "wide")
    out = str(tmp_path / "narrow")
    assert cli.main(["narrow", str(tmp_path / "wide"), "-o", out, "--weights", "bf16,a=keep,bi*=f16"]) == 0
    assert types(read_bundle(out)) == {"a": "f32", "b": "bf16", "bias": "f16"}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"ok {out}: 55.7 kB of weights -> 40.")
    assert line.endswith("the bound is 0.05. Weights that keep their type: 1 kept as asked")
    assert cli.main(["show", out]) == 0
    assert re.search(r"Weights: 3, 40\.\d kB, 55\.7 kB before narrowing: 1 f32", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--weights", "i4"], 2, "'i4': weights can be bf16, f16, f8_e4m3, i8 or keep"),
        (["--weights", "i8,norm"], 2, "'norm': write PATTERN=TYPE, such as *.norm*=keep"),
        (["--weights", "i8,norm*=keep"], 1, "--weights: no weight's name matches norm*"),
        (
            ["--weights", "keep"],
            1,
            "--weights keep: narrows no weight. Weights that keep their type: 3 kept as",
        ),
    ],
)
def test_a_wrong_choice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, message: str
) -> None:
    """A wrong type, a pattern without a fitting tensor, and a choice that changes nothing are errors."""
    export(tmp_path / "wide")
    assert cli.main(["narrow", str(tmp_path / "wide"), "-o", str(tmp_path / "narrow"), *flags]) == status
    assert message in capsys.readouterr().err
    assert not (tmp_path / "narrow").exists()


def test_a_model_that_i8_spoils_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In i8, a table with one huge value per row loses its other values, so it is refused. --tolerance accepts the reported error."""
    spoiled = {"w": normal(128, 64)}
    spoiled["w"][:, 0] = 1000

    def rest(p: Any, x: Any) -> Any:
        return p["w"][x][:, :, 1:]

    export(tmp_path / "wide", rest, spoiled, TOKENS)
    command = ["narrow", str(tmp_path / "wide"), "-o", str(tmp_path / "narrow"), "--weights", "i8"]
    assert cli.main(command) == 1
    assert (
        f"{tmp_path / 'wide'}: model.b1.mlir: output 'output': differs from the wide model by 1 of its largest magnitude; the"
        " bound is 0.1. Keep the type of some weights, choose a wider type, or accept the error with --tolerance f32=1.1"
    ) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]
    assert cli.main([*command, "--tolerance", "f32=1"]) == 0


def test_samples_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs from --samples can show an error that random inputs do not show."""
    params = {"w": normal(64, 128)}
    params["w"][0] = 0
    params["w"][0, 0] = 1e-3

    def narrow_range(p: Any, x: Any) -> Any:
        return x @ p["w"]

    export(tmp_path / "wide", narrow_range, params)
    sample = np.zeros((1, 64), np.float32)
    sample[0, 0] = 1
    np.savez(tmp_path / "samples.npz", x=sample)
    command = ["narrow", str(tmp_path / "wide"), "-o", str(tmp_path / "narrow"), "--weights", "i8"]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main([*command, "--overwrite", "--samples", str(tmp_path / "samples.npz")]) == 1
    assert "differs from the wide model by 1 of its largest magnitude" in capsys.readouterr().err


def test_the_task_has_a_figure_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The directions of embeddings are compared in addition to their values.

    A bundle is refused if a direction changes too much, even if the error of the values is within the bound. `--tolerance
    cosine=...` raises the bound for directions.
    """
    # The first value is large in all rows, and the other values decide the direction.
    params = {"w": normal(64, 64)}
    task = {"kind": "feature-extraction", "inputs": {"ids": "x"}, "outputs": {"embedding": "e"}}
    tokens = {"x": np.zeros((1,), np.int32)}

    def embed(p: Any, x: Any) -> Any:
        row = p["w"][x % 64]
        return {"e": jnp.where(jnp.arange(64) > 0, row, 0)}

    params["w"][:, 0] = 30
    export(tmp_path / "wide", embed, params, tokens, task=task)
    command = ["narrow", str(tmp_path / "wide"), "-o", str(tmp_path / "narrow"), "--weights", "i8"]
    assert cli.main([*command, "--tolerance", "f32=1"]) == 1
    assert re.search(
        r"task: cosine: 1 minus the smallest cosine of an embedding and its wide one is 0\.\d+; the bound is 0\.01\.",
        capsys.readouterr().err,
    )
    assert cli.main([*command, "--tolerance", "cosine=much"]) == 2
    assert "'cosine=much': write TYPE=ERROR" in capsys.readouterr().err
    assert cli.main([*command, "--tolerance", "f32=1", "--tolerance", "cosine=0.9"]) == 0
    assert "narrowed_task" in read_bundle(tmp_path / "narrow").manifest.numerics


def test_fine_tunes_still_share_their_backbone(tmp_path: Path) -> None:
    """Equal wide tensors become equal narrow tensors and scales, so a server stores them once."""
    keys = []
    for seed in (1, 2):
        wide = export(tmp_path / f"wide{seed}", params=DENSE | {"b": normal(96, 80, seed=seed)})
        new = narrow_bundle(wide.path, tmp_path / f"narrow{seed}", weights="i8").bundle
        keys.append(dict(zip(types(new), tensor_keys(new), strict=True)))
    first, second = keys
    assert {name for name in first if first[name] == second[name]} == {"a", "a:scale", "bias"}


def test_a_model_with_state_is_narrowed(tmp_path: Path) -> None:
    """In a model with state, the scales are between the weights and the pools, and a second step continues from the state."""

    def step(p: Any, state: Any, x: jax.Array) -> Any:
        new = jnp.tanh(x @ p["w"] + state["h"])
        return {"y": new}, {"h": new}

    zeros = {"h": jax.ShapeDtypeStruct((64,), jnp.float32)}
    old = export_stateful(
        step, zeros, {"w": normal(64, 64)}, X, slots=4, batch_sizes=[1, 2], out_dir=tmp_path / "wide"
    )
    new = narrow_bundle(old.path, tmp_path / "narrow", weights="i8").bundle
    x, slots = [normal(2, 64)], np.array([2, 0])

    def two_steps(bundle: Bundle) -> Any:
        run = ModuleRunner(bundle)
        _, pools = run.step((0, 2), x, ~slots, run.pools(0))
        return run.step((0, 2), x, slots, pools)[0][0]

    np.testing.assert_allclose(two_steps(new), two_steps(old), rtol=0, atol=0.05)


@pytest.mark.long
def test_a_generation_is_compared_over_texts(tmp_path: Path) -> None:
    """For a generation, the error is the share of tokens that differ after equal texts.

    So a module is not refused because of a single different token.
    """
    from tests.unit.bundle.test_stateful import MODEL, export_model

    old = export_model(tmp_path / "wide", batch_sizes=[1], chunks=[1])
    kinds = "i8,embedding=i8"
    report = narrow_bundle(old.path, tmp_path / "narrow", weights=kinds)
    assert report.errors["model.v0.b1"] <= 0.1
    spoiled = MODEL | {"embedding": MODEL["embedding"].copy()}
    # Columns of very different magnitude share the scale of their row.
    spoiled["embedding"][:, 0] = 1000
    wide = export_model(tmp_path / "other", params=spoiled, batch_sizes=[1], chunks=[1])
    with pytest.raises(
        BundleError, match=r"output 'token': differs from the wide model by \S+ of its values"
    ):
        narrow_bundle(wide.path, tmp_path / "refused", weights=kinds)


def test_exports_of_all_frameworks_can_be_narrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option works in every exporter, here JAX on the command line and ONNX in Python."""
    (tmp_path / "narrow_nets.py").write_text(
        "import numpy as np\n\n"
        "def net():\n"
        "    return lambda p, x: x @ p, np.eye(64, dtype=np.float32), {'x': np.ones((1, 64), np.float32)}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["export", "--jax", "narrow_nets:net", "-o", "a", "--batch-sizes", "2", "--weights", "i8"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"2 weights, 4352 bytes, .*\nnarrowed from 16384 bytes, at most \S+ from the wide modules\n", out
    )
    assert types(read_bundle("a")) == {"params": "i8", "params:scale": "f32"}
    made = graph(
        [node("MatMul", "x w", "y")],
        {"x": (np.float32, ["n", 64])},
        {"y": (np.float32, ["n", 80])},
        {"w": normal(64, 80)},
    )
    file = write(tmp_path / "m.onnx", made)
    assert types(export_onnx(file, out_dir="c", batch_sizes=[2], weights="f16")) == {"w": "f16"}


def test_a_narrow_bundle_is_checked_with_its_own_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check --numerics` compares a narrow bundle with its source at the bound that was used to narrow it."""
    export(tmp_path / "m", weights="f8_e4m3")
    assert cli.main(["check", "--numerics", "--against", f"{__name__}:answers", str(tmp_path / "m")]) == 0
    assert "from its source" in capsys.readouterr().out


def answers(x: Any) -> Any:
    return dense(DENSE, x)


def test_modules_for_another_platform_are_not_narrowed(tmp_path: Path) -> None:
    """Modules for another platform are refused, because they cannot be compared on this machine."""
    with pytest.raises(
        BundleError, match="weights, compute: modules for cuda cannot be compared on this machine"
    ):
        export(tmp_path / "m", weights="i8", platform="cuda")


def network(p: Any, x: Any) -> Any:
    """A network with convolutions, a norm, a shortcut, the softmax of attention, and a loop."""
    image = x.reshape(-1, 1, 8, 8)
    for name in ("c1", "c2"):
        new = jax.lax.conv_general_dilated(image, p[name], (1, 1), "SAME")
        image = jax.nn.relu(new * p["scale"][:, None, None] + p["shift"][:, None, None]) + image
    image = jax.lax.reduce_window(
        jax.lax.conv(image, p["c2"], (1, 1), "SAME"),
        -jnp.inf,
        jax.lax.max,
        (1, 1, 3, 3),
        (1, 1, 1, 1),
        "SAME",
    )
    tokens = image.reshape(len(x), 8, 64)
    scores = jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", tokens @ p["q"], tokens) / 8)
    hidden = jax.nn.standardize(jnp.einsum("nqk,nkd->nqd", scores, tokens)).mean(1)
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["q"]), None), hidden, None, length=2)[0]


NETWORK = {
    "c1": normal(8, 1, 3, 3),
    "c2": normal(8, 8, 3, 3) / 8,
    "scale": np.full(8, 1.25, np.float32),
    "shift": normal(8),
    "q": normal(64, 64),
}


@pytest.mark.parametrize(("compute", "worst"), [("bf16", 0.03), ("f16", 0.004)])
def test_a_module_computes_in_half_precision(tmp_path: Path, compute: str, worst: float) -> None:
    """Products take the half type. Exponentials, reductions, the state of loops, inputs and outputs stay f32."""
    old = export(tmp_path / "wide", network, NETWORK, batch_sizes=[2])
    report = narrow_bundle(old.path, tmp_path / "half", compute=compute)
    assert report.bundle.weight_bytes == old.weight_bytes
    assert 0 < report.errors["model.b2"] < worst
    assert (report.bundle.manifest.inputs, report.bundle.manifest.outputs) == (
        old.manifest.inputs,
        old.manifest.outputs,
    )
    with parsed(report.bundle.modules[0, 2].read_bytes()) as module:
        lines = str(module).splitlines()
    for name in ("dot_general", "convolution"):
        operations = [line for line in lines if f"stablehlo.{name}" in line]
        assert operations
        assert not any("f32" in line.partition(" : ")[2] for line in operations)
    for name in ("exponential", "reduce(", "while", "rsqrt", "tanh"):
        assert not any(compute in line for line in lines if f"stablehlo.{name}" in line)
    # The pooling compares values of the half type.
    assert [f"tensor<{compute}>" in line for line in lines if "^bb0" in line] == [True]
    # The sums with weights follow the convolutions. The sums with the input's shortcut stay in f32.
    assert sum("stablehlo.add" in line and compute in line for line in lines) == 2
    both = narrow_bundle(old.path, tmp_path / "both", weights="i8", compute=compute)
    assert both.bound == pytest.approx(0.1 + {"bf16": 0.05, "f16": 0.01}[compute])
    assert both.errors["model.b2"] < 0.05


def test_complex_products_stay_in_f32(tmp_path: Path) -> None:
    """Products of complex numbers stay in f32, because there are no complex numbers of half precision.

    A conversion to half precision would lose the imaginary part.
    """

    def waves(p: Any, x: Any) -> Any:
        spectrum = jnp.fft.rfft(x @ p["in"])[:, :16]
        return jnp.fft.irfft(spectrum @ jax.lax.complex(p["real"], p["imaginary"]), 64)

    params = {"in": normal(64, 64), "real": normal(16, 16), "imaginary": normal(16, 16, seed=1)}
    old = export(tmp_path / "wide", waves, params, batch_sizes=[2])
    report = narrow_bundle(old.path, tmp_path / "half", compute="bf16")
    assert 0 < report.errors["model.b2"] < 0.01
    with parsed(report.bundle.modules[0, 2].read_bytes()) as module:
        results = [
            line.rpartition("-> ")[2] for line in str(module).splitlines() if "stablehlo.dot_general" in line
        ]
    assert results == ["tensor<2x64xbf16>", "tensor<2x16xcomplex<f32>>"]


def test_text_of_types() -> None:
    """The text of --weights is parsed with every spelling of the types that the format knows."""
    weight_types = WeightTypes.parse("int8, *.norm*=keep,head=float8_e4m3fn")
    assert weight_types.of("layer.norm.weight") == ("keep", True)
    assert weight_types.of("head") == ("f8_e4m3", True)
    assert weight_types.of("body") == ("i8", False)


def test_a_meta_model_has_nothing_to_narrow(tmp_path: Path) -> None:
    """A bundle without modules is refused."""
    from tests.unit.bundle.forge import META, make_bundle

    path = make_bundle(tmp_path, META, modules=(), hooks="def run(inputs, call):\n    return {}\n")
    with pytest.raises(BundleError, match="narrow the bundles that it calls"):
        narrow_bundle(path, tmp_path / "narrow", weights="i8")
