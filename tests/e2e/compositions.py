"""Models that combine many features, and their expected answers, for the table of docs/compatibility.md."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from rsrv_bundle import yaml12
from rsrv_bundle.export import export_bundle
from rsrv_bundle.stateful import export_generative, export_stateful
from tests.builders import write_meta
from tests.e2e.bundles import Array, ensure_made
from tests.e2e.harness import ROOT
from tests.e2e.stateful import CONTEXT, STORY, bytes_tokenizer

#: Compiled lengths, and compiled batch sizes.
LENGTHS, SIZES = (4, 8), (1, 4)
#: Largest error of a narrow model's answer, relative to the answer's largest magnitude.
BOUND = 0.15
_RNG = np.random.default_rng(0)
_TABLE, _HEAD = (_RNG.standard_normal(shape, np.float32) for shape in ((256, 32), (32, 128)))
#: Token 0 adds nothing to an embedding, so it may pad rows.
_TABLE[0] = 0
PARAMS: Mapping[str, Array] = {"table": _TABLE, "head": _HEAD / 8}

#: Hooks that convert text to tokens. LENGTHS are the lengths that the modules take.
HOOKS = """
import numpy as np

LENGTHS = {lengths}


def preprocess(inputs):
    rows = [[int(word) for word in text.split()] for text in inputs["text"]]
    length = min(one for one in LENGTHS if one >= max(map(len, rows)))
    return {{"ids": np.array([row + [0] * (length - len(row)) for row in rows], np.int32)}}
"""
#: A meta model that embeds a text with three models, and returns the sum of the embeddings.
META = """
import numpy as np


def run(inputs, call):
    text = inputs["text"]
    ids = np.array([[int(word) for word in one.split()] for one in text], np.int32)
    # Models with hooks take no more rows of a call than the largest size has.
    parts = [{"text": text[first : first + 4]} for first in range(0, len(text), 4)]
    found = call.many([(name, part) for name in ("text_called", "text_internal") for part in parts])
    inner = np.concatenate([one["embedding"] for one in found])
    last = call("ids_native", {"ids": np.pad(ids, ((0, 0), (0, 8 - ids.shape[1])))})
    return {"embedding": inner[: len(text)] + inner[len(text) :] + last["embedding"]}
