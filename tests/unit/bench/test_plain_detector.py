"""The detector without rsrv: it is made of the same steps, networks and weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import example_bundles
from examples import detector_networks, detector_run
from rsrv_bundle import load_weights, read_bundle
from tests.bench import plain_detector


def test_the_plain_detector_computes_the_same(tmp_path: Path) -> None:
    """Sources and weights are copies; configs are what Triton reads, with the bundles' tensors."""
    bundles = example_bundles.ensure()
    plain_detector.write(tmp_path, bundles, Path("environment"), instances=2)
    plain_detector.write(tmp_path, bundles, Path("environment"), instances=2)

    for name in ("detector", *plain_detector.STAGES):
        config = text_format.Parse(
            (tmp_path / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
        )
        manifest = read_bundle(bundles / name, digest=False).manifest
        assert config.name == name
        assert config.instance_group[0].count == (2 if name == "detector" else 1)
        for tensors, specs in (
            (config.input, manifest.wire_inputs),
            (config.output, manifest.wire_outputs),
        ):
            assert [(each.name, tuple(each.dims)) for each in tensors] == [
                (spec.name, spec.dims[1:]) for spec in specs
            ]
    steps = (tmp_path / "detector" / "1" / "steps.py").read_text()
    assert steps == Path(detector_run.__file__).read_text()
    for name in plain_detector.STAGES:
        networks = (tmp_path / name / "1" / "networks.py").read_text()
        assert networks == Path(detector_networks.__file__).read_text()
        bundle = read_bundle(bundles / name, digest=False)
        with np.load(tmp_path / name / "1" / "weights.npz") as file:
            for weight, array in zip(bundle.weights, load_weights(bundle), strict=True):
                assert (file[weight.name] == array).all()
