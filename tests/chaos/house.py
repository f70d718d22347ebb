"""A server with its own mounts: a small /dev/shm, and a small disk for compiled models. Tests can fill them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

import native_front
from local_triton import LAUNCHER, TritonServer, free_ports
from rsrv.serve.operator_key import KEY_FILE
from rsrv.triton_command_line import OPERATOR_HEADER, restriction
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory
from rsrv.wire.socket import Closed
from rsrv_gen import cli as rsrv_gen
from tests.chaos import bundles
from tests.chaos.figures import STRIKE, Record
from tests.chaos.load import PATIENCE, Connection, Load
from tests.chaos.questions import ITEMS, LIGHT_FACTORS, SPARE_ITEMS, Question
from tests.e2e.harness import EXPLICIT, ROOT, RunningTriton, running_triton
from tests.status import read_status
from tests.waiting import wait_until

#: Kinds of servers. devices: with two devices. clock: the runtime reads a clock that tests can set. serve: under `rsrv serve`. crowded:
#: with twenty models that clients call. catalogue: with a catalogue of lazy models.
Kind = Literal["plain", "devices", "clock", "serve", "crowded", "catalogue"]
#: Models of a plain server at its start.
SERVED = (
    "exact",
    "only_rows",
    "elastic",
    "sudden",
    "fragile",
    "moody",
    "heavy_a",
    "heavy_b",
    "bulky",
    "chain",
)
#: Models of the crowded server.
CROWD = ("exact", "only_rows", "elastic", "sudden", "fragile", "moody", "chain", *LIGHT_FACTORS)
#: Models of the catalogue's server that are not in the catalogue.
BESIDE = ("exact", "only_rows", "chain")
#: Callees of `chain`.
INTERNAL = ("double", "triple")
#: MiB of /dev/shm, and MiB of the disk for compiled models.
_SHM, _DISK = 192, 64
#: MiB of /dev/shm for a catalogue. Each stub with the Python front has a region there.
_CATALOGUE_SHM = 512
#: Seconds that the start of a runtime and its control process takes at most.
_NEW_S = 10.0
#: Seconds after which a hook hangs, and seconds after which an execution hangs.
HOOK_TIMEOUT, WATCHDOG = 3.0, 3.0
#: Bytes that a stub may allocate, and bytes of weights that may be on the device. One heavy model fits.
STUB_BYTES, WEIGHT_BYTES = 2**30, 200 * 2**20
_OF_ALL = """
stub: {{hook_timeout_s: {hook}, memory_limit_bytes: {stub}}}
lifecycle: {{bundles: [{bundles}], poll_s: 0.2}}
"""
_SETTINGS = (
    "runtime: {{weight_budget_bytes: {weights}, watchdog_s: {watchdog}, devices: {devices}}}" + _OF_ALL
)
#: Settings for lazy models. Weights of 40 items fit on the device, and of 80 items into host memory.
LAZY = (
    """
runtime:
  watchdog_s: {watchdog}
  start: lazy
  start_timeout_s: 200
  idle: {{device: 2s, host: 4s, executable: 8s}}
  weight_budget_bytes: 11000000
  host_memory_bytes: 22000000
