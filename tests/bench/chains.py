"""Models that consist mostly of weights: chains of matrix products, which differ only in their weights."""

from __future__ import annotations

import hashlib
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv_bundle.narrowing import Narrow, narrow
from rsrv_bundle.writer import write_weights
from tests.bench.models import generate
from tests.bench.places import HERE, ROOT, WORK
from tests.unit.bundle.forge import seal

Array = npt.NDArray[Any]

#: Number of elements in a row of the input, of the output, and of all intermediate results.
WIDTH = 512
#: Bytes of one layer's weights.
LAYER_BYTES = WIDTH * WIDTH * 4
SIZES = (1, 2, 4, 8)
#: Type of the weights that are not narrowed.
WIDE = "f32"


def names(count: int) -> list[str]:
    """Return the names of the models. `chain_0` gets most requests."""
    return [f"chain_{number}" for number in range(count)]


def layers_of(nbytes: int) -> int:
    """Return the number of layers that have `nbytes` of weights. Raises ValueError if it is not a whole number."""
    layers, rest = divmod(nbytes, LAYER_BYTES)
    if rest or not layers:
        raise ValueError(f"{nbytes} bytes of weights: must be a multiple of {LAYER_BYTES}, one layer")
    return layers


def weights(name: str, layers: int) -> dict[str, Array]:
    """Return the weights of a model. They are the same in every process, and different for every name."""
    rng = np.random.default_rng([2000, int(name.rpartition("_")[2])])
    scale = np.float32((2 / WIDTH) ** 0.5)
    return {
        f"layer_{number:03}": rng.standard_normal((WIDTH, WIDTH), np.float32) * scale
        for number in range(layers)
    }


def narrow_weights(name: str, layers: int, kind: str) -> dict[str, Narrow]:
    """Return the weights in a narrower type, with a scale for each column."""
    return {
        layer: narrowed
        for layer, kernel in weights(name, layers).items()
        if isinstance(narrowed := narrow(kernel, kind, frozenset({0})), Narrow)
    }


def reference(name: str, layers: int, x: Array, kind: str = WIDE) -> Array:
    """Return the expected answer, f32 [n, WIDTH], to x, f32 [n, WIDTH].

    The computation uses double precision, and the weights as the bundle stores them.
    """
    value = x.astype(np.float64)
    kernels = weights(name, layers)
    if kind != WIDE:
        kernels = {
            layer: values.astype(np.float32) * (1 if scale is None else scale)
            for layer, (values, scale) in narrow_weights(name, layers, kind).items()
        }
    for kernel in kernels.values():
        value = np.maximum(value @ kernel, 0)
    return value.astype(np.float32)


def repository(count: int, nbytes: int, kind: str = WIDE) -> Path:
    """Make a model repository with `count` chains. Each has `nbytes` of weights before they are narrowed to `kind`."""
    layers = layers_of(nbytes)
    bundles = _ensure(count, layers, kind)
    return generate(f"chains-{count}-{layers}-{kind}", [bundles / name for name in names(count)])


def _ensure(count: int, layers: int, kind: str) -> Path:
    """Return the folder of the bundles. Make the missing bundles, or all bundles if this module, the exporter or jax changed."""
    folder = WORK / "bundles" / f"chains-{layers}-{kind}"
    stamp = folder / "stamp"
    key = hashlib.sha256(f"jax {metadata.version('jax')}".encode())
    for source in (HERE / "chains.py", *sorted((ROOT / "bundles" / "rsrv_bundle").glob("*.py"))):
        key.update(source.read_bytes())
    if not (stamp.is_file() and stamp.read_text() == key.hexdigest()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"exporting chains of {layers} layers in {kind} ...", flush=True)
        _export(folder / "chain_0", layers, kind)
        stamp.write_text(key.hexdigest())
    for name in names(count):
        if not (folder / name).is_dir():
            _vary(folder / "chain_0", folder / name, layers, kind)
    return folder


def _export(folder: Path, layers: int, kind: str) -> None:
    import jax

    from rsrv_bundle.export import export_bundle

    def apply(params: Any, x: Any) -> Any:
        for kernel in params.values():
            x = jax.nn.relu(x @ kernel)
        return {"y": x}

    example = {"x": np.zeros((1, WIDTH), np.float32)}
    export_bundle(
        apply,
        weights(folder.name, layers),
        example,
        batch_sizes=SIZES,
        out_dir=folder,
        weights=None if kind == WIDE else kind,
    )


def _vary(original: Path, folder: Path, layers: int, kind: str) -> None:
    """Copy a bundle with other weights, without exporting it again."""
    work = folder.with_name(f".{folder.name}")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(original, work)
    stored = list(weights(folder.name, layers).items())
    if kind != WIDE:
        narrowed = narrow_weights(folder.name, layers, kind)
        stored = [(layer, tensor.values) for layer, tensor in narrowed.items()]
        stored += [(f"{layer}:scale", scale) for layer, (_, scale) in narrowed.items() if scale is not None]
    write_weights(work / "weights.safetensors", stored)
    seal(work)
    work.rename(folder)
