"""Compiled modules checked against the manifest and the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv_bundle import Bundle, BundleError, read_bundle
from rsrv_bundle.modules import (
    Signature,
    artifact_version,
    as_exported,
    check_signatures,
    module_file,
    parsed,
    read_module,
    serialised,
    signature_of,
    strip_locations,
)
from tests.unit.bundle.forge import GOOD, VARIANTS, changed, make_bundle, one_weight, seal, tensor

F32 = "f32"
X4, Y4, W = (F32, (4, 3, 4, 5)), (F32, (4, 2)), (F32, (2, 3))


def lower(fn: Callable[..., Any], *arguments: tuple[str, tuple[int, ...]], **options: Any) -> bytes:
    """Return the compiled artifact of `fn` for these arguments."""
    struct: Any = jax.ShapeDtypeStruct
    structs = [
        struct(shape, jnp.dtype({"f32": "float32", "i32": "int32", "bool": "bool"}[d]))
        for d, shape in arguments
    ]
    exported = jax.export.export(jax.jit(fn, keep_unused=True), platforms=["cpu"], **options)(*structs)
    return bytes(exported.mlir_module_serialized)


@functools.cache
def returning(*results: tuple[str, tuple[int, ...]], takes: tuple[tuple[str, tuple[int, ...]], ...]) -> bytes:
    """Return the artifact of a module with these results and arguments."""
    return lower(lambda *_: tuple(jnp.zeros(shape, dtype) for dtype, shape in _named(results)), *takes)


def _named(results: tuple[tuple[str, tuple[int, ...]], ...]) -> list[tuple[Any, tuple[int, ...]]]:
    return [({"f32": jnp.float32, "i32": jnp.int32}[dtype], shape) for dtype, shape in results]


def bundle_of(parent: Path, modules: dict[str, bytes], manifest: Any = None, **more: Any) -> Bundle:
    """Write a bundle with one weight and these modules."""
    manifest = changed(GOOD, batching=None) if manifest is None else manifest
    return read_bundle(make_bundle(parent, manifest, modules=modules, weights=one_weight(), **more))


def problems_of(bundle: Bundle) -> tuple[str, ...]:
    """Return the problems of a bundle's modules."""
    with pytest.raises(BundleError) as caught:
        check_signatures(bundle)
    return caught.value.problems


def test_a_fitting_module_passes_with_its_own_size(tmp_path: Path) -> None:
    """A module without a size in its name has the batch size of its signature. It may return more than the declared outputs."""
    blob = returning(Y4, ("i32", ()), takes=(X4, W))
    bundle = bundle_of(tmp_path, {"model.mlir": blob})
    signatures = check_signatures(bundle)
    assert signatures == {(0, 4): Signature((X4, W), (Y4, ("i32", ())))}
    assert module_file(bundle, (0, 4)).name == "model.mlir"


def test_a_module_without_a_batch_axis_has_size_1(tmp_path: Path) -> None:
    """A module without a batch axis has size 1."""
    manifest = changed(
        GOOD,
        batching=None,
        executable_inputs=[tensor(shape="c", c=3)],
        executable_outputs=[tensor("y", shape="")],
    )
    blob = returning((F32, ()), takes=((F32, (3,)), W))
    bundle = bundle_of(tmp_path, {"model.mlir": blob}, manifest)
    assert set(check_signatures(bundle)) == {(0, 1)}


@pytest.mark.parametrize(
    ("blob", "expected"),
    [
        (
            lambda: returning(Y4, takes=(X4,)),
            "main takes 1 arguments, but the manifest and the weights list 2",
        ),
        (lambda: returning(Y4, takes=(W, X4)), "input 'x': argument 0 of main is f32 [2, 3]"),
        (
            lambda: returning(Y4, takes=(("i32", X4[1]), W)),
            "argument 0 of main is i32 [4, 3, 4, 5], expected f32",
        ),
        (lambda: returning(Y4, takes=((F32, (4, 3, 5, 4)), W)), "expected f32 [4, 3, 4, 5]"),
        (lambda: returning(Y4, takes=(X4, (F32, (3, 2)))), "weight 'w': argument 1 of main is f32 [3, 2]"),
        (lambda: returning((F32, (4, 3)), takes=(X4, W)), "output 'y': result 0 of main is f32 [4, 3]"),
        (lambda: returning((F32, (2, 4)), takes=(X4, W)), "expected f32 [4, 2]"),
        (lambda: returning(("i32", (4, 2)), takes=(X4, W)), "result 0 of main is i32 [4, 2], expected f32"),
        (lambda: returning((F32, (4, 2, 1)), takes=(X4, W)), "result 0 of main is f32 [4, 2, 1]"),
        (lambda: returning(takes=(X4, W)), "main returns 0 results, but the manifest lists 1"),
    ],
)
def test_a_signature_that_does_not_fit_is_named(
    tmp_path: Path, blob: Callable[[], bytes], expected: str
) -> None:
    """A wrong signature is refused. The error has the argument, its type and the expected type."""
    lines = problems_of(bundle_of(tmp_path, {"model.b4.mlir": blob()}))
    assert all(line.startswith("model.b4.mlir: ") for line in lines)
    assert expected in lines[0]


