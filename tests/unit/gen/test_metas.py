"""rsrv-gen on meta models: the callees that they contain, internal models, and refusals."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv_gen.cli import main
from rsrv_gen.signatures import LINK_BYTES
from tests.builders import FEW_EXAMPLES
from tests.unit.bundle.forge import COUNTER, GOOD, changed, make_bundle, seal, tensor
from tests.unit.gen.bundles_for_tests import write_bundle, write_meta


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return the meta model `chain`, its internal callees `one` and `two`, and the unrelated `three`."""
    for name in ("one", "two", "three"):
        write_bundle(tmp_path / "bundles" / name, name, internal=name != "three")
    (tmp_path / "bundles" / "two" / "model.py").write_text("def preprocess(inputs): return inputs\n")
    write_meta(tmp_path / "bundles" / "chain", ["one", "two"])
    return tmp_path / "bundles"


@pytest.fixture
def gen(tmp_path: Path) -> Path:
    """Return the path of the repository, which does not exist yet."""
    return tmp_path / "gen"


@pytest.fixture
def bls(tmp_path: Path) -> tuple[str, str]:
    """Return the option that sends calls through Triton."""
    file = tmp_path / "bls.yaml"
    file.write_text("meta: {transport: bls}\n")
    return "--config", str(file)


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def models(gen: Path) -> set[str]:
    """Return the names of the models that Triton would find."""
    return {path.name for path in gen.iterdir() if path.is_dir()}


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file in a folder by its relative path. Links to folders are followed."""
    return {
        os.path.relpath(os.path.join(parent, name), folder): Path(parent, name).read_bytes()
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
    }


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def replace_file(file: Path, text: str) -> None:
    """Write a new file, and rename it to replace the old one."""
    new = file.with_name("new")
    new.write_text(text)
    new.replace(file)


def test_a_meta_model_carries_its_internal_callees_and_only_they_disappear(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Internal callees are inside the meta model, and have no directory of their own. A line for each says so."""
    assert run(bundles, "-o", gen) == 0
    assert models(gen) == {"chain", "three"}
    assert lines(capsys) == [
        "new three",
        "new chain (contains one, two)",
        "internal one (called by chain)",
        "internal two (called by chain)",
        "new rsrv.yaml",
    ]
    of_one = ["calls/one/manifest.yaml", "calls/one/model.b1.mlir", "calls/one/model.b8.mlir"]
    of_two = [name.replace("one", "two") for name in of_one]
    assert set(files(gen / "chain" / "1")) == {
        *("model.py", "__pycache__", "bundle/manifest.yaml", "bundle/model.py", "bundle/__pycache__"),
        *of_one,
        *(*of_two, "calls/two/model.py", "calls/two/__pycache__"),
    }
    text = (gen / "chain" / "1" / "model.py").read_text()
    assert text.startswith("from rsrv.stub.meta_model import TritonPythonModel\n")
    assert "rsrv_internal" not in (gen / "three" / "config.pbtxt").read_text()


