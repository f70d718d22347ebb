"""A bundle's model.py: what it may be, and what is refused with a reason."""

from pathlib import Path

import numpy as np
import pytest

from rsrv.hooks.loader import HookError, import_limit_s, load_hooks


def write(directory: Path, text: str) -> Path:
    path = directory / "model.py"
    path.write_text(text)
    return path


def test_functions_become_hooks_and_nothing_is_left_on_disk(tmp_path: Path) -> None:
    """A .pyc beside the file would look to Triton like a new version of the model."""
    hooks = load_hooks(
        write(tmp_path, "def postprocess(outputs):\n    return {k: -v for k, v in outputs.items()}\n")
    )

    assert hooks.preprocess is None
    assert hooks.postprocess is not None
    assert hooks.postprocess({"y": np.ones(1)})["y"][0] == -1
    assert [p.name for p in tmp_path.iterdir()] == ["model.py"]


def test_dataclasses_work_in_hooks(tmp_path: Path) -> None:
    """Pickles and dataclasses look their module up by name."""
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\ndef preprocess(i):\n    return i\n"

    assert load_hooks(write(tmp_path, text)).preprocess is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\n", "defines neither"), ("preprocess = 3\n", "preprocess must be a function")],
)
def test_a_file_without_hooks_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Silence would hide a misspelt name."""
    with pytest.raises(HookError, match=message):
        load_hooks(write(tmp_path, text))


def test_an_import_may_take_a_minute_however_short_the_limit_of_hooks_is() -> None:
    """Hooks take milliseconds, and importing their libraries seconds."""
    assert [import_limit_s(limit) for limit in (None, 0.5, 90.0)] == [None, 60.0, 90.0]
