"""Bundles for the tests only; `answers` has their functions in numpy.

They are built once into build/test_bundles and again when this file, the bundle format or jax changes. No arithmetic
here rounds differently at different batch sizes, so every answer is exact.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from rsrv_bundle import yaml12
from rsrv_bundle.export import export_bundle
from rsrv_bundle.writer import write_weights
from tests.builders import write_meta
from tests.e2e.answers import FACTOR, LEAST_STEPS, ROUNDS, SUMMAND, Array, exact_kernel, stepped
from tests.e2e.harness import ROOT

__all__ = ["LEAST_STEPS", "Array", "exact_kernel", "stepped"]

Arrays = dict[str, Array]

OUTPUT = ROOT / "build" / "test_bundles"

#: The rsrv.yaml of the tests' repository.
SETTINGS = """
models:
  short_queue: {max_queue_depth: 2}
"""

# --- work of a known length ---------------------------------------------------------------------------------------

#: Number of steps of the models `steady` and `short_queue`. They take some tenths of a second.
STEADY_STEPS = 1000


def _steps(x: jax.Array, steps: jax.Array) -> jax.Array:
    """Apply rounds of x <- FACTOR x + SUMMAND to each row of `x`. `steps` has each row's number of steps.

    The rounds are composed into one affine map, so the work hardly depends on the number of rows.
    """

    def go_on(state: Any) -> Any:
        return state[0] < steps.max()

    def one_round(_: jax.Array, map_: Any) -> Any:
        a, c = map_
        return a * jnp.uint32(FACTOR), c * jnp.uint32(FACTOR) + jnp.uint32(SUMMAND)

    def step(state: Any) -> Any:
        i, a, c, row_a, row_c = state
        a, c = jax.lax.fori_loop(0, ROUNDS, one_round, (a, c))
        goes_on = i < steps
        return i + 1, a, c, jnp.where(goes_on, a, row_a), jnp.where(goes_on, c, row_c)

    one, zero = jnp.ones_like(steps, jnp.uint32), jnp.zeros_like(steps, jnp.uint32)
    start = jnp.int32(0), jnp.uint32(1), jnp.uint32(0), one, zero
    _, _, _, a, c = jax.lax.while_loop(go_on, step, start)
    return x * a[:, None] + c[:, None]


def _elastic(out_dir: Path) -> None:
    """Write a model whose executions last as long as their longest row, and at least some milliseconds."""
    _of_any_length(out_dir, LEAST_STEPS)


def _sudden(out_dir: Path) -> None:
    """Write a model whose measured costs predict nothing. Its executions take microseconds, but a row may ask for any number of steps."""
    _of_any_length(out_dir, 0)


def _of_any_length(out_dir: Path, least: int) -> None:
    export_bundle(
        lambda params, x, steps: {"y": _steps(x, steps + least)},
        {},
        {"x": np.zeros((1, 4), np.uint32), "steps": np.zeros(1, np.int32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
    )


def _steady(out_dir: Path) -> None:
    """Write a model whose executions all last some tenths of a second."""
    export_bundle(
        lambda params, x: {"y": _steps(x, jnp.full(x.shape[0], STEADY_STEPS, jnp.int32))},
        {},
        {"x": np.zeros((1, 4), np.uint32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
    )


# --- element types and axes ---------------------------------------------------------------------------------------

#: NumPy's types by their names in the bundle format. Clients can send tensors of these types.
DTYPES: Mapping[str, Any] = {
    "bool": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


def _every_dtype(out_dir: Path) -> None:
    """Write a model with an input x_T and an output y_T for each type T. It reverses the elements of each row."""
    export_bundle(
        lambda params, **inputs: {name.replace("x", "y"): value[:, ::-1] for name, value in inputs.items()},
        {},
        {f"x_{token}": np.zeros((1, 5), dtype) for token, dtype in DTYPES.items()},
        batch_sizes=(1, 4),
        out_dir=out_dir,
    )


def _scalars(out_dir: Path) -> None:
    """Write a model without a batch axis. Some of its inputs and outputs are scalars."""
    export_bundle(
        lambda params, a, b, m: {
            "scaled": a * b.astype(np.float32),
            "next": b + 1,
            "turned": m.T,
            "shift": params["shift"] + a,
        },
        {"shift": np.arange(3, dtype=np.float32)},
        {"a": np.zeros((), np.float32), "b": np.zeros((), np.int64), "m": np.zeros((2, 3), np.float64)},
        batch_sizes=(),
        batch_axis=None,
        out_dir=out_dir,
    )


def _only_rows(out_dir: Path) -> None:
    """Write a model that returns three times its input: i32 [n] -> i32 [n]."""
    export_bundle(
        lambda params, x: {"y": 3 * x},
        {},
        {"x": np.zeros(1, np.int32)},
        batch_sizes=(1, 2, 8),
        out_dir=out_dir,
    )


def _axes(out_dir: Path) -> None:
    """Write a model whose batch axis is not the first axis of each tensor: a: [3, n], b: [n, 2] -> sum: [2, n, 3]."""
    export_bundle(
        lambda params, a, b: {"sum": jnp.transpose(a)[None, :, :] + jnp.transpose(b)[:, :, None]},
        {},
        {"a": np.zeros((3, 1), np.float32), "b": np.zeros((1, 2), np.float32)},
        batch_sizes=(1, 4),
        batch_axis={"a": 1, "b": 0},
        out_dir=out_dir,
    )


#: Number of elements in one row of `large`. The row has 64 MiB.
LARGE = 16 * 2**20
LARGE_STEP = 2**16


def _large(out_dir: Path) -> None:
    """Write a model that returns every LARGE_STEP-th element of its input, f32 [1, LARGE]."""
    export_bundle(
        lambda params, x: {"y": x[:, ::LARGE_STEP]},
        {},
        {"x": jax.ShapeDtypeStruct((1, LARGE), np.float32)},
        batch_sizes=(1,),
        out_dir=out_dir,
    )


def _exact(out_dir: Path) -> None:
    """Write a model that multiplies matrices of small whole numbers. The order of summation does not change its results."""
    export_bundle(
        lambda params, x: {"y": x @ params["kernel"]},
        {"kernel": exact_kernel()},
        {"x": np.zeros((1, 64), np.float32)},
        batch_sizes=(1, 2, 4, 8, 16),
        out_dir=out_dir,
    )


# --- hooks --------------------------------------------------------------------------------------------------------

#: Actions of the hooks of `hooked`. The first element of a request selects an action (see `deed`), and 0 selects none.
DEEDS = (
    "nothing", "raise", "exit", "sys_exit", "wait", "not_a_dict", "missing", "wrong_dtype", "wrong_shape",
    "wrong_rows", "wrong_rank", "objects", "huge", "list", "extra", "fortran", "in_place", "blame",
)  # fmt: skip

#: Environment variable with the folder in which a waiting hook and its test exchange files.
MEETING = "RSRV_TEST_MEETING"
HOOKS = f"""
import os
import sys
import time
from pathlib import Path

