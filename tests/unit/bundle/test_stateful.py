"""`export_stateful` and `export_generative`: what they write, and what they refuse."""

from __future__ import annotations

import re
import runpy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv_bundle import Bundle, BundleError, cli, numerics, read_bundle
from rsrv_bundle.commands.converting import convert
from rsrv_bundle.modules import check_signatures, known_version
from rsrv_bundle.numerics import ModuleRunner
from rsrv_bundle.stateful import export_generative, export_stateful

X = {"x": np.zeros((1, 3), np.float32)}
ZEROS = {"sum": jax.ShapeDtypeStruct((3,), jnp.float32), "steps": jax.ShapeDtypeStruct((), jnp.int32)}
SCALE = {"scale": np.array([1, 2, 4], np.float32)}


def add(params: Any, state: Any, x: jax.Array) -> Any:
    """Add x, [n, 3], to the sum of each sequence."""
    total = state["sum"] + x * params["scale"]
    return {"total": total}, {"sum": total, "steps": state["steps"] + 1}


def export(out_dir: Path, step: Any = add, init: Any = None, **options: Any) -> Bundle:
    """Call export_stateful with defaults for all arguments that a test does not set."""
    options = {"slots": 8, "batch_sizes": [1, 4], **options}
    return export_stateful(
        step, ZEROS if init is None else init, SCALE, options.pop("inputs", X), out_dir=out_dir, **options
    )


def test_a_bundle_keeps_the_state_of_each_sequence(tmp_path: Path) -> None:
    """A step continues or begins the slots of its rows, and does not change other slots. Padded rows write nothing."""
    bundle = export(tmp_path / "sums", when_full="host", idle_timeout_s=5, description="Sums.")
    manifest = bundle.manifest
    assert manifest.format_version == "3"
    assert manifest.state is not None
    assert [(tensor.name, tensor.dtype, tensor.dims) for tensor in manifest.state.tensors] == [
        ("steps", "i32", ()),
        ("sum", "f32", (3,)),
    ]
    assert (manifest.state.when_full, manifest.state.idle_timeout_s) == ("host", 5)
    assert set(manifest.numerics) == {"max_abs_error", "max_rel_error", "source", "buckets", "rows"}
    run = ModuleRunner(bundle)
    inputs = [np.ones((4, 3), np.float32)]
    (first,), pools = run.step((0, 4), inputs, ~np.array([5, 0, 7, 1]), run.pools(9))
    (second,), pools = run.step((0, 4), inputs, np.array([0, 8, ~2, 8]), pools)
    assert first[:, 2].tolist() == [4, 4, 4, 4]
    assert second[[0, 2], 2].tolist() == [8, 4]
    assert np.asarray(pools[0]).tolist() == [2, 1, 1, 9, 9, 1, 9, 1]


def test_a_sequence_begins_with_what_init_gives(tmp_path: Path) -> None:
    """`init`, a function of the weights, returns the state with which a sequence begins."""

    def init(params: Any) -> Any:
        return {"sum": -params["scale"], "steps": jnp.int32(10)}

    run = ModuleRunner(export(tmp_path / "sums", init=init))
    (total,), (steps, _) = run.step((0, 1), [np.ones((1, 3), np.float32)], ~np.array([3]), run.pools(0))
    assert (total.tolist(), int(steps[3])) == ([[0, 0, 0]], 11)


@pytest.mark.long
def test_a_step_copies_no_pool(tmp_path: Path) -> None:
    """The compiled step writes pools in place, both for one row, which XLA handles as slices, and for several."""

    def change(_: Any, state: Any, x: jax.Array) -> Any:
        new = state.at[:, :3].add(x)
        return new[:, :1], new

    bundle = export(tmp_path / "m", change, jax.ShapeDtypeStruct((9000,), jnp.float32), slots=33)
    for key, signature in check_signatures(bundle).items():
        text = numerics.compiled(bundle, key, signature).as_text()
        assert not re.findall(r"f32\[33,9000\]\S* copy\(", text), key


