"""The precision of f32 products before and after a treatment, on modules made by hand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv_bundle import BundleError
from rsrv_bundle.modules import as_exported, parsed, serialised, signature_of
from rsrv_bundle.precision import Treatment, product, treat
from rsrv_bundle.products import Precision, precision_of

F32 = "f32"
ROUNDED = "lhs_precision_type = tf32, rhs_precision_type = tf32, accumulation_type = f32"
EXACT = "lhs_precision_type = f32, rhs_precision_type = f32, accumulation_type = f32"
COARSE = "lhs_precision_type = bf16, rhs_precision_type = bf16, accumulation_type = f32"


def algorithm(types: str, operations: int = 1) -> str:
    return (
        f", algorithm = <{types}, lhs_component_count = 1, rhs_component_count = 1, "
        f"num_primitive_operations = {operations}, allow_imprecise_accumulation = false>"
    )


def dot(types: tuple[str, str, str] = (F32, F32, F32), more: str = "") -> str:
    """Return an operation on matrices %x and %y. The three element types are those of %x, %y and the result."""
    x, y, z = (f"tensor<2x2x{kind}>" for kind in types)
    return f"%z = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0]{more} : ({x}, {y}) -> {z}"


def function(
    body: str, takes: tuple[str, ...] = (F32, F32), returns: str = F32, *, result: str = "%z", after: str = ""
) -> str:
    """Return a module's text. Its main takes 2 x 2 matrices %x and %y of these types, and returns one matrix."""
    arguments = ", ".join(f"%{name}: tensor<2x2x{kind}>" for name, kind in zip("xyg", takes, strict=False))
    kind = f"tensor<2x2x{returns}>"
    return f"func.func public @main({arguments}) -> {kind} {{\n{body}\nreturn {result} : {kind} }}\n{after}"


def artifact(text: str) -> bytes:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    # The context of another module has the dialects loaded.
    with parsed(product(2)[0]):
        return serialised(ir.Module.parse(text), stablehlo.get_current_version())


def text_of(blob: bytes) -> str:
    with parsed(blob) as module:
        return str(module)


def applied(blob: bytes, treatment: Treatment) -> tuple[bytes, Precision]:
    """Treat a module after inspecting it, as the runtime does."""
    with parsed(blob) as module:
        seen = precision_of(module)
    return treat(blob, "model.mlir", treatment, seen)


def treated(text: str, treatment: Treatment) -> Precision:
    """Return the precision after the treatment, and check that a second treatment changes nothing."""
    blob, precision = applied(artifact(text), treatment)
    again, seen = applied(blob, treatment)
    assert again == blob
    fields = ("f32", "tf32", "hardware", "algorithm", "ungovernable")
    assert [getattr(seen, key) for key in fields] == [getattr(precision, key) for key in fields]
    return precision


@pytest.mark.parametrize("operations", [1, 3])
def test_a_tf32_algorithm_is_stripped_for_other_hardware(operations: int) -> None:
    """`strip` removes a TF32 algorithm, which other hardware would refuse or compute differently."""
    blob, precision = applied(artifact(function(dot(more=algorithm(ROUNDED, operations)))), "strip")

    assert precision == Precision(hardware=1, stripped=1)
    assert "algorithm" not in text_of(blob)
    signature = signature_of(blob, "model.mlir")
    (result,) = jax.jit(as_exported(blob, signature).call)(np.eye(2, dtype=np.float32), X)
    np.testing.assert_array_equal(result, X)


X = np.array([[1, 2], [3, 4]], np.float32)


@pytest.mark.parametrize("operations", [1, 3])
def test_a_tf32_algorithm_becomes_one_of_f32(operations: int) -> None:
    """`pin` replaces a TF32 algorithm by an f32 algorithm, even if the TF32 algorithm consists of three products."""
    blob, precision = applied(artifact(function(dot(more=algorithm(ROUNDED, operations)))), "pin")

    assert precision == Precision(f32=1, rewritten=1)
    assert f"{EXACT}, lhs_component_count = 1, rhs_component_count = 1, num_primitive_operations = 1" in (
        text_of(blob)
    )


