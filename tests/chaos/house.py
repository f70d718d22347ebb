"""A server with mounts of its own: a small /dev/shm and a small disk for compiled models, which can be filled."""

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

#: A server; one with two devices; one whose runtime reads a clock that can be set; one under `rsrv serve`; one with twenty
#: models that clients call; one with a catalogue of lazy models.
Kind = Literal["plain", "devices", "clock", "serve", "crowded", "catalogue"]
#: The models that are served from the start.
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
#: The models of the server with twenty.
CROWD = ("exact", "only_rows", "elastic", "sudden", "fragile", "moody", "chain", *LIGHT_FACTORS)
#: The models beside a catalogue.
BESIDE = ("exact", "only_rows", "chain")
#: The callees of `chain`.
INTERNAL = ("double", "triple")
#: MiB of /dev/shm and of the disk for compiled models.
_SHM, _DISK = 192, 64
#: MiB of /dev/shm for a catalogue, where each stub of Python has one.
_CATALOGUE_SHM = 512
#: Seconds in which a runtime and its control process start.
_NEW_S = 10.0
#: Seconds after which a hook, or an execution, hangs.
HOOK_TIMEOUT, WATCHDOG = 3.0, 3.0
#: Bytes that a stub may have, and that weights may take on the device: one heavy model at a time.
STUB_BYTES, WEIGHT_BYTES = 2**30, 200 * 2**20
_OF_ALL = """
stub: {{hook_timeout_s: {hook}, memory_limit_bytes: {stub}}}
lifecycle: {{bundles: [{bundles}], poll_s: 0.2}}
"""
_SETTINGS = (
    "runtime: {{weight_budget_bytes: {weights}, watchdog_s: {watchdog}, devices: {devices}}}" + _OF_ALL
)
#: Settings of lazy models: 40 items fit on the device, and 80 in host memory.
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
#: The first actions of the house's shell: $0 is the disk's path, the rest the server's command.
_MOUNTS = (
    "mount -t tmpfs -o size={shm}m,mode=1777 tmpfs /dev/shm && "
    'mount -t tmpfs -o size={disk}m,mode=0700 tmpfs "$0" && exec "$@"'
)


class NotPossible(Exception):
    """A fault that this machine does not allow; the message has the reason."""


