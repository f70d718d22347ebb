"""A stub's process ends after its model was unloaded, whatever model.py has left running."""

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

_UNLOADED = """
import atexit, ctypes, logging, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from rsrv.stub import hook_guard
from rsrv.stub.model import ModelStub

class Served:
    def close(self):
        {close}

logging.basicConfig(stream=sys.stdout, format="%(message)s")
hook_guard._EXIT_S = {exit_s}
{left}
stub = ModelStub()
stub._served = Served()
try:
    stub.finalize()
except RuntimeError as error:
    print(error)
"""
#: Statements in model.py that leave a thread or an exit handler running, by the name of the test case.
_LEFT = {
    "a busy executor": "ThreadPoolExecutor(1).submit(threading.Event().wait)",
    "a thread": "threading.Thread(target=threading.Event().wait).start()",
    "an exit handler that waits": "atexit.register(threading.Event().wait)",
    "an exit handler that holds the interpreter's lock": "atexit.register(ctypes.PyDLL(None).sleep, 600)",
}


def unload(leftover: str, close: str = "pass", exit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a process that unloads its model, and return its result. If the process does not end, the test fails."""
    script = _UNLOADED.format(left=leftover, close=close, exit_s=exit_s)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.parametrize("leftover", _LEFT.values(), ids=_LEFT)
def test_what_model_py_leaves_does_not_keep_the_process(leftover: str) -> None:
    """The process ends even if model.py has left a thread or an exit handler running. Python alone would wait for it forever."""
    process = unload(leftover, exit_s=0.1)
    assert "Thread" in process.stderr
    if "PyDLL" not in leftover:
        assert process.returncode == 0
        assert "exit handlers or threads of its model.py still run" in process.stdout


def test_ordinary_exit_handlers_of_model_py_are_called() -> None:
    """If exit handlers of model.py end, they are called as in any Python process."""
    process = unload("atexit.register(lambda: print('saved'))")
    assert (process.returncode, process.stdout, process.stderr) == (0, "saved\n", "")


def test_a_close_that_fails_does_not_keep_the_process() -> None:
    """If closing the model raises an error, the process writes the error to its log and ends."""
    process = unload(_LEFT["a thread"], close="raise RuntimeError('no close')", exit_s=0.1)
    assert process.returncode == 0
    assert "no close" in process.stdout