@pytest.mark.parametrize(
    ("types", "pinned"),
    [
        ((F32, F32, F32), 1),
        ((F32, F32, "f64"), 1),
        (("bf16", F32, F32), 1),
        (("complex<f32>", "complex<f32>", "complex<f32>"), 1),
        (("bf16", "bf16", F32), 0),
        (("f16", "f16", "f16"), 0),
        (("f64", "f64", "f64"), 0),
        (("i32", "i32", "i32"), 0),
    ],
)
def test_products_of_f32_are_pinned_and_no_others(types: tuple[str, str, str], pinned: int) -> None:
    """A product is pinned if one of its operands is f32 or complex64."""
    precision = treated(function(dot(types), types[:2], types[2]), "pin")

    assert precision == Precision(f32=pinned, pinned=pinned)


@pytest.mark.parametrize(
    ("attribute", "pinned"),
    [
        (", precision = [DEFAULT, DEFAULT]", 1),
        (", precision = [HIGH, HIGH]", 1),
        (", precision = [HIGHEST, DEFAULT]", 1),
        (", precision = [HIGHEST, HIGHEST]", 0),
        (algorithm(EXACT), 0),
    ],
)
def test_less_than_the_highest_precision_is_not_f32(attribute: str, pinned: int) -> None:
    """A product counts as f32 only if both operands have the highest precision, because HIGH is TF32 on a GPU."""
    assert treated(function(dot(more=attribute)), "pin") == Precision(f32=1, pinned=pinned)


def test_another_algorithm_is_the_exporters_choice() -> None:
    """Another explicit algorithm is counted and left unchanged by every treatment."""
    for treatment in ("keep", "strip", "pin"):
        assert treated(function(dot(more=algorithm(COARSE))), treatment) == Precision(algorithm=1)


CONVOLUTION = """%z = stablehlo.convolution(%x, %y) dim_numbers = [b, f]x[i, o]->[b, f], window = {{}}
    {{batch_group_count = 1 : i64, feature_group_count = 1 : i64{more}}} : (tensor<2x2x{kind}>, tensor<2x2x{kind}>) -> tensor<2x2x{kind}>"""
CONFIG = ", precision_config = [#stablehlo<precision DEFAULT>, #stablehlo<precision HIGHEST>]"


@pytest.mark.parametrize(
    ("body", "takes"),
    [
        (CONVOLUTION.format(kind=F32, more=""), (F32, F32)),
        (CONVOLUTION.format(kind=F32, more=CONFIG), (F32, F32)),
        (
            '%z = "stablehlo.dot"(%x, %y) : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>',
            (F32, F32),
        ),
    ],
)
def test_other_products_are_pinned_likewise(body: str, takes: tuple[str, ...]) -> None:
    """Convolutions and StableHLO's older dot are also pinned."""
    assert treated(function(body, takes), "keep") == Precision(hardware=1)
    assert treated(function(body, takes), "pin") == Precision(f32=1, pinned=1)


def test_a_convolution_of_another_type_is_left_alone() -> None:
    """A bf16 convolution is not counted."""
    text = function(CONVOLUTION.format(kind="bf16", more=""), ("bf16", "bf16"), "bf16")
    assert treated(text, "pin") == Precision()


def test_an_einsum_cannot_be_pinned_and_is_refused() -> None:
    """StableHLO's einsum has no precision, so pinning it is refused. The message names the operation and what to do."""
    body = '%z = "stablehlo.einsum"(%x, %y) {einsum_config = "ij,jk->ik"} : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>'
    assert treated(function(body), "strip") == Precision(hardware=1)
    with pytest.raises(BundleError, match=r"model\.mlir: 1 stablehlo\.einsum: .* Export the model again"):
        applied(artifact(function(body)), "pin")


