"""The bundles of the chaos tests. They fail, hang, use memory or take long on request."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.export import export_bundle
from tests.chaos.questions import (
    BREAKS,
    BULKY,
    BULKY_STEP,
    HEAVY,
    HEAVY_FACTORS,
    ITEM,
    LIGHT,
    LIGHT_FACTORS,
    MOODS,
    item_factor,
    item_name,
    mixing,
    mood,
)
from tests.e2e import bundles, stateful
from tests.e2e.harness import ROOT
from tests.e2e.metas import write_meta, write_scale

OUTPUT = ROOT / "build" / "chaos_bundles"

#: Bundles of the end-to-end tests that the chaos tests also serve.
BORROWED = ("exact", "only_rows", "elastic", "sudden")


def _fragile(out_dir: Path) -> None:
    """Write a model that returns three times its input, f32 [n, 4]. If an element is BREAKS or more, the execution fails on the device."""

    def fail(x: jax.Array) -> Any:
        # A LAPACK routine gets elements of a type that it does not support, and reports an error when it is executed.
        result = jax.ShapeDtypeStruct(x.shape, np.int32), jax.ShapeDtypeStruct((), np.int32)
        call = jax.ffi.ffi_call("lapack_spotrf_ffi", result)
        factor, _ = call(jax.lax.bitcast_convert_type(x, np.int32), uplo=np.uint8(ord("L")))
        return jax.lax.bitcast_convert_type(factor, np.float32)

    export_bundle(
        lambda params, x: {"y": jax.lax.cond((x >= BREAKS).any(), fail, lambda x: 3 * x, x)},
        {},
        {"x": np.zeros((1, 4), np.float32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
    )


HOOKS = f"""
import os
import time

MOODS = {MOODS!r}
FIRST = {float(mood(MOODS[0]).inputs["x"][0, 0])}


def act(mood):
    match mood:
        case "hang":
            while True:
                time.sleep(1)
        case "hoard":
            held = []
            for _ in range(96):
                held.append(b"x" * 2**25)
            raise RuntimeError("three GiB, and nobody minds")
        case "exit":
            os._exit(3)


def preprocess(inputs):
    number = int(inputs["x"][0, 0] - FIRST)
    if 0 <= number < len(MOODS):
        act(MOODS[number])
    return inputs


def postprocess(outputs):
    return {{"y": outputs["y"] + 1}}
"""


def _moody(out_dir: Path) -> None:
    """Write a model that returns twice its input plus one, f32 [n, 4]. A request with one of the MOODS makes a hook misbehave."""
    export_bundle(
        lambda params, x: {"y": 2 * x},
        {},
        {"x": np.zeros((1, 4), np.float32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
        hooks=HOOKS,
    )


def _heavy(out_dir: Path) -> None:
    """Write a model that looks up its weights at the indices of its input, i32 [n, 4]. Its weights take a second to read."""
    _lookup(out_dir, HEAVY, HEAVY_FACTORS[out_dir.name])


def _light(out_dir: Path) -> None:
    """Write a model that looks up its weights at the indices of its input, i32 [n, 4]. Its weights are quick to read."""
    _lookup(out_dir, LIGHT, LIGHT_FACTORS[out_dir.name])


def _lookup(out_dir: Path, elements: int, factor: int) -> None:
    weights = np.arange(elements, dtype=np.uint32) * np.uint32(factor)
    export_bundle(
        lambda params, at: {"y": params["table"][at]},
        {"table": weights},
        {"at": jax.ShapeDtypeStruct((1, 4), np.int32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
    )


def _item(out_dir: Path) -> None:
    """Write a model that looks up its weights at the indices of its input, i32 [n, 4]. `put_item` copies it for a catalogue."""
    _lookup(out_dir, ITEM, item_factor(0))


def put_item(folder: Path, number: int, *, factor_of: int | None = None) -> Path:
    """Put a model of the catalogue into the folder, and replace an earlier one.

    `factor_of`: the number of another model whose weights this model gets.
    """
    name = item_name(number)
    weights = np.arange(ITEM, dtype=np.uint32) * np.uint32(
        item_factor(number if factor_of is None else factor_of)
    )
    made = bundles.with_weights(OUTPUT / "item", folder.with_name("made") / name, {"table": weights})
    shutil.rmtree(folder / name, ignore_errors=True)
    return made.rename(folder / name)


def _bulky(out_dir: Path) -> None:
    """Write a model that returns every BULKY_STEP-th element of its input, f32 [n, BULKY]."""
    export_bundle(
        lambda params, x: {"y": x[:, ::BULKY_STEP]},
        {},
        {"x": jax.ShapeDtypeStruct((1, BULKY), np.float32)},
        batch_sizes=(1, 4),
        out_dir=out_dir,
    )


def _compiling(out_dir: Path) -> None:
    """Write a model that mixes up its input, u32 [n, 4]. Each size takes seconds to compile."""

    def mix(params: Any, x: jax.Array) -> Any:
        h = x
        for shift, factor in mixing():
            h = (h ^ h >> jnp.uint32(shift)) * jnp.uint32(factor)
        return {"y": h}

    export_bundle(mix, {}, {"x": np.zeros((1, 4), np.uint32)}, batch_sizes=(1, 2, 4), out_dir=out_dir)


def _double(out_dir: Path) -> None:
    write_scale(out_dir, 2)


def _triple(out_dir: Path) -> None:
    write_scale(out_dir, 3)


def _chain(out_dir: Path) -> None:
    """Write a meta model that returns six times its input, f32 [n, 8], in two stages."""
    body = """
    def run(inputs, call):
        return call("triple", {"x": call("double", inputs)["y"]})
    """
    write_meta(out_dir, body, ["double", "triple"])


MAKERS: Mapping[str, Callable[[Path], None]] = {
    "fragile": _fragile,
    "moody": _moody,
    "heavy_a": _heavy,
    "heavy_b": _heavy,
    "bulky": _bulky,
    "item": _item,
    "compiling": _compiling,
    "double": _double,
    "triple": _triple,
    "chain": _chain,
}


def ensure(*, many: bool = False) -> Mapping[str, Path]:
    """Return the bundles by name, built if necessary. With `many`, the light models are included."""
    here = Path(__file__)
    sources = (here, here.with_name("questions.py"))
    own = bundles.ensure_made(OUTPUT, MAKERS, sources)
    borrowed = bundles.ensure()
    made = {name: own / name for name in MAKERS} | {name: borrowed / name for name in BORROWED}
    made |= {name: stateful.ensure() / name for name in ("alone", "sums")}
    if many:
        light = bundles.ensure_made(
            OUTPUT.with_name("chaos_light"), dict.fromkeys(LIGHT_FACTORS, _light), sources
        )
        made |= {name: light / name for name in LIGHT_FACTORS}
    return made
