"""Aliases of rsrv.yaml in the repository: written, refused, changed and removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from rsrv.settings import load_settings
from rsrv_bundle import Bundle
from rsrv_bundle.compatibility import Feature
from rsrv_bundle.spec import PadSpec
from rsrv_gen.aliases import plan_aliases
from rsrv_gen.cli import main
from rsrv_gen.config import EXECUTE_ROWS, ConfigError, RowLimits, render_alias
from rsrv_gen.metas import BundleFacts
from rsrv_gen.plan import SourceBundle
from rsrv_gen.update import Broken, Gone, RepositorySettings, RepositoryUpdate, Update, Written
from rsrv_gen.write import is_alias
from tests.unit.gen.bundles_for_tests import MANIFEST, bundle, spec, write_bundle, write_meta


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return a directory with the bundles `v7`, `v8`, an internal one, and a meta model."""
    for name in ("v7", "v8"):
        write_bundle(tmp_path / "bundles" / name, name)
    write_bundle(tmp_path / "bundles" / "part", internal=True)
    write_meta(tmp_path / "bundles" / "meta", ["v7"])
    return tmp_path / "bundles"


def bring(bundles: Path, *names: str, aliases: Mapping[str, Any]) -> Update:
    """Update the models with these names, or all models."""
    settings = load_settings(json.dumps({"aliases": aliases, "models": {"v8": {"max_rows": 4}}}))
    work = RepositoryUpdate(bundles.parent / "gen", [bundles], RepositorySettings.of(settings, None))
    return work.write(names or None)


def config(gen: Path, name: str) -> Any:
    return text_format.Parse((gen / name / "config.pbtxt").read_text(), ModelConfig())


def test_an_alias_is_a_model_with_the_interface_and_the_bundles_of_its_targets(bundles: Path) -> None:
    """An alias has the smallest `max_batch_size` of its targets, and the shares in its configuration."""
    gen = bundles.parent / "gen"

    assert "fraud" in bring(bundles, aliases={"fraud": {"v7": 95, "v8": 5}}).of(Written)

    made, plain = config(gen, "fraud"), config(gen, "v7")
    assert (made.name, made.max_batch_size, plain.max_batch_size) == ("fraud", 4, EXECUTE_ROWS)
    assert (made.input, made.output) == (plain.input, plain.output)
    assert json.loads(made.parameters["rsrv_alias"].string_value) == {"v7": 95.0, "v8": 5.0}
    assert "rsrv.stub.alias" in (gen / "fraud/1/model.py").read_text()
    assert (gen / "fraud/1/calls/v8/model.b8.mlir").read_text() == "v8 8"
    assert is_alias(gen / "fraud")
    assert not any(is_alias(gen / name) for name in ("v7", "meta"))


def test_an_alias_has_the_task_of_its_targets(bundles: Path) -> None:
    """An alias has the task of its models, if they have the same task."""
    generated: list[Any] = []
    for labels in (["a", "b"], ["b", "a"]):
        for name in ("v7", "v8") if not generated else ("v8",):
            write_bundle(
                bundles / name, name, manifest=classifier(labels), files={"model.py": "preprocess = len\n"}
            )
        bring(bundles, aliases={"fraud": {"v7": 95, "v8": 5}})
        generated.append(config(bundles.parent / "gen", "fraud").parameters)
    assert json.loads(generated[0]["task"].string_value)["labels"] == ["a", "b"]
    assert "task" not in generated[1]


def classifier(labels: list[str]) -> str:
    """Return the manifest of a bundle with the task of a classifier of texts."""
    roles = {"inputs": {"text": "text"}, "outputs": {"scores": "y"}}
    task = {"kind": "text-classification", **roles, "labels": labels}
    client = {"client_inputs": [{"name": "text", "dtype": "bytes", "shape": "n"}], "task": task}
    return MANIFEST + "".join(f"{key}: {json.dumps(value)}\n" for key, value in client.items())


def test_an_alias_follows_its_shares_its_targets_and_its_end(bundles: Path) -> None:
    """An alias is written again only if its shares or a target change. Without its settings, it is removed."""
    bring(bundles, aliases={"fraud": {"v7": 95, "v8": 5}})

    assert not bring(bundles, aliases={"fraud": {"v7": 95, "v8": 5}}).of(Written)
    assert bring(bundles, "fraud", aliases={"fraud": {"v7": 50, "v8": 50}}).names(Written) == {"fraud"}
    write_bundle(bundles / "v8", "better")
    assert bring(bundles, "v8", aliases={"fraud": {"v7": 50, "v8": 50}}).names(Written) == {"v8", "fraud"}
    assert bring(bundles, "fraud", aliases={}).of(Gone) == {"fraud": Gone()}


@pytest.mark.parametrize(
    ("aliases", "name", "reason"),
    [
        ({"a": "v9"}, "a", "an alias of 'v9', which is not a bundle here"),
        ({"a": "meta"}, "a", "an alias of 'meta', which is a meta model: name a model"),
        ({"a": "part"}, "a", "an alias of 'part', which only meta models may call"),
        ({"a": "v7", "b": "a"}, "b", "an alias of 'a', which is an alias: name the models of that alias"),
        ({"v7": "v8"}, "aliases.v7", "a bundle has this name: rename the alias, or the bundle"),
        ({"a/b": "v8"}, "aliases.a/b", "a model cannot have this name"),
    ],
)
def test_an_alias_that_cannot_be_served_is_refused(
    bundles: Path, aliases: Mapping[str, Any], name: str, reason: str
) -> None:
    """The reason for a refused alias names the target. Bundles and other aliases are served."""
    done = bring(bundles, aliases=aliases)

    assert done.of(Broken)[name].reason.startswith(reason)
    assert {"v7", "v8", "meta"} <= done.names(Written)


