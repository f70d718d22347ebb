"""Small meta models over models whose arithmetic is exact, for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from textwrap import dedent

import jax.numpy as jnp
import numpy as np

from rsrv_bundle.export import export_bundle
from tests import builders
from tests.e2e.bundles import OUTPUT, ensure_made, with_weights

#: Number of columns of every tensor here.
COLUMNS = 8

HOOKS = """
def preprocess(inputs):
    return {"x": inputs["x"].astype("float32") + 100}


def postprocess(outputs):
    return {"y": outputs["y"] - 1}
"""


@cache
def _made() -> Path:
    """Return the folder of the bundle from which `write_scale` copies all its models."""

    def scale(out_dir: Path) -> None:
        export_bundle(
            lambda params, x: {"y": params["factor"] * x},
            {"factor": jnp.float32(1)},
            {"x": np.zeros((1, COLUMNS), np.float32)},
            batch_sizes=(1, 4, 16),
            out_dir=out_dir,
        )

    return ensure_made(OUTPUT.with_name("test_metas"), {"scale": scale}, [Path(__file__)])


def write_scale(path: Path, factor: float, *, internal: bool = False, hooks: str = "") -> Path:
    """Write a model y = factor * x for rows of COLUMNS f32."""
    with_weights(_made() / "scale", path, {"factor": np.array(factor, np.float32)})
    if hooks:
        (path / "model.py").write_text(hooks)
    if internal:
        manifest = path / "manifest.yaml"
        manifest.write_text(manifest.read_text() + "\ninternal: true\n")
    return path


#: Write a meta model from x to y, both rows of COLUMNS f32. `body` is its model.py.
write_meta = partial(
    builders.write_meta,
    client="".join(
        f"client_{kind}: [{{name: {name}, dtype: f32, shape: na, dims: {{a: {COLUMNS}}}}}]\n"
        for kind, name in (("inputs", "x"), ("outputs", "y"))
    ),
)


#: The `execute` function of a plain model that adds 11.
ADDS_11 = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() + 11)]) for r in requests
    ]
"""


def plain_model(repository: Path, name: str, body: str) -> None:
    """Write a Python model without rsrv, from x to y, next to the generated models. `body` defines execute(self, requests)."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(
        f"""
        backend: "python"
        max_batch_size: 64
        input [{{ name: "x" data_type: TYPE_FP32 dims: [{COLUMNS}] }}]
        output [{{ name: "y" data_type: TYPE_FP32 dims: [{COLUMNS}] }}]
        instance_group [{{ kind: KIND_CPU }}]
        """
    )
    code = "import triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n" + dedent(
        body
    ).replace("\n", "\n    ")
    (folder / "model.py").write_text(code)


def rows(count: int, value: float = 1.0) -> Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Return the inputs of a request with `count` rows, whose elements are all `value`."""
    return {"x": np.full((count, COLUMNS), value, np.float32)}
