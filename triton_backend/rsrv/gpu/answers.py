"""Parts `correctness` and `numerics`.

`correctness` compares the device's answers with the CPU's answers. `numerics` compares the device's products of matrices with
products in float64.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.runtimes import ModelClient, RuntimeProcess, Unanswered, runtime
from rsrv.runtime.device import Array
from rsrv.stub.connection import Rejected
from rsrv.wire.socket import Closed
from rsrv_bundle import Bundle, BundleError, read_bundle
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.export import export_bundle
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.numerics import TOLERANCE, Judge, difference

#: Tolerances for TF32, which has as many bits of mantissa as f16.
_TF32 = {**TOLERANCE, "f32": TOLERANCE["f16"]}
#: Number of rows, and of columns, of the matrices.
_SIDE = 512
#: Maximum errors of a product relative to its largest element.
_F32_ERROR, _TF32_ERROR = 1e-5, 5e-3


def correctness(part_input: PartInput, tell: Tell) -> None:
    """Compare each module of each bundle with a runtime on the CPU, under the default numerics and, on a GPU, under f32."""
    bundles: dict[Path, Bundle] = {}
    for path in part_input.bundles:
        try:
            bundle = read_bundle(path)
        except BundleError as error:
            tell(Finding(path.name, "FAIL", reason=str(error)))
            continue
        if bundle.manifest.kind == "meta":
            tell(Finding(path.name, "NOT RUN", reason="a meta model has no modules, only its callees have"))
        elif bundle.manifest.state is not None:
            tell(
                Finding(path.name, "NOT RUN", reason="requests for a model with state are steps of sequences")
            )
        else:
            bundles[path] = bundle
    with runtime(part_input, "reference", "cpu") as reference:
        for policy in ("auto",) if part_input.on_cpu else ("auto", "f32"):
            left = list(bundles)
            errors: list[float] = []
            while left:
                errors += _policy(part_input, tell, policy, left, bundles, reference, errors)


def _policy(
    part_input: PartInput,
    tell: Tell,
    policy: str,
    left: list[Path],
    bundles: Mapping[Path, Bundle],
    reference: RuntimeProcess,
    before: Sequence[float],
) -> list[float]:
    """Compare the bundles in `left` until a bundle ends the runtime. Compared bundles are removed from the list.

    Returns the largest error of each bundle that passed. `before` has the errors of earlier calls.
    """
    tolerance = _TF32 if policy == "auto" and part_input.device.tf32 else TOLERANCE
    limit = f"tolerance for f32: {tolerance['f32']:g} of an output's largest magnitude"
    errors: list[float] = []
    with runtime(part_input, f"card-{policy}", part_input.device.platform, numerics=policy) as card:
        while left:
            path = left.pop(0)
            title, bundle = f"{path.name}, numerics {policy}", bundles[path]
            judge = Judge(bundle, tolerance, "the CPU's answer")
            try:
                with (
                    closing(ModelClient(card.launcher.open, path.name, path)) as on_card,
                    closing(ModelClient(reference.launcher.open, path.name, path)) as on_cpu,
                ):
                    _compare(bundle, on_card, on_cpu, judge)
                judge.raise_if_any()
            except (BundleError, Rejected, Unanswered) as error:
                tell(Finding(title, "FAIL", _largest(judge), str(error)))
            except (Closed, OSError) as error:
                tell(Finding(title, "FAIL", reason=f"the runtime ended or does not answer: {error}"))
                break
            else:
                errors.append(max(judge.errors.get("source", {}).values(), default=0.0))
                everything = [*before, *errors]
                value = (
                    f"{len(everything)} of {len(bundles)} as on the CPU, largest error {max(everything):.2g}"
                )
                tell(Finding(f"bundles, numerics {policy}", "PASS", value, limit))
    return errors


def _compare(bundle: Bundle, card: ModelClient, reference: ModelClient, judge: Judge) -> None:
    types = [numpy_dtype(spec.dtype) for spec in bundle.manifest.outputs]
    for variant, shapes in enumerate(card.interface.variants):
        for size in shapes.sizes:
            inputs = random_inputs(bundle, variant, size)
            answer, expected = (
                [
                    value.view(dtype)
                    for value, dtype in zip(client.ask(inputs, variant, size), types, strict=True)
                ]
                for client in (card, reference)
            )
            judge.source((variant, size), answer, expected)


def _largest(judge: Judge) -> str:
    errors = judge.errors.get("source", {})
    return f"{len(errors)} modules, largest error {max(errors.values()):.2g}" if errors else ""


def numerics(part_input: PartInput, tell: Tell) -> None:
    """Multiply f32 matrices under each policy, through a model in a runtime, and compare with float64."""
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((_SIDE, _SIDE)).astype(np.float32) for _ in range(2))
    path = part_input.folder / "product"
    export_bundle(
        lambda params, x: {"y": x @ params["w"]},
        {"w": w},
        {"x": x},
        batch_sizes=[_SIDE],
        out_dir=path,
    )
    expected = x.astype(np.float64) @ w.astype(np.float64)
    for policy in ("auto", "f32", "tf32"):
        title = f"product of f32, numerics {policy}"
        if policy == "tf32" and not part_input.device.tf32:
            tell(Finding(title, "NOT RUN", reason="the device has no TF32, so every model would be refused"))
            continue
        allowed = _TF32_ERROR if part_input.device.tf32 and policy != "f32" else _F32_ERROR
        with runtime(part_input, policy, part_input.device.platform, numerics=policy) as process:
            try:
                (product,) = ModelClient(process.launcher.open, "product", path).ask([x], rows=_SIDE)
            except (Rejected, Unanswered, Closed, OSError) as error:
                tell(Finding(title, "FAIL", reason=str(error)))
                continue
            computes = process.record().computes
        tell(_judge(title, product, expected, allowed, computes))


def _judge(title: str, product: Array, expected: Array, allowed: float, computes: str | None) -> Finding:
    _, error = difference(product, expected)
    precision = "" if computes is None else f"; by default, the device multiplies in {computes}"
    return check(
        title,
        error <= allowed and computes != "indeterminate",
        f"error {error:.2g}",
        f"at most {allowed:g} of the largest element{precision}",
        {"error": error},
    )