def test_products_in_regions_and_functions_are_found() -> None:
    """Products in loops, branches, reductions, called functions and composites are counted and pinned."""
    square = "tensor<2x2xf32>"
    inner = dot().replace("%x", "%a").replace("%y", "%b")
    helper = f"func.func private @{{}}(%a: {square}, %b: {square}) -> {square} {{{{ {inner} \n return %z : {square} }}}}\n"
    body = f"""
      %n = stablehlo.constant dense<3> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %1:2 = stablehlo.while(%i = %n, %c = %x) : tensor<i32>, {square}
        cond {{ %p = stablehlo.compare GT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
               stablehlo.return %p : tensor<i1> }}
        do {{ %j = stablehlo.subtract %i, %one : tensor<i32>
             {dot().replace("%z", "%d").replace("%x", "%c")}
             %q = stablehlo.compare GT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
             %e = "stablehlo.if"(%q) ({{ {dot().replace("%z", "%r").replace("%x", "%d")} \n stablehlo.return %r : {square} }},
                                      {{ stablehlo.return %d : {square} }}) : (tensor<i1>) -> {square}
             stablehlo.return %j, %e : tensor<i32>, {square} }}
      %2 = func.call @called(%1#1, %y) : ({square}, {square}) -> {square}
      %3 = stablehlo.composite "any.thing" %2, %y {{decomposition = @decomposed}} : ({square}, {square}) -> {square}
      %4 = "stablehlo.reduce"(%3, %zero) ({{
        ^bb0(%u: tensor<f32>, %v: tensor<f32>):
          %w = "stablehlo.dot_general"(%u, %v) {{dot_dimension_numbers = #stablehlo.dot<>}} : (tensor<f32>, tensor<f32>) -> tensor<f32>
          stablehlo.return %w : tensor<f32>
      }}) {{dimensions = array<i64: 0>}} : ({square}, tensor<f32>) -> tensor<2xf32>
      %z = stablehlo.broadcast_in_dim %4, dims = [0] : (tensor<2xf32>) -> {square}"""
    text = function(body, after=helper.format("called") + helper.format("decomposed"))

    assert treated(text, "keep") == Precision(hardware=5)
    assert treated(text, "pin") == Precision(f32=5, pinned=5)


@functools.cache
def ragged() -> bytes:
    struct: Any = jax.ShapeDtypeStruct
    shapes = (struct((4, 2), jnp.float32), struct((2, 2, 3), jnp.float32), struct((2,), jnp.int32))
    exported = jax.export.export(jax.jit(jax.lax.ragged_dot), platforms=["cuda"])(*shapes)
    return bytes(exported.mlir_module_serialized)


def test_a_ragged_product_is_pinned_where_the_compiler_reads_it() -> None:
    """A ragged product is pinned in its composite, because the compiler uses the composite's precision."""
    blob, precision = applied(ragged(), "pin")

    # The two products of its decomposition are also pinned. They are the same product, which is counted once.
    assert precision == Precision(f32=1, pinned=1)
    assert text_of(blob).count("precision = [HIGHEST, HIGHEST]") == 2
    assert applied(ragged(), "keep") == (ragged(), Precision(hardware=1))
    assert hlo(blob).count("operand_precision={highest,highest}") == 1
    assert " ragged-dot(" in hlo(blob)


def test_a_ragged_product_of_its_own_dialect_is_pinned() -> None:
    """A ragged product of CHLO, as other exporters may write it, is pinned."""
    square = "tensor<2x2xf32>"
    body = f"""%g = stablehlo.constant dense<[1, 1]> : tensor<2xi32>
      %w = stablehlo.broadcast_in_dim %y, dims = [1, 2] : ({square}) -> tensor<2x2x2xf32>
      %z = "chlo.ragged_dot"(%x, %w, %g) {{ragged_dot_dimension_numbers = #chlo.ragged_dot<lhs_batching_dimensions = [],
        rhs_batching_dimensions = [], lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1],
        lhs_ragged_dimensions = [0], rhs_group_dimensions = [0]>}} : ({square}, tensor<2x2x2xf32>, tensor<2xi32>) -> {square}"""
    assert treated(function(body), "pin") == Precision(f32=1, pinned=1)


def hlo(blob: bytes) -> str:
    """Return the HLO that the compiler gets."""
    signature = signature_of(blob, "model.mlir")
    shapes = [np.zeros(shape, {"f32": np.float32, "i32": np.int32}[kind]) for kind, shape in signature.inputs]
    lowered: Any = jax.jit(as_exported(blob, signature).call).lower(*shapes).compiler_ir("hlo")
    return str(lowered.as_hlo_text())


def test_the_probes_product_is_the_hardwares_whatever_the_process_prefers() -> None:
    """The probe's product leaves its precision to the hardware, even under `runtime.numerics: f32`."""
    with jax.default_matmul_precision("highest"):
        assert product(2)[1].precision == Precision(hardware=1)


def test_the_compiler_is_given_what_was_pinned() -> None:
    """A pinned precision reaches the HLO that XLA compiles."""
    before, signature = product(2)
    after, precision = applied(before, "pin")

    assert signature.precision == Precision(hardware=1)
    assert precision == Precision(f32=1, pinned=1)
    assert "operand_precision" not in hlo(before)
    assert "operand_precision={highest,highest}" in hlo(after)
    assert signature_of(after, "model.mlir") == signature


