"""Golden bundles of every format version give the answers that were recorded with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import golden_bundles
from rsrv_bundle import Bundle, dtypes, read_bundle
from rsrv_bundle.commands.converting import convert
from rsrv_bundle.inspection import Inspector
from rsrv_bundle.modules import artifact_version, check_signatures, known_version
from rsrv_bundle.numerics import TOLERANCE, difference, label
from rsrv_bundle.spec import TensorSpec

Array = np.ndarray[Any, Any]

SETS = sorted(file.parent for file in golden_bundles.GOLDEN.glob(f"*/{golden_bundles.DIGESTS}"))
BUNDLES = sorted(file.with_suffix("") for folder in SETS for file in folder.glob("*/*.npz"))
NAMES = [path.relative_to(golden_bundles.GOLDEN).as_posix() for path in BUNDLES]
#: Bundles that a conversion changes most.
OLDER = [path for path in BUNDLES if path.parent.name == "format_2_0" or "stablehlo" in path.name]
golden = pytest.mark.parametrize("path", BUNDLES, ids=NAMES)


class Answers:
    """Answers that a bundle gave when it was made."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        with np.load(path.with_suffix(".npz")) as archive:
            self.arrays = {name: archive[name] for name in archive.files}
        self.bundle = bundle

    def specs(self, place: str, direction: str) -> tuple[TensorSpec, ...]:
        manifest = self.bundle.manifest
        if place == "client":
            return manifest.wire_inputs if direction == "in" else manifest.wire_outputs
        return manifest.inputs if direction == "in" else manifest.outputs

    def of(self, place: str, direction: str) -> dict[str, Array]:
        """Return the recorded arrays of a place and a direction, by tensor."""
        arrays = {}
        for spec in self.specs(place, direction):
            array = self.arrays[f"{place}/{direction}/{spec.name}"]
            arrays[spec.name] = (
                array.view(dtypes.numpy_dtype(spec.dtype)) if array.dtype.kind == "V" else array
            )
        return arrays

    def check(self, place: str, got: dict[str, Array]) -> None:
        want = self.of(place, "out")
        assert set(got) == set(want)
        for spec in self.specs(place, "out"):
            array, expected = got[spec.name], want[spec.name]
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert difference(array, expected)[1] <= TOLERANCE.get(spec.dtype, 0.0), f"{place}: {spec.name}"


def check_answers(bundle: Bundle, answers: Answers) -> None:
    """Compare the answers of every module, and the answers through the hooks, with the recorded ones."""
    if bundle.modules:
        outputs = golden_bundles.ask_modules(bundle, lambda place, _: list(answers.of(place, "in").values()))
        for place in {name.partition("/")[0] for name in outputs}:
            out = f"{place}/out/"
            answers.check(place, {k.removeprefix(out): v for k, v in outputs.items() if k.startswith(out)})
    if bundle.hooks is not None:
        answers.check("client", dict(golden_bundles.ask_client(bundle, answers.of("client", "in"))))


def test_all_that_the_format_has_is_in_a_set() -> None:
    """Together, the golden sets have all format versions and features."""
    assert {read_bundle(path).manifest.format_version for path in BUNDLES} == {"2.0", "3"}
    for version in ("2_0", "3"):
        bundles = [read_bundle(path) for path in BUNDLES if path.parent.name == f"format_{version}"]
        assert any(bundle.variants > 1 for bundle in bundles)
        assert any(bundle.manifest.client_inputs and bundle.modules for bundle in bundles)
        assert any(bundle.manifest.kind == "meta" for bundle in bundles)
        assert any(bundle.modules and not bundle.weights for bundle in bundles)
        assert any(weight.dtype == "bf16" for bundle in bundles for weight in bundle.weights)
        assert any(bundle.modules and not bundle.manifest.batched for bundle in bundles)
    with_state = [read_bundle(path).manifest for path in BUNDLES if path.parent.name == "format_3"]
    assert {manifest.generate is None for manifest in with_state if manifest.state} == {True, False}


def test_no_file_of_a_set_has_changed() -> None:
    """The digests of all golden bundles, by which servers identify bundles, are the recorded ones. So no file has changed."""
    for folder in SETS:
        noted = json.loads((folder / golden_bundles.DIGESTS).read_text())
        assert noted == {
            f"{path.parent.name}/{path.name}": read_bundle(path).digest
            for path in sorted(folder.glob("*/*/"))
        }


@golden
def test_an_old_bundle_answers_as_it_did(path: Path) -> None:
    """An old bundle gives its recorded answers. Reader, weights, modules and hooks take part."""
    bundle = read_bundle(path)
    check_answers(bundle, Answers(path, bundle))


@pytest.mark.parametrize("path", OLDER, ids=[path.name for path in OLDER])
def test_an_old_bundle_can_be_converted(path: Path, tmp_path: Path) -> None:
    """An old bundle is converted to format 3 and the default StableHLO version, and keeps its interface."""
    new = convert(path, tmp_path / path.name, stablehlo=known_version(None))
    assert new.manifest.format_version == "3"
    assert new.manifest.inputs == read_bundle(path).manifest.inputs
    versions = {artifact_version(file.read_bytes()) for file in new.modules.values()}
    assert versions <= {known_version(None)}


def test_old_modules_pass_the_inspector() -> None:
    """The inspector accepts the modules of all golden bundles."""
    inspector = Inspector()
    try:
        for path in BUNDLES:
            bundle = read_bundle(path)
            signatures = check_signatures(bundle, inspector)
            assert len({label(bundle, key) for key in signatures}) == len(bundle.modules)
    finally:
        inspector.close()
