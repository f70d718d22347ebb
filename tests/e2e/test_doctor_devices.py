"""Faults of devices and processes of a real server, and the findings of `rsrv doctor`."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest

from rsrv.control import find
from tests.bench.places import paced
from tests.e2e import bundles
from tests.e2e.calls import Refused, caller, outcome
from tests.e2e.harness import (
    EXPLICIT,
    HURRY,
    RunningTriton,
    StartTriton,
    aborted_by_a_lock,
    despite,
    make_repository,
)
from tests.e2e.lives import place
from tests.e2e.metas import rows, write_scale
from tests.e2e.test_doctor import asked, diagnosed, export, operate
from tests.status import read_status
from tests.waiting import wait_until

pytestmark = pytest.mark.long

Findings = Mapping[str, Mapping[str, str]]
#: Time limit in seconds until a finding appears or ends. After a cure, the old figures stay in the window for one minute.
_LATER_S = 120.0
#: Milliseconds of an execution of any batch size.
EXECUTION_MS = 100
BOUND = """
runtime: {devices: [cpu, cpu]}
lifecycle: {poll_s: 0.1}
models:
  crowded: {devices: [0]}
"""
#: Expected findings by name. Each has a pattern of its evidence, and words of its cause or its cure.
CROWDED = {
    "overloaded": (
        r"device 0: the device is busy 9\d(\.\d)?% of the time, and (2\d|3[01]) requests wait; the median wait is [2-6](\.\d+)? s",
        "larger batch sizes for crowded",
    ),
    "single_rows": (
        r"crowded executes one row at a time while requests wait [2-6](\.\d+)? s on average; it takes 9\d(\.\d)?% of",
        "export batch sizes 1, 8 and 32",
    ),
    "uneven_devices": (
        r"device 0 is busy 9\d(\.\d)?% of the time and (2\d|3[01]) requests wait for it, while device 1 is busy \d(\.\d+)?%",
        "models.crowded.devices: [0] excludes device 1; add 1 to models.crowded.devices",
    ),
}
LATE_HOOKS = """
import pathlib
import time

while not pathlib.Path({gate!r}).exists():
    time.sleep(0.05)


def preprocess(inputs):
    return inputs
"""
#: Flags of a server that loads only the model `late`.
ONE = ("--model-control-mode=explicit", "--load-model=late", HURRY)
#: Evidence about a model with LATE_HOOKS.
IMPORTING = r"^late's model.py has been importing for [3-9]\d(\.\d)? s; "
WAITS = "of its model.py loops, or waits"
UNSERVED = r"^other has not been served for [3-9]\d(\.\d)? s"
SILENT = r"the runtime of device 0 has not answered for \d\d(\.\d)? s"
#: A shell script that runs the runtime's Python. A test can break this file.
WORKING = f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n"


def findings(server: RunningTriton) -> Findings:
    """Return the findings by name."""
    return {finding["name"]: finding for finding in diagnosed(server)[0]}


def all_of(names: Collection[str], by_name: Findings) -> Findings:
    """Return the findings if all of `names` are among them. If not, return nothing."""
    return by_name if by_name.keys() >= set(names) else {}


def critical(by_name: Findings) -> Findings:
    """Return the findings if one is critical. If none is critical, return nothing."""
    return by_name if any(finding["severity"] == "SEVERITY_CRITICAL" for finding in by_name.values()) else {}


def check(finding: Mapping[str, str], severity: str, evidence: str, words: str) -> None:
    """Check a finding's severity, a pattern of its evidence, and words of its cause or its cure."""
    assert finding["severity"] == f"SEVERITY_{severity.upper()}", finding
    assert re.search(evidence, finding["evidence"]), finding
    assert words in f"{finding['cause']}; {finding['cure']}", finding


def test_a_device_that_gets_all_the_work_is_found(tmp_path: Path, start_triton: StartTriton) -> None:
    """32 clients ask a model that has only batch size 1 and is bound to one of two devices.

    Three findings report this, and end with their cures.
    """
    write_scale(tmp_path / "all", 2)
    bundles.with_sizes(tmp_path / "all", tmp_path / "bundles" / "crowded", [1])
    repository = make_repository(tmp_path, settings=BOUND)
    server = start_triton(repository, extra_args=[*EXPLICIT, HURRY], env=paced(EXECUTION_MS), expected=None)
    troubles = CROWDED.keys()

    with asked(server, {"crowded": (1, 32)}):
        by_name = wait_until(lambda: all_of(troubles, findings(server)), _LATER_S, what=str(troubles))
        for name, words in CROWDED.items():
            check(by_name[name], "warning", *words)

        settings = repository / "rsrv.yaml"
        settings.write_text(settings.read_text().replace("devices: [0]", "devices: [0, 1]"))
        wait_until(lambda: {"overloaded", "uneven_devices"}.isdisjoint(findings(server)), _LATER_S)
        place(tmp_path / "all", tmp_path / "bundles" / "crowded")
        wait_until(lambda: troubles.isdisjoint(findings(server)), _LATER_S)