@pytest.mark.long
def test_chunks_are_compared_with_the_whole_sequence(tmp_path: Path) -> None:
    """If the time is a variable axis, the export compares a sequence in chunks with the whole sequence at once."""

    def run(params: Any, state: Any, x: jax.Array) -> Any:
        sums = state["sum"][:, None] + jnp.cumsum(x, 1) * params["scale"]
        return {"sums": sums}, {"sum": sums[:, -1]}

    options: dict[str, Any] = {
        "inputs": {"x": np.zeros((1, 1, 3), np.float32)},
        "axes": {"x": "ntc"},
        "input_shapes": [{"t": 1}, {"t": 5}],
        "init": {"sum": ZEROS["sum"]},
    }
    bundle = export(tmp_path / "sums", run, **options)
    (error,) = dict(bundle.manifest.numerics["chunks"]).values()  # type: ignore[arg-type]
    assert error < 1e-6

    def forgetful(params: Any, state: Any, x: jax.Array) -> Any:
        outputs, after = run(params, state, x)
        return outputs, {"sum": after["sum"] if x.shape[1] == 1 else state["sum"]}

    with pytest.raises(BundleError, match="in chunks differs from the original model for the whole by"):
        export(tmp_path / "bad", forgetful, **options)
    assert not (tmp_path / "bad").exists()


def write_in_place(params: Any, pools: Any, slots: Any, begins: Any, x: Any) -> Any:
    """Add x to the slots' sums in place."""
    before = pools["sum"].at[slots].get(mode="fill", fill_value=0)
    total = jnp.where(begins[:, None], 0, before) + x * params["scale"]
    return {"total": total}, {"sum": pools["sum"].at[slots].set(total, mode="drop")}


def test_a_step_may_write_its_slots_in_place(tmp_path: Path) -> None:
    """A step that writes the pools itself gives the same as a step that sees only its rows."""
    bundle = export(tmp_path / "m", write_in_place, {"sum": ZEROS["sum"]}, in_place=True)
    run = ModuleRunner(bundle)
    inputs = [np.ones((1, 3), np.float32)]
    _, pools = run.step((0, 1), inputs, ~np.array([6]), run.pools(5))
    (total,), _ = run.step((0, 1), inputs, np.array([6]), pools)
    assert total.tolist() == [[2, 4, 8]]


def test_a_step_that_writes_other_slots_is_refused(tmp_path: Path) -> None:
    """A step that writes in place, and changes the state of sequences outside its batch, is refused."""

    def wild(params: Any, pools: Any, slots: Any, begins: Any, x: Any) -> Any:
        outputs, after = write_in_place(params, pools, slots, begins, x)
        return outputs, {"sum": after["sum"] * 0.5}

    with pytest.raises(
        BundleError, match="'sum': a step changes the state of sequences that are not in its batch"
    ):
        export(tmp_path / "m", wild, {"sum": ZEROS["sum"]}, in_place=True)


def wrong_shape(params: Any, state: Any, x: Any) -> Any:
    """Return a state of another shape."""
    return add(params, state, x)[0], {**state, "sum": state["sum"][:, :2]}


