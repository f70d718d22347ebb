"""Each rule of the manifest, with the message for a broken rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rsrv_bundle import BundleError, TensorSpec, read_bundle
from tests.unit.bundle.forge import (
    GOOD,
    META,
    VARIANTS,
    changed,
    make_bundle,
    one_weight,
    problems_of,
    tensor,
)

HOOKS = "def preprocess(inputs):\n    return inputs\n"
V2: dict[str, Any] = changed(GOOD, format_version=2.0)


def with_input(**entry: Any) -> dict[str, Any]:
    """Return GOOD with keys of its input replaced. The value None removes a key."""
    return changed(GOOD, executable_inputs=[changed(GOOD["executable_inputs"][0], **entry)])


def calls(calls: list[str], external: Any) -> dict[str, Any]:
    """Return the section `meta`."""
    return {"calls": calls, "external": external}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no version", changed(GOOD, format_version=None), "format_version: is missing"),
    ("old version", changed(GOOD, format_version="1.0"), "format_version: '1.0' is not supported"),
    ("name", changed(GOOD, name=7), "name: must be text"),
    ("description", changed(GOOD, description=["a"]), "description: must be text"),
    ("kind", changed(GOOD, kind="graph"), "kind: must be 'model' or 'meta', not 'graph'"),
    ("kind type", changed(GOOD, kind=3), "kind: must be 'model' or 'meta', not 3"),
    ("no inputs", changed(GOOD, executable_inputs=None), "executable_inputs: is missing"),
    ("no outputs", changed(GOOD, executable_outputs=None), "executable_outputs: is missing"),
    ("empty outputs", changed(GOOD, executable_outputs=[]), "executable_outputs: must list at least one"),
    ("inputs type", changed(GOOD, executable_inputs={}), "executable_inputs: must be a list"),
    ("tensor type", changed(GOOD, executable_inputs=["x"]), "executable_inputs[0]: must be a mapping"),
    ("tensor name", with_input(name=None), "executable_inputs[0]: tensor entry missing string name"),
    ("tensor name type", with_input(name=3), "executable_inputs[0]: tensor entry missing string name"),
    ("tensor name text", with_input(name="a\nb"), "printable characters"),
    ("dtype missing", with_input(dtype=None), "executable_inputs.x: dtype is missing; use one of f16"),
    (
        "dtype unknown",
        with_input(dtype="float32"),
        "executable_inputs.x: unknown dtype 'float32'; did you mean f32?",
    ),
    ("dtype spelt", with_input(dtype="TYPE_INT64"), "unknown dtype 'TYPE_INT64'; did you mean i64?"),
    ("dtype of strings", with_input(dtype="TYPE_STRING"), "unknown dtype 'TYPE_STRING'; strings are bytes"),
    (
        "strings in a module",
        with_input(dtype="bytes"),
        "executable_inputs.x: unknown dtype 'bytes'; strings are bytes, in client_inputs",
    ),
    (
        "any number of strings a row",
        changed(META, client_inputs=[tensor("texts", "bytes", "nk", k=-1)]),
        "client_inputs.texts: an axis of strings needs a size",
    ),
    ("dtype type", with_input(dtype=["f32"]), "executable_inputs.x: unknown dtype"),
    ("shape missing", with_input(shape=None), "executable_inputs.x: shape must be text"),
    ("shape letter", with_input(shape="n1hw"), "'1' is not an ASCII letter"),
    ("shape unicode", with_input(shape="nähw"), "is not an ASCII letter"),
    ("shape repeat", with_input(shape="nchh"), "repeats the axis 'h'"),
    ("two n", with_input(shape="nn"), "repeats the axis 'n'"),
    ("n and b", with_input(shape="nb"), "has two batch axes"),
    ("dims type", with_input(dims=[3, 4, 5]), "dims must be a mapping"),
    ("dims key", with_input(dims={"c": 3, "h": 4, "w": 5, "ww": 1}), "dims: 'ww' is not one ASCII letter"),
    ("dims batch", with_input(dims={"c": 3, "h": 4, "w": 5, "n": 1}), "dims: 'n' is reserved"),
    ("dims orphan", with_input(dims={"c": 3, "h": 4, "w": 5, "z": 1}), "dims: 'z' does not occur"),
    ("dims missing", with_input(dims={"c": 3, "h": 4}), "dims gives no size for the axis 'w'"),
    ("dims zero", with_input(dims={"c": 0, "h": 4, "w": 5}), "dims: c must be a whole number"),
    ("dims -2", with_input(dims={"c": -2, "h": 4, "w": 5}), "or -1, not -2"),
    ("dims bool", with_input(dims={"c": True, "h": 4, "w": 5}), "dims: c must be a whole number"),
    ("dims float", with_input(dims={"c": 3.0, "h": 4, "w": 5}), "dims: c must be a whole number"),
    ("dims text", with_input(dims={"c": "3", "h": 4, "w": 5}), "dims: c must be a whole number"),
    ("dims large", with_input(dims={"c": 2**31, "h": 4, "w": 5}), "dims: c must be a whole number"),
    ("dims product", with_input(dims={"c": 2**31 - 1, "h": 2**31 - 1, "w": 5}), "more bytes than 64 bits"),
    ("same name", changed(GOOD, executable_inputs=[tensor(c=1), tensor(c=1)]), "names must be unique"),
    (
        "mixed batching",
        changed(GOOD, executable_inputs=[tensor(c=1), tensor("z", shape="c", c=1)]),
        "mixes batched and unbatched executable inputs; these have no batch axis: z",
    ),
    ("batching type", changed(GOOD, batching=[1]), "batching: must be a mapping"),
    ("sizes type", changed(GOOD, batching={"compiled_batch_sizes": 4}), "must be a list of batch sizes"),
    ("size 0", changed(GOOD, batching={"compiled_batch_sizes": [0]}), "from 1 to 2147483647, not 0"),
    ("size bool", changed(GOOD, batching={"compiled_batch_sizes": [True]}), "not True"),
    ("provenance", changed(GOOD, provenance="me"), "provenance: must be a mapping"),
    ("numerics", changed(GOOD, numerics={"max_abs_error": "0"}), "numerics.max_abs_error: must be a number"),
    ("numerics", changed(GOOD, numerics={"source": {"b1": []}}), "numerics.source.b1: must be a number"),
    ("f8 to clients", with_input(dtype="f8_e4m3"), "the element type f8_e4m3 cannot be sent to clients"),
    ("client spec", changed(GOOD, client_outputs=[tensor(c=1)]), "client_outputs: only hooks can change"),
    ("meta on a model", changed(GOOD, meta={"calls": []}), "meta: only a bundle of kind 'meta' has it"),
    ("internal type", changed(GOOD, internal="yes"), "internal: must be true or false, not 'yes'"),
    (
        "many variants",
        changed(VARIANTS, input_shapes=[{"h": i, "w": 1} for i in range(1, 1002)]),
        "has 1001 entries",
    ),
    (
        "many sizes",
        changed(GOOD, batching={"compiled_batch_sizes": list(range(1, 1002))}),
        "has 1001 entries",
    ),
    ("many tensors", changed(GOOD, executable_inputs=[{}] * 1001), "executable_inputs: has 1001 entries"),
    (
        "many calls",
        changed(META, meta={"calls": ["m"] * 1001}),
        "meta.calls: has 1001 entries; 1000 are allowed",
    ),
    (
        "number beyond 64 bits",
        with_input(dims={"c": 2**70, "h": 4, "w": 5}),
        "whole numbers have at most 64 bits",
    ),
    ("unknown key", changed(GOOD, executable_input=[]), "did you mean 'executable_inputs'?"),
    ("unknown key far", changed(GOOD, zzz=1), "zzz: unknown key; known are format_version"),
    ("unknown nested", changed(GOOD, batching={"batch_sizes": [1]}), "batching.batch_sizes: unknown key"),
    ("unknown in tensor", with_input(dim={}), "executable_inputs[0].dim: unknown key; did you mean 'dims'?"),
    ("open axis", with_input(dims={"c": 3, "h": -1, "w": 5}), "axes of size -1 (h)"),
    ("shapes type", changed(VARIANTS, input_shapes={"h": 1}), "input_shapes: must be a list of mappings"),
    ("shapes empty", changed(VARIANTS, input_shapes=[]), "input_shapes: must list at least one"),
    ("shapes needless", changed(GOOD, input_shapes=[{"h": 1}]), "no executable input has an axis of size -1"),
    ("shapes entry", changed(VARIANTS, input_shapes=[4]), "input_shapes[0]: must be a mapping"),
    (
        "shapes key",
        changed(VARIANTS, input_shapes=[{"hh": 1, "h": 1, "w": 1}]),
        "'hh' is not one ASCII letter",
    ),
    ("shapes orphan", changed(VARIANTS, input_shapes=[{"c": 1, "h": 1, "w": 1}]), "gives a size for 'c'"),
    ("shapes missing", changed(VARIANTS, input_shapes=[{"h": 1}]), "no size for the variable axis 'w'"),
    ("shapes zero", changed(VARIANTS, input_shapes=[{"h": 0, "w": 1}]), "input_shapes[0].h: sizes are whole"),
    (
        "shapes twice",
        changed(VARIANTS, input_shapes=[{"h": 1, "w": 2}, {"w": 2, "h": 1}]),
        "input_shapes[1]: repeats the sizes",
    ),
]
BAD_META: list[tuple[str, dict[str, Any], str]] = [
    ("no meta", changed(META, meta=None), "meta.calls: a meta model needs the list"),
    ("calls type", changed(META, meta={"calls": "first"}), "meta.calls: a meta model needs the list"),
    ("call type", changed(META, meta={"calls": [1]}), "entries are model names, not 1"),
    ("call twice", changed(META, meta={"calls": ["a", "a"]}), "'a' is listed 2 times"),
    ("own name", changed(META, meta={"calls": ["model_a"]}), "'model_a' must not call itself"),
    ("external type", changed(META, meta=calls([], "x")), "meta.external: must be a list of model names"),
    ("external entry", changed(META, meta=calls([], [""])), "meta.external: entries are model names, not ''"),
    ("external twice", changed(META, meta=calls([], ["x", "x"])), "meta.external: 'x' is listed 2 times"),
    ("external self", changed(META, meta=calls([], ["model_a"])), "meta.external: 'model_a' must not call"),
    (
        "restartable type",
        changed(META, meta=calls([], []) | {"restartable": "yes"}),
        "meta.restartable: must be true or false, not 'yes'",
    ),
    ("overlap", changed(META, meta=calls(["a", "b"], ["b"])), "meta.external: 'b' is also in meta.calls"),
    ("internal", changed(META, internal=True), "internal: only a bundle of kind 'model' has it"),
    ("no client inputs", changed(META, client_inputs=None), "client_inputs: a meta model must list"),
    ("no client outputs", changed(META, client_outputs=[]), "client_outputs: a meta model must list"),
    ("shapes", changed(META, input_shapes=[{"c": 1}]), "input_shapes: a meta model has no compiled shapes"),
    (
        "unknown",
        changed(META, meta={"calls": [], "call": 1}),
        "meta.call: unknown key; did you mean 'calls'?",
    ),
]


@pytest.mark.parametrize(("manifest", "fragment"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_broken_rule_is_named(tmp_path: Path, manifest: dict[str, Any], fragment: str) -> None:
    """A broken rule gives one line, which names the file, the key and the rule."""
    lines = [line for line in problems_of(make_bundle(tmp_path, manifest)) if fragment in line]
    assert len(lines) == 1
    assert lines[0].startswith("manifest.yaml: ")


@pytest.mark.parametrize(("manifest", "fragment"), [b[1:] for b in BAD_META], ids=[b[0] for b in BAD_META])
def test_a_broken_rule_of_meta_models_is_named(
    tmp_path: Path, manifest: dict[str, Any], fragment: str
) -> None:
    """A broken rule of the section `meta` is named with its key."""
    lines = problems_of(make_bundle(tmp_path, manifest, modules=(), hooks=HOOKS))
    assert [line for line in lines if fragment in line]


def test_a_meta_model_without_hooks_is_refused(tmp_path: Path) -> None:
    """A meta model without a model.py is refused."""
    assert problems_of(make_bundle(tmp_path, META, modules=())) == (
        "manifest.yaml: kind: a meta model needs a model.py",
    )


def test_a_good_meta_model_needs_neither_modules_nor_weights(tmp_path: Path) -> None:
    """A meta model is read without modules and weights."""
    bundle = read_bundle(make_bundle(tmp_path, META, modules=(), hooks=HOOKS))
    assert bundle.manifest.meta_calls == ("first", "second")
    assert (bundle.modules, bundle.weights, bundle.manifest.wire_inputs[0].dims) == ({}, (), (-1, -1))


def test_a_meta_model_may_call_models_that_are_no_bundles(tmp_path: Path) -> None:
    """`meta.external` lists other Triton models that a meta model may call."""
    manifest = changed(META, meta=calls(["first"], ["tokenizer", "resnet"]))
    bundle = read_bundle(make_bundle(tmp_path, manifest, modules=(), hooks=HOOKS))
    assert bundle.manifest.meta_calls == ("first",)
    assert bundle.manifest.meta_external == ("tokenizer", "resnet")
    assert not bundle.manifest.meta_restartable


@pytest.mark.parametrize(("value", "internal"), [(None, False), (False, False), (True, True)])
@pytest.mark.parametrize("version", ["2.0", 3])
def test_a_model_is_internal_when_it_says_so(
    tmp_path: Path, version: Any, value: bool | None, internal: bool
) -> None:
    """A model is internal in both formats only if its manifest says so."""
    manifest = changed(GOOD, format_version=version, internal=value)
    assert read_bundle(make_bundle(tmp_path, manifest, weights=one_weight())).manifest.internal is internal


@pytest.mark.parametrize("text", ["", "[]", "just words", "- a\n- b"])
def test_a_manifest_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """A manifest that is not a mapping gets only that message."""
    assert problems_of(make_bundle(tmp_path, text)) == ("manifest.yaml: must be a mapping of keys to values",)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """Problems of the manifest, the modules and the weights are reported together."""
    bad = changed(GOOD, kind="x", executable_outputs=[tensor("y", dtype="f", c=1)])
    lines = problems_of(make_bundle(tmp_path, bad, modules=["model.b1.mlir"], weights=b"short"))
    assert len(lines) == 4
    assert {line.partition(":")[0] for line in lines} == {
        "manifest.yaml",
        "model.b4.mlir",
        "weights.safetensors",
    }


def test_a_newline_in_a_key_does_not_forge_a_second_line(tmp_path: Path) -> None:
    """A newline in a key does not split the line of its problem."""
    (line,) = problems_of(make_bundle(tmp_path, changed(GOOD, **{"a\nb": 1})))
    assert "\n" not in line


@pytest.mark.parametrize("version", [2, 2.0, "2", "2.0", 3, 3.0, "3"])
def test_versions_may_be_written_as_numbers(tmp_path: Path, version: Any) -> None:
    """A format version written as a YAML number is read."""
    made = make_bundle(tmp_path, changed(GOOD, format_version=version), weights=one_weight())
    assert read_bundle(made).manifest.format_version == ("3" if str(version)[0] == "3" else "2.0")


def test_version_3_shapes_are_row_major(tmp_path: Path) -> None:
    """Shapes of format 3 are row-major, as in numpy."""
    (spec,) = read_bundle(make_bundle(tmp_path)).manifest.inputs
    assert spec == TensorSpec("x", "f32", (-1, 3, 4, 5), 0, "nchw")


def test_version_2_shapes_are_reversed(tmp_path: Path) -> None:
    """Shapes of format 2 are reversed: their first letter varies fastest."""
    manifest = changed(
        V2,
        executable_inputs=[tensor(shape="whcn", w=5, h=4, c=3)],
        executable_outputs=[tensor("y", shape="b")],
    )
    bundle = read_bundle(make_bundle(tmp_path, manifest, weights=one_weight()))
    assert bundle.manifest.inputs == (TensorSpec("x", "f32", (-1, 3, 4, 5), 0, "nchw"),)
    assert bundle.manifest.outputs == (TensorSpec("y", "f32", (-1,), 0, "b"),)


def test_version_2_ignores_unknown_keys_and_odd_provenance(tmp_path: Path) -> None:
    """Unknown keys and odd provenance of format 2 are ignored."""
    odd = {"executable_input": [], "provenance": "me", "numerics": {"a": "b"}, "meta": 3, "internal": "no"}
    bundle = read_bundle(make_bundle(tmp_path, changed(V2, **odd), weights=one_weight()))
    assert (bundle.manifest.provenance, bundle.manifest.internal) == ({}, False)


def test_an_unquoted_shape_of_one_batch_axis_is_text(tmp_path: Path) -> None:
    """An unquoted `shape: n` and a dims key `y` are text, not booleans."""
    text = """
