"""The black box: a file from which a front learns how its runtime has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rsrv.runtime.activity import Activity
from rsrv.runtime.crash_history import BlackBox
from rsrv.wire import paths
from rsrv.wire.blackbox import BYTES, BlackBoxReader, Phase, UnfinishedTask, how_it_ended, read_slots

_DIE = """
import os, sys
from pathlib import Path
from rsrv.runtime.activity import Activity
from rsrv.runtime.crash_history import BlackBox
from rsrv.wire.blackbox import Phase

box = BlackBox(Path(sys.argv[1]))
box.catch_signals()
Activity(box.memory).launch.begin(Phase.EXECUTING, "m@1")
print("ready", flush=True)
input()
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGSEGV, "crashed"), (signal.SIGABRT, "crashed"), (signal.SIGKILL, "killed")]
)
def test_a_crash_is_told_from_a_kill(tmp_path: Path, number: signal.Signals, how: str) -> None:
    """A model is suspect if its runtime crashed while it executed the model, and not if the runtime was killed.

    A reader that opened the black box before the end can still read it when the next runtime has replaced the file.
    """
    command = [sys.executable, "-c", _DIE, str(tmp_path), str(number.value)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        reader = BlackBoxReader(tmp_path)
        process.communicate(b"\n")
    assert how_it_ended((tmp_path / paths.BLACKBOX).read_bytes()) == how
    BlackBox(tmp_path)

    assert reader.is_suspect("m@1") == (how == "crashed")
    assert not reader.is_suspect("n@1")


def test_a_hang_is_that_of_its_model(tmp_path: Path) -> None:
    """If one execution is marked as hung, only its model is suspect. Executions of other models have only waited for it."""
    activity = Activity(BlackBox(tmp_path).memory)
    reader = BlackBoxReader(tmp_path)
    activity.launch.begin(Phase.EXECUTING, "m@1")
    activity.read.begin(Phase.EXECUTING, "n@1")
    activity.launch.mark_hung()

    assert (reader.is_suspect("m@1"), reader.is_suspect("n@1"), reader.is_suspect("")) == (True, False, True)


def test_a_hung_loop_makes_each_execution_suspect(tmp_path: Path) -> None:
    """If the scheduler's loop is marked as hung, every model is suspect, because the loop itself may execute models."""
    activity = Activity(BlackBox(tmp_path).memory)
    reader = BlackBoxReader(tmp_path)
    activity.round.begin(Phase.LOOPING, "")
    activity.round.mark_hung()

    assert reader.is_suspect("m@1")


def test_a_failed_loop_makes_each_execution_suspect(tmp_path: Path) -> None:
    """If the loop has failed, every model is suspect, because a request to any model may have caused the error.

    This holds even if no execution is recorded.
    """
    box = BlackBox(tmp_path)
    reader = BlackBoxReader(tmp_path)
    box.clear()
    assert not reader.is_suspect("m@1")
    box.crashed("the loop failed")

    assert reader.is_suspect("m@1")


def test_a_device_that_sleeps_is_told_after_the_next_runtime_has_begun(tmp_path: Path) -> None:
    """If a runtime ended because its device was put to sleep, its reader reports this even after the next runtime has begun.

    No model is suspect then. A reader of the next runtime reports no sleep.
    """
    box = BlackBox(tmp_path)
    reader = BlackBoxReader(tmp_path)
    before = reader.sleeps
    box.fall_asleep()
    box.clear()
    BlackBox(tmp_path)

    assert (before, reader.sleeps, BlackBoxReader(tmp_path).sleeps) == (False, True, False)
    assert not reader.is_suspect("m@1")


def test_without_a_box_each_end_is_a_crash(tmp_path: Path) -> None:
    """If the black box is missing or too short, each model is suspect.

    Without this rule, a request could be retried forever.
    """
    assert BlackBoxReader(tmp_path).is_suspect("m@1")
    (tmp_path / paths.BLACKBOX).write_bytes(bytes(BYTES - 1))

    assert BlackBoxReader(tmp_path).is_suspect("m@1")


def test_a_slot_says_that_a_request_executes_alone() -> None:
    """While a request executes alone, its slot of the black box says so. After the execution, the slot does not."""
    memory = bytearray(BYTES)
    activity = Activity(memory)
    activity.launch.begin(Phase.EXECUTING, "m@1", alone=True)
    assert read_slots(bytes(memory)) == [UnfinishedTask(Phase.EXECUTING, False, "m@1", alone=True)]
    activity.launch.end()
    activity.launch.begin(Phase.EXECUTING, "m@1")

    (slot,) = read_slots(bytes(memory))

    assert not slot.alone
