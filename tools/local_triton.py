"""Local tritonserver, without a container and without a GPU.

    python tools/local_triton.py

This command fetches tritonserver 2.51 (24.10) with its Python backend from the wheel `nvidia-pytriton`, and perf_analyzer from a
wheel of `tritonclient`, into .triton. It also makes the small environment in which Triton's stub processes run. Completed steps
are not repeated.

Tests and tools import `TritonServer` from this module. With RSRV_TEST_TRITONSERVER=/path/to/tritonserver, they use that server.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rsrv.triton_command_line import ask_flags
from rsrv.triton_install import Installation, InstallError, make_stub_environment

ROOT = Path(__file__).resolve().parent.parent
#: The installation in .triton, which `make` makes.
INSTALLATION = Installation.at(ROOT / ".triton", ROOT / ".triton")
#: The tritonserver that RSRV_TEST_TRITONSERVER names, or None. It must find its libraries, its backends and the Python of its
#: stubs without help from this module.
OTHER = Path(named).absolute() if (named := os.environ.get("RSRV_TEST_TRITONSERVER")) else None
#: The tritonserver that tests and tools start.
LAUNCHER = OTHER or INSTALLATION.launcher
LOOPBACK = "127.0.0.1"
#: Ports for servers. A server opens its ports only after loading its models. So the ports are below 32768, because Linux might
#: meanwhile give a higher port to a connection or to a socket that is bound to port 0.
_PORTS = range(10_000, 32_768)
#: Number of ports that a process reserves at a time.
_BLOCK = 64
EXEC_BOUND = ROOT / "triton_backend" / "rsrv" / "serve" / "exec_bound.py"


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"local_triton: {text}", flush=True)


def numpy2_bin() -> Path:
    """Return the folder `bin` of an environment for stubs with numpy 2. The first call makes the environment."""
    folder = INSTALLATION.own / "stub-numpy2"
    if not (folder / "done").exists():
        make_stub_environment(folder, "numpy>=2.1,<3\npillow>=10.1\ntokenizers>=0.21,<1\n")
        (folder / "done").touch()
    return folder / "bin"


class ServerFailed(Exception):
    """tritonserver, or one of its models, did not start. The text ends with the last lines of its log."""


def free_ports(count: int) -> list[int]:
    """Return free loopback ports. While this process lives, this function gives them to no other process of this user."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_reserved_ports)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind((LOOPBACK, port))
            ports.append(port)
    return ports


