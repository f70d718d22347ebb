"""Each operator of ONNX against the standard's own cases."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from rsrv_bundle import BundleError
from rsrv_bundle.from_onnx import export_onnx
from rsrv_bundle.onnx_import.evaluate import Evaluator
from rsrv_bundle.onnx_import.model import read_model
from tests.onnx_files import compare, evaluated

pytestmark = pytest.mark.long


#: All allowed reasons for which a case of the standard is refused.
REASONS = (
    "rsrv cannot compile it",  # pictures' files, strings
    "names no opset of the standard's operators",  # training
    "the number of its results depends on the values",  # NonMaxSuppression
    "drops values at random",
    "draws random numbers",
    "normalises by the batch, as in training",
    "does not support bool or complex",  # BitCast of bool
    "its mode 'max' is not supported",  # RoiAlign
    "Scan of opset 8 is not supported",
    "its element type, a power of two, is not supported",
    "depends on the values of a request",
    "it makes strings",
    "it reads numbers from strings",
)  # fmt: skip


def _plain(case: Any) -> bool:
    """Return whether a case is about one node, has only tensors of numbers, and is not the expanded form of another case."""
    values = [*case.model.graph.input, *case.model.graph.output]
    return case.kind == "node" and "_expanded" not in case.name and all(
        value.type.WhichOneof("value") == "tensor_type" and value.type.tensor_type.elem_type != onnx.TensorProto.STRING
        for value in values
    )  # fmt: skip


def cases() -> list[Any]:
    with warnings.catch_warnings():
        # Some cases cast numbers that are too large for the type on purpose.
        warnings.simplefilter("ignore")
        return [case for case in collect_testcases(None) if _plain(case)]


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _try(case: Any, path: Path) -> str | None:
    """Run a case. Return the reason for which it is refused, or None."""
    onnx.save(case.model, path)
    with jax.enable_x64(True):
        try:
            evaluator = Evaluator(read_model(path))
            for inputs, outputs in case.data_sets:
                names = [value.name for value in case.model.graph.input]
                results = evaluated(evaluator, dict(zip(names, map(_array, inputs), strict=False)))
                for value, expected in zip(case.model.graph.output, outputs, strict=True):
                    compare(np.asarray(results[value.name]), _array(expected), case.rtol, case.atol)
        except BundleError as refusal:
            return str(refusal)
    return None


@pytest.mark.timeout(1800)
def test_all_operators_are_right_or_refused(tmp_path: Path) -> None:
    """No case of the standard gives a wrong result. Few cases are refused, each for one of the known reasons."""
    every = cases()
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for case in every:
        try:
            refusal = _try(case, tmp_path / "case.onnx")
        except AssertionError as error:
            wrong[case.name] = str(error)
        else:
            if refusal is not None:
                refused[case.name] = refusal
    print(f"{len(every)} cases, {len(refused)} refused, {len(wrong)} wrong")
    assert not wrong
    unknown = {name: why for name, why in refused.items() if not any(reason in why for reason in REASONS)}
    assert not unknown
    assert len(every) > 1200
    assert len(refused) < 0.045 * len(every), sorted(refused)


#: The logits of these networks are all 6.8e9 and 9.7e18, where one unit in the last place is 512 and 1.1e12. If XLA computes them
#: twice, for the maximum and for the exponentials, their difference overflows, and the export is refused. It depends on the machine
#: whether XLA does so.
OVERFLOWING = ("light_squeezenet", "light_resnet50")
#: The other networks of the standard. The files do not store weights: nodes with constants make them.
NETWORKS = [
    path
    for path in sorted(Path(onnx.__file__).parent.glob("backend/test/data/light/*.onnx"))
    if path.stem not in OVERFLOWING
]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda path: path.stem)
def test_the_networks_of_the_standard_export(network: Path, tmp_path: Path) -> None:
    """Each whole network is exported. The export itself compares the answers with onnxruntime's."""
    bundle = export_onnx(network, out_dir=tmp_path / "bundle", batch_sizes=(1,))
    assert "model.b1" in bundle.manifest.numerics["source"]  # type: ignore[operator]


def test_the_standard_has_networks() -> None:
    """The installed package has the networks that the test above exports."""
    assert len(NETWORKS) == 7