format_version: "2.0"
executable_inputs: [{name: x, dtype: f32, shape: ny, dims: {y: 4}}]
executable_outputs: [{name: y, dtype: i64, shape: n}, {name: z, dtype: bool, shape: no, dims: {o: 2}}]
"""
    bundle = read_bundle(make_bundle(tmp_path, text, modules=["model.mlir"], weights=one_weight()))
    assert [spec.letters for spec in (*bundle.manifest.inputs, *bundle.manifest.outputs)] == ["yn", "n", "on"]


def test_a_scalar_has_an_empty_shape(tmp_path: Path) -> None:
    """A scalar has an empty shape without axes."""
    manifest = changed(GOOD, batching=None, executable_inputs=[tensor(shape="")])
    (spec,) = read_bundle(make_bundle(tmp_path, manifest, modules=["model.mlir"])).manifest.inputs
    assert spec == TensorSpec("x", "f32", (), None, "")


def test_client_specs_replace_what_clients_see(tmp_path: Path) -> None:
    """Client specs replace the modules' tensors on the wire, and the modules may use f8."""
    manifest = changed(
        GOOD,
        executable_inputs=[tensor(dtype="f8_e5m2", c=2)],
        client_inputs=[tensor("image", dtype="u8", shape="nc", c=-1)],
    )
    bundle = read_bundle(make_bundle(tmp_path, manifest, hooks=HOOKS))
    assert [spec.name for spec in bundle.manifest.wire_inputs] == ["image"]
    assert bundle.manifest.wire_outputs == bundle.manifest.outputs