def test_a_model_that_triton_did_not_load_is_found(tmp_path: Path, start_triton: StartTriton) -> None:
    """While model.py is being imported, Triton's ports stay closed. A critical finding reports this.

    Afterwards, a critical finding reports a model that Triton's flags do not load.
    """
    gate = tmp_path / "gate"
    write_scale(tmp_path / "bundles" / "late", 2, hooks=LATE_HOOKS.format(gate=str(gate)))
    write_scale(tmp_path / "bundles" / "other", 2)
    repository = make_repository(
        tmp_path, settings="{lifecycle: {mode: static}, stub: {hook_timeout_s: null}}"
    )
    server = start_triton(repository, extra_args=ONE, wait_ready=False, expected=None)
    wait_until(
        lambda: any(process.server_pid == server.pid for process in find.running()),
        what="the control process",
    )

    by_name = wait_until(lambda: all_of({"not_served", "slow_import"}, findings(server)))
    check(by_name["not_served"], "note", UNSERVED, "Triton is still starting")
    check(
        by_name["slow_import"],
        "critical",
        f"{IMPORTING}no model is served, because Triton opens its ports",
        WAITS,
    )
    gate.touch()
    wait_until(lambda: "slow_import" not in findings(server))
    by_name = wait_until(lambda: critical(findings(server)))
    check(by_name["not_served"], "critical", UNSERVED, "`rsrv reload other`")

    operate(server, "reload", "other")
    wait_until(lambda: "not_served" not in findings(server))
    with caller(server) as call:
        call("other", rows(1))


@pytest.mark.long  # A load may take a minute.
def test_an_import_that_hangs_is_found_until_its_load_fails(
    tmp_path: Path, start_triton: StartTriton
) -> None:
    """An import hangs in Triton's only load thread, and the load of another model waits. A finding reports this.

    After a minute the load fails, and the finding `model_failed` is about the import.
    """
    gate = tmp_path / "gate"
    write_scale(tmp_path / "bundles" / "good", 2)
    settings = (
        f"{{stub: {{hook_timeout_s: 1}}, lifecycle: {{bundles: [{tmp_path / 'bundles'}], poll_s: 0.1}}}}"
    )
    repository = make_repository(tmp_path, settings=settings)
    flags = [*EXPLICIT, HURRY, "--model-load-thread-count=1"]
    server = start_triton(repository, extra_args=flags, expected=None)
    assert "slow_import" not in findings(server)

    late = write_scale(tmp_path / "late", 2, hooks=LATE_HOOKS.format(gate=str(gate)))
    place(late, tmp_path / "bundles" / "late")
    wait_until(lambda: server.stub_pids("late"), what="the load of late")
    place(write_scale(tmp_path / "other", 2), tmp_path / "bundles" / "other")
    by_name = wait_until(lambda: all_of({"slow_import"}, findings(server)))
    check(
        by_name["slow_import"],
        "critical",
        f"{IMPORTING}other models wait for this import: imports hold 1 of Triton's 1 load thread$",
        WAITS,
    )
    assert not server.grpc.is_model_ready("other")

    by_name = wait_until(lambda: all_of({"model_failed"}, findings(server)))
    check(
        by_name["model_failed"],
        "critical",
        "^late has failed",
        "the import of model.py has taken 6",
    )
    gate.touch()
    wait_until(lambda: all(server.grpc.is_model_ready(name) for name in ("other", "late")))
    wait_until(lambda: {"slow_import", "model_failed"}.isdisjoint(findings(server)))


def test_a_model_whose_process_ended_is_found(tmp_path: Path, start_triton: StartTriton) -> None:
    """The stub of a model is killed. The finding is a note, and the model answers again without an operator."""
    write_scale(tmp_path / "bundles" / "good", 2)
    repository = make_repository(tmp_path)

    def start() -> RunningTriton:
        return start_triton(repository, extra_args=[*EXPLICIT, HURRY], expected=None)

    def kill_stub(server: RunningTriton) -> None:
        (stub,) = server.stub_pids("good")
        os.kill(stub, signal.SIGKILL)
        wait_until(lambda: "process_ended" in findings(server))
        finding = findings(server)["process_ended"]
        check(
            finding,
            "note",
            r"the process of good in Triton ended 1 time in \d+(\.\d+)? (s|min)",
            "nothing, if the process ended once",
        )
        with caller(server) as call:
            wait_until(lambda: not isinstance(outcome(lambda: call("good", rows(1))), Refused))

    despite(aborted_by_a_lock, start, kill_stub)


