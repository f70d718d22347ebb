"""The hooks library as a whole: its imports, missing packages, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rsrv.hooks import BadInput, image
from rsrv.hooks.text import Tokeniser
from rsrv.stub.endpoint import run_hook
from rsrv.stub.replies import RequestFailure
from rsrv.wire.frames import Status
from tests.logged import logged_here

_SCRIPT = """
import json, sys
from rsrv.hooks import audio, boxes, image, labels, text, tokens
print(json.dumps(sorted(sys.modules)))
"""


def test_importing_it_loads_numpy_and_nothing_else() -> None:
    """An import of the library loads numpy and no optional package, because every model's process imports it."""
    out = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(out.stdout)}
    assert "numpy" in loaded
    assert not loaded & {"PIL", "tokenizers", "scipy", "torch", "jax"}


@pytest.mark.parametrize(
    ("module", "package", "use"),
    [
        ("PIL", "Pillow", lambda: image.resize([np.zeros((2, 2, 3), np.uint8)], (1, 1))),
        ("tokenizers", "tokenizers", lambda: Tokeniser("tokenizer.json", [8])),
    ],
)
def test_what_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, use: Callable[[], Any]
) -> None:
    """If an optional package is missing, the function that needs it says what to install."""
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{package} is not installed.*pip install --no-deps {package}"):
        use()


class NoGuard:
    """A guard without any restriction."""

    @contextmanager
    def within(self, hook: str, who: str) -> Iterator[None]:
        yield


def test_a_request_that_a_hook_blames_is_refused_with_its_words(caplog: pytest.LogCaptureFixture) -> None:
    """A request that a hook refuses is INVALID with the hook's text. The log gets no line."""

    def preprocess(inputs: dict[str, Any]) -> dict[str, Any]:
        raise BadInput("row 3 is upside down")

    guard: Any = NoGuard()
    with pytest.raises(RequestFailure) as failed:
        run_hook("preprocess", preprocess, {}, "request", guard)
    assert (failed.value.status, failed.value.text) == (Status.INVALID, "row 3 is upside down")
    assert not logged_here(caplog)


class Unsayable(BadInput):
    """An exception whose text cannot be computed."""

    def __str__(self) -> str:
        raise KeyError("no such text")


@pytest.mark.parametrize(
    ("error", "start", "longest"),
    [
        (BadInput(), "the model refuses this request", 100),
        (Unsayable(), "the model refuses this request", 100),
        (BadInput("x" * 10_000_000), "xxx", 1100),
        (BadInput("not text: \udc80"), r"not text: \udc80", 20),
    ],
)
def test_the_text_of_a_refusal_is_short_and_valid(error: BadInput, start: str, longest: int) -> None:
    """For any exception of a hook, the client gets a short valid text."""

    def preprocess(inputs: dict[str, Any]) -> dict[str, Any]:
        raise error

    guard: Any = NoGuard()
    with pytest.raises(RequestFailure) as failed:
        run_hook("preprocess", preprocess, {}, "request", guard)
    assert failed.value.status is Status.INVALID
    assert failed.value.text.startswith(start)
    assert len(failed.value.text.encode()) <= longest