def test_what_computes_in_a_library_is_named() -> None:
    """f32 operations in libraries, whose precision cannot be set, are counted by their target."""
    square = "tensor<2x2xf32>"
    body = f"""%a = stablehlo.cholesky %x, lower = true : {square}
      %b = "stablehlo.triangular_solve"(%a, %y) {{left_side = true, lower = true, unit_diagonal = false,
        transpose_a = #stablehlo<transpose NO_TRANSPOSE>}} : ({square}, {square}) -> {square}
      %z = stablehlo.custom_call @cusolver_potrf_ffi(%b) : ({square}) -> {square}
      %c = stablehlo.custom_call @cusolver_potrf_ffi(%z) : ({square}) -> {square}
      %i = stablehlo.constant dense<1> : tensor<i32>
      %j = stablehlo.custom_call @cu_threefry2x32(%i) : (tensor<i32>) -> tensor<i32>"""
    expected = {"cholesky": 1, "custom_call cusolver_potrf_ffi": 2, "triangular_solve": 1}

    for treatment in ("keep", "strip", "pin"):
        precision = treated(function(body), treatment)
        assert precision == Precision(ungovernable=expected)
    assert str(precision) == (
        "products of f32: cholesky 1, custom_call cusolver_potrf_ffi 2, triangular_solve 1"
    )


def test_custom_calls_that_multiply_nothing_are_not_counted() -> None:
    """Custom calls that multiply nothing, such as those for sharding, are not counted."""
    square = "tensor<2x2xf32>"
    body = f"%z = stablehlo.custom_call @Sharding(%x) : ({square}) -> {square}"

    assert treated(function(body), "pin") == Precision()


NOTHING_TO_DO: list[tuple[Precision, Treatment]] = [
    (Precision(tf32=1, hardware=1), "keep"),
    (Precision(hardware=1, f32=1), "strip"),
    (Precision(f32=1, algorithm=1, ungovernable={"cholesky": 1}), "pin"),
    (Precision(), "pin"),
]


def test_a_module_without_anything_to_change_is_not_even_parsed() -> None:
    """A module is not parsed again if the treatment has nothing to change in it."""
    for seen, treatment in NOTHING_TO_DO:
        assert treat(b"any", "model.mlir", treatment, seen) == (b"any", seen)


def test_a_damaged_module_is_refused() -> None:
    """A damaged module is refused by name."""
    with pytest.raises(BundleError, match=r"^model\.mlir: is not a valid StableHLO portable artifact"):
        treat(product(2)[0][:-20], "model.mlir", "pin", Precision(hardware=1))


KINDS = st.sampled_from([F32, "f64", "bf16"])
WAYS = st.sampled_from(
    ["", ", precision = [HIGH, HIGHEST]", *map(algorithm, (ROUNDED, EXACT, COARSE)), algorithm(ROUNDED, 3)]
)


@given(st.lists(st.tuples(KINDS, WAYS), min_size=1, max_size=5), st.sampled_from(["keep", "strip", "pin"]))
def test_no_product_is_lost_or_left_as_it_must_not_be(
    products: list[tuple[str, str]], treatment: Treatment
) -> None:
    """For any products, pinning leaves no f32 product below f32, and stripping leaves no product in TF32."""
    body = ""
    for i, (kind, way) in enumerate(products):
        body += f"%c{i} = stablehlo.convert %x : (tensor<2x2xf32>) -> tensor<2x2x{kind}>\n"
        body += dot((kind, kind, kind), way).replace("%z", f"%d{i}").replace("%x, %y", f"%c{i}, %c{i}") + "\n"
    precision = treated(function(body, result="%x"), treatment)

    of_f32 = sum(kind == F32 for kind, _ in products)
    tf32 = sum("tf32" in way for _, way in products)
    if treatment == "pin":
        assert precision.tf32 == precision.hardware == 0
        assert precision.rewritten == tf32
        assert precision.f32 + precision.algorithm >= of_f32
    elif treatment == "strip":
        assert (precision.tf32, precision.stripped, precision.pinned) == (0, tf32, 0)
    else:
        assert precision.tf32 == tf32
        assert (precision.pinned, precision.rewritten, precision.stripped) == (0, 0, 0)
