"""Promises of docs/security.md on processes, directories and messages that no other test covers."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.runtime.compile_cache import CompileCacheError, check_private
from rsrv.runtime.device import Array
from rsrv.wire.frames import ProtocolError
from rsrv.wire.socket import connect, listen
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime, StartEngine, StartRuntime
from tests.unit.runtime.metas import answer_of

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("bundles/rsrv_bundle", "gateway", "model_repository_gen", "triton_backend")

#: Modules that turn data into code, and functions that run text.
_UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "pty",
}
_UNSAFE_CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
    "np.load",
    "numpy.load",
    "jax.export.deserialize",
}
_LAST_WORDS = {name.rpartition(".")[2] for name in _UNSAFE_CALLS}


def unsafe(source: str) -> Iterator[str]:
    """Yield the parts of a source text that turn data into code."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in _UNSAFE_MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in _UNSAFE_MODULES:
                yield module
            case ast.Call(func=ast.Name() | ast.Attribute() as function, keywords=keywords):
                last = function.id if isinstance(function, ast.Name) else function.attr
                if last not in _LAST_WORDS and not {"shell", "allow_pickle"} & {
                    argument.arg for argument in keywords
                }:
                    continue
                name = ast.unparse(function)
                arguments = {(keyword.arg, ast.unparse(keyword.value)) for keyword in keywords}
                if name in _UNSAFE_CALLS and ("allow_pickle", "False") not in arguments:
                    yield name
                for keyword, value in sorted(
                    arguments & {("shell", "True"), ("allow_pickle", "True")}, key=str
                ):
                    yield f"{name}({keyword}={value})"


def test_nothing_turns_data_into_code() -> None:
    """The product uses no pickle, no eval and no shell. Its only exec runs a bundle's model.py, which is code."""
    sources = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(sources) > 80
    uses_by_path = {str(path.relative_to(ROOT)): list(unsafe(path.read_text())) for path in sources}
    assert {path: uses for path, uses in uses_by_path.items() if uses} == {
        "triton_backend/rsrv/hooks/loader.py": ["exec"]
    }


def test_another_user_cannot_talk_to_a_runtime(
    start_runtime: StartRuntime, tmp_path: Path, open_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user cannot connect, neither in the private directory nor at a socket that is open to all.

    Only root can act as another user. If the test runs as any other user, it connects as that user and is greeted.
    """
    runtime = start_runtime()
    root = os.getuid() == 0
    assert stranger_hears(runtime.socket) == ("PermissionError" if root else "a greeting")

    way_in = open_folder / "socket"
    os.link(runtime.socket, way_in)
    way_in.chmod(0o666)
    with caplog.at_level(logging.WARNING):
        assert stranger_hears(way_in) == ("the end" if root else "a greeting")
    runtime.open().sock.close()  # When this connection is greeted, the loop has logged the refusal.
    assert ("refused a connection: the peer runs as uid 65534" in caplog.text) == root


def stranger_hears(path: Path) -> str:
    """Return how the runtime reacts to another user.

    The process changes to the socket's directory before it gives up its rights.
    """
    script = """
import os, socket, sys
from rsrv.wire.frames import hello
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    sock.connect(sys.argv[2])
    sock.send(hello())
    print("a greeting" if sock.recv(1000) else "the end")
except PermissionError as error:
    print(type(error).__name__)
except ConnectionError:
    print("the end")
"""
    command = [sys.executable, "-c", script, str(path.parent), path.name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """Return a directory that all users can enter, on the file system of `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_stub_does_not_talk_to_another_users_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub does not connect to the runtime of another user, who may have made the directory first."""
    with listen(tmp_path / "socket"):
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(ProtocolError, match="run both as one user"):
            connect(tmp_path / "socket")


def test_the_cache_of_compiled_code_is_private(tmp_path: Path) -> None:
    """A cache directory that others can write to is refused, because its executables are run.

    If others can only read a cache directory, its mode is changed to 0700.
    """
    for mode, expected in ((0o700, 0o700), (0o755, 0o700), (0o750, 0o700)):
        directory = tmp_path / f"{mode:o}"
        directory.mkdir()
        directory.chmod(mode)
        check_private(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == expected
    for mode in (0o777, 0o770, 0o1777):
        directory = tmp_path / f"{mode:o}"
        directory.mkdir()
        directory.chmod(mode)
        with pytest.raises(CompileCacheError, match="writable by no other user"):
            check_private(directory)


SECRET = "hunter2-never-to-be-seen"


def leaky(arrays: dict[str, Array]) -> dict[str, Array]:
    """Raise an error with secrets, as a faulty hook might."""
    raise RuntimeError(f"{os.environ['RSRV_TEST_TOKEN']} in {__file__}")


@pytest.mark.parametrize(
    "hooks",
    [Hooks(), Hooks(preprocess=leaky), Hooks(postprocess=leaky), Hooks(preprocess=lambda a: {"x": object()})],  # type: ignore[dict-item]
    ids=["device", "preprocess", "postprocess", "nonsense"],
)
def test_errors_of_clients_have_no_secrets(
    runtime: Runtime, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hooks: Hooks
) -> None:
    """No error that a client gets has a part of the environment, a path or a traceback."""
    monkeypatch.setenv("RSRV_TEST_TOKEN", SECRET)
    engine = start_engine(hooks)
    runtime.device.fail = f"{SECRET} in {tmp_path}"
    wrong = np.zeros((1, 7), np.float32)
    requests = [
        FakeRequest({"x": np.zeros((1, 3), np.float32)}),
        FakeRequest({"x": wrong}),
        FakeRequest({"y": wrong}),
        FakeRequest({}),
        *(FakeRequest({"x": wrong[:, :3]}, parameters=json.dumps(p)) for p in PARAMETERS),
    ]
    answers = engine.execute(requests)
    texts = [
        answer.error.message
        for answer in (answers if answers is not None else [answer_of(r) for r in requests])
        if answer.error is not None
    ]
    assert len(texts) == len(requests)
    for text in texts:
        assert SECRET not in text
        assert not re.search(r"/\w+/|Traceback|File \"|\.py\b|0x[0-9a-f]{6}", text), text
        assert len(text) < 500


PARAMETERS: list[dict[str, object]] = [
    {"rsrv_run": "9" * 5000},
    {"rsrv_run": "18446744073709551616"},
    {"rsrv_run": "x" * 5000},
    {"rsrv_priority": "x" * 5000},
    {"rsrv_deadline_unix_ns": -1},
]
