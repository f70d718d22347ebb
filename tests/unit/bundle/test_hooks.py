"""The hooks file is checked without executing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv_bundle import BundleError, Kind
from rsrv_bundle.hooks import check_hooks, source_of


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
    """A hook is found in any form of definition, and the file's own code is not executed."""
    file = tmp_path / "model.py"
    file.write_text(f"{text}\nraise SystemExit(3)\n")
    assert check_hooks(file, "model") == ("preprocess",)


def test_hooks_inside_other_definitions_do_not_count(tmp_path: Path) -> None:
    """Functions inside other definitions are not hooks."""
    file = tmp_path / "model.py"
    file.write_text("class A:\n    def preprocess(self): ...\ndef f():\n    def postprocess(o): ...\n")
    with pytest.raises(BundleError, match="defines no hook"):
        check_hooks(file, "model")


@pytest.mark.parametrize(
    "text",
    [
        "async def run(inputs, call): ...",
        "def run(inputs, call, top_k=5, *, fast=False): ...",
        "def run(inputs, /, *rest): ...",
        "def run(*arguments, **options): ...",
        "run = lambda inputs, call: inputs",
        "@cached\ndef run(): ...",
        "import both\nrun = both.run",
        "try:\n    from fast import run\nexcept ImportError:\n    def run(inputs): ...",
    ],
)
def test_run_may_be_written_in_any_way_that_takes_two_arguments(tmp_path: Path, text: str) -> None:
    """`run` may be a coroutine, and may have default values, `*arguments` and `**options`.

    Definitions whose signature is known only after an execution are accepted.
    """
    file = tmp_path / "model.py"
    file.write_text(text)
    assert check_hooks(file, "meta") == ("run",)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("meta", "def run(inputs): ...", "run: takes (inputs), but it is called as run(inputs, call)"),
        (
            "meta",
            "async def run(a, b, c): ...",
            "run: takes (a, b, c), but it is called as run(inputs, call)",
        ),
        ("meta", "def run(inputs, *, call): ...", "run: takes (inputs, *, call), but"),
        ("meta", "run = lambda: 0", "run: takes (), but"),
        ("meta", "if x:\n    def run(): ...\nelse:\n    def run(a): ...", "run: takes (a), but"),
        ("model", "def preprocess(inputs, call): ...", "but it is called as preprocess(inputs)"),
        ("model", "async def postprocess(o): ...", "plain function; write def postprocess(outputs)"),
    ],
)
def test_a_hook_that_could_not_be_called_is_refused(
    tmp_path: Path, kind: Kind, text: str, message: str
) -> None:
    """A hook with a wrong signature is refused; the message shows both signatures."""
    file = tmp_path / "model.py"
    file.write_text(text)
    with pytest.raises(BundleError) as caught:
        check_hooks(file, kind)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "def preprocess(inputs, x, y=1" + " + 1" * 5000 + "): ...",
        "if a: pass\n" + "elif b: pass\n" * 5000,
        "x = " + "(" * 5000,
        "x = " + "-" * 50_000 + "1",
        "#" * 1_000_001,
    ],
    ids=["default", "elif", "brackets", "signs", "length"],
)
def test_python_without_end_is_refused(tmp_path: Path, text: str) -> None:
    """Python that is nested too deeply, malformed or too long is refused as invalid, and does not crash the check."""
    file = tmp_path / "model.py"
    file.write_text(text)
    with pytest.raises(BundleError, match=r"model\.py: is not valid Python"):
        check_hooks(file, "model")


def test_hooks_are_given_as_a_file_or_as_their_text(tmp_path: Path) -> None:
    """One line that ends with .py is the name of a file. Other text is the hooks themselves, even if its last line ends with .py."""
    file = tmp_path / "model.py"
    file.write_text("the file")

    assert source_of(file) == source_of(str(file)) == "the file"
    for text in ("from helpers import preprocess", "def preprocess(inputs): ...\n# as in old.py"):
        assert source_of(text) == text
