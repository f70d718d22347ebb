"""The course of `rsrv serve`: it reads the settings, makes the repository, and runs the supervised server."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from rsrv.address import Address
from rsrv.control.find import running
from rsrv.control.triton import Triton
from rsrv.serve import repositories, view
from rsrv.serve.child_probes import bind_error, wait_for_hang
from rsrv.serve.openai_process import keep_openai
from rsrv.serve.orderly_end import end_in_order
from rsrv.serve.plan import REPOSITORY, ServeError, ServerPlan, plan
from rsrv.serve.supervise import IDLE_S, RestartReason, StopSignals, SupervisorHooks, supervise
from rsrv.settings import RuntimeSection, Settings, SettingsError, dump_settings, read_settings
from rsrv.settings_changes import FILE_CHECK_S, FileMonitor, refusal_file
from rsrv.settings_fleet import GatewaySection
from rsrv.triton_command_line import ask_flags
from rsrv.wire.paths import RuntimeDirectoryError, base_directory, hold, make_private, write_whole
from rsrv_gen.known import Known
from rsrv_gen.sources import SETTINGS_FILE, Sources, read_sources, unknown_models, unserved_models
from rsrv_gen.write import carried

log = logging.getLogger(__name__)

#: A server that accepts connections but has answered nothing for this many seconds is killed and restarted.
HANG_S = 60.0
#: After SIGTERM, clients with open connections are served for at most this many seconds.
_LINGER_S = 5.0
#: Seconds that Triton needs to send its last traces.
_TRACES_S = 8.0


@dataclass(frozen=True, slots=True)
class Output:
    """Destination of the log and of the lines for the operator."""

    #: Writes whole lines of the log.
    put: Callable[[bytes], None]
    #: Shows a line.
    show: Callable[[view.Line], None]


class ErrorLines:
    """Passes the lines of a server's log on, and remembers the last error."""

    #: Matches an error line of Triton, of rsrv as text, or of rsrv as JSON. Every Triton without a GPU logs that its
    #: CudaDriverHelper has not been initialized.
    _ERROR = re.compile(
        rb"^(?:E\d{4} (?!.*CudaDriverHelper has not been init)|\d{4}-\d\d-\d\d [\d:,]+ [EC] |\{.*\"level\": ?\"(?:error|critical)\").*$",
        re.MULTILINE,
    )

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put
        self.last = ""

    def put(self, lines: bytes) -> None:
        """Pass whole lines on."""
        self._put(lines)
        if errors := self._ERROR.findall(lines):
            self.last = errors[-1].decode(errors="replace")