@pytest.mark.parametrize(("generates", "reason"), [(True, None), (False, "keeps state: a sequence must go")])
def test_of_models_with_state_those_that_generate_may_have_aliases(
    tmp_path: Path, *, generates: bool, reason: str | None
) -> None:
    """A model that generates may have an alias, because each answer is one request.

    Other models with state may not, because steps of one sequence would go to several models.
    """
    facts = BundleFacts(frozenset({Feature.GENERATION if generates else Feature.STATE}))
    source = SourceBundle(tmp_path, None, facts)

    recipes, refused = plan_aliases({"champion": {"v7": 1.0}}, {"v7": source}, (), {}, "hard")

    assert recipes.keys() == ({"champion"} if generates else set())
    assert (reason or "") in refused.get("champion", "")


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ("dims: {c: 2}", "dims: {c: 3}", "output 'y' is TYPE_FP32 [2] and TYPE_FP32 [3]"),
        ("name: x", "name: z", "input 'x' is TYPE_FP32 [4] and missing"),
        ("{name: x, dtype: f32", "{name: x, dtype: f64", "input 'x' is TYPE_FP32 [4] and TYPE_FP64 [4]"),
    ],
)
def test_targets_with_different_interfaces_are_refused(
    bundles: Path, before: str, after: str, difference: str
) -> None:
    """The error names the tensor and how it differs."""
    manifest = bundles / "v8/manifest.yaml"
    manifest.write_text(manifest.read_text().replace(before, after))

    done = bring(bundles, aliases={"fraud": {"v7": 1, "v8": 1}})

    assert done.of(Broken)["fraud"].reason.startswith("'v7' and 'v8' differ")
    assert difference in done.of(Broken)["fraud"].reason


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (((4,), (8,), None), "requests may have each length from 1 to 8 and the sizes 4, 8"),
        (((4,), (16,), 0), "requests may have each length from 1 to 8 and each length from 1 to 16"),
        (((2,), (8,), 0), ""),
    ],
)
def test_targets_that_take_other_lengths_are_refused(
    other: tuple[tuple[int], tuple[int], int | None], difference: str
) -> None:
    """Targets with different lengths are refused, because a request would fail or not, depending on the target that gets it."""

    def lengths(short: tuple[int], long: tuple[int], pad: int | None) -> Bundle:
        made = bundle([spec("x", "nt")], [spec("y", "nc", c=2)], input_shapes=[short, long])
        padding = None if pad is None else PadSpec("t", {"x": pad}, None)
        return replace(made, manifest=replace(made.manifest, pad=padding))

    bundles = {"short": lengths((4,), (8,), 0), "long": lengths(*other)}
    limits = dict.fromkeys(bundles, RowLimits())

    if difference:
        with pytest.raises(ConfigError, match=difference):
            render_alias("fraud", {"short": 1, "long": 1}, bundles, limits)
    else:
        assert b'name: "fraud"' in render_alias("fraud", {"short": 1, "long": 1}, bundles, limits)


def test_an_alias_of_a_broken_bundle_stays_as_it_was(bundles: Path) -> None:
    """If a target's bundle breaks or goes, the alias's directory stays as it is, and the reason is reported."""
    aliases = {"fraud": {"v7": 1, "v8": 1}}
    bring(bundles, aliases=aliases)
    (bundles / "v8/manifest.yaml").write_text("nothing")

    done = bring(bundles, aliases=aliases)

    assert "an alias of 'v8', whose bundle is broken" in done.of(Broken)["fraud"].reason
    shutil.rmtree(bundles / "v8")
    done = bring(bundles, "v8", aliases=aliases)
    assert "'v8', which is not a bundle here" in done.of(Broken)["fraud"].reason
    assert is_alias(bundles.parent / "gen/fraud")


def test_a_new_alias_begins_without_a_broken_bundle(bundles: Path) -> None:
    """A new alias serves without a target whose bundle is broken, and gets this target when the bundle is whole.

    If no answering target is left, the alias is refused.
    """
    aliases = {"fraud": {"v7": 95, "v8": 5}, "watched": {"v7": "shadow", "v8": 1}}
    manifest = bundles / "v8/manifest.yaml"
    text = manifest.read_text()
    manifest.write_text("nothing")

    done = bring(bundles, aliases=aliases)

    calls = bundles.parent / "gen/fraud/1/calls"
    assert "fraud" in done.of(Written)
    assert [folder.name for folder in calls.iterdir()] == ["v7"]
    assert done.of(Broken)["watched"].reason == "an alias of 'v8', whose bundle is broken: fix it first"
    manifest.write_text(text)
    assert {"v8", "fraud", "watched"} <= bring(bundles, "v8", aliases=aliases).names(Written)
    assert (calls / "v8/manifest.yaml").exists()


def test_the_command_writes_aliases_and_refuses_wrong_ones(
    bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rsrv-gen reports an alias like a model, and fails if an alias cannot be served."""
    file, gen = bundles.parent / "rsrv.yaml", bundles.parent / "gen"
    file.write_text("aliases: {champion: v7, other: v9}")

    status = main([str(bundles), "-o", str(gen), "--config", str(file)])

    captured = capsys.readouterr()
    assert status == 1
    assert "new        champion" in captured.out
    assert "other is skipped: an alias of 'v9', which is not a bundle here" in captured.err