"""
TEXT = {"name": "text", "dtype": "bytes", "shape": "n"}
EMBEDDING = {"name": "embedding", "dtype": "f32", "shape": "ne", "dims": {"e": 128}}
TASK = {"kind": "feature-extraction", "inputs": {"text": "text"}, "outputs": {"embedding": "embedding"}}


def embed(params: Any, ids: Any) -> Any:
    return jnp.tanh(params["table"][ids].sum(1) @ params["head"])


def embedded(ids: Array) -> Array:
    """Return the answer of the wide model."""
    return np.asarray(np.tanh(PARAMS["table"][ids].sum(1) @ PARAMS["head"]))


_NARROW: Mapping[str, Any] = {"weights": "i8", "compute": "bf16"}


def _ids(out_dir: Path, *, pad: str) -> None:
    export_bundle(
        lambda params, ids: {"embedding": embed(params, ids)},
        PARAMS,
        {"ids": _RNG.integers(1, 256, (4, 8)).astype(np.int32)},
        batch_sizes=SIZES,
        axes={"ids": "nt"},
        input_shapes=[{"t": length} for length in LENGTHS],
        pad=pad,
        task={"kind": "feature-extraction", "inputs": {"ids": "ids"}, "outputs": {"embedding": "embedding"}},
        out_dir=out_dir,
        **_NARROW,
    )


def _reader(out_dir: Path) -> None:
    """Write a model with sequences. It embeds all tokens that a sequence has sent so far."""

    def step(params: Any, state: Any, ids: Any) -> Any:
        total = state["total"] + params["table"][ids].sum(1)
        return {"embedding": jnp.tanh(total @ params["head"])}, {"total": total}

    export_stateful(
        step,
        {"total": jax.ShapeDtypeStruct((32,), np.float32)},
        PARAMS,
        {"ids": np.ones((1, 4), np.int32)},
        slots=8,
        batch_sizes=SIZES,
        axes={"ids": "nt"},
        input_shapes=[{"t": length} for length in LENGTHS],
        out_dir=out_dir,
        **_NARROW,
    )


def _teller(out_dir: Path) -> None:
    """Write a model that generates text: it continues `stateful.STORY` after the prompt."""
    letters = bytes_tokenizer()
    story = jnp.asarray(letters.encode(STORY).ids, jnp.int32)

    def step(params: Any, state: Any, position: Any, tokens: Any, lengths: Any) -> Any:
        # Among the products of the token's row with all rows, the product with itself is the largest.
        token = story[(position + lengths) % len(story)]
        return params["table"][token] @ params["table"].T, {"read": position + lengths}

    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        letters.save(file.name)
        export_generative(
            step,
            {"read": jax.ShapeDtypeStruct((), np.int32)},
            {"table": _RNG.standard_normal((256, 64), np.float32)},
            slots=8,
            context=CONTEXT,
            max_tokens=CONTEXT,
            chunks=[1, 16],
            batch_sizes=SIZES,
            tokenizer=file.name,
            out_dir=out_dir,
            **_NARROW,
        )


def ensure() -> Path:
    """Return the folder of the exported models, built if necessary."""
    makers: dict[str, Callable[[Path], None]] = {
        "sizes": partial(_ids, pad=""),
        "padded": partial(_ids, pad="t=0"),
        "reader": _reader,
        "teller": _teller,
    }
    return ensure_made(ROOT / "build" / "compositions", makers, [Path(__file__)])


def _with_text(source: Path, target: Path, *, lengths: tuple[int, ...], **changes: Any) -> None:
    """Copy a bundle whose input is ids. In the copy, hooks read text from clients."""
    shutil.copytree(source, target)
    (target / "model.py").write_text(HOOKS.format(lengths=lengths))
    file = target / "manifest.yaml"
    manifest = yaml12.parse(file.read_text()) | {"client_inputs": [TEXT], "client_outputs": [EMBEDDING]}
    manifest |= {"task": TASK} | changes
    file.write_text(yaml12.dump({key: value for key, value in manifest.items() if value is not None}))


def write(folder: Path) -> None:
    """Write the bundles of the server."""
    made = ensure()
    for name, source in (("ids", "sizes"), ("ids_padded", "padded")):
        shutil.copytree(made / source, folder / f"{name}_native")
    for number in (1, 2):
        _with_text(made / "padded", folder / f"text_padded{number}", lengths=tuple(range(1, 9)))
    _with_text(made / "sizes", folder / "text_called", lengths=LENGTHS)
    _with_text(made / "sizes", folder / "text_internal", lengths=LENGTHS, task=None, internal=True)
    client = yaml12.dump({"client_inputs": [TEXT], "client_outputs": [EMBEDDING], "task": TASK})
    write_meta(folder / "meta", META, ["text_called", "text_internal", "ids_native"], client=client)


def write_stateful(folder: Path) -> None:
    """Write the bundles of a server whose models have state."""
    made = ensure()
    _with_text(made / "reader", folder / "reader", lengths=LENGTHS)
    shutil.copytree(made / "teller", folder / "teller")


#: Models that clients ask. The answer of a model is the embedding times this factor.
EMBEDDERS: Mapping[str, int] = {"ids_native": 1, "ids_padded_native": 1, "alias_padded": 1, "meta": 3}
#: Settings for two devices. Models start with their first requests.
DEVICES = "runtime: {devices: [cpu, cpu], start: lazy}\n"
SETTINGS = f"""{DEVICES}
models: {{ids_native: {{front: native}}, ids_padded_native: {{front: native}}}}
aliases: {{alias_padded: {{text_padded1: 1, text_padded2: shadow}}}}
"""
#: A Python model without rsrv. It passes requests on to the model whose name follows `via_` in its own name.
_VIA = """
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"].removeprefix("via_")
        self.outputs = [one["name"] for one in json.loads(args["model_config"])["output"]]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        found = pb_utils.InferenceRequest(
            model_name=self.name,
            inputs=request.inputs(),
            requested_output_names=self.outputs,
            parameters=json.loads(request.parameters() or "{}"),
        ).exec()
        if found.has_error():
            return pb_utils.InferenceResponse(error=found.error())
        return pb_utils.InferenceResponse(found.output_tensors())
"""


def add_callers(repository: Path, model: str) -> None:
    """Write a Python model that calls `model`, and an ensemble for each of these two models."""
    config = text_format.Parse((repository / model / "config.pbtxt").read_text(), ModelConfig())
    for field in ("dynamic_batching", "parameters", "backend", "instance_group"):
        config.ClearField(field)
    via = f"via_{model}"
    python = ModelConfig()
    python.CopyFrom(config)
    python.name, python.backend = via, "python"
    python.instance_group.add(kind=2, count=1)  # KIND_CPU
    _add(repository, python)
    (repository / via / "1" / "model.py").write_text(_VIA)
    for step in (model, via):
        ensemble = ModelConfig()
        ensemble.CopyFrom(config)
        ensemble.name, ensemble.platform = f"ensemble_{step}", "ensemble"
        entry = ensemble.ensemble_scheduling.step.add(model_name=step, model_version=-1)
        entry.input_map.update({tensor.name: tensor.name for tensor in config.input})
        entry.output_map.update({tensor.name: tensor.name for tensor in config.output})
        _add(repository, ensemble)


def _add(repository: Path, config: Any) -> None:
    (repository / config.name / "1").mkdir(parents=True)
    (repository / config.name / "config.pbtxt").write_text(text_format.MessageToString(config))