def _unshare() -> list[str]:
    """Return the command that gives a server mounts of its own; empty if it is not allowed."""
    unshare = shutil.which("unshare")
    for flags in ("-m", "-rm"):
        if unshare is not None:
            probe = [unshare, flags, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return [unshare, flags]
    return []


def clock_library() -> Path:
    """Return the library that gives processes a settable clock (PyPI's libfaketime). Raises NotPossible."""
    found = find_spec("libfaketime")
    if found is None or found.origin is None:
        raise NotPossible("the package libfaketime is not installed")
    return Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


class _HousedServer(TritonServer):
    """A server; `inside` is a command that runs the rest of its arguments."""

    def __init__(self, *arguments: Any, inside: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._inside = list(inside)

    def command(self) -> list[str]:
        return [*self._inside, *super().command()]


class _SupervisedServer(_HousedServer):
    """An `rsrv serve` in place of the server, on its ports."""

    @property
    def operator_headers(self) -> dict[str, str]:
        """The key that `rsrv serve` has made."""
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
    """A server on the chaos bundles, which may be killed and started again."""

    def __init__(self, folder: Path, kind: Kind = "plain") -> None:
        """With a clock, `set_clock` sets the time of day of the runtime and its children."""
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
        """Return an interpreter whose wall clock `set_clock` sets. Raises NotPossible."""
        script = self._folder / "python"
        script.write_text(
            f"#!/bin/sh\nexport LD_PRELOAD={clock_library()} DONT_FAKE_MONOTONIC=1\n"
            # Its readers notice a change of the file within a second.
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
        """Add models to the repository."""
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
            # After the death of a stub, Triton waits for its longest time before it ends.
            self._running.server.kill()
        self._running = None
        self._stack.close()

    def revive(self) -> None:
        """Start the dead server again."""
        self.stop()
        self.start()

    @property
    def alive(self) -> bool:
        return self.server.server.process.poll() is None

    # --- tools of faults -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = read_status(self.server.pid, timeout=2)
        return found

    def model(self, name: str) -> Mapping[str, Any]:
        """Return the runtime's status of a model; empty if there is none."""
        try:
            found: Mapping[str, Any] = self.status()["models"].get(name, {})
        except (OSError, Closed):
            return {}
        return found

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
        """Wait until the runtime, and the control process that it started, are past their own start."""
        wait_until(lambda: self.status()["uptime_s"] > _NEW_S, 2 * _NEW_S, what="the runtime not to be new")

    def spare_pid(self) -> int | None:
        """Return the pid of the process that takes the runtime's place, if there is one."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.runtime_pid()).children():
                if "--listener-fd" in child.cmdline():
                    return int(child.pid)
        return None

    def runtime_folder(self) -> Path:
        return runtime_directory(self.server.pid, "0")

    def inside(self, path: Path | str) -> Path:
        """Return the path outside of the server's path."""
        return Path(f"/proc/{self.server.pid}/root{path}") if self._unshare else Path(path)

    def control_socket(self) -> Path:
        """Return the path of the control process's socket."""
        return self.runtime_folder() / CONTROL_SOCKET

    def control_pid(self) -> int | None:
        """Return the pid of the control process, if there is one."""
        wanted = ["-m", "rsrv.control", "--server-pid", str(self.server.pid)]
        for process in psutil.process_iter(["cmdline"]):
            if set(wanted) <= set(process.info["cmdline"] or []):
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
        """Return the same, if it is small enough to be filled. Raises NotPossible."""
        self._need_mounts("the compilation cache")
        return self.disk

    def _need_mounts(self, what: str) -> None:
        if not self._unshare:
            raise NotPossible(f"{what} cannot be filled: no mount namespaces here, for root nor for users")

    def rsrv(self, *arguments: str) -> None:
        """Run a command of `rsrv` on the server."""
        command = [
            sys.executable,
            "-m",
            "rsrv.cli.main",
            *arguments,
            "--server",
            f"unix:{self.control_socket()}",
        ]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, f"rsrv {' '.join(arguments)}: {ended.stdout}{ended.stderr}"

    def set_clock(self, seconds: float) -> None:
        """Set the runtime's wall clock so far from the real one, from the next second on."""
        fresh = self._clock.with_suffix(".new")
        fresh.write_text(f"{seconds:+.0f}\n")
        fresh.rename(self._clock)

    def saw_days(self) -> bool:
        """Return whether the log has lines of several days."""
        days = {line[:10] for line in self.server.log_text().splitlines() if line[4:5] == line[7:8] == "-"}
        return len(days) > 1

    def log_from(self, mark: int) -> str:
        """Return the log since `log_mark`."""
        return self.server.log_text()[mark:]

    def log_mark(self) -> int:
        return len(self.server.log_text())

    def wait_log(self, text: str, mark: int, timeout: float = 30) -> None:
        wait_until(lambda: text in self.log_from(mark), timeout, what=f"{text!r} in the log")

    def add(self, model: str) -> None:
        """Put a bundle among the others, and make a model of it."""
        if not (self.bundles / model).exists():
            shutil.copytree(self._made[model], self.bundles / model)
        self._generate(self.bundles / model)

    def remove(self, model: str) -> None:
        """Unload a model and remove it; return when the runtime has let go of it, so that its next load is a first one."""
        shutil.rmtree(self.bundles / model, ignore_errors=True)
        if self.alive and self.ready(model):
            self.unload_model(model)
            # Triton ends the stub later than it answers: until then, the model's next stub would find it warm.
            wait_until(lambda: self._lacks(model), what=f"the runtime to let go of {model}")
        shutil.rmtree(self.gen / model, ignore_errors=True)

    def _lacks(self, model: str) -> bool:
        """Return whether a runtime answers that does not have the model."""
        try:
            return model not in self.status()["models"]
        except (OSError, Closed):
            return False

    def ready(self, model: str) -> bool:
        return bool(self.server.grpc.is_model_ready(model))

    def load_model(self, model: str) -> str:
        """Let Triton load it; return the reason of a failure, or ""."""
        try:
            self.server.grpc.load_model(model, headers=self._operator_headers(), client_timeout=60)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            return " ".join(str(error).partition("\nAt:")[0].split())
        return ""

    def _operator_headers(self) -> dict[str, str]:
        """Return the headers that calls of the repository API need over gRPC."""
        return dict(restriction(*one) for one in self.server.server.operator_headers.items())

    def unload_model(self, model: str) -> None:
        self.server.grpc.unload_model(model, headers=self._operator_headers())
        wait_until(lambda: not self.ready(model), what=f"{model} to be unloaded")

    def reload(self, model: str) -> None:
        """Unload and load it, by which a model with a dead stub comes back, too. Fails the test if it does not."""
        self.unload_model(model)
        said = self.load_model(model)
        assert not said, said

    def strike(
        self, load: Load, model: str, question: Question, *, wait: bool = False, patience: float = PATIENCE
    ) -> float:
        """Send a request beside the load, to be judged with it; return the time."""
        sent = time.monotonic()

        def send() -> None:
            connection = Connection("grpc", self.server.server.grpc_url, patience)
            outcome, said = connection.ask(model, question)
            connection.close()
            load.note(Record(model, STRIKE, sent, time.monotonic(), outcome, said[:200]))

        thread = threading.Thread(target=send)
        thread.start()
        load.beside(thread)
        if wait:
            thread.join()
        return sent


@contextmanager
def houses() -> Iterator[Callable[[Kind], House]]:
    """Yield a function from a kind to its house, with a server that serves; all end with the block."""
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
    """Set a variable, here and for the server: its runtime's place has to be known here, too."""
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
    """Fill a file system to its last byte; return a function that frees it."""
    file = folder / "filling"
    with file.open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        for size in (2**20, 2**12):
            with contextlib.suppress(OSError):
                while filling.write(b"\0" * size):
                    pass
    return file.unlink
