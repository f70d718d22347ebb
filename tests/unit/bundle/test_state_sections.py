"""Each rule of a manifest's sections `state` and `generate`, with the message for a broken rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rsrv_bundle import GenerateSpec, StateSpec, read_bundle, writer, yaml12
from rsrv_bundle.spec import StateTensor
from tests.unit.bundle.forge import (
    COUNTER,
    GENERATE,
    HIDDEN,
    STATE,
    WRITER,
    changed,
    make_bundle,
    problems_of,
    seal,
    tensor,
)

MODULES = ("model.b1.mlir", "model.b4.mlir")
CHUNKS = tuple(f"model.v{variant}.b{size}.mlir" for variant in (0, 1) for size in (1, 4))


def with_state(**entry: Any) -> dict[str, Any]:
    """Return COUNTER with keys of its section `state` replaced. The value None removes a key."""
    return changed(COUNTER, state=changed(STATE, **entry))


def with_tensor(**entry: Any) -> dict[str, Any]:
    """Return COUNTER with one state tensor that has some keys replaced."""
    return with_state(tensors=[changed(HIDDEN, **entry)])


def generating(**entry: Any) -> dict[str, Any]:
    """Return WRITER with keys of its section `generate` replaced. The value None removes a key."""
    return changed(WRITER, generate=changed(GENERATE, **entry))


BAD_STATE: list[tuple[str, dict[str, Any], str]] = [
    ("type", changed(COUNTER, state=[4]), "state: must be a mapping with slots"),
    ("unknown", with_state(slot=4), "state.slot: unknown key; did you mean 'slots'?"),
    ("no slots", with_state(slots=None), "state.slots: must be a whole number from 1 to 65536, not None"),
    ("many slots", with_state(slots=65537), "state.slots: must be a whole number from 1 to 65536"),
    ("bool slots", with_state(slots=True), "state.slots: must be"),
    ("no tensors", with_state(tensors=[]), "state.tensors: must list 1 to 1000 tensors"),
    ("tensors type", with_state(tensors={"a": 1}), "state.tensors: must list"),
    ("timeout", with_state(idle_timeout_s=0), "state.idle_timeout_s: must be a number of seconds above 0"),
    ("timeout text", with_state(idle_timeout_s="1s"), "state.idle_timeout_s: must be"),
    ("when_full", with_state(when_full="drop"), "state.when_full: must be wait, refuse, host, not 'drop'"),
    ("when_full list", with_state(when_full=["wait"]), "state.when_full: must be wait"),
    ("tensor type", with_state(tensors=["hidden"]), "state.tensors[0]: must be a mapping"),
    ("tensor key", with_tensor(shape="n"), "state.tensors[0].shape: unknown key"),
    ("tensor name", with_tensor(name="a\nb"), "state.tensors[0]: needs a name of 1 to 256 printable"),
    (
        "dtype",
        with_tensor(dtype="float32"),
        "state.tensors.hidden: unknown dtype 'float32'; did you mean f32?",
    ),
    ("no dims", with_tensor(dims=None), "state.tensors.hidden: dims must list the sizes"),
    ("open dims", with_tensor(dims=[-1]), "state.tensors.hidden: dims must list the sizes"),
    ("bytes", with_tensor(dims=[2**31 - 1] * 2), "state.tensors.hidden: its dims and the slots multiply"),
    ("twice", with_state(tensors=[HIDDEN, HIDDEN]), "state.tensors.hidden: names must be unique"),
    ("internal", changed(COUNTER, internal=True), "internal: a model with state serves the sequences"),
    (
        "no inputs",
        changed(COUNTER, executable_inputs=[]),
        "executable_inputs: a model with state needs an input",
    ),
    (
        "batch axis",
        changed(COUNTER, executable_inputs=[tensor(shape="cn", c=2)]),
        "executable_inputs.x: with state, each tensor has the batch axis first",
    ),
    (
        "batch axis of an output",
        changed(COUNTER, executable_outputs=[tensor("y", shape="k", k=2)]),
        "executable_outputs.y: with state, each tensor has the batch axis first",
    ),
]
BAD_GENERATE: list[tuple[str, dict[str, Any], str]] = [
    ("type", changed(WRITER, generate="yes"), "generate: must be a mapping"),
    ("no state", changed(WRITER, state=None), "generate: needs the section state"),
    ("unknown", generating(stops=[2]), "generate.stops: unknown key; did you mean 'stop'?"),
    ("no tokens", generating(tokens="ids"), "generate.tokens: 'ids' must be an executable input, i32 [n, t]"),
    (
        "name type",
        generating(lengths=["lengths"]),
        "generate.lengths: ['lengths'] must be an executable input",
    ),
    ("token", generating(token="tokens"), "generate.token: 'tokens' must be an executable output, i32 [n]"),
    (
        "fixed chunk",
        changed(
            WRITER,
            input_shapes=None,
            executable_inputs=[tensor("tokens", "i32", "nt", t=4), *WRITER["executable_inputs"][1:]],
        ),
        "generate.tokens: 'tokens' must be an executable input, i32 [n, t] with t of size -1",
    ),
    (
        "sampling",
        changed(
            WRITER, executable_inputs=[*WRITER["executable_inputs"][:2], tensor("sampling", shape="ns", s=3)]
        ),
        "generate.sampling: 'sampling' must be an executable input, f32 [n, 4]",
    ),
    (
        "fourth input",
        changed(WRITER, executable_inputs=[*WRITER["executable_inputs"], tensor("mask", c=1)]),
        "generate: there are no values for the inputs mask",
    ),
    (
        "no step",
        changed(WRITER, input_shapes=[{"t": 4}, {"t": 16}]),
        "input_shapes: a generation needs the chunk of 1",
    ),
    ("context", generating(context=None), "generate.context: must be a whole number"),
    (
        "short context",
        generating(context=15, max_tokens=2),
        "generate.context: 15 is less than the longest chunk, 16",
    ),
    (
        "max_tokens",
        generating(max_tokens=65),
        "generate.max_tokens: must be a whole number from 1 to the context",
    ),
    ("stop", generating(stop=[-1]), "generate.stop: must list token ids"),
    ("stop bool", generating(stop=[False]), "generate.stop: must list token ids"),
    ("stop type", generating(stop=2), "generate.stop: must list token ids"),
    (
        "tokenizer",
        generating(tokenizer="t.json"),
        "generate.tokenizer: there is no file 't.json' in the bundle",
    ),
    ("tokenizer type", generating(tokenizer=3), "generate.tokenizer: must be the name of a file"),
    ("tokenizer path", generating(tokenizer="../t.json"), "generate.tokenizer: there is no file"),
    ("template", generating(template="{text}"), "generate.template: needs a tokenizer"),
    ("template text", generating(tokenizer="t", template="Q: "), "generate.template: must be text"),
]


@pytest.mark.parametrize(("manifest", "fragment"), [b[1:] for b in BAD_STATE], ids=[b[0] for b in BAD_STATE])
def test_a_broken_rule_of_state_is_named(tmp_path: Path, manifest: dict[str, Any], fragment: str) -> None:
    """A broken rule of the section `state` is named with its key."""
    lines = problems_of(make_bundle(tmp_path, manifest))
    assert [line for line in lines if line.startswith(f"manifest.yaml: {fragment}")], lines


@pytest.mark.parametrize(
    ("manifest", "fragment"), [b[1:] for b in BAD_GENERATE], ids=[b[0] for b in BAD_GENERATE]
)
def test_a_broken_rule_of_generate_is_named(tmp_path: Path, manifest: dict[str, Any], fragment: str) -> None:
    """A broken rule of the section `generate` is named with its key."""
    lines = problems_of(make_bundle(tmp_path, manifest, modules=CHUNKS))
    assert [line for line in lines if line.startswith(f"manifest.yaml: {fragment}")], lines


def test_a_generation_has_no_hooks(tmp_path: Path) -> None:
    """Hooks of a model that generates are refused, because the stub itself translates what clients send."""
    made = seal(make_bundle(tmp_path, WRITER, modules=CHUNKS, hooks="def preprocess(inputs): ..."))
    assert any("remove model.py" in line for line in problems_of(made))


def test_state_is_read_with_its_sizes(tmp_path: Path) -> None:
    """`idle_timeout_s` and `when_full` have defaults. The bytes of a slot and of all slots follow from the tensors."""
    manifest = read_bundle(make_bundle(tmp_path, COUNTER)).manifest
    tensors = (StateTensor("hidden", "f32", (8,)), StateTensor("position", "i32", ()))
    assert manifest.state == StateSpec(4, tensors, 60.0, "wait")
    assert (manifest.state.slot_bytes, manifest.state.pool_bytes) == (36, 144)
    assert manifest.generate is None


def test_a_generation_is_read_with_its_chunks(tmp_path: Path) -> None:
    """By default, the tensors of a generation have the names of their roles. The chunks are the lengths of the variants."""
    text = generating(tokenizer="tokenizer.json", template="Q: {text}\nA: ")
    made = make_bundle(tmp_path, text, modules=CHUNKS, files={"tokenizer.json": b"{}"})
    manifest = read_bundle(seal(made)).manifest
    names = ("tokens", "lengths", "sampling", "token")
    assert manifest.generate == GenerateSpec(*names, 64, (2, 0), 16, "tokenizer.json", "Q: {text}\nA: ")
    assert manifest.chunks == (1, 16)


@pytest.mark.parametrize("manifest", [COUNTER, WRITER], ids=["state", "generate"])
def test_what_is_written_again_is_equal(tmp_path: Path, manifest: dict[str, Any]) -> None:
    """A manifest with state has the same content after it is read and written again."""
    modules = MODULES if manifest is COUNTER else CHUNKS
    made = make_bundle(tmp_path, manifest, modules=modules)
    before = read_bundle(made).manifest
    writer.write_manifest(made / "manifest.yaml", writer.document_of(before, before.sha256))
    assert read_bundle(made).manifest == before
    assert yaml12.load((made / "manifest.yaml").read_bytes())["format_version"] == 3