def test_a_runtime_that_does_not_answer_is_found(tmp_path: Path, start_triton: StartTriton) -> None:
    """A critical finding reports a stopped runtime until it continues, and a runtime that cannot start until it can start."""
    write_scale(tmp_path / "bundles" / "good", 2)
    python = tmp_path / "python"
    python.write_text(WORKING)
    python.chmod(0o755)
    repository = make_repository(tmp_path)
    env = {"RSRV_RUNTIME_PYTHON": str(python)}
    server = start_triton(repository, extra_args=[*EXPLICIT, HURRY], env=env, expected=None)
    pid = read_status(server.pid)["pid"]

    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: "runtime_down" in findings(server))
        check(findings(server)["runtime_down"], "critical", SILENT, f"`kill -CONT {pid}`")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "runtime_down" not in findings(server))

    python.write_text("#!/bin/sh\nexit 1\n")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "runtime_down" in findings(server))
    check(findings(server)["runtime_down"], "critical", SILENT, f"the runtime did not start with {python}")
    python.write_text(WORKING)
    wait_until(lambda: "runtime_down" not in findings(server))


def test_weights_without_memory_are_found(tmp_path: Path, start_triton: StartTriton) -> None:
    """A runtime may allocate 16 MB more, and the weights of a model have 33.6 MB.

    The model's requests are refused until there is memory, and a finding reports this.
    """
    export(tmp_path / "bundles", "large", [1], 1, rows=32768)
    repository = make_repository(tmp_path)
    server = start_triton(repository, extra_args=[*EXPLICIT, HURRY], expected=None)
    x = {"x": np.zeros((1, 256), np.float32)}
    runtime = psutil.Process(read_status(server.pid)["pid"])

    with caller(server) as call:
        call("large", x)
        operate(server, "evict", "large")
        runtime.rlimit(psutil.RLIMIT_AS, (runtime.memory_info().vms + (16 << 20), psutil.RLIM_INFINITY))
        by_name = wait_until(
            lambda: (outcome(lambda: call("large", x)), all_of({"no_memory"}, findings(server)))[1]
        )
        words = (
            r"large refused \d+ of \d+ requests: there was no memory for its 33.6 MB of weights in addition to the 0 B on the device",
            "another program uses the memory",
        )
        check(by_name["no_memory"], "critical", *words)
        # Wait until the back-off is so long that the commands below are complete before it ends.
        wait_until(lambda: wait_of(outcome(lambda: call("large", x))) > 5)

        runtime.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        operate(server, "compact")
        call("large", x)


def wait_of(refusal: object) -> float:
    """Return the seconds after which a refused request may be sent again, or 0 if the text has none."""
    match = re.search(r"in (\d+\.\d) s", str(refusal))
    return float(match[1]) if match else 0.0


def test_a_start_that_compiled_is_found(tmp_path: Path, start_triton: StartTriton) -> None:
    """A finding reports that a runtime had to compile three executables at its start, because they were in no cache.

    The next runtime finds them in the cache, so this finding is absent.
    """
    write_scale(tmp_path / "bundles" / "good", 2)
    repository = make_repository(tmp_path)
    env = {
        **paced(EXECUTION_MS, compile_ms=4000),
        "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
    }
    server = start_triton(repository, extra_args=[*EXPLICIT, HURRY], env=env, expected=None)

    by_name = findings(server)
    check(
        by_name["compiled_at_start"],
        "note",
        r"3 executables were compiled since this runtime's start, which took [1-5]\d(\.\d)? s",
        f"the executables were not in {tmp_path / 'cache'}",
    )
    operate(server, "restart")
    wait_until(lambda: findings(server).keys() == {"runtime_restarts"})


def test_a_runtime_that_dies_without_a_cache_costs_no_compilation(
    tmp_path: Path, start_triton: StartTriton
) -> None:
    """The configured cache folder cannot be made, as in a read-only home.

    After a death of the runtime, the next one reads the executables from the server's own folder.
    """
    write_scale(tmp_path / "bundles" / "good", 2)
    repository = make_repository(tmp_path)
    (tmp_path / "home").touch()
    cache = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "home" / "xla")}
    env = {**paced(EXECUTION_MS, compile_ms=4000), **cache}
    server = start_triton(repository, extra_args=[*EXPLICIT, HURRY], env=env, expected=None)

    finding = findings(server)["no_compilation_cache"]
    check(finding, "warning", "executables are kept only until this server ends", "Not a directory")
    began = time.monotonic()
    os.kill(read_status(server.pid)["pid"], signal.SIGKILL)
    with caller(server) as call:
        assert (call("good", rows(1))["y"] == 2).all()
    assert time.monotonic() - began < 10
    assert "no_compilation_cache" in findings(server)
