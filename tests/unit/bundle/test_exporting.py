"""`rsrv-bundle export`: how it finds models and inputs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rsrv_bundle import cli, read_bundle, writer
from rsrv_bundle.commands.exporting import parse_inputs
from rsrv_bundle.commands.sources import LoadError, load
from rsrv_bundle.provenance import MAX_PATCH_BYTES, PATCH_FILE, collect, working_tree_patch

MODELS = """
import numpy as np

KERNEL = np.arange(6, dtype=np.float32).reshape(3, 2)


def scaled(params, x):
    return x @ params


pair = (scaled, KERNEL)


def with_examples():
    return scaled, KERNEL, {"x": KERNEL.T}


def torch_net():
    import torch

    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()


def in_training():
    import torch

    return torch.nn.Dropout()


def nnx_net():
    from flax import nnx

    return nnx.Linear(3, 2, rngs=nnx.Rngs(0)), {"inputs": KERNEL.T}


def linen_net():
    from flax import linen

    return linen.Dense(2)


LINEN = linen_net()


def linen_pair():
    import jax

    variables = LINEN.init(jax.random.key(0), KERNEL.T)
    return LINEN.apply, variables, {"inputs": KERNEL.T}


def equinox_net():
    import equinox
    import jax

    return equinox.nn.Linear(3, 2, key=jax.random.key(0)), {"x": KERNEL.T}


def untraceable():
    return lambda params, x: x if x.sum() > 0 else -x, KERNEL


def member():
    import os

    weights = {"backbone": KERNEL, "head": np.full(2, os.environ["MEMBER"], np.float32)}
    return lambda weights, x: x @ weights["backbone"] * weights["head"], weights, {"x": KERNEL.T}


def raises():
    raise ValueError("no weights here")


def needs_more():
    import flax_of_tomorrow
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module with models into the working directory, and return its name."""
    name = re.sub(r"\W", "_", tmp_path.name)
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--jax", ":pair", "--input", "x=f32[3]"],
            "2 modules, 1 weight, 24 bytes, at most 0 from the model",
        ),
        (["--jax", ":with_examples"], "2 modules, 1 weight, 24 bytes, at most 0 from the model"),
        (["--nnx", ":nnx_net"], "2 modules, 2 weights, 32 bytes"),
        (["--equinox", ":equinox_net"], "2 modules, 2 weights, 32 bytes"),
        pytest.param(
            [
                *("--torch", ":torch_net", "--input", "input=f32[5,h,w]", "--output-names", "mean"),
                *("--input-shape", "h=4,w=4", "--input-shape", "h=2,w=6", "--description", "Means."),
            ],
            "4 modules, 0 weights, 0 bytes",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_model_of_each_kind_is_exported(
    models: str, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of each framework is exported. The command names the model itself, or a function that makes it."""
    arguments[1] = models + arguments[1]
    assert cli.main(["export", *arguments, "-o", "out/m", "--batch-sizes", "1,2"]) == 0
    assert capsys.readouterr().out.startswith(f"ok out/m: {line}")
    assert read_bundle("out/m").manifest.compiled_batch_sizes == (1, 2)