def test_every_module_is_checked_and_all_problems_come_together(tmp_path: Path) -> None:
    """All modules are checked, and all problems are reported together. The size in a file's name must be the module's batch size."""
    modules = {"model.b1.mlir": b"junk", "model.b4.mlir": returning(Y4, takes=(X4, W))}
    modules["model.b8.mlir"] = modules["model.b4.mlir"]
    lines = problems_of(bundle_of(tmp_path, modules))
    assert [line.partition(":")[0] for line in lines] == ["model.b1.mlir", "model.b8.mlir", "model.b8.mlir"]


def test_variants_are_checked_with_their_own_sizes(tmp_path: Path) -> None:
    """A module of another variant's shapes is refused."""
    good = {
        "model.v0.mlir": returning(Y4, takes=((F32, (4, 3, 4, 5)), ("bool", (5, 4)), W)),
        "model.v1.mlir": returning(Y4, takes=((F32, (4, 3, 6, 7)), ("bool", (7, 4)), W)),
    }
    manifest = changed(VARIANTS, batching=None)
    assert set(check_signatures(bundle_of(tmp_path, good, manifest))) == {(0, 4), (1, 4)}
    swapped = dict(zip(good, reversed(good.values()), strict=True))
    assert len(problems_of(bundle_of(tmp_path, swapped, manifest, name="swapped"))) == 4


def read(blob: bytes) -> str:
    """Return the reader's problem with a module of this content."""
    with pytest.raises(BundleError) as caught:
        signature_of(blob, "model.mlir")
    assert all(line.startswith("model.mlir: ") for line in caught.value.problems)
    return str(caught.value)


def test_what_is_no_artifact_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """Text, empty files and torn files are refused, and the compiler prints nothing to the terminal."""
    blob = returning(Y4, takes=(X4, W))
    for junk in (b"", b"hello", b"module {}", blob[:4], blob[4:]):
        assert "is not a StableHLO portable artifact" in read(junk)
    for torn in (blob[:-20], blob[: len(blob) // 2]):
        assert "is not a valid StableHLO portable artifact: " in read(torn)
    assert capfd.readouterr() == ("", "")


def test_an_artifact_of_a_newer_version_is_refused_with_both_versions() -> None:
    """A newer artifact is refused with both versions, so that the user knows which side to update."""
    blob = returning(Y4, takes=(X4, W))
    version = artifact_version(blob)
    newer = blob.replace(f"StableHLO_v{version}".encode(), f"StableHLO_v9{version[1:]}".encode())
    assert f"is StableHLO 9{version[1:]}, but this jaxlib reads up to" in read(newer)


def test_dynamic_shapes_are_refused() -> None:
    """Dynamic shapes are refused, because a bundle has one module for each size."""
    exported = jax.export.export(jax.jit(lambda x: x + 1))(
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), jnp.float32)
    )
    assert "has the dynamic shape tensor<?x3xf32>" in read(bytes(exported.mlir_module_serialized))


def test_element_types_outside_the_format_are_refused() -> None:
    """Complex results are refused, because the manifest has no name for them."""
    assert "result 0: has the element type complex<f32>" in read(lower(lambda x: x + 1j, (F32, (2,))))


def test_host_callbacks_are_refused() -> None:
    """Host callbacks are refused, because they call an address of the exporting process."""

    def aim(module: Any) -> None:
        from jaxlib.mlir import ir

        def check(operation: Any) -> Any:
            if operation.name == "stablehlo.custom_call":
                operation.attributes["call_target_name"] = ir.StringAttr.get("xla_ffi_python_cpu_callback")
            return ir.WalkResult.ADVANCE

        module.operation.walk(check)

    blob = edited(lower(jnp.linalg.cholesky, (F32, (3, 3))), aim)
    assert "custom_call xla_ffi_python_cpu_callback: is not an allowed target" in read(blob)


