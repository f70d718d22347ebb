"""A bundle's model.py: what it may contain, and what is refused with a reason."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rsrv.hooks.loader import HookError, import_limit_s, load_hooks


def write(directory: Path, text: str) -> Path:
    path = directory / "model.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_functions_become_hooks_and_nothing_is_left_on_disk(tmp_path: Path) -> None:
    """Functions of model.py become hooks.

    Python writes no .pyc file beside model.py, because Triton would take it for a new version of the model.
    """
    hooks = load_hooks(
        write(tmp_path, "def postprocess(outputs):\n    return {k: -v for k, v in outputs.items()}\n")
    )

    assert hooks.preprocess is None
    assert hooks.postprocess is not None
    assert hooks.postprocess({"y": np.ones(1)})["y"][0] == -1
    assert [p.name for p in tmp_path.iterdir()] == ["model.py"]


def test_dataclasses_work_in_hooks(tmp_path: Path) -> None:
    """Pickles and dataclasses work in model.py, although they look up its module by name."""
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\ndef preprocess(i):\n    return i\n"

    assert load_hooks(write(tmp_path, text)).preprocess is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\n", "defines neither"), ("preprocess = 3\n", "preprocess must be a function")],
)
def test_a_file_without_hooks_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A file without hooks is refused, because the name of a hook may be misspelt."""
    with pytest.raises(HookError, match=message):
        load_hooks(write(tmp_path, text))


def test_an_import_may_take_a_minute_however_short_the_limit_of_hooks_is() -> None:
    """The limit of an import is at least a minute, even if hooks have a shorter limit, because importing libraries takes long."""
    assert [import_limit_s(limit) for limit in (None, 0.5, 90.0)] == [None, 60.0, 90.0]


#: A program that loads the `model.py` of each folder in its arguments, and prints what the hook of the last one returns.
LOAD = """
import sys
from pathlib import Path
from rsrv.hooks.loader import HookError, load_hooks
try:
    hooks = [load_hooks(Path(folder, "model.py")) for folder in sys.argv[1:]]
    print(hooks[-1].preprocess({}))
except HookError as error:
    print("HookError:", error)
"""


def answer(*folders: Path, **environment: str) -> str:
    """Return what `LOAD` prints for these folders. It runs in a new process, because a process imports a module only once."""
    command = [sys.executable, "-c", LOAD, *map(str, folders)]
    variables = {**os.environ, **environment}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout


def write_bundle(folder: Path, text: str, **modules: str) -> Path:
    """Write `model.py` and its helper modules to a folder.

    The key `a` of `modules` makes the file a.py, and the key `a__b` makes a/b.py.
    """
    for name, content in modules.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    folder.mkdir(exist_ok=True)
    write(folder, text)
    return folder


def test_modules_beside_model_py_can_be_imported(tmp_path: Path) -> None:
    """Hooks can import a module and a package in their bundle, also while they run."""
    text = """
import constants
from tables import small


def preprocess(inputs):
    import late

    return constants.ONE, small.TWO, late.THREE
"""
    modules = {
        "constants": "ONE = 1",
        "tables__small": "from constants import ONE\nTWO = ONE + 1",
        "late": "THREE = 3",
    }

    assert answer(write_bundle(tmp_path, text, **modules)) == "(1, 2, 3)\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_executes_functions_of_model_py(tmp_path: Path, method: str) -> None:
    """Functions and classes of model.py can be pickled, however multiprocessing starts its workers."""
    text = f"""
import dataclasses
import multiprocessing


@dataclasses.dataclass
class Pair:
    a: int
    b: int


def swap(pair):
    return Pair(pair.b, pair.a)


def preprocess(inputs):
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        return pool.map(swap, [Pair(1, 2)])
"""

    assert answer(write_bundle(tmp_path, text)) == "[Pair(a=2, b=1)]\n"


def test_each_bundle_of_a_process_imports_its_own_modules(tmp_path: Path) -> None:
    """An alias of two versions runs the hooks of both in one process.

    Each bundle imports its own modules, although their names are equal.
    """
    text = """
import json
import multiprocessing
import pickle

import tables.small
from tables import small as same
from words import Word, name


def spell(word):
    import words

    return words.name, word


def preprocess(inputs):
    import late

    assert same is tables.small
    assert type(pickle.loads(pickle.dumps(Word("a")))) is Word
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return [late.name, tables.small.name, pool.map(spell, [Word("a")])]
"""
    for bundle in ("one", "two", "three"):
        write_bundle(
            tmp_path / bundle,
            text,
            late=f"name = {bundle!r}",
            words=f"import dataclasses\nname = {bundle!r}\n@dataclasses.dataclass\nclass Word:\n    text: str\n",
            tables____init__="",
            tables__small="from words import name\nfrom . import other\nassert other.name == name\n",
            tables__other="import words\nname = words.name\n",
        )

    for last in ("one", "two", "three"):
        folders = [tmp_path / bundle for bundle in ("one", "two", "three")]
        folders = [*folders[: folders.index(tmp_path / last)], tmp_path / last]
        assert answer(*folders) == f"[{last!r}, {last!r}, [({last!r}, Word(text='a'))]]\n"


def test_a_module_that_no_bundle_has_is_named(tmp_path: Path) -> None:
    """A missing module fails the first bundle and further bundles of a process with the same error."""
    folders = [
        write_bundle(tmp_path / name, "import nowhere_to_be_found\ndef preprocess(i):\n    return i\n")
        for name in ("one", "two")
    ]
    good = write_bundle(tmp_path / "good", "def preprocess(i):\n    return i\n")

    for bundles in ([folders[0]], [good, folders[1]]):
        assert "HookError: model.py: No module named 'nowhere_to_be_found'" in answer(*bundles)


def test_a_file_whose_name_the_process_cannot_encode_is_named(tmp_path: Path) -> None:
    """Triton's stubs encode file names as ASCII, so they cannot open a file with another name. The error names the file."""
    text = "from pathlib import Path\nPath(__file__).with_name('n\u00e4me.txt').read_text()\ndef preprocess(i):\n    return 1\n"
    write_bundle(tmp_path, text)
    (tmp_path / "n\u00e4me.txt").touch()

    assert answer(tmp_path) == "1\n"
    as_in_a_stub = answer(tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert as_in_a_stub.startswith(r"HookError: model.py cannot open 'n\xe4me.txt'")
