"""Each rule of a manifest's section `task`, with the message for a broken rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rsrv_bundle import TaskSpec, read_bundle, writer
from tests.unit.bundle.forge import GOOD, META, WRITER, changed, make_bundle, problems_of, tensor

HOOKS = "def preprocess(inputs): ...\n"
TASK: dict[str, Any] = {
    "kind": "text-classification",
    "inputs": {"text": "text"},
    "outputs": {"scores": "scores", "tokens": "used"},
    "labels": ["cat", "dog"],
}
CLASSIFIER: dict[str, Any] = {
    **GOOD,
    "client_inputs": [tensor("text", "bytes", "n"), tensor("second", "bytes", "nk", k=1)],
    "client_outputs": [
        tensor("scores", "f32", "nk", k=2),
        tensor("used", "i32", "n"),
        tensor("map", "f32", "nhw", h=4, w=-1),
    ],
    "task": TASK,
}
CHUNKS = tuple(f"model.v{variant}.b{size}.mlir" for variant in (0, 1) for size in (1, 4))
GENERATES = {"kind": "text-generation", "inputs": {"ids": "tokens"}, "outputs": {"ids": "tokens"}}


def with_task(**entry: Any) -> dict[str, Any]:
    """Return CLASSIFIER with keys of its section `task` replaced. The value None removes a key."""
    return changed(CLASSIFIER, task=changed(TASK, **entry))


EMBEDS: dict[str, Any] = {"kind": "feature-extraction", "labels": None, "outputs": {"embedding": "scores"}}
BAD: list[tuple[dict[str, Any], str]] = [
    (changed(CLASSIFIER, task=["a"]), "task: must be a mapping with kind"),
    (with_task(label=["a"]), "task.label: unknown key; did you mean 'labels'?"),
    (with_task(kind="classify"), "task.kind: 'classify' is not one of feature-extraction, "),
    (with_task(kind=["a"]), "task.kind: "),
    (with_task(inputs={"text": 1}), "task.inputs: must be a mapping from role"),
    (with_task(inputs={}), "task.inputs: needs the role text"),
    (with_task(inputs={"text": "x"}), "task.inputs.text: there is no input 'x'; clients see text, second"),
    (
        with_task(inputs={"text": "text", "image": "text"}),
        "task.inputs.image: unknown role; the kind has text",
    ),
    (with_task(outputs={"scores": "used"}), "task.outputs.scores: used: the role needs f32 with one axis"),
    (with_task(outputs={"scores": "map"}), "task.outputs.scores: map: the role needs f32 with one axis"),
    (
        with_task(outputs={"scores": "scores", "tokens": "scores"}),
        "task.outputs.tokens: scores: the role needs i32",
    ),
    (with_task(labels=None), "task.labels: is missing"),
    (with_task(labels=["a"]), "task.labels: there are 1 for 2 columns of scores"),
    (with_task(labels=["a", 0]), "task.labels: names are text"),
    (with_task(labels=[]), "task.labels: must list 1 to"),
    (with_task(dimensions=[1]), "task.dimensions: text-classification has no embedding"),
    (with_task(**EMBEDS, dimensions=[1, 3]), "task.dimensions: 3 is more than the 2 numbers"),
    (with_task(**EMBEDS, dimensions=[0]), "task.dimensions: must list lengths"),
    (with_task(**{**EMBEDS, "labels": ["a"]}), "task.labels: feature-extraction has no labels"),
    (
        with_task(kind="text-ranking", inputs={"text": "text", "text_pair": "second"}, labels=None),
        "task.outputs.scores: has 2 numbers in a row",
    ),
    (with_task(**GENERATES), "task.kind: text-generation is the task of bundles with the section generate"),
    (changed(CLASSIFIER, internal=True), "task: clients cannot call an internal model"),
]


@pytest.mark.parametrize(("manifest", "fragment"), BAD, ids=[fragment[:40] for _, fragment in BAD])
def test_a_broken_rule_of_task_is_named(tmp_path: Path, manifest: dict[str, Any], fragment: str) -> None:
    """A broken rule of the section `task` is named with its key."""
    lines = problems_of(make_bundle(tmp_path, manifest, hooks=HOOKS))
    assert [line for line in lines if line.startswith(f"manifest.yaml: {fragment}")], lines


@pytest.mark.parametrize(
    ("manifest", "task"),
    [
        (
            CLASSIFIER,
            TaskSpec(
                "text-classification",
                {"text": "text"},
                {"scores": "scores", "tokens": "used"},
                ("cat", "dog"),
            ),
        ),
        (
            with_task(**EMBEDS, dimensions=[2, 1]),
            TaskSpec("feature-extraction", {"text": "text"}, {"embedding": "scores"}, (), (1, 2)),
        ),
        (
            with_task(kind="depth-estimation", inputs={"image": "text"}, outputs={"map": "map"}, labels=None),
            TaskSpec("depth-estimation", {"image": "text"}, {"map": "map"}),
        ),
    ],
    ids=["classifier", "embedding", "map"],
)
def test_a_task_is_read_and_written(tmp_path: Path, manifest: dict[str, Any], task: TaskSpec) -> None:
    """A task names tensors by their roles. It is the same after it is written and read again."""
    made = make_bundle(tmp_path, manifest, hooks=HOOKS)
    before = read_bundle(made).manifest
    assert before.task == task
    writer.write_manifest(made / "manifest.yaml", writer.document_of(before, before.sha256))
    assert read_bundle(made).manifest == before


def test_a_generation_and_a_meta_model_have_tasks(tmp_path: Path) -> None:
    """The tensors of a generation's task follow from the section `generate`.

    A meta model's task names the tensors that its clients send and receive.
    """
    manifest = {**WRITER, "task": GENERATES}
    read = read_bundle(make_bundle(tmp_path, manifest, modules=CHUNKS)).manifest
    assert read.task == TaskSpec("text-generation", {"ids": "tokens"}, {"ids": "tokens"})
    inputs = [tensor("text", "bytes", "n"), tensor("text_pair", "bytes", "n")]
    roles = {"text": "text", "text_pair": "text_pair"}
    task = {"kind": "text-ranking", "inputs": roles, "outputs": {"scores": "y"}}
    meta = {**META, "client_inputs": inputs, "task": task}
    made = make_bundle(tmp_path / "meta", meta, modules=(), hooks="def run(inputs, call): ...\n")
    assert read_bundle(made).manifest.task == TaskSpec("text-ranking", roles, {"scores": "y"})
