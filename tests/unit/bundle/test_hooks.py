"""The hooks file is looked at without being run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv_bundle import BundleError
from rsrv_bundle.hooks import check_hooks


@pytest.mark.parametrize(
    "text",
    [
        "def preprocess(inputs): ...",
        "from helpers import other as preprocess",
        "preprocess = print",
        "preprocess: object = print",
        "if True:\n    pass\nelse:\n    def preprocess(inputs): ...",
        "try:\n    import a\nexcept ImportError:\n    preprocess = None",
    ],
)
def test_a_hook_may_be_defined_in_any_way(tmp_path: Path, text: str) -> None:
    """The file is parsed, so exiting in it does nothing here."""
    file = tmp_path / "model.py"
    file.write_text(f"{text}\nraise SystemExit(3)\n")
    assert check_hooks(file, "model") == ("preprocess",)


def test_hooks_inside_other_definitions_do_not_count(tmp_path: Path) -> None:
    """Nobody could call them."""
    file = tmp_path / "model.py"
    file.write_text("class A:\n    def preprocess(self): ...\ndef f():\n    def postprocess(o): ...\n")
    with pytest.raises(BundleError, match="defines no hook"):
        check_hooks(file, "model")


def test_a_meta_model_runs(tmp_path: Path) -> None:
    """Its hook is `run`."""
    file = tmp_path / "model.py"
    file.write_text("def run(inputs, call): ...\n")
    assert check_hooks(file, "meta") == ("run",)
    with pytest.raises(BundleError, match="define preprocess or postprocess"):
        check_hooks(file, "model")