def reserve_ports(folder: Path) -> Iterator[int]:
    """Yield ports that no other process or iterator gets.

    The ports are reserved with locks on files in `folder`. The locks are released when this iterator ends.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as locks:
        for first in random.sample(_PORTS[::_BLOCK], len(_PORTS[::_BLOCK])):
            lock = os.open(folder / str(first), os.O_CREAT | os.O_RDWR, 0o600)
            locks.callback(os.close, lock)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield from range(first, min(first + _BLOCK, _PORTS.stop))
        raise ServerFailed(f"other processes have reserved all ports for servers, see {folder}")


_reserved_ports = reserve_ports(Path(tempfile.gettempdir(), f"rsrv-ports-{os.getuid()}"))


def path_with_tritonserver() -> str:
    """Return a PATH on which the tritonserver of the tests comes first."""
    return f"{LAUNCHER.parent}:{os.environ.get('PATH', os.defpath)}"


def no_client_shared_memory() -> list[str]:
    """Return flags that keep clients from registering shared memory.

    With these flags, a registration needs a header with a random value. Newer releases of Triton have the flag
    --allow-client-shm=false for this purpose.
    """
    only = f"shared-memory:rsrv-shared-memory={secrets.token_hex(16)}"
    return [f"--http-restricted-api={only}", f"--grpc-restricted-protocol={only}"]


def _client_shared_memory() -> list[str]:
    """Return flags that let clients register shared memory. Without these flags, Triton refuses this from release 26.05 on."""
    return ["--allow-client-shm=true"] if "allow-client-shm" in ask_flags(str(LAUNCHER)) else []


class TritonServer:
    """One tritonserver process on a model repository, on loopback addresses only.

    As a context manager, it starts the server, and always ends it. `wait_ready` returns once the server serves. The server also
    ends with the thread that started it, even if the thread's process gets SIGKILL. So start the server from the main thread.
    """

    def __init__(
        self,
        model_repository: Path,
        *,
        installation: Installation | None = None,
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        exit_on_error: bool = True,
        exit_timeout_s: int = 10,
        client_shared_memory: bool = False,
    ) -> None:
        """Prepare a server.

        `extra_args` come last, so they take precedence. Without a `log_path`, the server's output goes to this process's
        output. With `exit_on_error`, a model that fails to load ends the server, which is Triton's default. Without it, the
        other models are served. Clients can register their shared memory only with `client_shared_memory`.
        """
        self.model_repository = model_repository
        self.installation = installation or INSTALLATION
        # Choose free ports for those that the caller does not name. Another process may still open such a port before the server
        # does.
        ports = iter(free_ports(3))
        self.http_port = http_port or next(ports)
        self.grpc_port = grpc_port or next(ports)
        self.metrics_port = metrics_port or next(ports)
        self.extra_args = tuple(extra_args)
        self.env = dict(env or {})
        self.log_path = log_path
        self.exit_on_error = exit_on_error
        self.exit_timeout_s = exit_timeout_s
        self.client_shared_memory = client_shared_memory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http_url(self) -> str:
        """host:port for clients."""
        return f"{LOOPBACK}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{LOOPBACK}:{self.grpc_port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    @property
    def pid(self) -> int:
        """Process id of tritonserver, the stubs' parent."""
        return self.process.pid

    def command(self) -> list[str]:
        """Return the command line, with the flags of every local server."""
        own = [str(self.installation.tritonserver), f"--backend-directory={self.installation.backends}"]
        return [
            *(own if OTHER is None else [str(OTHER)]),
            f"--model-repository={self.model_repository}",
            # The generated configurations are complete. Completing them would cost an additional stub and 1 s per model.
            "--disable-auto-complete-config",
            "--model-load-thread-count=32",
            # Without this flag, the whole server would become unready while it loads one more model.
            "--strict-readiness=false",
            f"--exit-on-error={str(self.exit_on_error).lower()}",
            f"--exit-timeout-secs={self.exit_timeout_s}",
            "--backend-config=python,shm-default-byte-size=1048576",
            f"--http-address={LOOPBACK}",
            f"--grpc-address={LOOPBACK}",
            f"--metrics-address={LOOPBACK}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            *(_client_shared_memory() if self.client_shared_memory else no_client_shared_memory()),
            *self.extra_args,
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the server: those of this process, with the additions that the server needs.

        LD_LIBRARY_PATH names the server's libraries, the stubs' Python comes first in PATH, and RSRV_RUNTIME_PYTHON names the
        runtime's Python.
        """
        if OTHER is not None:
            return {"RSRV_RUNTIME_PYTHON": sys.executable, **os.environ, **self.env}
        path = f"{self.installation.stub_bin}:{os.environ.get('PATH', os.defpath)}"
        fixed = {"LD_LIBRARY_PATH": self.installation.library_path, "PATH": path}
        return {"RSRV_RUNTIME_PYTHON": sys.executable, **os.environ, **fixed, **self.env}

    def start(self) -> Self:
        """Start the process and return at once.

        Raises:
            InstallError: the installation is missing, or of other versions.
        """
        if OTHER is not None and (OTHER.name != "tritonserver" or not os.access(OTHER, os.X_OK)):
            raise InstallError(
                f"RSRV_TEST_TRITONSERVER must name a program called tritonserver, and names {OTHER}"
            )
        if OTHER is None and not self.installation.is_installed():
            raise InstallError("tritonserver is not installed here: run python tools/local_triton.py")
        bound = [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid())]
        with contextlib.ExitStack() as files:
            log = files.enter_context(self.log_path.open("ab")) if self.log_path else None
            # Use a separate session, so that a Ctrl-C on this process does not reach the server.
            self._process = subprocess.Popen(
                [*bound, *self.command()],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout: float = 120, progress: Callable[[str], None] | None = None) -> None:
        """Wait until the server and all its models are up.

        Raises ServerFailed as soon as that is impossible. `progress` gets the name of each model after it has loaded (needs a
        log file). Without `exit_on_error`, failed models are ignored here; `model_states()` reports them.
        """
        deadline = time.monotonic() + timeout
        follow = self._loaded_models()
        while True:
            for name in next(follow):
                if progress is not None:
                    progress(name)
            if (status := self.process.poll()) is not None:
                raise ServerFailed(f"tritonserver exited with status {status}{self._log_tail()}")
            if self.is_ready():
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ServerFailed(f"tritonserver was not ready within {timeout:.0f} s{self._log_tail()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(remaining, 0.05))
        for name in next(follow):
            if progress is not None:
                progress(name)
        failed = {
            name: reason for name, (state, reason) in self.model_states().items() if state == "UNAVAILABLE"
        }
        if failed and self.exit_on_error:
            listed = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
            raise ServerFailed(f"models failed to load:\n{listed}{self._log_tail()}")

    @property
    def operator_headers(self) -> dict[str, str]:
        """HTTP headers for Triton's APIs that are restricted to operators."""
        return {}

    def is_ready(self) -> bool:
        """Return whether the HTTP front end is ready (it opens only after the first loads have ended)."""
        try:
            return self._http("GET", "/v2/health/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def model_states(self) -> dict[str, tuple[str, str]]:
        """Return each model's state (READY, UNAVAILABLE and so on, or empty if never loaded) and the reason."""
        status, body = self._http("POST", "/v2/repository/index", b"{}")
        if status != 200:
            raise ServerFailed(f"repository index answered {status}: {body.decode(errors='replace')}")
        return {row["name"]: (row.get("state", ""), row.get("reason", "")) for row in json.loads(body)}

    def log_text(self) -> str:
        """Return the output of the server and its stubs so far."""
        return self.log_path.read_text(errors="replace") if self.log_path and self.log_path.exists() else ""

    def terminate(self, timeout: float | None = None) -> int:
        """Send SIGTERM, and return the exit status. Kill the server if it does not end."""
        patience = timeout if timeout is not None else self.exit_timeout_s + 20
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        # Wait for the stubs, which share the server's process group. After a crash of the server, they need a moment to end and
        # to remove their shared memory. Kill stubs that hang.
        until = time.monotonic() + 2
        while (lives := group_lives(self.process.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        if lives:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return status

    def kill(self) -> None:
        """Send SIGKILL only to the server. Its children must end by themselves."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.terminate()

    def _http(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(LOOPBACK, self.http_port, timeout=5)
        with contextlib.closing(connection):
            connection.request(method, path, body, self.operator_headers)
            response = connection.getresponse()
            return response.status, response.read()

    def _loaded_models(self) -> Iterator[list[str]]:
        """At each step, yield the models whose loading the log has reported since the previous step."""
        seen = 0
        while True:
            # Read only whole lines, because the last one may still be incomplete.
            lines = [line for line in self.log_text().splitlines(keepends=True) if line.endswith("\n")]
            loaded = [line.split("'")[1] for line in lines[seen:] if "successfully loaded '" in line]
            seen = len(lines)
            yield loaded

    def _log_tail(self, lines: int = 40) -> str:
        tail = self.log_text().splitlines()[-lines:]
        return "\n--- end of the server's log ---\n" + "\n".join(tail) if tail else ""


def group_lives(group: int) -> bool:
    """Return whether a process of this group runs. An ended process may remain for seconds until process 1 reaps it."""
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # The process may end while the folder is read.
            state, _, its_group = each.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def main() -> int:
    """Install tritonserver into .triton. Return the exit status."""
    try:
        INSTALLATION.install(say)
    except InstallError as error:
        print(f"local_triton: {error}", file=sys.stderr)
        return 1
    say(f"ready in {INSTALLATION.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
