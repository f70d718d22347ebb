"""The measured meta models and their callees, and the same models written by hand for Triton."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.build import build
from rsrv_bundle.meta import write_meta_bundle
from tests.bench import plain_detector, plain_env
from tests.bench.models import (
    Array,
    Case,
    ensure_bundle,
    export_mlp,
    generate,
    mlp_reference,
    mlp_weights,
    write_plain_mlp,
)
from tests.bench.places import HERE, ROOT, WORK
from tests.bench.plain_chain import STAGES

#: Number of elements in a row of every tensor that clients send or get, except for the detector.
WIDTH = 256

#: Names of example bundles: the meta model, and its callees.
DETECTOR = ("detector", "detector_backbone", "detector_head")
#: Number of concurrent runs of the detector that is written by hand. It equals the default of scheduler.meta_concurrency in rsrv.
_AT_A_TIME = 2
_EXAMPLES = ROOT / "build" / "bundles"

CHAIN = "chain"
#: The chain's first model. Clients can also call it directly, which shows the cost of one of the chain's three calls.
ONE_CALL = STAGES[0]
_CHAIN = f"""
def run(inputs, call):
    x = inputs["x"]
    for name in {STAGES}:
        x = call(name, {{"x": x}})["logits"]
    return {{"logits": x}}
"""

_RELAY = """
def run(inputs, call):
    between = call("{fill}", inputs, keep_on_device={keep})
    return call("{drain}", between)
"""

_PLAIN_CHAIN_CONFIG = f"""\
name: "{CHAIN}"
backend: "python"
max_batch_size: 32
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ }}
"""


def chain_case() -> Case:
    """Return the case of the chain."""

    def reference(x: Array) -> Array:
        return functools.reduce(lambda value, name: mlp_reference(_stage_weights(name), value), STAGES, x)

    return Case(CHAIN, "x", (WIDTH,), "logits", 8, reference)


def one_call_case() -> Case:
    """Return the case of the chain's first model."""
    weights = _stage_weights(ONE_CALL)
    return Case(ONE_CALL, "x", (WIDTH,), "logits", 8, lambda x: mlp_reference(weights, x))


@dataclass(frozen=True)
class Relay:
    """Two models with a tensor of `nbytes` between them.

    The first makes it from a small input, and the second reduces it to a small output.
    """

    label: str
    nbytes: int

    @property
    def fill(self) -> str:
        return f"fill_{self.nbytes}"

    @property
    def drain(self) -> str:
        return f"drain_{self.nbytes}"

    def meta(self, *, keep: bool) -> str:
        """Return the name of the meta model. With `keep`, this meta model keeps the tensor on the device."""
        return f"{'keep' if keep else 'relay'}_{self.nbytes}"

    @property
    def blocks(self) -> int:
        """How often the input fits into the tensor."""
        return self.nbytes // (4 * WIDTH)

    @property
    def step(self) -> int:
        """The second model reads every `step`-th block."""
        return max(1, self.blocks // 64)

    def case(self, *, keep: bool) -> Case:
        """Return the case of the meta model."""
        factors = 1 + np.arange(self.blocks, dtype=np.float32)[:: self.step] / np.float32(self.blocks)
        return Case(self.meta(keep=keep), "x", (WIDTH,), "z", 1, lambda x: np.asarray(x * factors.mean()))


KIB = 1024
RELAYS = (
    Relay("1 kB", KIB),
    Relay("1 MB", KIB * KIB),
    Relay("50 MB", 50 * KIB * KIB),
)


def repository(transport: str) -> Path:
    """Make a repository of all models. `transport`: how meta models call others. With bls, tensors cannot stay on the device."""
    build(_EXAMPLES, DETECTOR)
    bundles = [_EXAMPLES / name for name in DETECTOR]
    bundles += [ensure_bundle(name, _export_stage, HERE / "meta_models.py") for name in STAGES]
    bundles.append(_chain_bundle())
    for relay in RELAYS:
        bundles += [
            ensure_bundle(relay.fill, functools.partial(_export_fill, relay), HERE / "meta_models.py"),
            ensure_bundle(relay.drain, functools.partial(_export_drain, relay), HERE / "meta_models.py"),
            _relay_bundle(relay, keep=False),
        ]
        if transport == "direct":
            bundles.append(_relay_bundle(relay, keep=True))
    return generate(f"metas-{transport}", bundles, f"meta: {{transport: {transport}}}\n")


def plain_repository() -> Path:
    """Make a repository with a chain and a detector written by hand. Each callee computes with jax in its own process."""
    environment = plain_env.ensure()
    folder = WORK / "metas-plain"
    shutil.rmtree(folder, ignore_errors=True)
    for name in STAGES:
        write_plain_mlp(folder / name, _stage_weights(name), environment)
    (folder / CHAIN / "1").mkdir(parents=True)
    (folder / CHAIN / "config.pbtxt").write_text(_PLAIN_CHAIN_CONFIG)
    shutil.copy(HERE / "plain_chain.py", folder / CHAIN / "1" / "model.py")
    build(_EXAMPLES, DETECTOR)
    plain_detector.write(folder, _EXAMPLES, environment, instances=_AT_A_TIME)
    return folder


def _stage_weights(name: str) -> Mapping[str, Array]:
    return mlp_weights(name, outputs=WIDTH)


def _export_stage(folder: Path) -> None:
    export_mlp(folder, _stage_weights(folder.name))
    if folder.name != ONE_CALL:
        manifest = folder / "manifest.yaml"
        manifest.write_text(manifest.read_text() + "internal: true\n")


def _chain_bundle() -> Path:
    folder = WORK / "bundles" / CHAIN
    write_meta_bundle(
        _CHAIN,
        calls=STAGES,
        client_inputs=[_row("x")],
        client_outputs=[_row("logits")],
        out_dir=folder,
        overwrite=True,
    )
    return folder


def _relay_bundle(relay: Relay, *, keep: bool) -> Path:
    folder = WORK / "bundles" / relay.meta(keep=keep)
    write_meta_bundle(
        _RELAY.format(fill=relay.fill, drain=relay.drain, keep=keep),
        calls=[relay.fill, relay.drain],
        client_inputs=[_row("x")],
        client_outputs=[_row("z")],
        out_dir=folder,
        overwrite=True,
    )
    return folder


def _row(name: str) -> dict[str, Any]:
    return {"name": name, "dtype": "f32", "shape": "nc", "dims": {"c": WIDTH}}


def _export_fill(relay: Relay, folder: Path) -> None:
    import jax.numpy as jnp

    from rsrv_bundle.export import export_bundle

    def apply(params: Any, x: Any) -> Any:
        factors = 1 + jnp.arange(relay.blocks, dtype=jnp.float32) / relay.blocks
        return {"y": (x[:, None, :] * factors[None, :, None]).reshape(len(x), -1)}

    example = {"x": np.zeros((1, WIDTH), np.float32)}
    export_bundle(apply, {}, example, batch_sizes=(1,), out_dir=folder, overwrite=True)


def _export_drain(relay: Relay, folder: Path) -> None:
    from rsrv_bundle.export import export_bundle

    def apply(params: Any, y: Any) -> Any:
        return {"z": y.reshape(len(y), relay.blocks, WIDTH)[:, :: relay.step].mean(1)}

    example = {"y": np.zeros((1, relay.blocks * WIDTH), np.float32)}
    export_bundle(apply, {}, example, batch_sizes=(1,), out_dir=folder, overwrite=True)
