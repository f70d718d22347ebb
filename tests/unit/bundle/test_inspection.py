"""The inspector's child process parses modules that may crash it, stall it or exhaust its memory."""

from __future__ import annotations

import base64
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rsrv_bundle import BundleError, inspection
from rsrv_bundle.cli import main
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import signature_of
from tests.unit.bundle.forge import GOOD, changed, make_bundle, one_weight
from tests.unit.bundle.test_modules import X4, Y4, W, returning
from tests.waiting import PATIENCE_S

GOOD_MODULE = returning(Y4, takes=(X4, W))


@pytest.fixture
def inspector() -> Iterator[Inspector]:
    with closing(Inspector()) as inspector:
        yield inspector


def pid(inspector: Inspector) -> int:
    """Start the process that parses the next module, and return its id."""
    inspector.start()
    assert inspector._child is not None
    return inspector._child.process.pid


#: An affine model of 547 bytes with byte 42 set to 0. It ends jaxlib 0.10.2 with SIGSEGV. Later versions may refuse it.
CRASHING = base64.b64decode(
    """
    TUzvUg1TdGFibGVITE9fdjEuMTUuMAABHQUBBQ0BAwsDCw8TFxsfA18xAAERBw8jCw8LCwsDIQsLDwsXCw8TCwsLC0
    8TTy8BBQsPAxcHFwcbGxMTHwcTEwJuAh8RAwUDBwcJCwMNAwUREQEABRMFFQUXIxUNAR8XARcBAwcTExMjEwMDHw0D
    ISMdGR0bHR0dHx8RIQEAAAAAAAAAAgAAAAAAAAADBRcXHxEhAAAAAAAAAAABAAAAAAAAAB8ZEQEAAAAAAAAAAQkBAg
    IJKQUFEQUdKQcFCQ0FKQcJDREFKQMRBSkDCQkRBwsNDwMHQykDAQkpAwUJBHMFAVEBBQEHBGEDAQUDUAEDBwRNAw0T
    BxUZHQAFRgEFAwcFAQMHRgEHAwcDBQkGAQMHBQcJCwQBAwsGAwEFAQA+AyEPCw8hEyUpORUPKR8RDwsRYnVpbHRpbg
    B2aGxvAG1vZHVsZQBmdW5jX3YxAGRvdF9nZW5lcmFsX3YyAGJyb2FkY2FzdF9pbl9kaW1fdjEAYWRkX3YxAHJldHVy
    bl92MQBqYXgudXNlc19zaGFwZV9wb2x5bW9ycGhpc20AbWhsby5udW1fcGFydGl0aW9ucwBtaGxvLm51bV9yZXBsaW
    NhcwBqaXRfbWFpbgBqYXgucmVzdWx0X2luZm8AcmVzdWx0AG1haW4AcHVibGljAAgzCQUfAQsZGx0lJxkRERURKRER
    KxURLREDLw==
    """
)
CRASHED = r"parsing it ends in SIG\w+: it is damaged|is not a valid StableHLO"


def test_a_good_module_is_seen_as_it_is(inspector: Inspector) -> None:
    """One child process parses all good modules, with the same results as parsing in this process."""
    first = pid(inspector)
    for _ in range(3):
        signature, expected = inspector(GOOD_MODULE, "model.mlir"), signature_of(GOOD_MODULE, "model.mlir")
        assert (signature, signature.digest) == (expected, expected.digest)
    assert pid(inspector) == first


def test_a_bad_module_is_refused_in_the_same_words(inspector: Inspector) -> None:
    """A bad module gets the same message as in this process, and the child is replaced afterwards."""
    first = pid(inspector)
    for junk in (b"hello", GOOD_MODULE[:-20]):
        with pytest.raises(BundleError) as here:
            signature_of(junk, "model.mlir")
        with pytest.raises(BundleError) as there:
            inspector(junk, "model.mlir")
        assert there.value.problems == here.value.problems
    assert pid(inspector) != first
    assert inspector(GOOD_MODULE, "model.mlir").outputs == (Y4,)


def test_a_module_that_crashes_the_parser_costs_that_model_only(inspector: Inspector) -> None:
    """If a module crashes the parser, the error names the file and the signal. The next module is parsed."""
    with pytest.raises(BundleError, match=f"^model.b4.mlir: ({CRASHED})"):
        inspector(CRASHING, "model.b4.mlir")
    assert inspector(GOOD_MODULE, "model.mlir").outputs == (Y4,)


