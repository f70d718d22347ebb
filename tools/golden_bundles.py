"""Make the golden bundles of a new set: `python tools/golden_bundles.py`, after a change of the format or of jax.

tests/golden/README.md explains their purpose. The script writes a set that does not exist yet, and never changes an existing
one.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from examples import v2_affine
from rsrv.hooks.loader import load_hooks, load_run
from rsrv_bundle import Bundle, dtypes, load_weights, read_bundle, weights, writer, yaml12
from rsrv_bundle.commands.converting import convert
from rsrv_bundle.export import export_bundle
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.manifest import CURRENT
from rsrv_bundle.meta import write_meta_bundle
from rsrv_bundle.numerics import Array, ModuleRunner, answers, label
from rsrv_bundle.stateful import export_generative, export_stateful

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
#: File of a set with the digest of each bundle.
DIGESTS = "digests.json"
#: Older versions of StableHLO to which one of the bundles is also converted.
OLDER = ("0.9.0", "1.0.0")

Arrays = Mapping[str, Array]

HOOKS = '''
from pathlib import Path

import numpy as np

SCALE = float((Path(__file__).parent / "scale.txt").read_text())


def preprocess(inputs):
    """Convert pixels, u8 [n, 3], to x, f32 [n, 3]."""
    return {"x": inputs["pixels"].astype(np.float32) / SCALE}


def postprocess(outputs):
    """Convert y, f32 [n, 2], to best, i64 [n, 1]."""
    return {"best": outputs["y"].argmax(1, keepdims=True)}
'''
META = '''
def run(inputs, call):
    """Sum x, f32 [n, 3], to total, f32 [n]."""
    y = call("affine", {"x": inputs["x"]})["y"]
    return {"total": call("plain", {"x": y})["z"].sum(1)}
'''


def _affine(params: Any, x: jax.Array) -> Any:
    return {"y": x @ params["kernel"] + params["bias"]}


def _half(params: Any, x: jax.Array, t: jax.Array) -> Any:
    """Compute y from x, [n, 2, 3], and t, [3, n]. The batch axes of x and t differ."""
    return {"y": jnp.einsum("nab,abc->cn", x, params) + t[:1]}


def _images(params: Any, image: jax.Array) -> Any:
    mean = image.mean((1, 2))
    return {"scores": jax.nn.softmax(mean @ params), "blurred": (image + jnp.roll(image, 1, 1)) / 2}


def _types(params: Any, d: Any, i: Any, u: Any, f: Any) -> Any:
    return {"d": jnp.sin(d) * params["d"], "i": i + params["i"], "u": u ^ 7, "f": ~f, "h": params["h"] * 2}


def write_bundles(folder: Path) -> None:
    """Write small bundles of the current format that together use all its features."""
    ints = np.random.default_rng(0).integers
    x = {"x": np.zeros((1, 3), np.float32)}
    affine = {
        "kernel": ints(-8, 9, (3, 2)).astype(np.float32),
        "bias": np.array([1, -2], np.float32),
    }
    export_bundle(
        _affine, affine, x, batch_sizes=[1, 4], out_dir=folder / "affine", description="y = x A + b, ünïcode."
    )
    export_bundle(
        lambda _, x: {"z": x * 2},
        {},
        {"x": np.zeros((1, 2), np.float32)},
        batch_sizes=[2],
        out_dir=folder / "plain",
    )
    export_bundle(
        _images,
        ints(-8, 9, (3, 5)).astype(np.float32),
        {"image": np.zeros((1, 4, 4, 3), np.float32)},
        batch_sizes=[1, 2],
        axes={"image": "nhwc", "blurred": "nhwc"},
        input_shapes=[{"h": 4, "w": 4}, {"h": 2, "w": 6}],
        out_dir=folder / "variants",
    )
    export_bundle(
        _half,
        ints(-8, 9, (2, 3, 4)).astype(ml_dtypes.bfloat16),
        {"x": np.zeros((1, 2, 3), ml_dtypes.bfloat16), "t": np.zeros((3, 1), ml_dtypes.bfloat16)},
        batch_sizes=[3],
        batch_axis={"t": 1},
        out_dir=folder / "half",
    )
    with jax.enable_x64(True):
        export_bundle(
            _types,
            {"d": np.float64(0.1), "i": np.array([2**40, -3]), "h": np.array([[0.5, 3]], np.float16)},
            {
                "d": np.zeros((), np.float64),
                "i": np.zeros(2, np.int64),
                "u": np.zeros((1, 3), np.uint8),
                "f": np.zeros(2, np.bool_),
            },
            batch_sizes=[],
            batch_axis=None,
            out_dir=folder / "types",
        )
    export_bundle(
        _affine,
        affine,
        x,
        batch_sizes=[4],
        out_dir=folder / "hooks",
        hooks=HOOKS,
        client_inputs=[{"name": "pixels", "dtype": "u8", "shape": "nc", "dims": {"c": 3}}],
        client_outputs=[{"name": "best", "dtype": "i64", "shape": "nk", "dims": {"k": 1}}],
    )
    (folder / "hooks" / "scale.txt").write_text("16\n")
    write_meta_bundle(
        META,
        calls=["affine", "plain"],
        client_inputs=[{"name": "x", "dtype": "f32", "shape": "nc", "dims": {"c": 3}}],
        client_outputs=[{"name": "total", "dtype": "f32", "shape": "n", "dims": {}}],
        out_dir=folder / "meta",
    )
    for version in OLDER:
        convert(
            folder / "affine", folder / f"affine_stablehlo_{version.replace('.', '_')}", stablehlo=version
        )


def write_stateful_bundles(folder: Path) -> None:
    """Write small bundles with state: one that counts, and one that generates."""
    ints = np.random.default_rng(0).integers
    struct: Any = jax.ShapeDtypeStruct
    export_stateful(
        lambda p, state, x: ({"y": state["sum"] + x @ p}, {"sum": state["sum"] + x @ p, "n": state["n"] + 1}),
        lambda p: {"sum": p[0], "n": jnp.int32(1)},
        ints(-8, 9, (3, 2)).astype(np.float32),
        {"x": np.zeros((1, 3), np.float32)},
        slots=8,
        when_full="host",
        batch_sizes=[1, 4],
        out_dir=folder / "counter",
    )
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text("{}")
    export_generative(
        _logits,
        {"seen": struct((8,), np.float32)},
        {"table": ints(-8, 9, (8, 8)).astype(np.float32)},
        slots=4,
        context=32,
        max_tokens=8,
        stop=[0],
        chunks=[1, 4],
        batch_sizes=[2],
        tokenizer=tokenizer,
        template="Q: {text}",
        out_dir=folder / "generator",
    )
    tokenizer.unlink()


def _logits(params: Any, state: Any, position: Any, tokens: Any, lengths: Any) -> Any:
    """Return logits from the tokens seen so far."""
    counted = jnp.arange(tokens.shape[1]) < lengths[:, None]
    seen = state["seen"] + (jax.nn.one_hot(tokens, 8) * counted[:, :, None]).sum(1)
    return seen @ params["table"] + position[:, None] / 64, {"seen": seen}


def write_as_2(bundle: Path, out_dir: Path) -> None:
    """Rewrite a bundle in format 2.0, with reversed axes and weights, and keys that only the reader of format 2.0 knows."""
    old = read_bundle(bundle)
    shutil.copytree(bundle, out_dir, ignore=shutil.ignore_patterns("__pycache__"))
    document = yaml12.load((bundle / "manifest.yaml").read_bytes())
    for section in ("executable_inputs", "executable_outputs", "client_inputs", "client_outputs"):
        for entry in document.get(section, ()):
            entry["shape"] = entry["shape"][::-1]
    for key in ("numerics", "sha256"):
        document.pop(key, None)
    writer.write_manifest(
        out_dir / "manifest.yaml", {**document, "format_version": "2.0", "name": out_dir.name, "made_up": [1]}
    )
    if old.manifest.kind == "model":
        reverse = [array.T for array in load_weights(old)]
        writer.write_weights(
            out_dir / weights.FILE, list(zip([weight.name for weight in old.weights], reverse, strict=True))
        )


# Results of a bundle. Arrays are named PLACE/DIRECTION/TENSOR, where PLACE is a module or `client`.


def ask_modules(
    bundle: Bundle, inputs_of: Callable[[str, tuple[int, int]], Sequence[Array]]
) -> dict[str, Array]:
    """Return the inputs and outputs of every module. A module's inputs are `inputs_of(label, key)`."""
    run = ModuleRunner(bundle)
    results: dict[str, Array] = {}
    for key in run.keys():  # noqa: SIM118 - not a mapping
        place = label(bundle, key)
        inputs = inputs_of(place, key)
        for specs, direction, arrays in (
            (bundle.manifest.inputs, "in", inputs),
            (bundle.manifest.outputs, "out", run(key, inputs)),
        ):
            results |= {
                f"{place}/{direction}/{s.name}": array for s, array in zip(specs, arrays, strict=True)
            }
    return results


