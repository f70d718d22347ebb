"""The measured models as bundles and as plain Triton models, and repositories of them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import native_front
from rsrv.settings import Front
from rsrv_gen import cli as rsrv_gen
from tests.bench import plain_env
from tests.bench.places import HERE, ROOT, WORK
from tests.bench.plain_model import SIZES

Array = npt.NDArray[Any]

MLP = "mlp"
IMAGES = "images"
#: Compiled sizes of `images`. The largest is smaller than the 48 clients, so there are always requests for a next batch.
IMAGE_SIZES = (1, 2, 4, 8)
IMAGE_SHAPE = (3, 224, 224)

_PLAIN_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: 32
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 256 ] }} ]
output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ {outputs} ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ }}
parameters [ {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{environment}" }} }} ]
"""


@dataclass(frozen=True)
class Case:
    """A model's interface for clients, and a function that computes the expected answers."""

    name: str
    input: str
    shape: tuple[int, ...]
    output: str
    most_rows: int
    reference: Callable[[Array], Array]


def mlp_names(count: int) -> list[str]:
    """Return the names of `mlp` and its copies, whose weights differ."""
    return [MLP, *(f"{MLP}_{number}" for number in range(1, count))]


def mlp_weights(name: str, outputs: int = 10) -> dict[str, Array]:
    """Return the weights of `mlp` or of a copy. They are the same in every process."""
    _, _, number = name.partition("_")
    rng = np.random.default_rng(int(number or 0))
    return {
        "hidden_kernel": (rng.standard_normal((256, 256)) / 16).astype(np.float32),
        "hidden_bias": rng.standard_normal(256).astype(np.float32),
        "output_kernel": (rng.standard_normal((256, outputs)) / 16).astype(np.float32),
        "output_bias": rng.standard_normal(outputs).astype(np.float32),
    }


def mlp_case(name: str) -> Case:
    """Return the case of one of the mlps."""
    weights = mlp_weights(name)
    return Case(name, "x", (256,), "logits", 8, lambda x: mlp_reference(weights, x))


def mlp_reference(weights: Mapping[str, Array], x: Array) -> Array:
    """Return the expected logits, f32 [n, outputs], of x, f32 [n, 256]."""
    hidden = np.maximum(x @ weights["hidden_kernel"] + weights["hidden_bias"], 0)
    return np.asarray(hidden @ weights["output_kernel"] + weights["output_bias"])


def image_weights() -> dict[str, Array]:
    rng = np.random.default_rng(100)
    return {"kernel": rng.standard_normal((147, 10)).astype(np.float32)}


def images_case() -> Case:
    """Return the case of `images`."""
    kernel = image_weights()["kernel"]

    def reference(image: Array) -> Array:
        return np.asarray(image[:, :, ::32, ::32].reshape(len(image), -1) @ kernel)

    return Case(IMAGES, "image", IMAGE_SHAPE, "scores", 2, reference)


def rsrv_repository(count: int) -> Path:
    """Make a repository with `count` mlps as bundles, which have the Python front."""
    return generate(f"rsrv-{count}", [ensure_bundle(name, _export_mlp) for name in mlp_names(count)])


def native_repository(count: int) -> Path:
    """Make a repository with `count` mlps as bundles, which have the native front."""
    bundles = [ensure_bundle(name, _export_mlp) for name in mlp_names(count)]
    return generate(f"native-{count}", bundles, "stub: {front: native}")


def images_repository(front: Front = "python") -> Path:
    """Make a repository with the bundle `images`: 602 kB in, 40 bytes out, and almost no work for the CPU."""
    name = {"python": "rsrv-images", "native": "native-images"}[front]
    return generate(name, [ensure_bundle(IMAGES, _export_images)], f"stub: {{front: {front}}}")


def gateway_repository() -> Path:
    """Make a repository with two models, one of small requests and one of large requests."""
    return generate("gateway", [ensure_bundle(MLP, _export_mlp), ensure_bundle(IMAGES, _export_images)])


def plain_repository(count: int) -> Path:
    """Make a repository with `count` mlps as plain Triton models."""
    environment = plain_env.ensure()
    repository = WORK / f"plain-{count}"
    shutil.rmtree(repository, ignore_errors=True)
    for name in mlp_names(count):
        write_plain_mlp(repository / name, mlp_weights(name), environment)
    return repository


def write_plain_mlp(folder: Path, weights: Mapping[str, Array], environment: Path) -> None:
    """Write a plain Triton model with these weights. It computes with jax in its own process."""
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        _PLAIN_CONFIG.format(name=folder.name, outputs=weights["output_bias"].size, environment=environment)
    )
    shutil.copy(HERE / "plain_model.py", version / "model.py")
    arrays: Mapping[str, Any] = weights
    np.savez(version / "weights.npz", **arrays)


def ensure_bundle(name: str, export: Callable[[Path], None], *makers: Path) -> Path:
    """Return the bundle of this name. Export it again if this module, the exporter, jax or one of `makers` changed."""
    sources = [HERE / "models.py", *makers, *sorted((ROOT / "bundles" / "rsrv_bundle").glob("*.py"))]
    key = hashlib.sha256(f"jax {metadata.version('jax')}".encode())
    for source in sources:
        key.update(source.read_bytes())
    folder, stamp = WORK / "bundles" / name, WORK / "bundles" / f"{name}.stamp"
    if not (stamp.is_file() and stamp.read_text() == key.hexdigest() and folder.is_dir()):
        print(f"exporting the bundle {name} ...", flush=True)
        export(folder)
        stamp.write_text(key.hexdigest())
    return folder


def _export_mlp(folder: Path) -> None:
    export_mlp(folder, mlp_weights(folder.name))


def export_mlp(folder: Path, weights: Mapping[str, Array]) -> None:
    """Export a bundle with these weights and the plain model's sizes."""
    import jax

    from rsrv_bundle.export import export_bundle

    def apply(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["hidden_kernel"] + params["hidden_bias"])
        return {"logits": hidden @ params["output_kernel"] + params["output_bias"]}

    example = {"x": np.zeros((1, 256), np.float32)}
    export_bundle(apply, weights, example, batch_sizes=SIZES, out_dir=folder, overwrite=True)


def _export_images(folder: Path) -> None:
    from rsrv_bundle.export import export_bundle

    def apply(params: Any, image: Any) -> Any:
        return {"scores": image[:, :, ::32, ::32].reshape(image.shape[0], -1) @ params["kernel"]}

    example = {"image": np.zeros((1, *IMAGE_SHAPE), np.float32)}
    weights = image_weights()
    export_bundle(apply, weights, example, batch_sizes=IMAGE_SIZES, out_dir=folder, overwrite=True)


def generate(name: str, bundles: Sequence[Path], settings: str = "") -> Path:
    """Make a model repository with rsrv-gen and these settings. Its output is shown only if it fails."""
    native_front.ensure()  # Without this library, Triton does not batch requests.
    repository = WORK / name
    config = WORK / f"{name}.yaml"
    config.write_text(settings)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        failed = rsrv_gen.main(
            [*map(str, bundles), "-o", str(repository), "--prune", "--config", str(config)]
        )
    if failed:
        raise RuntimeError(f"rsrv-gen failed for {name}:\n{output.getvalue()}")
    return repository