def read(options: Namespace) -> Settings:
    """Return the settings of the file, the environment and the command line. Raises ServeError, SettingsError."""
    settings = read_settings(options.config)
    gateway, usual = settings.gateway, GatewaySection()
    if changed := [
        key for key in GatewaySection.model_fields if getattr(gateway, key) != getattr(usual, key)
    ]:
        raise ServeError(
            f"gateway.{changed[0]}: `rsrv serve` starts no gateway. Its ports are options (--http-port, --grpc-port, "
            "--metrics-port); for TLS, tokens or several machines, start rsrv-gateway with a file of its own"
        )
    if options.devices is not None:
        try:
            runtime = RuntimeSection(**{**settings.runtime.model_dump(), "devices": options.devices})
        except ValidationError as error:
            raise ServeError(f"--devices: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        fields = settings.runtime.model_fields_set | {"devices"}
        runtime = RuntimeSection.model_construct(fields, **dict(runtime))
        settings = settings.model_copy(update={"runtime": runtime})
    return repositories.watched(settings, options.bundles)


def repository(options: Namespace) -> Path:
    """Return the model repository of a server with these options."""
    return Path(os.path.abspath(options.directory.expanduser())) / REPOSITORY


def make_plan(options: Namespace, settings: Settings, sources: Sources) -> ServerPlan:
    """Return the plan for the options of the command line. Raises ServeError."""
    return plan(
        settings,
        repository(options).parent,
        options.tritonserver,
        links=base_directory(),
        ports={"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port},
        host=options.host,
        client_shm=options.client_shm,
        arguments=[*_client_shm_flags(options), *options.arguments],
        drain_s=options.drain,
        variables={**_thread_counts(), **_runtime_python()},
        calling=repositories.call_through_triton(sources, settings),
        machine=socket.gethostname(),
    )


def _client_shm_flags(options: Namespace) -> list[str]:
    """Return the flag that lets clients register shared memory, in releases of Triton that require one."""
    if not options.client_shm:
        return []
    try:
        flags = ask_flags(options.tritonserver)
    except OSError as error:
        raise ServeError(f"--client-shm: {error}") from None
    return ["--allow-client-shm=true"] if "allow-client-shm" in flags else []


def run(options: Namespace, settings: Settings, planned: ServerPlan, known: Known, output: Output) -> int:
    """Serve until a signal, and return the exit status. Raises OSError."""
    broken = _generate(planned, settings, options.bundles, known)
    if options.compile_for:
        repositories.compile_for(options.compile_for, planned.repository)
    return asyncio.run(_serve(planned, settings, options, broken, output))


#: Variables that limit the threads of libraries, which would otherwise start a thread for each core of the machine.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")


def _runtime_python() -> dict[str, str]:
    """Return the variable that makes the runtime use this Python, unless the environment names another one."""
    return {} if os.environ.get("RSRV_RUNTIME_PYTHON") else {"RSRV_RUNTIME_PYTHON": sys.executable}


def _thread_counts() -> dict[str, str]:
    """Return variables with thread counts for a container with a CPU limit. Variables that are already set are left out."""
    limit = cpu_limit()
    return {} if limit is None else {name: str(limit) for name in _THREADS if name not in os.environ}


def cpu_limit(root: Path = Path("/")) -> int | None:
    """Return the container's CPU limit in whole cores, or None if no limit is below the number of usable cores.

    Inside a container, the root of /sys/fs/cgroup is the container's own control group.
    """
    groups = root / "sys/fs/cgroup"
    try:
        quota, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((groups / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    if not quota.strip().isdecimal():
        return None  # The quota is "max" or -1.
    cores = int(quota) / int(period)
    return max(1, int(cores)) if cores < len(os.sched_getaffinity(0)) else None


def check_free(planned: ServerPlan) -> None:
    """Raise ServeError if another process uses a port of the server. Tritonserver would fail only after loading its models."""
    for kind, address in planned.ports.items():
        if taken := bind_error(address):
            holder = next(
                (f", by rsrv's server {server}" for server in running() if address.port in server.ports), ""
            )
            raise ServeError(
                f"{address} cannot be used for {kind}: {taken}{holder}. End the process that uses it, or choose another port "
                f"(rsrv serve --{kind}-port)"
            )


def live_page(page: Address | None) -> str | None:
    """Return the URL of the live page, or None without a page.

    If another process uses the address, return a text that says why there is no page.
    """
    if page is None:
        return None
    url = f"http://{page}/"
    if taken := bind_error(page):
        setting = "metrics.listen in rsrv.yaml (--config), or RSRV_METRICS__LISTEN,"
        log.warning("%s is not served: %s. Set %s to a free port, or to null", url, taken, setting)
        return f"none: another program uses {url}"
    return url


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Lock the directory for this process. Raises ServeError, OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = hold(directory)
    if lock is None:
        raise ServeError(
            f"another server uses {directory}: end that server, or name another folder with --directory"
        )
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def linked(planned: ServerPlan) -> Iterator[None]:
    """Make the plan's link, and remove it when the block ends. Raises ServeError, OSError."""
    if planned.link is None:
        yield
        return
    try:
        make_private(planned.link.parent)
    except RuntimeDirectoryError as error:
        raise ServeError(str(error)) from None
    # A killed server may have left the link. It can be replaced, because this server has the lock of the folder.
    planned.link.unlink(missing_ok=True)
    planned.link.symlink_to(planned.repository.parent)
    try:
        yield
    finally:
        planned.link.unlink(missing_ok=True)


def _generate(
    planned: ServerPlan, settings: Settings, bundles: Sequence[Path], known: Known | None = None
) -> dict[str, str]:
    """Write the repository. Return the names of broken bundles, each with the reason."""
    sources = read_sources(bundles, known)
    failed = repositories.generate(planned.repository, sources, settings, known, planned.argv[0])
    problems = repositories.complaints(sources, planned.repository)
    problems += unknown_models(settings, {*sources.good, *sources.broken})
    for problem in (*problems, *failed):
        log.error("%s", problem)
    for line in unserved_models(sources):
        log.warning("%s", line)
    if cost := repositories.cost_of_missing_library(settings):
        log.warning("%s", cost)
    log.info("%d models in %s", len(sources.good), planned.repository)
    return {name: "; ".join(lines) for name, lines in sources.broken.items()}


async def _serve(
    planned: ServerPlan, settings: Settings, options: Namespace, broken: dict[str, str], output: Output
) -> int:
    loop = asyncio.get_running_loop()
    orders = StopSignals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, orders.once_more)
    tasks: dict[str, asyncio.Future[None]] = {}
    refusal_file(planned.repository / SETTINGS_FILE).unlink(missing_ok=True)

    log_lines = ErrorLines(output.put)

    async def show_changes(pid: int) -> None:
        async for line in view.follow(planned, pid, broken, lambda: log_lines.last):
            output.show(line)

    pids: list[int] = []

    def started(pid: int) -> None:
        log.info("tritonserver is process %d", pid)
        pids[:] = [pid]
        if "changes" in tasks:
            tasks["changes"].cancel()
        tasks["changes"] = asyncio.ensure_future(show_changes(pid))

    async def say_stopping() -> None:
        await orders.end.wait()
        tasks["changes"].cancel()
        output.show(
            view.Line("Stopping: requests in flight are answered first. Ctrl-C again stops at once.", "note")
        )

    def openai_started(listen: str) -> None:
        output.show(view.Line(f"OpenAI's clients: http://{listen}/v1", "note"))

    tasks["stopping"] = asyncio.ensure_future(say_stopping())
    tasks["openai"] = asyncio.ensure_future(
        keep_openai(planned, settings, log_lines.put, openai_started, orders.end)
    )
    first = None
    if not repositories.model_folders(planned.repository):
        first = tasks["first"] = asyncio.ensure_future(_first_bundles(planned, settings, options.bundles))
    if options.config is not None:
        tasks["settings"] = asyncio.ensure_future(_follow_settings(options, planned.repository))
    try:
        hooks = SupervisorHooks(
            log_lines.put,
            started,
            partial(_reason_to_restart, planned.ports["http"], first),
            unload=partial(_unload, planned, pids),
            idle_s=_idle_s(planned),
        )
        status = await supervise(planned, hooks, orders)
    finally:
        for task in tasks.values():
            task.cancel()
        refusal_file(planned.repository / SETTINGS_FILE).unlink(missing_ok=True)
    log.info("all processes have ended")
    return status


async def _unload(planned: ServerPlan, pids: Sequence[int], terminate: Callable[[], None]) -> bool:
    """Unload the models of the running server, and end the server with `terminate`.

    Return False if the models cannot be unloaded.
    """
    callers = {
        name for name in repositories.model_folders(planned.repository) if carried(planned.repository / name)
    }
    async with Triton.of(pids[-1]) as triton:
        if triton.trouble or triton.mode != "explicit":
            terminate()
            return False
        return await end_in_order(triton, terminate, callers, min(_LINGER_S, planned.drain_s / 2))


def _idle_s(planned: ServerPlan) -> float:
    """Return the seconds that a server may take to end after the unload of its models. Traces take longer."""
    return _TRACES_S if any(word.startswith("--trace-config") for word in planned.argv) else IDLE_S


async def _follow_settings(options: Namespace, repository: Path) -> None:
    """Write the repository's settings, which the server reads, again whenever the operator's file changes."""
    monitor = FileMonitor(options.config)
    while True:
        await asyncio.sleep(FILE_CHECK_S)
        if await asyncio.to_thread(monitor.changed):
            take_settings(options, repository)


def take_settings(options: Namespace, repository: Path) -> None:
    """Write the repository's settings again, from the current content of the operator's file."""
    file = repository / SETTINGS_FILE
    try:
        write_whole(file, dump_settings(read(options)))
    except (ServeError, SettingsError, OSError) as error:
        log.error("%s has changed, but the new file is not used: %s", options.config, error)
        with suppress(OSError):
            write_whole(refusal_file(file), str(error))
    else:
        with suppress(OSError):
            refusal_file(file).unlink(missing_ok=True)


async def _first_bundles(planned: ServerPlan, settings: Settings, bundles: Sequence[Path]) -> None:
    """Wait until the repository has models.

    Before that, there is no control process that could watch for bundles, because a model's start also starts that process.
    """
    pause = settings.lifecycle.slow_poll_s
    log.info("there is nothing to serve yet: looking for the first bundle every %g s", pause)
    while not repositories.model_folders(planned.repository):
        await asyncio.sleep(pause)
        if read_sources(bundles).good:
            _generate(planned, settings, bundles)


async def _reason_to_restart(http: Address, first: asyncio.Future[None] | None) -> RestartReason:
    """Wait for a reason to restart the server: it hangs, or `first` is done."""
    hang = asyncio.ensure_future(wait_for_hang(http, HANG_S))
    try:
        coming = [hang] if first is None or first.done() else [hang, first]
        done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hang.cancel()
    for task in done:
        task.result()
    if hang in done:
        return RestartReason(f"has not answered for {HANG_S:g} s")
    # The server is killed, because stopping it might use up its whole drain time, although it has nothing to drain.
    return RestartReason("has its first models now", works=True)