def test_a_module_that_takes_for_ever_is_given_up(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A parser that uses more CPU time than it may is killed, and the next module is parsed."""
    busy = tmp_path / "busy"
    busy.write_text(f"#!{sys.executable}\nimport os\nos.write(0, b'ready\\n')\nwhile True: pass\n")
    busy.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(busy))
    monkeypatch.setattr(inspection, "_SECONDS", 0.2)
    with pytest.raises(BundleError, match=r"model\.mlir: parsing this file takes forever"):
        inspector(GOOD_MODULE, "model.mlir")
    monkeypatch.undo()
    assert inspector(GOOD_MODULE, "model.mlir").outputs == (Y4,)


def test_a_process_that_got_none_of_the_processor_is_no_modules_fault(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser that gets no CPU time, here because it is stopped, is reported as the machine's fault."""
    inspector(GOOD_MODULE, "model.mlir")
    monkeypatch.setattr(inspection, "_SECONDS", 0.1)
    os.kill(pid(inspector), signal.SIGSTOP)
    with pytest.raises(
        InspectorError, match=r"model\.mlir: parsing this file got only 0\.0 s .* the machine is too busy"
    ):
        inspector(GOOD_MODULE, "model.mlir")
    monkeypatch.undo()
    assert inspector(GOOD_MODULE, "model.mlir").outputs == (Y4,)


def test_a_process_that_was_killed_is_replaced(inspector: Inspector) -> None:
    """After the idle process was killed, a new process parses the next module."""
    inspector(GOOD_MODULE, "model.mlir")
    os.kill(pid(inspector), signal.SIGKILL)
    assert inspector(GOOD_MODULE, "model.mlir").outputs == (Y4,)


def test_a_process_that_is_killed_again_is_no_modules_fault(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that is killed twice is reported as a lack of memory, not as the module's fault."""
    killed = tmp_path / "killed"
    killed.write_text(
        f"#!{sys.executable}\nimport os\nos.write(0, b'ready\\n')\nos.read(0, 1)\nos.kill(os.getpid(), 9)\n"
    )
    killed.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(killed))
    with pytest.raises(InspectorError, match=r"model\.mlir: .* ends in SIGKILL: .* too little memory"):
        inspector(GOOD_MODULE, "model.mlir")


def test_a_process_that_cannot_start_is_no_modules_fault(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that the process cannot start, as without jaxlib, and blames no module."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(InspectorError, match="does not start"):
        inspector(GOOD_MODULE, "model.mlir")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(InspectorError, match="does not start"):
        inspector(GOOD_MODULE, "model.mlir")


def test_memory_and_time_of_the_process_are_limited(inspector: Inspector) -> None:
    """The kernel limits memory, CPU time and core files of the process, even if native code hangs."""
    inspector(GOOD_MODULE, "model.mlir")
    lines = Path(f"/proc/{pid(inspector)}/limits").read_text().splitlines()
    limits = {line[:25].strip(): line[26:].split()[0] for line in lines}
    assert int(limits["Max address space"]) < 4 << 30
    assert int(limits["Max cpu time"]) < 60
    assert limits["Max core file size"] == "0"


def test_the_process_ends_with_its_owner() -> None:
    """The process ends when its owner's sockets close, as when the owner is killed."""
    with closing(Inspector()) as inspector:
        inspector(GOOD_MODULE, "model.mlir")
        child = inspector._child
        assert child is not None
        child.answers.close()
        child.sock.close()
        assert child.process.wait(PATIENCE_S) == 0


def test_the_command_says_which_module_crashes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv-bundle check` names the module that crashes its parser and checks the next bundle."""
    bad, good = (
        make_bundle(
            tmp_path,
            changed(GOOD, batching=None),
            name=name,
            modules={"model.b4.mlir": module},
            weights=one_weight(),
        )
        for name, module in (("bad", CRASHING), ("good", GOOD_MODULE))
    )
    assert main(["check", str(bad), str(good)]) == 1
    out = capsys.readouterr().out
    assert re.search(f"^{bad}: model.b4.mlir: ({CRASHED})", out)
    assert f"ok {good}" in out