def test_a_public_callee_has_a_directory_as_well(
    bundles: Path, gen: Path, bls: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With either transport, a public callee has its own directory for clients, and is also inside the meta model."""
    write_bundle(bundles / "one")
    for options in ((), bls):
        assert run(bundles, "-o", gen, *options) == 0
        assert "one" in models(gen)
        assert "rsrv_internal" not in (gen / "one" / "config.pbtxt").read_text()
        assert (gen / "chain/1/calls/one/model.b1.mlir").is_file()
    assert "unchanged one" in lines(capsys)


def test_through_triton_callees_have_directories_that_are_marked(
    bundles: Path, gen: Path, bls: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the transport bls, internal callees have marked directories, which are written before the meta model."""
    assert run(bundles, "-o", gen, *bls) == 0
    assert lines(capsys)[:-1] == [
        "new one (internal: called by chain)",
        "new three",
        "new two (internal: called by chain)",
        "new chain (contains one, two)",
    ]
    for name in ("one", "two"):
        text = (gen / name / "config.pbtxt").read_text()
        assert 'parameters {\n  key: "rsrv_internal"\n  value {\n    string_value: "true"\n  }\n}' in text
    assert run(bundles, "-o", gen, *bls, "--check") == 0


def test_a_change_of_transport_removes_directories_and_brings_them_back(
    bundles: Path, gen: Path, bls: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A change of the transport removes or restores the callees' directories. --check only reports it."""
    run(bundles, "-o", gen, *bls)
    assert run(bundles, "-o", gen, "--check") == 1
    assert models(gen) == {"chain", "one", "two", "three"}
    assert run(bundles, "-o", gen) == 0
    assert models(gen) == {"chain", "three"}
    assert run(bundles, "-o", gen, *bls) == 0
    assert models(gen) == {"chain", "one", "two", "three"}


def test_a_new_meta_model_takes_nothing_away_from_clients(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a new meta model calls a public model, the public model keeps its own directory."""
    run(bundles, "-o", gen)
    write_meta(bundles / "second", ["three"])
    assert run(bundles, "-o", gen) == 0
    assert models(gen) == {"chain", "second", "three"}
    assert (gen / "second/1/calls/three").is_dir()


def test_a_served_model_that_becomes_internal_is_named(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that becomes internal is reported as removed for clients. Without the key `internal`, it returns."""
    run(bundles, "-o", gen)
    write_bundle(bundles / "three", "three", internal=True)
    capsys.readouterr()
    assert run(bundles, "-o", gen) == 0
    reason = "its manifest says internal: clients cannot address it any more; no meta model calls it"
    assert f"removed three ({reason})" in lines(capsys)
    assert models(gen) == {"chain"}
    write_bundle(bundles / "three", "three")
    assert run(bundles, "-o", gen) == 0
    assert models(gen) == {"chain", "three"}


def test_an_internal_model_stays_hidden_whatever_becomes_of_its_meta_model(
    bundles: Path, gen: Path, bls: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An internal model stays hidden if its meta model breaks, calls another model, or is removed."""
    run(bundles, "-o", gen)
    (bundles / "chain" / "manifest.yaml").write_text("meta: {calls: [one, two")
    assert run(bundles, "-o", gen, "--prune") == 1
    assert models(gen) == {"chain", "three"}
    assert "kept chain (as it was before its bundle broke)" in lines(capsys)
    write_meta(bundles / "chain", ["one"])
    assert run(bundles, "-o", gen) == 0
    assert models(gen) == {"chain", "three"}
    assert not (gen / "chain/1/calls/two").exists()
    others = [bundles / name for name in ("one", "two", "three")]
    assert run(*others, "-o", gen, "--prune", *bls) == 0
    assert models(gen) == {"three"}


def test_a_callee_stays_while_its_meta_model_cannot_be_written(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that becomes internal is removed only when every meta model that contains it is written."""
    for name in ("one", "two"):
        write_bundle(bundles / name, name)
    run(bundles / "one", bundles / "two", "-o", gen)
    for name in ("one", "two"):
        write_bundle(bundles / name, name, internal=True)
    (gen / "chain").mkdir()
    assert run(bundles, "-o", gen) == 1
    assert "kept one (a meta model that must carry it could not be written)" in lines(capsys)
    assert {"one", "two"} <= models(gen)


@pytest.mark.parametrize("link", ["hard", "copy"])
def test_a_changed_callee_changes_the_meta_models_that_carry_it(
    bundles: Path, gen: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed callee changes its meta models, so that Triton reloads them."""
    large = "x" * LINK_BYTES
    for name in ("one", "two"):
        write_bundle(bundles / name, files={"weights.txt": large}, internal=True)
    write_meta(bundles / "other", ["two"])
    options = ("-o", gen, "--link", link)
    assert run(bundles, *options) == 0
    for meta, callee in (("chain", "one"), ("chain", "two"), ("other", "two")):
        target = gen / meta / "1/calls" / callee
        assert (target / "weights.txt").samefile(bundles / callee / "weights.txt") == (link != "copy")
    assert run(bundles, *options, "--check") == 0
    replace_file(bundles / "one" / "weights.txt", large.replace("x", "y"))
    replace_file(bundles / "one" / "model.b8.mlir", "another")
    seal(bundles / "one")
    capsys.readouterr()
    assert run(bundles, *options) == 0
    printed = lines(capsys)
    assert "changed chain (contains one, two)" in printed
    assert "unchanged other (contains two)" in printed
    assert files(gen / "chain/1/calls/one") == files(bundles / "one")


@pytest.mark.parametrize(
    ("calls", "external", "problem"),
    [
        pytest.param(
            ["tow"],
            [],
            "manifest.yaml: meta.calls: calls 'tow', which is not a bundle here: add its bundle, "
            "or list it under meta.external if it is another Triton model; did you mean 'two'?",
            id="a typing error",
        ),
        pytest.param(
            ["zebra"], [], "calls 'zebra', which is not a bundle here: add its bundle", id="unknown"
        ),
        pytest.param(["a\nb"], [], r"calls 'a\nb', which is not a bundle here", id="a name of two lines"),
        pytest.param(["other"], [], "calls 'other', which is a meta model", id="a meta model"),
        pytest.param(["bad"], [], "calls 'bad', and that bundle is broken; fix it first", id="broken"),
        pytest.param(["empty"], [], "calls 'empty', and that bundle is broken", id="refused by Triton"),
        pytest.param(["one"], ["two"], "meta.external: 'two' is a bundle here; move it to", id="no external"),
        pytest.param([], ["other"], "meta.external: 'other' is a meta model", id="external meta model"),
        pytest.param(["chain"], [], "meta.calls: 'chain' must not call itself", id="itself"),
    ],
)
def test_a_call_that_cannot_work_is_refused_and_the_rest_is_written(
    bundles: Path,
    gen: Path,
    calls: list[str],
    external: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A call that cannot work is refused. The error names the callee and what to do, and the rest is written."""
    write_meta(bundles / "chain", calls, external)
    write_meta(bundles / "other", ["three"])
    write_bundle(bundles / "bad")
    (bundles / "bad" / "manifest.yaml").write_text("nothing: good\n")
    empty = write_bundle(bundles / "empty")
    text = (empty / "manifest.yaml").read_text().replace("[1, 8]", "[1]")
    (empty / "manifest.yaml").write_text(text.replace("\n  - {name: x", " []\n#"))
    (empty / "model.b8.mlir").unlink()
    seal(empty)
    assert run(bundles, "-o", gen) == 1
    errors = capsys.readouterr().err
    assert "empty is skipped:\n  a model needs at least one input" in errors
    assert "chain is skipped:" in errors
    assert problem in errors
    assert models(gen) == {"three", "other"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def main(inputs, call): ...\n", "model.py: defines no hook; define run as a function"),
        ("def run(inputs): ...\n", "model.py: run: takes (inputs), but it is called as run(inputs, call)"),
        ("def run(:\n", "model.py: is not valid Python"),
    ],
)
def test_a_meta_model_that_could_not_run_is_refused(
    bundles: Path, gen: Path, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """rsrv-gen refuses a meta model whose code cannot run, so no request has to fail first."""
    (bundles / "chain" / "model.py").write_text(text)
    assert run(bundles, "-o", gen) == 1
    assert problem in capsys.readouterr().err
    assert models(gen) == {"three"}


def test_a_meta_model_may_call_nothing_or_other_models_of_triton(bundles: Path, gen: Path) -> None:
    """A meta model without callees contains no model. Its configuration names its external models."""
    write_meta(bundles / "chain", [], ["resnet", "tokenizer"])
    assert run(bundles, "-o", gen) == 0
    assert models(gen) == {"chain", "three"}
    assert not (gen / "chain/1/calls").exists()
    text = (gen / "chain" / "config.pbtxt").read_text()
    assert 'key: "rsrv_external"' in text
    assert r'string_value: "[\"resnet\", \"tokenizer\"]"' in text


MODELS = ("a", "b", "c", "d")
METAS = ("k", "l", "m")
CALLS = st.dictionaries(
    st.sampled_from(METAS), st.lists(st.sampled_from(MODELS), unique=True, max_size=3), max_size=3
)


@FEW_EXAMPLES
@given(
    first=CALLS,
    then=CALLS,
    internal=st.sets(st.sampled_from(MODELS)),
    link=st.sampled_from(["hard", "copy"]),
    transport=st.sampled_from(["direct", "bls"]),
)
def test_any_metas_carry_all_that_they_call(
    first: dict[str, list[str]],
    then: dict[str, list[str]],
    internal: set[str],
    link: str,
    transport: str,
) -> None:
    """From any earlier contents, each meta model gets the files of its callees, and a second run changes nothing.

    With direct calls, Triton does not see internal models. With calls through Triton, internal models are marked.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = root / "settings.yaml"
        config.write_text(f"meta: {{transport: {transport}}}\n")
        gen = root / "gen"
        for round_number, metas in enumerate((first, then)):
            bundles = root / f"bundles{round_number}"
            for name in MODELS:
                write_bundle(bundles / name, f"{name} {round_number}", internal=name in internal)
            for name, calls in metas.items():
                write_meta(bundles / name, calls)
            options = (bundles, "-o", gen, "--link", link, "--config", config, "--prune")
            assert run(*options) == 0
            assert run(*options, "--check") == 0

            for name, calls in metas.items():
                for callee in calls:
                    assert files(gen / name / "1/calls" / callee) == files(bundles / callee)
                carried = gen / name / "1/calls"
                assert (set(os.listdir(carried)) if carried.is_dir() else set()) == set(calls)
            called = {callee for calls in metas.values() for callee in calls}
            hidden = internal if transport == "direct" else internal - called
            assert models(gen) == {*MODELS, *metas} - hidden
            marked = {n for n in models(gen) if "rsrv_internal" in (gen / n / "config.pbtxt").read_text()}
            assert marked == internal - hidden


def test_a_call_of_a_model_with_state_is_refused(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A meta model cannot call a model with state, because its calls belong to no sequence."""
    make_bundle(bundles, COUNTER, name="counter")
    write_meta(bundles / "caller", ["counter"])
    assert run(bundles, "-o", gen) == 1
    assert "calls 'counter', which keeps state for the sequences of clients" in capsys.readouterr().err


def test_a_call_of_a_model_with_a_padded_axis_is_refused(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A meta model cannot call a model with a padded axis, because calls have no length."""
    padded = changed(
        GOOD,
        executable_inputs=[tensor("x", "f32", "nt", t=-1)],
        input_shapes=[{"t": 4}, {"t": 8}],
        pad={"t": {"values": {"x": 0}}},
    )
    modules = [f"model.v{variant}.b{size}.mlir" for variant in (0, 1) for size in (1, 4)]
    make_bundle(bundles, padded, name="padded", modules=modules)
    write_meta(bundles / "caller", ["padded"])
    assert run(bundles, "-o", gen) == 1
    assert "calls 'padded', which has a padded axis" in capsys.readouterr().err