import numpy as np

from rsrv.hooks import BadInput

DEEDS = {DEEDS!r}


def act(deed, name, array):
    match deed:
        case "raise":
            raise RuntimeError("secret words of the hook")
        case "blame":
            raise BadInput("row 0 is upside down")
        case "exit":
            os._exit(3)
        case "sys_exit":
            sys.exit(3)
        case "wait":
            meeting = Path(os.environ[{MEETING!r}])
            (meeting / "waits").touch()
            while not (meeting / "go").exists():
                time.sleep(0.005)
        case "not_a_dict":
            return 17
        case "missing":
            return {{}}
        case "wrong_dtype":
            return {{name: array.astype(np.complex64)}}
        case "wrong_shape":
            return {{name: array[:, :-1]}}
        case "wrong_rows":
            return {{name: np.concatenate([array, array])}}
        case "wrong_rank":
            return {{name: array.ravel()}}
        case "objects":
            return {{name: np.full(array.shape, None)}}
        case "huge":
            return {{name: np.broadcast_to(array[:, :1], (len(array), 2**27))}}
        case "list":
            return {{name: [[np.float32(value) for value in row] for row in array]}}
        case "extra":
            return {{name: array, "nobody_asked": np.zeros(3)}}
        case "fortran":
            return {{name: np.asfortranarray(array)}}
        case "in_place":
            array += 0
    return {{name: array}}


def deed(value, offset):
    number = int(value) - offset
    return DEEDS[number] if 0 <= number < len(DEEDS) else "nothing"


def preprocess(inputs):
    x = inputs["x"]
    return act(deed(x[0, 0], 0), "x", x)


def postprocess(outputs):
    y = outputs["y"]
    return act(deed(y[0, 0] / 2, 100), "y", y)
"""


def deed(when: str, what: str) -> float:
    """Return the first element of a request that makes the hook `when` ("preprocess", "postprocess") do `what`."""
    return float(DEEDS.index(what) + {"preprocess": 0, "postprocess": 100}[when])


def _hooked(out_dir: Path) -> None:
    """Write a model that returns twice its input, f32 [n, 4], and whose hooks fail on request."""
    export_bundle(
        lambda params, x: {"y": 2 * x},
        {},
        {"x": np.zeros((1, 4), np.float32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
        hooks=HOOKS,
    )


# --- strings and an axis of any length ----------------------------------------------------------------------------

_LENGTHS = """
import numpy as np


