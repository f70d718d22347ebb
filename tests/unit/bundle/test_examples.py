"""The example bundles agree with their references."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

import examples.build
from examples import digits_hooks, mlp, two_sizes, v2_affine
from rsrv_bundle import load_weights, read_bundle
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.modules import as_exported, check_signatures, module_file


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build all examples that need no training."""
    out_dir = tmp_path_factory.mktemp("examples")
    examples.build.build(out_dir, ["mlp", "two_sizes", "v2_affine"])
    return out_dir


@pytest.mark.parametrize("maker", [mlp, two_sizes, v2_affine])
def test_every_module_gives_the_answers_of_the_reference(built: Path, maker: ModuleType) -> None:
    """On random inputs, every module of every variant and size gives the reference's answers."""
    bundle = read_bundle(built / maker.__name__.rpartition(".")[2])
    weights = load_weights(bundle)
    for key, signature in check_signatures(bundle).items():
        inputs = random_inputs(bundle, *key)
        outputs = jax.jit(as_exported(module_file(bundle, key).read_bytes(), signature).call)(
            *inputs, *weights
        )
        expected = maker.reference(
            {spec.name: array for spec, array in zip(bundle.manifest.inputs, inputs, strict=True)}
        )
        assert set(expected) == set(bundle.output_names(len(outputs)))
        for name, got in zip(bundle.output_names(len(outputs)), outputs, strict=True):
            np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-5)


def test_a_second_build_does_nothing_and_imports_no_jax(built: Path) -> None:
    """A second build does nothing and imports no jax, so it is quick enough to run before every test run."""
    script = Path(examples.build.__file__)
    code = f"import sys, runpy; sys.argv = ['build.py', '-o', {str(built)!r}, 'mlp', 'v2_affine']\n"
    code += f"try: runpy.run_path({str(script)!r}, run_name='__main__')\nexcept SystemExit as e: assert not e.code\n"
    code += "assert 'jax' not in sys.modules"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == ["mlp: up to date", "v2_affine: up to date"]


def test_an_unknown_example_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown example is refused with the list of examples."""
    with pytest.raises(SystemExit):
        examples.build.main(["-o", str(tmp_path), "nope"])
    assert f"there are {', '.join(examples.build.NAMES + examples.build.LARGE)}" in capsys.readouterr().err


def test_a_bundle_is_built_again_when_any_source_that_its_maker_imports_changes() -> None:
    """The hash covers the examples that a maker imports, directly or through other examples, and the files that it reads."""
    names = {source.name for source in examples.build._sources("family_odd")}
    assert {"digits.py", "digits_hooks.py", "adam.py", "export.py", "labels.py"} <= names
    assert "cli.py" not in names
    assert "LICENSE" in {source.name for source in examples.build._sources("glossary_bytes")}


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names a missing package of an example, and the extra that installs it."""
    monkeypatch.setitem(examples.build._PACKAGES, "mlp", ("no-such-package",))
    assert examples.build.main(["-o", str(tmp_path), "mlp"]) == 1
    message = capsys.readouterr().err
    assert "no-such-package" in message
    assert "make bundles" in message


def test_the_digits_hook_turns_logits_into_class_and_score() -> None:
    """The hook returns the best class and its softmax as the score: 3/4 for the logits [0, ln 3], whose softmax is [1/4, 3/4]."""
    outputs = digits_hooks.postprocess({"logits": np.log(np.array([[1, 3], [1, 1]], np.float32))})
    assert outputs["class"].tolist() == [[1], [0]]
    np.testing.assert_allclose(outputs["score"], [[0.75], [0.5]], rtol=1e-6)
    assert [outputs[name].dtype.name for name in ("class", "score")] == ["int64", "float32"]
