"""Change the precision in which a module multiplies f32, and check the changed module."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

from rsrv_bundle.errors import BundleError
from rsrv_bundle.modules import Signature, parsed, serialised, signature_of
from rsrv_bundle.products import COMPOSITE, RAGGED, Precision, holder, kind_of, precision_of, products

#: Treatments of a module. keep: no change. strip: remove TF32 algorithms, so that hardware without TF32 runs the module. pin:
#: compute all products in f32.
Treatment = Literal["keep", "strip", "pin"]


def treat(blob: bytes, file: str, treatment: Treatment, seen: Precision) -> tuple[bytes, Precision]:
    """Apply the treatment to a module. Return the module to compile, and the precision of its products.

    `blob` is the module, `file` is the name of its file, and `seen` is the precision that `signature_of` found in it. If there is
    nothing to change, return the same bytes without parsing them. Raises BundleError if a product is not in f32 after `pin`.
    """
    if not {"keep": 0, "strip": seen.tf32, "pin": seen.tf32 + seen.hardware}[treatment]:
        return blob, seen
    from jaxlib.mlir.dialects import stablehlo

    changed: Counter[str] = Counter()
    try:
        with parsed(blob) as module:
            for operation, repeats in products(module):
                done = _change(operation, treatment)
                if not repeats:
                    changed.update(done)
            # Write the library's current version, because the compiler reads the module with the same library.
            blob = serialised(module, stablehlo.get_current_version())
        # Check the serialised module, because the compiler gets this form.
        with parsed(blob) as module:
            precision = precision_of(module)
            left = _not_in_f32(module) if treatment == "pin" else ""
    except ValueError as e:
        raise BundleError(f"{file}: {e}") from None
    if left:
        raise BundleError(
            f"{file}: {left}: multiplies f32 values, and no setting makes this operation compute in f32. Export the model again "
            "with stablehlo.dot_general in its place, or do not set runtime.numerics: f32"
        )
    return blob, replace(
        precision,
        pinned=changed["pinned"],
        rewritten=changed["rewritten"],
        stripped=changed["stripped"],
    )


def product(n: int) -> tuple[bytes, Signature]:
    """Return a module that multiplies two square matrices of f32 in the hardware's default precision."""
    import jax
    import jax.export
    import jax.numpy as jnp

    square: Any = jax.ShapeDtypeStruct  # This class has no type annotations.
    # Set the precision explicitly, because the process may have another default.
    default = jax.lax.Precision.DEFAULT
    exported = jax.export.export(jax.jit(lambda x, y: jnp.matmul(x, y, precision=default)))(
        *[square((n, n), jnp.float32)] * 2
    )
    blob = bytes(exported.mlir_module_serialized)
    return blob, signature_of(blob, "product")


def _not_in_f32(module: Any) -> str:
    """Name and count the operations that may multiply f32 in a lower precision. Return an empty text if there are none."""
    left = Counter(
        operation.name for operation, _ in products(module) if kind_of(operation) in ("hardware", "tf32")
    )
    return ", ".join(f"{count} {name}" for name, count in sorted(left.items()))


def _change(operation: Any, treatment: Treatment) -> list[str]:
    """Apply the treatment to an operation. Return the changes, each as the name of a field of `Precision`."""
    kind = kind_of(operation)
    if kind == "tf32":
        if treatment == "strip":
            del operation.attributes["algorithm"]
            return ["stripped"]
        operation.attributes["algorithm"] = _f32_algorithm()
        return ["rewritten"]
    if kind == "hardware" and treatment == "pin" and operation.name != "stablehlo.einsum":
        _pin(operation)
        return ["pinned"]
    return []


def _f32_algorithm() -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    f32 = ir.F32Type.get()
    return stablehlo.DotAlgorithm.get(f32, f32, f32, 1, 1, 1, False)


def _pin(operation: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, stablehlo

    if operation.name == COMPOSITE:
        highest: Any = ir.StringAttr.get("HIGHEST")
        attributes = {attribute.name: attribute.attr for attribute in holder(operation)}
        attributes["precision_config"] = ir.ArrayAttr.get([highest, highest])
        operation.attributes["composite_attributes"] = ir.DictAttr.get(attributes)
        return
    dialect = chlo if operation.name == RAGGED else stablehlo
    highest = dialect.PrecisionAttr.get("HIGHEST")
    operation.attributes["precision_config"] = ir.ArrayAttr.get([highest, highest])
