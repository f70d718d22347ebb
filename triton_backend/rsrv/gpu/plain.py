"""Small networks as bundles, and the same networks as plain Python-backend models of Triton."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rsrv.runtime.device import Array
from rsrv_bundle.export import export_bundle

#: Number of elements of an input and of an output.
WIDTH = 256
#: The Python-backend model. It also runs as a program, without Triton.
MODEL = Path(__file__).with_name("plain_model.py")
_CONFIG = """\
backend: "python"
max_batch_size: {largest}
dynamic_batching {{}}
input [{{ name: "x", data_type: TYPE_FP32, dims: [{width}] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [{width}] }}]
instance_group [{{ kind: KIND_CPU, count: 1 }}]
parameters {{ key: "bundle", value: {{ string_value: "{bundle}" }} }}
parameters {{ key: "platform", value: {{ string_value: "{platform}" }} }}
"""


def example() -> Array:
    """Return one row of input."""
    return np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)


def export_networks(folder: Path, names: Sequence[str], sizes: Sequence[int]) -> list[Path]:
    """Export bundles of one layer, each with different weights."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2)
    for name in names:
        export_bundle(
            lambda params, x: {"y": x @ params["w"]},
            {"w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)},
            {"x": example()},
            batch_sizes=sizes,
            out_dir=folder / name,
        )
    return [folder / name for name in names]


def place_plain(repository: Path, name: str, bundle: Path, platform: str, largest: int) -> None:
    """Add a plain model, which executes the modules of a bundle, to a model repository."""
    (repository / name / "1").mkdir(parents=True)
    shutil.copyfile(MODEL, repository / name / "1" / "model.py")
    config = _CONFIG.format(largest=largest, width=WIDTH, bundle=bundle, platform=platform)
    (repository / name / "config.pbtxt").write_text(config + _environment(Path(sys.prefix)))


def _environment(prefix: Path) -> str:
    """Return the parameter that lets Triton's stub import from this environment, because the stub's own environment has no jax.

    Without a virtual environment the stub runs on the first python3 of PATH, as the server does.
    """
    if not (prefix / "bin" / "activate").is_file():
        return ""
    return f'parameters {{ key: "EXECUTION_ENV_PATH", value: {{ string_value: "{prefix}" }} }}\n'