def test_library_calls_are_allowed() -> None:
    """Linear algebra calls of known libraries are allowed."""
    blob = strip_locations(lower(jnp.linalg.cholesky, (F32, (3, 3)))).blob
    assert signature_of(blob, "model.mlir").outputs == ((F32, (3, 3)),)


def test_main_must_be_there_and_public() -> None:
    """A module without a public `main`, which the runtime calls, is refused."""
    blob = returning(Y4, takes=(X4, W))

    def set_main(key: str, value: str) -> bytes:
        from jaxlib.mlir import ir

        def edit(module: Any) -> None:
            module.body.operations[0].attributes[key] = ir.StringAttr.get(value)

        return edited(blob, edit)

    assert "has no function 'main'; it has: other" in read(set_main("sym_name", "other"))
    assert "its function 'main' is private" in read(set_main("sym_visibility", "private"))


def test_partitioned_modules_are_refused() -> None:
    """Partitioned modules are refused, because an executable runs on one device."""

    def split(module: Any) -> None:
        from jaxlib.mlir import ir

        kind = ir.IntegerType.get_signless(32)
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(kind, 2)

    blob = edited(returning(Y4, takes=(X4, W)), split)
    assert "mhlo.num_partitions: is 2; only 1 is supported" in read(blob)


def edited(blob: bytes, edit: Callable[[Any], None]) -> bytes:
    """Return an artifact after a change to its module."""
    with parsed(blob) as module:
        edit(module)
        return serialised(module, artifact_version(blob))


def test_locations_are_stripped_and_nothing_else_changes() -> None:
    """Stripping removes source locations, and with them the exporter's path, and keeps the results."""
    blob = lower(lambda x: (jnp.sin(x) @ x, jax.lax.top_k(x, 1)[0]), (F32, (2, 2)))
    stripped = strip_locations(blob).blob
    assert __file__.encode() in blob
    assert __file__.encode() not in stripped
    assert b".py" not in stripped
    assert artifact_version(stripped) == artifact_version(blob)
    assert strip_locations(stripped).blob == stripped
    x = np.array([[1, 2], [3, 4]], np.float32)
    signature = Signature(((F32, (2, 2)),), ((F32, (2, 2)), (F32, (2, 1))))
    results = [jax.jit(as_exported(b, signature).call)(x) for b in (blob, stripped)]
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_64_bit_modules_run_where_64_bit_types_are_on() -> None:
    """64-bit modules compute with 64 bits if jax has them on."""
    signature = Signature((("i64", (2,)),), (("i64", (2,)),))
    with jax.enable_x64(True):
        struct: Any = jax.ShapeDtypeStruct
        exported = jax.export.export(jax.jit(lambda x: x * 2**33))(struct((2,), jnp.int64))
    wrapped = as_exported(bytes(exported.mlir_module_serialized), signature)
    with jax.enable_x64(True):
        (result,) = jax.jit(wrapped.call)(np.array([1, 2]))
    assert np.asarray(result).tolist() == [2**33, 2**34]


def call_tree(levels: int, *, main: str = "f0") -> str:
    """Return a module whose functions each call the next one ten times."""
    body = "".join(
        f"""func.func {"public" if i == 0 else "private"} @{main if i == 0 else f"f{i}"}(%x: tensor<f32>) -> tensor<f32> {{
        {"".join(f"%{j + 1} = func.call @f{i + 1}(%x) : (tensor<f32>) -> tensor<f32>" + chr(10) for j in range(10))}
        return %x : tensor<f32> }}"""
        for i in range(levels)
    )
    return (
        f"{body} func.func private @f{levels}(%x: tensor<f32>) -> tensor<f32> {{ return %x : tensor<f32> }}"
    )