def wrong_tree(params: Any, state: Any, x: Any) -> Any:
    """Return a state without one of its tensors."""
    return add(params, state, x)[0], {"sum": state["sum"]}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"step": wrong_shape}, "step: returns the state sum as float32 [1, 2], expected float32 [1, 3]"),
        ({"step": wrong_tree}, "step: returns the state PyTreeDef({'sum': *}), but init returns"),
        ({"step": lambda params, state, x: x}, "step: must return a tuple (outputs, state)"),
        ({"slots": 0}, "slots: must be a whole number from 1 to 65536, not 0"),
        ({"slots": 3}, "takes 4 rows, but only 3 sequences have a slot"),
        ({"init": {}}, "init: gives no state"),
        ({"init": {"sum": np.zeros(3, np.float32)}}, "init: give a function of the weights"),
        ({"init": {"sum": 3}}, "state: sum: is a int; make it an array"),
        ({"when_full": "drop"}, "state.when_full: must be wait, refuse, host, not 'drop'"),
    ],
)
def test_a_wrong_step_is_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    """A step or a state that cannot be exported is refused, and nothing is written."""
    with pytest.raises(BundleError, match=re.escape(problem)):
        export(tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


VOCABULARY, WIDTH, CONTEXT = 40, 8, 32


def attend(
    params: Any,
    pools: Any,
    slots: Any,
    begins: Any,
    position: Any,
    tokens: Any,
    lengths: Any,
    clean: bool = True,
) -> Any:
    """Attend to a cache of keys with one layer and one head.

    With `clean`, zeros replace the keys that an earlier sequence left in the slot.
    """
    embedded = params["embedding"][tokens]
    at = position[:, None] + jnp.arange(tokens.shape[1])
    real = jnp.arange(tokens.shape[1]) < lengths[:, None]
    cache = pools["keys"].at[slots[:, None], jnp.where(real, at, CONTEXT)].set(embedded, mode="drop")
    keys = cache.at[slots].get(mode="fill", fill_value=0)
    if clean:
        keys = jnp.where((jnp.arange(CONTEXT) < (position + lengths)[:, None])[:, :, None], keys, 0)
    scores = jnp.einsum("ntd,ncd->ntc", embedded @ params["query"], keys)
    scores = jnp.where(jnp.arange(CONTEXT) <= at[:, :, None], scores, -1e9)
    mixed = jnp.einsum("ntc,ncd->ntd", jax.nn.softmax(scores), keys)
    last = jnp.take_along_axis(mixed, lengths[:, None, None] - 1, 1)[:, 0]
    return last @ params["embedding"].T, {"keys": cache}


RANDOM = np.random.default_rng(1)
MODEL = {
    "embedding": RANDOM.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
    "query": RANDOM.standard_normal((WIDTH, WIDTH)).astype(np.float32),
}


def export_model(out_dir: Path, step: Any = attend, params: Any = MODEL, **options: Any) -> Bundle:
    """Export the model, which has a cache of keys for four sequences."""
    cache = {"keys": jax.ShapeDtypeStruct((CONTEXT, WIDTH), jnp.float32)}
    fixed: dict[str, Any] = {"slots": 4, "context": CONTEXT, "max_tokens": 8, "stop": [2], "chunks": [1, 8]}
    return export_generative(
        step, cache, params, in_place=True, out_dir=out_dir, **{**fixed, "batch_sizes": [2], **options}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the model with a tokenizer file."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text("{}")
    return export_model(folder / "model", tokenizer=folder / "tokenizer.json", template="Q: {text}").path


def test_a_language_model_generates(model: Path) -> None:
    """A model is exported with chunks, position and sampling. A prompt in chunks gives the same tokens as the whole prompt."""
    bundle = read_bundle(model)
    assert bundle.manifest.generate is not None
    assert (bundle.manifest.generate.tokenizer, bundle.manifest.generate.stop) == ("tokenizer.json", (2,))
    assert (bundle.path / "tokenizer.json").read_text() == "{}"
    assert bundle.manifest.chunks == (1, 8)
    assert set(bundle.manifest.numerics["source"]) == {"model.v0.b2", "model.v1.b2"}  # type: ignore[arg-type]
    run = ModuleRunner(bundle)

    def ask(variant: int, tokens: list[int], slot: int, pools: Any) -> tuple[int, Any]:
        padded = np.zeros((2, bundle.manifest.chunks[variant]), np.int32)
        padded[0, : len(tokens)] = tokens
        inputs = [padded, np.array([len(tokens), 1], np.int32), np.zeros((2, 4), np.float32)]
        (token,), pools = run.step((variant, 2), inputs, np.array([slot, 4]), pools)
        return int(token[0]), pools

    prompt = [5, 9, 11, 30]
    whole, pools = ask(1, prompt, ~2, run.pools(7))
    for index, token in enumerate(prompt):
        last, pools = ask(0, [token], ~1 if index == 0 else 1, pools)
    assert last == whole
    assert np.asarray(pools[0]).tolist() == [7, 4, 4, 7]


@pytest.mark.long
def test_a_model_that_ignores_lengths_is_refused(tmp_path: Path) -> None:
    """A step whose padding changes its answer is refused: chunks would differ from the whole prompt."""

    def careless(
        params: Any, pools: Any, slots: Any, begins: Any, position: Any, tokens: Any, lengths: Any
    ) -> Any:
        everything = jnp.full_like(lengths, tokens.shape[1])
        return attend(params, pools, slots, begins, position, tokens, everything)

    with pytest.raises(BundleError, match="output 'token': its logit by fn, for the whole prompt, is"):
        export_model(tmp_path / "model", careless, batch_sizes=[1])


@pytest.mark.long
def test_a_model_that_reads_what_an_earlier_sequence_left_is_refused(tmp_path: Path) -> None:
    """A model that only multiplies an earlier sequence's keys by zero is refused, because zero times a NaN is a NaN."""
    with pytest.raises(BundleError, match=r"output 'token': its logits are not finite\. A slot holds what"):
        export_model(tmp_path / "model", partial(attend, clean=False), batch_sizes=[1], chunks=[1])


def test_a_step_that_reads_what_an_earlier_sequence_left_is_refused(tmp_path: Path) -> None:
    """A step in place is refused if it begins a sequence by multiplying the slot's old state by zero.

    Zero times a NaN that an earlier sequence left in the slot is a NaN.
    """

    def stale(params: Any, pools: Any, slots: Any, begins: Any, x: Any) -> Any:
        before = pools["sum"].at[slots].get(mode="fill", fill_value=0) * ~begins[:, None]
        total = before + x * params["scale"]
        return {"total": total}, {"sum": pools["sum"].at[slots].set(total, mode="drop")}

    with pytest.raises(BundleError, match="output 'total': differs from the original model by inf"):
        export(tmp_path / "m", stale, {"sum": ZEROS["sum"]}, in_place=True, batch_sizes=[1])


def test_a_state_tensor_called_position_is_refused(tmp_path: Path) -> None:
    """A state tensor of the name `position` is refused, because the exporter adds this tensor itself."""
    taken = {"position": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(BundleError, match="init: position: the exporter adds"):
        export_generative(attend, taken, MODEL, slots=1, context=8, max_tokens=1, out_dir=tmp_path / "m")


def test_the_tools_know_state_and_generation(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check`, `show` and `diff` of rsrv-bundle report a bundle's slots and its generation."""
    assert cli.main(["check", "--numerics", str(model)]) == 0
    assert ", 4 slots of 1028 bytes, generates text, " in capsys.readouterr().out
    assert cli.main(["show", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "State: 4 slots of 1.03 kB, 4.11 kB; idle sequences end after 60 s; if all slots are taken: wait"
        in lines
    )
    assert "  keys      f32  [32, 8]" in lines
    assert "  template    Q: {text}" in lines
    assert "Clients send" not in lines
    other = shutil.copytree(model, tmp_path / "model")
    text = (other / "manifest.yaml").read_text()
    (other / "manifest.yaml").write_text(
        text.replace("slots: 4", "slots: 5").replace("context: 32", "context: 31")
    )
    assert cli.main(["diff", str(model), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {"state.slots: 4 in A, 5 in B", "generate.context: 32 in A, 31 in B"} <= set(lines)


@pytest.mark.long
def test_a_bundle_with_state_is_converted(model: Path, tmp_path: Path) -> None:
    """`rsrv-bundle convert` keeps state and generation, and compares the first steps."""
    new = convert(model, tmp_path / "model", stablehlo=known_version("1.9.0"))
    old = read_bundle(model).manifest
    assert (new.manifest.state, new.manifest.generate) == (old.state, old.generate)
    assert new.manifest.format_version == "3"


@pytest.mark.long
def test_the_documented_step_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in docs/state.md can be exported as it is."""
    page = (Path(__file__).parents[3] / "docs" / "state.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("running.py").write_text(page.partition("```python\n# running.py\n")[2].partition("```")[0])
    runpy.run_path("running.py")
    assert "chunks" in read_bundle("bundles/running").manifest.numerics