INPUT = ["--input", "x=f32[3]"]


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_an_export_that_is_ended_leaves_nothing_behind(
    models: str, name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export that a signal ends leaves no temporary directory, and restores the signal's handler."""

    def end(*_: object) -> None:
        assert len(list(Path("out").glob(".export-*"))) == 1
        os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr(writer, "write_manifest", end)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["export", "--jax", f"{models}:pair", *INPUT, "-o", "out/m"]) == status
    assert list(Path("out").iterdir()) == []
    assert "Traceback" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--torch", ":in_training", *INPUT], 1, ":in_training: module: is in training mode"),
        (["--jax", ":pair", "--input", "y=f32[3]"], 1, ":untraced"),
        (["--jax", ":untraceable", *INPUT], 1, "TracerBoolConversionError"),
        (
            ["--jax", ":pair", *INPUT, "--platform", "gpu"],
            1,
            "platform: 'gpu' is none of cpu, cuda, rocm, tpu",
        ),
        (["--jax", ":raises", *INPUT], 2, ":raises: raised ValueError: no weights here"),
        (["--jax", ":nothing", *INPUT], 2, "has no 'nothing'"),
        (["--jax", ":needs_more", *INPUT], 2, "No module named 'flax_of_tomorrow'"),
        (
            ["--jax", ":torch_net", *INPUT],
            2,
            ":torch_net: must return a JAX function of parameters and inputs",
        ),
        (["--jax", "", *INPUT], 2, "write package.module:factory"),
        (["--jax", ":KERNEL", *INPUT], 2, ":KERNEL: must return a JAX function"),
        (["--nnx", ":linen_net", *INPUT], 2, ":linen_net: is a Flax Linen module; export it with --jax"),
        (["--nnx", ":LINEN", *INPUT], 2, ":LINEN: is a Flax Linen module; export it with --jax"),
        (
            ["--jax", ":with_examples", "--input-shape", "h=3"],
            2,
            "(x) name no axes; let it return the model alone",
        ),
        (["--jax", ":pair", "--input", "x=float32[3]"], 2, "no element type 'float32'; did you mean f32?"),
        (["--jax", ":pair"], 2, "gives no example inputs; describe the inputs, such as --input 'x=f32[8]'"),
        (["--jax", ":with_examples", *INPUT], 2, "gives example inputs; leave one of the two out"),
        (["--jax", ":pair", *INPUT, "--hooks", "none.py"], 2, "--hooks none.py: is not a file"),
        (["--jax", ":pair", *INPUT, "--files", "none.txt"], 2, "--files none.txt: does not exist"),
        (
            ["--jax", ":pair", *INPUT, "--batch-sizes", "1,0"],
            2,
            "'1,0' is not a list of whole numbers from 1 on",
        ),
        (
            ["--jax", ":pair", *INPUT, "--tolerance", "foo=1"],
            2,
            "'foo=1': no element type 'foo'; use one of f16",
        ),
        (["--jax", ":pair", *INPUT, "--tolerance", "f32"], 2, "'f32': write TYPE=ERROR, e.g. f32=1e-3"),
        (["--jax", ":untraceable", *INPUT, "-o", "out/a b"], 2, "a b: a bundle's directory name is letters"),
        (["--jax", ":pair", *INPUT, "-o", "."], 2, ". exists; pass --overwrite to replace it"),
    ],
)
def test_what_is_wrong_with_a_model_is_1_and_with_the_line_2(
    models: str, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the model exits 1, an error of the command line exits 2, and nothing is written."""
    arguments[1] = models + arguments[1]
    assert cli.main(["export", "-o", "out/m", "--batch-sizes", "1,2", *arguments]) == status
    assert message.replace(":untraced", "unexpected keyword argument 'y'") in capsys.readouterr().err
    assert not Path("out/m").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("net.pt", "'net.pt': a file of weights is not a model: write a function"),
        ("models/net.py", "'models/net.py': write models.net:factory"),
        ("models/net.py:tagger", "'models/net.py:tagger': write models.net:tagger"),
        ("/models/net.py:tagger", "'/models/net.py:tagger': write net:tagger"),
        ("net.py:tagger", "'net.py:tagger': write net:tagger"),
    ],
)
def test_a_file_in_place_of_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    """If the command names a file in place of a model, the message says how to name a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pt").touch()
    with pytest.raises(LoadError, match=message):
        load("torch", target)


def test_an_export_says_what_it_assumed_and_what_is_next(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without batch sizes, the output says that requests are not coalesced. The last line is the next command."""
    export = ["export", "--jax", f"{models}:pair", *INPUT]
    assert cli.main([*export, "-o", "out/m"]) == 0
    _, assumed, command = capsys.readouterr().out.splitlines()
    assert (
        assumed
        == "no batch axis: requests run one at a time; with --batch-sizes 1,8,32, requests can share an execution"
    )
    assert command == "next: rsrv serve out/"
    assert cli.main([*export, "-o", "out/n", "--batch-sizes", "1"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["ok out/n", "next"]


@pytest.mark.parametrize(
    ("out", "served"),
    [
        ("m", "m"),
        ("../m", "../m"),
        ("a/b/m", "a/b/"),
        ("my bundles/m", "'my bundles/'"),
        ("bundles/m", "bundles/"),
        ("tmp/m", "tmp/m"),
        ("home/m", "home/m"),
    ],
)
def test_the_next_command_serves_the_folder_of_the_bundles(
    models: str, out: str, served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export names the folder of all bundles, but not the working directory or above, nor a folder with other files."""
    sys.path.insert(0, os.getcwd())
    Path("here").mkdir()
    os.chdir("here")
    for folder in ("bundles/other", "tmp/no-bundle", "home"):
        Path(folder).mkdir(parents=True)
    Path("bundles/other/manifest.yaml").touch()
    Path("home/.profile").touch()
    assert cli.main(["export", "--jax", f"{models}:pair", *INPUT, "-o", out, "--batch-sizes", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: rsrv serve {served}"


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("pictur:tagger", "; did you mean 'pictures'?"),
        ("nets.resnt:tagger", "; did you mean 'nets.resnet'?"),
        ("other:tagger", ""),
    ],
)
def test_an_unknown_module_is_reported_with_the_nearest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, hint: str
) -> None:
    """The message names the folder that was searched, and the most similar module there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nets").mkdir()
    for name in ("pictures.py", "nets/__init__.py", "nets/resnet.py"):
        (tmp_path / name).touch()
    module = target.partition(":")[0]
    with pytest.raises(LoadError) as raised:
        load("torch", target)
    assert str(raised.value) == (
        f"{target}: No module named '{module}' in {tmp_path} or among the installed packages{hint}"
    )


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("jax", "export"), ("torch", "export-torch"), ("nnx", "export-flax"), ("equinox", "export-equinox")],
)
def test_a_missing_jax_is_reported_with_the_extra_of_the_framework(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, extra: str
) -> None:
    """If jax is missing, the message names the extra that installs both jax and the framework."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["export", f"--{kind}", "a:b", "-o", "out/m"]) == 2
    message = capsys.readouterr().err
    assert "jax is not installed" in message
    assert f"[{extra}]" in message


def test_a_family_from_one_factory_shares_its_backbone(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One factory makes the members of a family, chosen by an environment variable. `diff` lists the tensors that two members share."""
    for name in ("1", "2"):
        monkeypatch.setenv("MEMBER", name)
        command = ["export", "--jax", f"{models}:member", "-o", f"out/m{name}", "--batch-sizes", "1,2"]
        assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(["diff", "out/m1", "out/m2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "= backbone: f32 [3, 2], 24 B" in lines
    assert "~ head: f32 [2], 8 B" in lines


def test_a_linen_module_is_exported_as_a_function(models: str) -> None:
    """A Linen module is exported with --jax, as its `apply` and its variables."""
    assert cli.main(["export", "--jax", f"{models}:linen_pair", "-o", "out/m", "--batch-sizes", "1,2"]) == 0
    assert [weight.name for weight in read_bundle("out/m").weights] == ["params/bias", "params/kernel"]


def test_a_source_answers_as_its_author_runs_it(models: str) -> None:
    """The source is called by name with numpy arrays, as its author calls it."""
    source = load("jax", f"{models}:with_examples")
    np.testing.assert_array_equal(source.examples["x"], [[0, 2, 4], [1, 3, 5]])
    [answer] = source.eager(x=np.ones((1, 3), np.float32)).values
    np.testing.assert_array_equal(answer, [[6, 9]])
    with pytest.raises(LoadError, match=r"must return a PyTorch module.*such as `return net\.eval"):
        load("torch", f"{models}:with_examples")


def test_inputs_as_text_name_their_axes() -> None:
    """Inputs that are given as text get letters for their fixed axes. The batch axis is in front, or at its letter."""
    inputs = parse_inputs(
        ["image=f32[3,h,a]", "mask=bool[h,n]", "scale=f16[]"], ["h=4,a=6", "h=8,a=6"], batched=True
    )
    assert {name: (value.shape, value.dtype.name) for name, value in inputs.examples.items()} == {
        "image": ((1, 3, 4, 6), "float32"),
        "mask": ((4, 1), "bool"),
        "scale": ((1,), "float16"),
    }
    assert inputs.axes == {"image": "ncha", "mask": "hn", "scale": "n"}
    assert inputs.input_shapes == [{"h": 4, "a": 6}, {"h": 8, "a": 6}]
    assert parse_inputs(["x=i64[2]"], [], batched=False).axes == {"x": "a"}


@pytest.mark.parametrize(
    ("inputs", "shapes", "message"),
    [
        (["x"], [], "--input x: write NAME=TYPE[SIZE,SIZE]"),
        (["x=f99[1]"], [], "--input x=f99[1]: no element type 'f99'; use one of f16"),
        (["x=f32[0]"], [], "--input x=f32[0]: '0' is neither a size nor an axis' letter"),
        (["x=f32[hw]"], [], "'hw' is neither a size nor an axis' letter"),
        (["x=f32[h]"], [], "--input: axis 'h' has no size; give it one in --input-shape"),
        (["x=f32[1]", "x=f32[2]"], [], "--input: two have the same name"),
        (["x=f32[h]"], ["h=0"], "--input-shape h=0: write LETTER=SIZE,LETTER=SIZE"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(inputs: list[str], shapes: list[str], message: str) -> None:
    """Malformed inputs are refused with the wrong text and the right syntax."""
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_inputs(inputs, shapes, batched=True)


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def dirty(code: object) -> object:
    return collect(code, platform="cpu", stablehlo="", exported_at=None)["git_dirty"]


def test_a_framework_that_does_not_fit_is_named(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a part of the framework is missing in the installed version, the message says what to install."""
    monkeypatch.delitem(sys.modules, "rsrv_bundle.from_nnx", raising=False)
    monkeypatch.delattr("jax.interpreters.partial_eval.dce_jaxpr")
    with pytest.raises(LoadError, match=r"dce_jaxpr.*; run pip install .*\[export-flax\]"):
        load("nnx", f"{models}:nnx_net")


def test_what_is_not_yet_committed_is_stored_on_request(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncommitted changes are stored in a bundle only with --working-tree-patch, because they may contain secrets."""
    git(tmp_path, "init", "-q")
    (tmp_path / "notes").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "notes").write_text("two\n")
    with (tmp_path / f"{models}.py").open("a") as file:
        file.write("# changed\n")
    line = ["export", "--jax", f"{models}:with_examples", "--batch-sizes", "1", "-o"]
    assert cli.main([*line, "out/without"]) == 0
    assert cli.main([*line, "out/with", "--working-tree-patch"]) == 0
    assert not Path("out/without", PATCH_FILE).exists()
    patch = Path("out/with", PATCH_FILE).read_text()
    assert "+# changed" in patch
    assert "-one\n+two" in patch
    provenance = read_bundle("out/with").manifest.provenance
    assert provenance["git_dirty"] is True
    assert len(provenance["git_commit"]) == 40
    assert load("jax", f"{models}:pair").export.keywords["code"] is sys.modules[models]
    # There is no patch if it would be too large, or if the function is not in a repository.
    factory = sys.modules[models].with_examples
    monkeypatch.setattr("rsrv_bundle.provenance.MAX_PATCH_BYTES", len(patch) - 1)
    assert working_tree_patch(factory) is None
    assert working_tree_patch(len) is None
    assert len(patch) < MAX_PATCH_BYTES
    # A change of any tracked file makes the tree dirty. Files that git does not track do not.
    git(tmp_path, "checkout", "-q", f"{models}.py")
    assert dirty(sys.modules[models].with_examples) is True
    git(tmp_path, "checkout", "-q", "notes")
    assert dirty(sys.modules[models].with_examples) is False