def assembled(text: str) -> bytes:
    """Return an artifact of a module in MLIR's text form."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    # In the context of another module, which has loaded the dialects.
    with parsed(returning(Y4, takes=(X4, W))):
        return serialised(ir.Module.parse(text), stablehlo.get_current_version())


def test_functions_that_unfold_without_end_are_refused() -> None:
    """Functions whose calls expand to billions of operations, or recurse, are refused."""
    assert "comes to more than 1000000 operations" in read(assembled(call_tree(9, main="main")))
    small = assembled(call_tree(3, main="main"))
    assert signature_of(small, "small.mlir").outputs == ((F32, ()),)
    endless = "func.func public @main(%x: tensor<f32>) -> tensor<f32> {%y = func.call @main(%x) : (tensor<f32>) -> tensor<f32> return %y : tensor<f32>}"
    assert "comes to more than 1000000 operations" in read(assembled(endless))


def test_tensors_larger_than_any_memory_are_refused() -> None:
    """Tensors larger than any memory are refused, because the compiler multiplies their extents unchecked."""
    shape = "x".join(["1000000"] * 3)
    big = f"""func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
        %y = stablehlo.broadcast_in_dim %x, dims = [] : (tensor<f32>) -> tensor<{shape}xf32>
        return %x : tensor<f32> }}"""
    assert "makes a tensor of more than 1099511627776 elements" in read(assembled(big))


def test_regions_nested_without_end_are_refused() -> None:
    """Deeply nested regions are refused, because a recursive walk would exhaust the stack."""
    inner = "stablehlo.return %p : tensor<f32>"
    for _ in range(120):
        inner = f"""%q = "stablehlo.if"(%c) ({{ {inner} }}, {{ stablehlo.return %p : tensor<f32> }}) :
            (tensor<i1>) -> tensor<f32> stablehlo.return %q : tensor<f32>"""
    inner = inner.removesuffix("stablehlo.return %q : tensor<f32>") + "return %q : tensor<f32>"
    text = f"func.func public @main(%c: tensor<i1>, %p: tensor<f32>) -> tensor<f32> {{ {inner} }}"
    assert "is nested more than 100 levels deep" in read(assembled(text))


def test_a_module_is_what_it_was_when_it_was_read(tmp_path: Path) -> None:
    """A module that changes after its check is refused when it is opened."""
    blob = returning(Y4, takes=(X4, W))
    bundle = bundle_of(tmp_path, {"model.mlir": blob})
    ((key, signature),) = check_signatures(bundle).items()
    assert read_module(bundle, key, signature) == blob
    module_file(bundle, key).write_bytes(returning(Y4, Y4, takes=(X4, W)))
    with pytest.raises(BundleError, match="was written to while the model was loaded"):
        read_module(bundle, key, signature)
    module_file(bundle, key).unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        read_module(bundle, key, signature)


SLOTS, POOLS = ("i32", (4,)), ((F32, (4, 8)), ("i32", (4,)))
STATEFUL = changed(
    GOOD,
    format_version=3,
    batching=None,
    sha256={},
    state={
        "slots": 4,
        "tensors": [{"name": "h", "dtype": "f32", "dims": [8]}, {"name": "p", "dtype": "i32", "dims": []}],
    },
)


def stateful(parent: Path, blob: bytes) -> Bundle:
    """Write a bundle with state of 3 slots, one weight and this module."""
    made = make_bundle(parent, STATEFUL, modules={"model.mlir": blob}, weights=one_weight())
    return read_bundle(seal(made))


def test_a_module_with_state_takes_slots_and_pools(tmp_path: Path) -> None:
    """A module with state takes inputs, slots, weights and pools, and returns outputs and pools."""
    blob = returning(Y4, *POOLS, takes=(X4, SLOTS, W, *POOLS))
    assert list(check_signatures(stateful(tmp_path, blob))) == [(0, 4)]


@pytest.mark.parametrize(
    ("takes", "gives", "fragment"),
    [
        ((X4, W, *POOLS), (Y4, *POOLS), "list 5: 1 inputs, the slots, 2 pools and 1 weights"),
        (
            (X4, ("i32", (3,)), W, *POOLS),
            (Y4, *POOLS),
            "slots: argument 1 of main is i32 [3], expected i32 [4]",
        ),
        (
            (X4, SLOTS, *POOLS, W),
            (Y4, *POOLS),
            "state 'p': argument 4 of main is f32 [2, 3], expected i32 [4]",
        ),
        ((X4, SLOTS, W, *POOLS), (Y4,), "main returns 1 results, expected 1 outputs and 2 pools"),
        ((X4, SLOTS, W, *POOLS), (Y4, Y4, *POOLS), "main returns 4 results"),
        (
            (X4, SLOTS, W, *POOLS),
            (Y4, *POOLS[::-1]),
            "state 'h': result 1 of main is i32 [4], expected f32 [4, 8]",
        ),
    ],
)
def test_another_convention_is_named(tmp_path: Path, takes: Any, gives: Any, fragment: str) -> None:
    """If a module takes or returns state in another way, the message names the argument or the result."""
    problems = problems_of(stateful(tmp_path, returning(*gives, takes=takes)))
    assert any(fragment in line for line in problems), problems