def preprocess(inputs):
    return {"length": np.array([[len(text)] for text in inputs["text"]], np.float32)}


def postprocess(outputs):
    return {"label": [b"%d bytes" % int(length) for (length,) in outputs["same"]]}
"""
_SHOUT = """
def run(inputs, call):
    shouted = [text.decode().upper() for text in inputs["text"]]
    return {"label": call("lengths", {"text": shouted})["label"], "text": [[one, one] for one in shouted]}
"""


def _lengths(out_dir: Path) -> None:
    """Write a model that returns, for the string of each row, a text with its length."""
    export_bundle(
        lambda params, length: {"same": length},
        {},
        {"length": np.zeros((1, 1), np.float32)},
        batch_sizes=[1, 8],
        out_dir=out_dir,
        hooks=_LENGTHS,
        client_inputs=[{"name": "text", "dtype": "bytes", "shape": "n"}],
        client_outputs=[{"name": "label", "dtype": "bytes", "shape": "n"}],
    )


def _shout(out_dir: Path) -> None:
    """Write a meta model. It returns the answer of `lengths` to each string in capital letters, and a row with this string twice."""
    write_meta(
        out_dir,
        _SHOUT,
        ["lengths"],
        client="client_inputs: [{name: text, dtype: bytes, shape: n}]\n"
        "client_outputs: [{name: label, dtype: bytes, shape: n}, {name: text, dtype: bytes, shape: nk, dims: {k: 2}}]\n",
    )


def _wide(out_dir: Path) -> None:
    """Write a model that returns the sum of each row: f32 [n, 1] or [n, 4] -> f32 [n, 1]."""
    export_bundle(
        lambda params, x: {"y": x.sum(1, keepdims=True)},
        {},
        {"x": np.zeros((1, 4), np.float32)},
        batch_sizes=[1, 8],
        axes={"x": "nk"},
        input_shapes=[{"k": 1}, {"k": 4}],
        out_dir=out_dir,
    )


# --- building -----------------------------------------------------------------------------------------------------

MAKERS: Mapping[str, Callable[[Path], None]] = {
    "elastic": _elastic,
    "sudden": _sudden,
    "steady": _steady,
    "short_queue": _steady,
    "every_dtype": _every_dtype,
    "scalars": _scalars,
    "only_rows": _only_rows,
    "axes": _axes,
    "large": _large,
    "exact": _exact,
    "hooked": _hooked,
    "lengths": _lengths,
    "shout": _shout,
    "wide": _wide,
}


def ensure() -> Path:
    """Return the folder of the test bundles, built if necessary. Two processes may call this function at the same time."""
    return ensure_made(OUTPUT, MAKERS, ())


def ensure_made(output: Path, makers: Mapping[str, Callable[[Path], None]], sources: Sequence[Path]) -> Path:
    """Write a bundle with each maker into `output`.

    Bundles from an earlier call are kept if `sources`, this module, the bundle format and jax are unchanged.
    """
    output.parent.mkdir(exist_ok=True)
    stamp = output.with_suffix(".stamp")
    with output.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        digest = _digest(sources)
        if not (stamp.is_file() and stamp.read_text() == digest):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(output, ignore_errors=True)
            with jax.enable_x64(True):
                for name, make in makers.items():
                    make(output / name)
            stamp.write_text(digest)
    return output


def with_weights(source: Path, target: Path, weights: Mapping[str, Array]) -> Path:
    """Copy a bundle with other weights. `weights` has the order of the modules' arguments. Nothing is exported."""
    shutil.copytree(source, target)
    file, manifest = target / "weights.safetensors", target / "manifest.yaml"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    write_weights(file, list(weights.items()))
    after = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(manifest.read_text().replace(before, after))
    return target


def with_sizes(source: Path, target: Path, sizes: Sequence[int]) -> Path:
    """Copy a bundle, and keep only some of its compiled batch sizes."""
    shutil.copytree(source, target)
    file = target / "manifest.yaml"
    manifest = yaml12.load(file.read_bytes())
    manifest["batching"]["compiled_batch_sizes"] = list(sizes)
    del manifest["numerics"]
    for module in target.glob("*.mlir"):
        if int(module.stem.rpartition(".b")[2]) not in sizes:
            module.unlink()
            del manifest["sha256"][module.name]
    file.write_text(yaml12.dump(manifest))
    return target


def _digest(sources: Sequence[Path]) -> str:
    total = hashlib.sha256(f"jax {metadata.version('jax')}".encode())
    format_ = sorted((ROOT / "bundles" / "rsrv_bundle").glob("*.py"))
    for file in (Path(__file__), Path(__file__).with_name("answers.py"), *sources, *format_):
        total.update(file.read_bytes())
    return total.hexdigest()