"""
    + _OF_ALL
)
#: Shell commands before the server's command. $0 is the path of the disk, and the other arguments are the server's command.
_MOUNTS = (
    "mount -t tmpfs -o size={shm}m,mode=1777 tmpfs /dev/shm && "
    'mount -t tmpfs -o size={disk}m,mode=0700 tmpfs "$0" && exec "$@"'
)


class NotPossible(Exception):
    """A fault that this machine does not allow. The message has the reason."""


def _unshare() -> list[str]:
    """Return the command that gives a server its own mounts, or an empty list if this is not allowed."""
    unshare = shutil.which("unshare")
    for flags in ("-m", "-rm"):
        if unshare is not None:
            probe = [unshare, flags, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return [unshare, flags]
    return []


def clock_library() -> Path:
    """Return the library that gives processes a clock that can be set (PyPI's libfaketime). Raises NotPossible."""
    spec = find_spec("libfaketime")
    if spec is None or spec.origin is None:
        raise NotPossible("the package libfaketime is not installed")
    return Path(spec.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


class _HousedServer(TritonServer):
    """A tritonserver that another command starts. `inside` is this command. The server's command is appended to its arguments."""

    def __init__(self, *arguments: Any, inside: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._inside = list(inside)

    def command(self) -> list[str]:
        return [*self._inside, *super().command()]


class _SupervisedServer(_HousedServer):
    """An `rsrv serve` on the server's ports."""

    @property
    def operator_headers(self) -> dict[str, str]:
        """The header with the key that `rsrv serve` has made."""
        return {OPERATOR_HEADER: (self.model_repository.parent / "serve" / KEY_FILE).read_text().strip()}

    @property
    def pid(self) -> int:
        """Return the pid of the current tritonserver."""
        return wait_until(self._pid, what="a server")

    def _pid(self) -> int:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                if child.name() == "tritonserver":
                    return int(child.pid)
        return 0

    def command(self) -> list[str]:
        folder = self.model_repository.parent
        return [
            *self._inside,
            *(sys.executable, "-m", "rsrv.cli.main", "serve", str(folder / "bundles"), "--devices", "cpu"),
            *("--config", str(folder / "settings.yaml"), "--directory", str(folder / "serve"), "--log", "-"),
            *("--tritonserver", str(LAUNCHER), "--http-port", str(self.http_port)),
            *("--grpc-port", str(self.grpc_port), "--metrics-port", str(self.metrics_port)),
        ]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}


class House:
    """A server on the chaos bundles. Tests may kill it and start it again."""

    def __init__(self, folder: Path, kind: Kind = "plain") -> None:
        """Prepare the repository. With the kind "clock", `set_clock` sets the time of day of the runtime and its children."""
        self._folder = folder
        self._kind = kind
        self._devices = "[cpu, cpu]" if kind == "devices" else "all"
        self._server = _SupervisedServer if kind == "serve" else _HousedServer
        self.bundles = folder / "bundles"
        self.gen = folder / "gen"
        self._config = folder / "settings.yaml"
        self._disk = folder / "cache"
        self._clock = folder / "clock"
        self._ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
        self._unshare = _unshare()
        self._env = {
            "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(self._disk),
        }
        if kind == "clock":
            self._env["RSRV_RUNTIME_PYTHON"] = str(self._clocked_python())
        self._stack = ExitStack()
        self._running: RunningTriton | None = None
        self._starts = 0
        self._prepare()

    def _clocked_python(self) -> Path:
        """Return the path of an interpreter whose time of day `set_clock` sets. Raises NotPossible."""
        script = self._folder / "python"
        script.write_text(
            f"#!/bin/sh\nexport LD_PRELOAD={clock_library()} DONT_FAKE_MONOTONIC=1\n"
            # Processes notice a change of the file within a second.
            f"export FAKETIME_TIMESTAMP_FILE={self._clock} FAKETIME_CACHE_DURATION=1\n"
            f'exec {sys.executable} "$@"\n'
        )
        script.chmod(0o700)
        return script

    def _prepare(self) -> None:
        self._disk.mkdir(mode=0o700)
        self.set_clock(0)
        crowded = self._kind == "crowded"
        self._made = bundles.ensure(many=crowded)
        served = {"crowded": CROWD, "catalogue": BESIDE}.get(self._kind, SERVED)
        for name in (*served, *INTERNAL):
            shutil.copytree(self._made[name], self.bundles / name)
        if self._kind == "catalogue":
            for number in range(ITEMS + SPARE_ITEMS):
                bundles.put_item(self.bundles, number)
        self.configure(LAZY if self._kind == "catalogue" else _SETTINGS)
        self._generate(self.bundles)

    def configure(self, settings: str) -> None:
        """Write rsrv.yaml."""
        text = settings.format(
            weights=WEIGHT_BYTES,
            watchdog=WATCHDOG,
            hook=HOOK_TIMEOUT,
            stub=STUB_BYTES,
            bundles=self.bundles,
            devices=self._devices,
        )
        fresh = self._config.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._config)

    def _generate(self, bundles: Path) -> None:
        """Generate models into the repository."""
        if os.environ.get("RSRV_STUB__FRONT") == "native":
            native_front.ensure()
        options = ["-o", str(self.gen), "--config", str(self._config)]
        with contextlib.redirect_stdout(None):
            status = rsrv_gen.main([str(bundles), *options])
        assert status == 0, "rsrv-gen failed"

    # --- the server ---------------------------------------------------------------------------------------

    @property
    def server(self) -> RunningTriton:
        assert self._running is not None, "the server was not started"
        return self._running

    def start(self) -> None:
        self._starts += 1
        shm = _CATALOGUE_SHM if self._kind == "catalogue" else _SHM
        mounts = _MOUNTS.format(shm=shm, disk=_DISK)
        inside = [*self._unshare, "sh", "-c", mounts, str(self._disk)] if self._unshare else []
        self._running = self._stack.enter_context(
            running_triton(
                self.gen,
                self._folder / f"server{self._starts}.log",
                extra_args=EXPLICIT,
                env=self._env,
                spare=True,
                expected=None,
                make=partial(self._server, inside=inside, exit_timeout_s=3, **self._ports),
            )
        )

    def stop(self) -> None:
        if self._running is not None and self._running.server.process.poll() is None:
            # After the death of a stub, an orderly end of Triton takes its whole exit timeout.
            self._running.server.kill()
        self._running = None
        self._stack.close()

    def revive(self) -> None:
        """Start the server again after its death."""
        self.stop()
        self.start()

    @property
    def alive(self) -> bool:
        return self.server.server.process.poll() is None

    # --- tools of faults -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = read_status(self.server.pid, timeout=2)
        return status

    def model(self, name: str) -> Mapping[str, Any]:
        """Return the runtime's status of a model, or an empty mapping if there is none."""
        try:
            status: Mapping[str, Any] = self.status()["models"].get(name, {})
        except (OSError, Closed):
            return {}
        return status

    def runtime_pid(self, device: int = 0) -> int:
        pid = wait_until(lambda: self._runtime_pid(device), what="a runtime")
        assert pid is not None
        return pid

    def _runtime_pid(self, device: int) -> int | None:
        try:
            return int(read_status(self.server.pid, str(device), timeout=2)["pid"])
        except (OSError, Closed):
            return None

    def wait_settled(self) -> None:
        """Wait until the runtime and its control process have completed their start."""
        wait_until(lambda: self.status()["uptime_s"] > _NEW_S, 2 * _NEW_S, what="the runtime not to be new")

    def spare_pid(self) -> int | None:
        """Return the pid of the spare process, or None if there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.runtime_pid()).children():
                if "--listener-fd" in child.cmdline():
                    return int(child.pid)
        return None

    def runtime_folder(self) -> Path:
        return runtime_directory(self.server.pid, "0")

    def inside(self, path: Path | str) -> Path:
        """Return the path outside of the server's mounts for a path inside them."""
        return Path(f"/proc/{self.server.pid}/root{path}") if self._unshare else Path(path)

    def control_socket(self) -> Path:
        """Return the path of the control process's socket."""
        return self.runtime_folder() / CONTROL_SOCKET

    def control_pid(self) -> int | None:
        """Return the pid of the control process, or None if there is none."""
        arguments = ["-m", "rsrv.control", "--server-pid", str(self.server.pid)]
        for process in psutil.process_iter(["cmdline"]):
            if set(arguments) <= set(process.info["cmdline"] or []):
                return int(process.pid)
        return None

    @property
    def shm(self) -> Path:
        self._need_mounts("/dev/shm")
        return self.inside("/dev/shm")

    @property
    def disk(self) -> Path:
        """Return the folder of compiled models."""
        return self.inside(self._disk)

    @property
    def small_disk(self) -> Path:
        """Return the folder of compiled models if its disk is small enough to be filled. Raises NotPossible."""
        self._need_mounts("the compilation cache")
        return self.disk

    def _need_mounts(self, what: str) -> None:
        if not self._unshare:
            raise NotPossible(f"{what} cannot be filled: no mount namespaces here, for root nor for users")

    def rsrv(self, *arguments: str) -> None:
        """Run a command of `rsrv` for the server. The command must succeed."""
        command = [
            sys.executable,
            "-m",
            "rsrv.cli.main",
            *arguments,
            "--server",
            f"unix:{self.control_socket()}",
        ]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert process.returncode == 0, f"rsrv {' '.join(arguments)}: {process.stdout}{process.stderr}"

    def set_clock(self, seconds: float) -> None:
        """Set the difference of the runtime's clock from the real time. It applies within a second."""
        fresh = self._clock.with_suffix(".new")
        fresh.write_text(f"{seconds:+.0f}\n")
        fresh.rename(self._clock)

    def saw_days(self) -> bool:
        """Return True if the log has lines with different dates."""
        days = {line[:10] for line in self.server.log_text().splitlines() if line[4:5] == line[7:8] == "-"}
        return len(days) > 1

    def log_from(self, mark: int) -> str:
        """Return the log from the position that `log_mark` returned."""
        return self.server.log_text()[mark:]

    def log_mark(self) -> int:
        return len(self.server.log_text())

    def wait_log(self, text: str, mark: int, timeout: float = 30) -> None:
        wait_until(lambda: text in self.log_from(mark), timeout, what=f"{text!r} in the log")

    def add(self, model: str) -> None:
        """Copy a bundle into the folder of bundles, and generate its model."""
        if not (self.bundles / model).exists():
            shutil.copytree(self._made[model], self.bundles / model)
        self._generate(self.bundles / model)

    def remove(self, model: str) -> None:
        """Unload and remove a model. Return when the runtime has released it, so that its next load has to build it."""
        shutil.rmtree(self.bundles / model, ignore_errors=True)
        if self.alive and self.ready(model):
            self.unload_model(model)
            # Triton answers before the stub has ended. Until the stub has ended, the runtime still has the model.
            wait_until(lambda: self._lacks(model), what=f"the runtime to let go of {model}")
        shutil.rmtree(self.gen / model, ignore_errors=True)

    def _lacks(self, model: str) -> bool:
        """Return True if a runtime answers and does not have the model."""
        try:
            return model not in self.status()["models"]
        except (OSError, Closed):
            return False

    def ready(self, model: str) -> bool:
        return bool(self.server.grpc.is_model_ready(model))

    def load_model(self, model: str) -> str:
        """Let Triton load a model. Return the reason of a failure, or an empty text."""
        try:
            self.server.grpc.load_model(model, headers=self._operator_headers(), client_timeout=60)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            return " ".join(str(error).partition("\nAt:")[0].split())
        return ""

    def _operator_headers(self) -> dict[str, str]:
        """Return the headers that calls of the repository API need over gRPC, as a mapping."""
        return dict(restriction(*header) for header in self.server.server.operator_headers.items())

    def unload_model(self, model: str) -> None:
        self.server.grpc.unload_model(model, headers=self._operator_headers())
        wait_until(lambda: not self.ready(model), what=f"{model} to be unloaded")

    def reload(self, model: str) -> None:
        """Unload and load a model, which also replaces a dead stub. A failed load fails the test."""
        self.unload_model(model)
        error = self.load_model(model)
        assert not error, error

    def strike(
        self, load: Load, model: str, question: Question, *, wait: bool = False, patience: float = PATIENCE
    ) -> float:
        """Send a request in addition to the load. Its record is added to the load's records. Return the time of sending."""
        sent = time.monotonic()

        def send() -> None:
            connection = Connection("grpc", self.server.server.grpc_url, patience)
            outcome, detail = connection.ask(model, question)
            connection.close()
            load.note(Record(model, STRIKE, sent, time.monotonic(), outcome, detail[:200]))

        thread = threading.Thread(target=send)
        thread.start()
        load.beside(thread)
        if wait:
            thread.join()
        return sent


@contextmanager
def houses() -> Iterator[Callable[[Kind], House]]:
    """Yield a function that returns the running server of a kind. All servers end with the block."""
    base = Path(tempfile.mkdtemp(prefix="rsrv-chaos-"))
    built: dict[Kind, House] = {}

    def get(kind: Kind) -> House:
        if kind not in built:
            folder = base / f"house{len(built)}"
            folder.mkdir()
            made = House(folder, kind)
            made.start()
            built[kind] = made
        return built[kind]

    with _environment("RSRV_RUNTIME_DIR", str(base / "run")):
        try:
            yield get
        finally:
            for made in built.values():
                made.stop()
            shutil.rmtree(base, ignore_errors=True)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable during the block: for the servers, and for this process, which reads it as they do."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def fill(folder: Path) -> Callable[[], None]:
    """Fill a file system to its last byte. Return a function that frees the space."""
    file = folder / "filling"
    with file.open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        for size in (2**20, 2**12):
            with contextlib.suppress(OSError):
                while filling.write(b"\0" * size):
                    pass
    return file.unlink
