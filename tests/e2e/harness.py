"""Real tritonservers for tests. The functions start, watch and call servers, and always end them.

Tests use the fixtures of conftest.py, which call this module.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http

from local_triton import OTHER, ServerFailed, TritonServer, numpy2_bin
from rsrv.cli import main as cli
from rsrv.control import find
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.wire.socket import Closed
from rsrv_gen import cli as rsrv_gen
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
T = TypeVar("T")

#: Flags of a server whose models rsrv's control process loads and unloads. At its start, the server loads all models.
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
#: Flag for a fast exit. Without it, dead stubs and unanswered requests delay the server's end by ten seconds or more.
HURRY = "--exit-timeout-secs=1"


def make_repository(folder: Path, *sources: Path, settings: str = "", options: Sequence[str] = ()) -> Path:
    """Write a repository with some bundles to `gen` in the folder, and return its path.

    Without `sources`, the repository has the bundles in the folder's `bundles`.
    """
    folder.mkdir(exist_ok=True)
    config = folder / "settings.yaml"
    config.write_text(settings)
    arguments = [*map(str, sources or [folder / "bundles"]), "-o", str(folder / "gen")]
    assert rsrv_gen.main([*arguments, "--config", str(config), *options]) == 0
    return folder / "gen"


class RunningTriton:
    """A running tritonserver, with a client for each protocol."""

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        self.grpc = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        # Eight connections, so that several threads of a test can share the client.
        self.http = tritonclient.http.InferenceServerClient(server.http_url, concurrency=8)

    @property
    def pid(self) -> int:
        """The process id of tritonserver."""
        return self.server.pid

    @property
    def http_port(self) -> int:
        return self.server.http_port

    @property
    def grpc_port(self) -> int:
        return self.server.grpc_port

    @property
    def metrics_port(self) -> int:
        return self.server.metrics_port

    @property
    def log_path(self) -> Path:
        """Return the path of the output of the server, its stubs and their children."""
        if self.server.log_path is None:
            raise RuntimeError("this server has no log file")
        return self.server.log_path

    def log_text(self) -> str:
        return self.server.log_text()

    def stub_pids(self, model: str | None = None) -> list[int]:
        """Return the pids of the stubs of one model, or of all models. A stub's command line contains the model's name."""
        pids = []
        for child in _children(self.pid):
            line = _command_line(child)
            is_stub = any(part.endswith("triton_python_backend_stub") for part in line[:1])
            if is_stub and (model is None or any(f"/{model}/" in part for part in line)):
                pids.append(child.pid)
        return pids

    def urgent_findings(self) -> dict[str, str]:
        """Return the evidence of the last minute's warnings and critical findings, by name.

        A server without a runtime has no findings. If the control process does not answer, the test fails.
        """
        if not self._has_runtime():
            return {}
        answer = wait_until(self._diagnosis, what="an answer of the control process")
        return {
            finding.name: finding.evidence
            for finding in answer.findings
            if finding.severity != pb.SEVERITY_NOTE
        }

    def _has_runtime(self) -> bool:
        """Return True if the server has a control process, or a runtime that answers."""
        if self._control_address() is not None:
            return True
        try:
            read_status(self.pid)
        except (OSError, Closed):
            return False
        return True

    def _diagnosis(self) -> Any:
        """Return the control process's diagnosis, or None if it does not answer."""
        address = self._control_address()
        if address is None:
            return None
        try:
            with grpc.insecure_channel(address) as channel:
                return control_pb2_grpc.ControlStub(channel).Diagnose(pb.DiagnoseRequest(), timeout=5)
        except grpc.RpcError:
            return None

    def operate(self, *arguments: str) -> None:
        """Run a command of `rsrv` for this server. The command must succeed."""
        address = wait_until(self._control_address, what="the control process")
        assert cli.main([*arguments, "--server", address]) == 0

    def _control_address(self) -> str | None:
        """Return the address of the server's control process, or None if there is none yet."""
        return next((process.address for process in find.running() if process.server_pid == self.pid), None)


#: Time limit for the start of a server, in seconds. With an empty cache, a server compiles dozens of models while other servers start.
START_S = 240.0
#: Largest number of starts of a server, if Triton's own fault ends it before it is ready.
_STARTS = 4


class StartTriton(Protocol):
    """The fixture `start_triton`: starts a server that ends with the test."""

    def __call__(
        self,
        model_repository: Path,
        *,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        exit_on_error: bool = True,
        wait_ready: bool = True,
        timeout: float = START_S,
        spare: bool = False,
        expected: Collection[str] | None = (),
        make: Callable[..., TritonServer] = TritonServer,
    ) -> RunningTriton: ...


#: The running servers. The report of a failed test has their logs.
_running: list[TritonServer] = []