def test_clients_may_send_and_get_strings(tmp_path: Path) -> None:
    """Strings are tensors of clients, where a hook converts them."""
    manifest = changed(
        GOOD,
        client_inputs=[tensor("text", dtype="bytes", shape="n")],
        client_outputs=[tensor("labels", dtype="bytes", shape="nk", k=2)],
    )
    hooks = "def preprocess(inputs): ...\ndef postprocess(outputs): ..."
    bundle = read_bundle(make_bundle(tmp_path, manifest, hooks=hooks))
    specs = (*bundle.manifest.wire_inputs, *bundle.manifest.wire_outputs)
    assert [(spec.name, spec.dtype) for spec in specs] == [("text", "bytes"), ("labels", "bytes")]


@pytest.mark.parametrize(
    ("section", "hook", "missing"),
    [("client_inputs", "postprocess", "preprocess"), ("client_outputs", "preprocess", "postprocess")],
)
def test_strings_that_no_hook_converts_are_refused(
    tmp_path: Path, section: str, hook: str, missing: str
) -> None:
    """Strings of clients are refused without the hook of their side, even if the hook of the other side exists."""
    manifest = changed(GOOD, **{section: [tensor("text", dtype="bytes", shape="n")]})
    path = make_bundle(tmp_path, manifest, hooks=f"def {hook}(tensors): ...")
    with pytest.raises(
        BundleError, match=rf"{section}\.text: only {missing} in model\.py can convert strings"
    ):
        read_bundle(path)