def ask_client(bundle: Bundle, request: Arrays) -> Arrays:
    """Return the outputs that a client gets from the model with its hooks, or from the `run` of a meta model.

    The callees of a meta model must be in the same folder as its bundle.
    """
    assert bundle.hooks is not None
    if bundle.manifest.kind == "meta":
        result: Arrays = load_run(bundle.hooks)(
            dict(request), lambda name, inputs: _ask(read_bundle(bundle.path.parent / name), inputs)
        )
        return result
    hooks = load_hooks(bundle.hooks)
    assert hooks.preprocess is not None
    assert hooks.postprocess is not None
    return hooks.postprocess(dict(_ask(bundle, hooks.preprocess(dict(request)))))


def _ask(bundle: Bundle, inputs: Arrays) -> Arrays:
    """Return the outputs of a model without its hooks. The rows must be the first axis of all its tensors."""
    run = ModuleRunner(bundle)
    results = answers(run, run.keys()[-1], [inputs[spec.name] for spec in bundle.manifest.inputs])
    return {spec.name: array for spec, array in zip(bundle.manifest.outputs, results, strict=True)}


def _client_request(bundle: Bundle) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {
        spec.name: rng.integers(0, 100, (3, *spec.dims[1:])).astype(dtypes.numpy_dtype(spec.dtype))
        for spec in bundle.manifest.wire_inputs
    }


