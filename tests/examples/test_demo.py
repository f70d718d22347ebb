"""The demo's bundles, compared with what their makers export with the same parameters. Nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import pytest

from examples import digits, family, glossary, glossary_bytes, unet
from examples.unet.network import UNet
from rsrv.explain import read_yaml
from rsrv.serve import demo
from rsrv_bundle import WeightSpec, read_bundle
from tests.examples.built import restored

BUNDLES = demo.DATA / demo.BUNDLES
#: Keys of a manifest whose values differ from build to build.
BUILD_KEYS = ("sha256", "provenance", "numerics")


def interface(folder: Path) -> tuple[dict[str, Any], list[WeightSpec]]:
    """Return the parts of the manifest that do not depend on the machine and the day, and the weights' names and shapes."""
    manifest = read_yaml((folder / "manifest.yaml").read_text(), of="the manifest")
    return {key: manifest[key] for key in manifest if key not in BUILD_KEYS}, list(
        read_bundle(folder).weights
    )


def export(name: str, out_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the maker of this bundle with the parameters that the demo's bundle has."""
    if name == "unet":
        weights, rest = eqx.partition(UNet(jax.random.key(0)), eqx.is_array)
        network = eqx.combine(restored(BUNDLES / name, weights), rest)
        monkeypatch.setattr(unet, "trained", lambda: network)
        unet.make(out_dir)
    elif name == "glossary_bytes":
        parameters = restored(BUNDLES / name, glossary.initial())
        monkeypatch.setattr(glossary, "trained", lambda: parameters)
        glossary_bytes.make(out_dir)
    else:
        maker = digits if name == "digits" else family
        params = digits.params_of(BUNDLES / name)
        monkeypatch.setattr(maker, "trained", lambda: params if name == "digits" else {name: params})
        maker.make(out_dir)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            folder.name, marks=[] if folder.name in ("digits", "family_half") else [pytest.mark.long]
        )
        for folder in sorted(BUNDLES.iterdir())
    ],
)
def test_a_bundle_has_the_interface_that_its_maker_exports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, shapes, batch sizes, weights and hooks of a bundle agree with what its maker exports. If not, run tools/demo_bundles.py."""
    export(name, tmp_path / name, monkeypatch)
    assert interface(BUNDLES / name) == interface(tmp_path / name)
    hooks = [folder / name / "model.py" for folder in (BUNDLES, tmp_path)]
    assert len({file.read_text() if file.exists() else "" for file in hooks}) == 1