def test_batch_sizes_are_sorted_and_unique(tmp_path: Path) -> None:
    """Compiled batch sizes are sorted, and duplicates are removed."""
    manifest = changed(GOOD, batching={"compiled_batch_sizes": [4, 1, 4]})
    assert read_bundle(make_bundle(tmp_path, manifest)).manifest.compiled_batch_sizes == (1, 4)


def test_variants_give_concrete_shapes_and_back(tmp_path: Path) -> None:
    """Variants give concrete shapes, and shapes give their variants. A letter has the same size in all inputs."""
    modules = [f"model.v{v}.b{b}.mlir" for v in (0, 1) for b in (1, 4)]
    bundle = read_bundle(make_bundle(tmp_path, VARIANTS, modules=modules))
    assert bundle.manifest.variable_axes == ((0, 2), (0, 3), (1, 0))
    assert bundle.manifest.input_shapes == ((4, 5, 5), (6, 7, 7))
    assert bundle.variants == 2
    for variant in (0, 1):
        shapes = [bundle.input_shape(i, variant, 4) for i in (0, 1)]
        assert bundle.variant_of(shapes) == variant
    assert bundle.input_shape(0, 1, 4) == (4, 3, 6, 7)
    assert bundle.input_shape(1, 1, 4) == (7, 4)
    assert bundle.variant_of([(4, 3, 6, 5), (7, 4)]) is None
    assert bundle.variant_of([(4, 3, 6, 7)]) is None
    assert bundle.variant_of([(4, 3, 6), (7, 4)]) is None
    with pytest.raises(IndexError):
        bundle.input_shape(0, 2, 1)


def test_the_documented_manifests_are_good_ones(tmp_path: Path) -> None:
    """The whole manifests on the pages are valid."""
    model, meta = (
        (Path(__file__).parents[3] / "docs" / page)
        .read_text(encoding="utf-8")
        .partition("```yaml\n")[2]
        .partition("```")[0]
        for page in ("bundles.md", "hooks.md")
    )
    modules = [f"model.b{size}.mlir" for size in (1, 4, 16)]
    made = make_bundle(tmp_path, model, modules=modules, weights=one_weight(), hooks=HOOKS)
    bundle = read_bundle(made, verify=False)
    assert [spec.name for spec in bundle.manifest.wire_outputs] == ["class", "score"]
    bundle = read_bundle(make_bundle(tmp_path, meta, name="reader", modules=(), hooks=HOOKS))
    assert bundle.manifest.meta_calls == ("backbone", "head")