def write_answers(path: Path, file: Path) -> None:
    """Write random inputs and the resulting outputs of a bundle to an .npz file, for each module and for a client's request."""
    bundle = read_bundle(path)
    arrays: dict[str, Array] = {}
    if bundle.modules:
        arrays = ask_modules(bundle, lambda _, key: random_inputs(bundle, *key))
    if bundle.hooks is not None:
        request = _client_request(bundle)
        arrays |= {f"client/in/{name}": array for name, array in request.items()}
        arrays |= {f"client/out/{name}": array for name, array in ask_client(bundle, request).items()}
    np.savez_compressed(file, **{name: array.copy(order="C") for name, array in arrays.items()})  # type: ignore[arg-type]


def main() -> int:
    """Make the set of the installed jax. Returns the exit status."""
    target = GOLDEN / f"jax_{metadata.version('jax').replace('.', '_')}"
    if target.exists():
        print(
            f"{target.name} already exists and is not changed: tests/golden/README.md says why",
            file=sys.stderr,
        )
        return 1
    new, old = target / f"format_{CURRENT}", target / "format_2_0"
    new.mkdir(parents=True)
    write_bundles(new)
    old.mkdir()
    for bundle in sorted(new.iterdir()):
        if "stablehlo" not in bundle.name:
            write_as_2(bundle, old / bundle.name)
    v2_affine.make(old / "by_hand")
    write_stateful_bundles(new)
    digests = {}
    for bundle in sorted(target.glob("*/*/")):
        write_answers(bundle, bundle.with_suffix(".npz"))
        digests[f"{bundle.parent.name}/{bundle.name}"] = read_bundle(bundle).digest
    (target / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