@contextmanager
def running_triton(
    model_repository: Path,
    log_path: Path,
    *,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    exit_on_error: bool = True,
    wait_ready: bool = True,
    timeout: float = START_S,
    spare: bool = False,
    expected: Collection[str] | None = (),
    make: Callable[..., TritonServer] = TritonServer,
) -> Iterator[RunningTriton]:
    """Run a server on `model_repository` until the block ends, and remove all that it leaves.

    `spare`: start a spare runtime, for a test in which a runtime ends. It costs 1.5 s of CPU time. `expected`: names of the
    urgent findings that the tests may cause, or None if they may cause any. Other urgent findings fail the test, because `rsrv
    doctor` must raise no false alarm.
    """
    server = make(
        model_repository,
        log_path=log_path,
        extra_args=extra_args,
        # Keep compiled models between runs of the tests: an empty cache only makes everything slower. Listen on no port for metrics,
        # because several servers at the same time would need the same port.
        env={
            "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(compilation_cache()),
            "RSRV_METRICS__LISTEN": "null",
            "RSRV_RUNTIME__SPARE": str(spare).lower(),
            # On a busy machine, a runtime may take longer to start than the default allows.
            "RSRV_STUB__RETRY_S": str(PATIENCE_S),
            **(env or {}),
        },
        exit_on_error=exit_on_error,
    )
    _running.append(server)
    try:
        with server:
            running = RunningTriton(server)
            try:
                if wait_ready:
                    _wait_ready(running, timeout)
                yield running
                findings = {} if expected is None else running.urgent_findings()
            finally:
                running.grpc.close()
                running.http.close()
                # An orderly end of Triton takes three seconds. Tests of an orderly end stop the server themselves.
                server.kill()
    finally:
        _running.remove(server)
    alarms = {name: evidence for name, evidence in findings.items() if name not in (expected or ())}
    assert not alarms, f"rsrv doctor would raise an alarm that no test caused: {alarms}"


def _wait_ready(running: RunningTriton, timeout: float) -> None:
    """Wait until the server is ready. If Triton's own fault ends it, start it again.

    On a busy machine, this may happen several times in a row.
    """
    for start in range(1, _STARTS + 1):
        try:
            running.server.wait_ready(timeout)
        except ServerFailed:
            if start == _STARTS or not aborted_by_a_lock(running):
                raise
            running.server.start()
        else:
            return


def crashed_by_a_cancellation(server: RunningTriton) -> bool:
    """Return True if the server crashed because of a fault of Triton that later releases do not have.

    Up to 24.10, Triton's gRPC front end may free a call that is being cancelled (triton-inference-server/server issues 7368 and
    8034). This happens about once in many thousand cancellations, with any model.
    """
    try:
        server.server.process.wait(5)  # The server writes its stack to the log before it ends.
    except subprocess.TimeoutExpired:
        return False
    _, crashed, where = server.log_text().rpartition("Signal (11) received")
    return bool(crashed) and "pthread_mutex_lock" in where


def last_words(server: RunningTriton) -> str:
    """Return the part of a server's log about its crash: the signal or the exception, and the first calls of the stack."""
    log = server.log_text()
    begin = max(log.rfind("Signal ("), log.rfind("terminate called"), 0)
    return log[begin:][:1000] if begin else log[-1000:]


def aborted_by_a_lock(server: RunningTriton) -> bool:
    """Return True if the server aborted because of Triton's fault with the locks that it shares with stubs.

    Triton 24.10 waits one second for such a lock, and does not catch the exception that follows. It aborts in one or two of a
    hundred cases in which a stub ends inside execute(), and in most cases in which a stub is stopped, with any model. On a busy
    machine, it also aborts while it starts.
    """
    try:
        status = server.server.process.wait(5)  # The server writes its stack to the log before it ends.
    except subprocess.TimeoutExpired:
        return False
    thrown = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"
    return status == -signal.SIGABRT and thrown in server.log_text()


def despite(
    fault: Callable[[RunningTriton], bool],
    start: Callable[[], RunningTriton],
    check: Callable[[RunningTriton], None],
) -> None:
    """Check a server. If `fault` finds that Triton's own fault ended it, check a new server."""
    server = start()
    try:
        check(server)
    except Exception:
        if not fault(server):
            raise
        check(start())


@contextmanager
def replaced_after(
    fault: Callable[[RunningTriton], bool], start: Callable[[int], AbstractContextManager[RunningTriton]]
) -> Iterator[Callable[[], RunningTriton]]:
    """Yield a function that returns the current server of several tests. It starts a new server if `fault` ended the last one.

    `start` gets the number of the server, from 0.
    """
    started: list[RunningTriton] = []
    with ExitStack() as servers:

        def living() -> RunningTriton:
            if not started or (started[-1].server.process.poll() is not None and fault(started[-1])):
                started.append(servers.enter_context(start(len(started))))
            return started[-1]

        yield living


def path_with_numpy2() -> str:
    """Return a PATH on which stubs find a Python with numpy 2. Skip the test if RSRV_TEST_TRITONSERVER names a server."""
    if OTHER is not None:
        pytest.skip(
            "RSRV_TEST_TRITONSERVER chooses the Python of its stubs; the other tests run with its numpy"
        )
    return f"{numpy2_bin()}:{os.environ.get('PATH', os.defpath)}"


def compilation_cache() -> Path:
    """Return the folder of compiled models. The environment names it, or it is the folder of the Makefile."""
    named = os.environ.get("RSRV_RUNTIME__COMPILATION_CACHE_DIR")
    return Path(named) if named else ROOT / ".cache" / "xla"


def log_tails(lines: int = 80) -> list[tuple[str, str]]:
    """Return a title and the end of the log for each running server."""
    return [
        (
            f"log of the tritonserver on {server.model_repository}",
            "\n".join(server.log_text().splitlines()[-lines:]),
        )
        for server in _running
    ]


def is_alive(pid: int) -> bool:
    """Return True if the process runs. A zombie does not run."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
