"""The detector on a Triton without rsrv: a model that calls two others. Each of these computes in its own process.

It has the same steps as the bundle. The steps use nothing of rsrv except the functions of `rsrv.hooks`, which are in the stubs'
environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import examples
from rsrv_bundle import load_weights, read_bundle
from rsrv_bundle.dtypes import kserve_name
from rsrv_bundle.spec import TensorSpec
from tests.bench.places import HERE

PIPELINE = "detector"
#: Functions of detector_networks.py, by the model that computes them.
STAGES = {"detector_backbone": "backbone", "detector_head": "head"}

_EXAMPLES = Path(examples.__file__).parent


def write(repository: Path, bundles: Path, environment: Path, *, instances: int = 1) -> None:
    """Add `detector` and its two callees to a model repository. Existing ones are replaced.

    bundles: the folder of the built examples. The models have the weights of these bundles.
    environment: a Python environment with jax and numpy for the models that compute (`plain_env.ensure()`).
    instances: number of processes of the model that calls. Each of them has one request at a time.
    """
    for name, function in STAGES.items():
        bundle = read_bundle(bundles / name, digest=False)
        sizes = bundle.manifest.compiled_batch_sizes
        parameters = {
            "EXECUTION_ENV_PATH": str(environment),
            "function": function,
            "sizes": ",".join(map(str, sizes)),
        }
        config = _config(name, bundle.manifest.inputs, bundle.manifest.outputs, sizes[-1], 1, parameters)
        version = _fresh(repository / name, config)
        shutil.copy(HERE / "plain_stage.py", version / "model.py")
        shutil.copy(_EXAMPLES / "detector_networks.py", version / "networks.py")
        arrays = dict(zip((weight.name for weight in bundle.weights), load_weights(bundle), strict=True))
        np.savez(version / "weights.npz", **arrays)  # type: ignore[arg-type]
    manifest = read_bundle(bundles / PIPELINE, digest=False).manifest
    config = _config(PIPELINE, manifest.wire_inputs, manifest.wire_outputs, 32, instances, {})
    version = _fresh(repository / PIPELINE, config)
    shutil.copy(HERE / "plain_pipeline.py", version / "model.py")
    shutil.copy(_EXAMPLES / "detector_run.py", version / "steps.py")


def _fresh(folder: Path, config: str) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    return version


def _config(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int,
    instances: int,
    parameters: Mapping[str, str],
) -> str:
    lines = [
        f'name: "{name}"',
        'backend: "python"',
        f"max_batch_size: {max_batch_size}",
        *(_tensor("input", spec) for spec in inputs),
        *(_tensor("output", spec) for spec in outputs),
        f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]",
        "dynamic_batching { }",
        *(
            f'parameters [ {{ key: "{key}" value: {{ string_value: "{value}" }} }} ]'
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, spec: TensorSpec) -> str:
    dims = ", ".join(map(str, spec.dims[1:]))
    return f'{kind} [ {{ name: "{spec.name}" data_type: TYPE_{kserve_name(spec.dtype)} dims: [ {dims} ] }} ]'
