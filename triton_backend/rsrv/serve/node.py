"""Life of a node: its settings, devices, repositories and processes."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rsrv
from rsrv import logs
from rsrv.address import Address, parse_address
from rsrv.control.find import running
from rsrv.serve import cores, nvml, repositories
from rsrv.serve.child_probes import log_progress, wait_for_hang
from rsrv.serve.child_process import LinePrefixer
from rsrv.serve.devices import choose
from rsrv.serve.errors import NodeError
from rsrv.serve.plan import WORKERS_FILE, ChildSpec, NodePlan, NodeWorker, describe, plan
from rsrv.serve.supervise import RestartReason, Restarts, StopSignals, SupervisorHooks, supervise
from rsrv.serve.workers_file import WorkersFile, write
from rsrv.settings import Settings, SettingsError, read_settings
from rsrv.text import os_error
from rsrv_gen.sources import unknown_models

log = logging.getLogger("rsrv.node")


@dataclass(frozen=True, slots=True)
class Serving:
    """Models and addresses of a node, as known before the servers start."""

    settings: Settings
    #: addresses of live pages, or reasons why there is none
    pages: tuple[str, ...]
    #: names of bundles that cannot be served, each with the reason
    broken: Mapping[str, str]
    #: the gateway's admin port; None: there is no gateway, or it has none
    gateway: Address | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """Destination of the logs of a node and its children."""

    #: writes whole lines of the log
    put: Callable[[bytes], None]
    #: follows a worker from its start, given its pid; cancelled at its end
    follow: Callable[[NodeWorker, int, Serving], Coroutine[Any, Any, None]]
    #: prints a line for the operator
    say: Callable[[str], None]


def run(options: Namespace, output: Output | None = None) -> int:
    """Run the command and return the exit status. Without `output`, the log goes to standard output."""
    name = "rsrv-node" if output is None else "rsrv serve"
    output = output or Output(_put, lambda worker, pid, _: log_progress(worker, pid), lambda line: None)
    try:
        settings = _settings(options)
        program = options.tritonserver or "tritonserver"
        planned = _plan(settings, program, options.bundles, or_cpu=getattr(options, "or_cpu", False))
        if options.dry_run:
            sys.stdout.write(describe(planned))
            return 0
        _log_to_output(settings.logs.format, output.put)
        devices = ", ".join(dict.fromkeys(worker.device.name for worker in planned.workers))
        output.say(f"rsrv {rsrv.__version__}: starting {program} on {devices}")
        with alone(settings.node.directory):
            repositories.check(options.bundles, settings)
            _check_free(planned, settings, name)
            for file, text in planned.files.items():
                write(file, text)
            broken = _generate(planned, settings, options.bundles)
            if options.compile_for:
                repositories.compile_for(options.compile_for, [one.repository for one in planned.workers])
            pulse = None if planned.gateway is None else planned.gateway.pulse
            serving = Serving(
                settings, _free_pages(planned.pages), broken, None if pulse is None else pulse[0]
            )
            return asyncio.run(_serve(planned, serving, options.bundles, output))
    except (NodeError, SettingsError, OSError) as error:
        print(f"{name}: {os_error(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1


def _settings(options: Namespace) -> Settings:
    """Return the settings of the file and the environment; the command line takes precedence."""
    settings = read_settings(options.config)
    changes: dict[str, object] = {} if options.directory is None else {"directory": options.directory}
    if options.gpus is not None:
        changes |= {"gpus": options.gpus, "cpu_workers": 0}
    if options.cpu_workers is not None:
        changes |= {"gpus": None, "cpu_workers": options.cpu_workers}
    node = settings.node.model_copy(update=changes)
    node = node.model_copy(update={"directory": Path(os.path.abspath(node.directory.expanduser()))})
    ports = {"http": options.http_port, "grpc": options.grpc_port, "admin": options.metrics_port}
    gateway = settings.gateway.model_copy(
        update={key: f"0.0.0.0:{port}" for key, port in ports.items() if port is not None}
    )
    settings = settings.model_copy(update={"node": node, "gateway": gateway})
    return repositories.watched(settings, options.bundles)


def _plan(settings: Settings, program: str, bundles: Sequence[Path], *, or_cpu: bool) -> NodePlan:
    node = settings.node
    if or_cpu and not node.gpus and not node.cpu_workers and not nvml.look().gpus:
        node = node.model_copy(update={"cpu_workers": 1})
        settings = settings.model_copy(update={"node": node})
    devices = choose(node.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), nvml.look, node.cpu_workers)
    shares = cores.share(cores.look(), [device.near for device in devices])
    tritonserver = shutil.which(program)
    if tritonserver is None:
        raise NodeError(
            f"--tritonserver: there is no program {program}; name its path, or run this where Triton is"
        )
    return plan(
        settings,
        devices,
        shares,
        os.environ,
        tritonserver=os.path.abspath(tritonserver),
        python=sys.executable,
        calling=repositories.call_through_triton(bundles, settings),
    )


def _check_free(planned: NodePlan, settings: Settings, command: str) -> None:
    """Raise NodeError if another process has a port of this node; the models would be loaded in vain."""
    wanted = [(kind, address) for worker in planned.workers for kind, address in worker.ports.each()]
    if planned.gateway is not None:
        gateway = settings.gateway
        ports = (("http", gateway.http), ("grpc", gateway.grpc), ("metrics", gateway.admin))
        wanted += [(kind, parse_address(text, any_host=True)) for kind, text in ports if text]
    for kind, address in wanted:
        if taken := _bind_error(address):
            holder = next((f", by rsrv's server {one}" for one in running() if address.port in one.ports), "")
            # rsrv-node has no options for ports.
            option = f"{command} --{kind}-port; " if command == "rsrv serve" else ""
            raise NodeError(
                f"{address} cannot be taken for {kind}: {taken}{holder}. End what listens there, or choose another port "
                f"({option}rsrv.yaml: gateway, node.first_port)"
            )


def _free_pages(pages: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of the live pages, or, if another process answers there, why there is none."""
    shown = []
    for page in pages:
        if taken := _bind_error(parse_address(page.removeprefix("http://").removesuffix("/"))):
            log.warning("%s is not served: %s. Set metrics.listen to a free port, or to null", page, taken)
            page = f"none: {page} is another program's; set metrics.listen to a free port"
        shown.append(page)
    return tuple(shown)


def _bind_error(address: Address) -> str:
    """Return why this process cannot listen at the address; empty if it can."""
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address.host, address.port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Lock the node's directory for this process. Raises NodeError, OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise NodeError(
            f"another server uses {directory}: end it, or name another folder with --directory (node.directory)"
        ) from None
    finally:
        os.close(fd)


def _generate(planned: NodePlan, settings: Settings, bundles: Sequence[Path]) -> dict[str, str]:
    """Write the repositories. Return the names of broken bundles, each with the reason."""
    sources, problems = repositories.find(bundles)
    problems += unknown_models(settings, {*sources.good, *sources.broken})
    for worker in planned.workers:
        problems += repositories.generate(worker.repository, sources, settings)
    for problem in problems:
        log.error("%s", problem)
    log.info("%d models for each of %d workers", len(sources.good), len(planned.workers))
    return {name: "; ".join(lines) for name, lines in sources.broken.items()}


async def _serve(planned: NodePlan, serving: Serving, bundles: Sequence[Path], output: Output) -> int:
    settings = serving.settings
    loop = asyncio.get_running_loop()
    orders = StopSignals.none()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, orders.once_more)
    for note in planned.notes:
        log.info("note: %s", note)
    for worker in planned.workers:
        log.info("%s on %s, %s", worker.child.name, worker.device.name, worker.ports)
    for page in serving.pages:
        log.info("live page: %s", page)
    # The node's own gateway ends before its workers.
    elsewhere = settings.gateway.grpc is None and settings.gateway.http is None
    roster = WorkersFile(planned, settings.node.directory / WORKERS_FILE, settings.control.enabled, elsewhere)
    workers = {worker.child.name: worker for worker in planned.workers}
    followers: dict[str, asyncio.Future[None]] = {}

    def started(child: ChildSpec, pid: int) -> None:
        roster.started(child, pid)
        if child.name in followers:
            followers.pop(child.name).cancel()
        if child.name in workers:
            following = output.follow(workers[child.name], pid, serving)
            followers[child.name] = asyncio.ensure_future(following)

    async def stop_following() -> None:
        await orders.end.wait()
        output.say("Stopping: requests in flight are answered first. Ctrl-C again stops at once.")
        for task in followers.values():
            task.cancel()

    stopping = asyncio.ensure_future(stop_following())
    first = None
    if _is_waiting(planned):
        first = asyncio.ensure_future(_first_bundles(planned, settings, bundles))
    try:
        status = await supervise(
            [worker.child for worker in planned.workers],
            planned.gateway,
            SupervisorHooks(
                output.put,
                started,
                watch=_watch(roster.names, settings.node.hang_s, first),
                leaves=roster.leaves,
            ),
            orders,
            lambda: Restarts(settings.node.max_restarts),
        )
    finally:
        for task in (first, stopping, *followers.values()):
            if task is not None:
                task.cancel()
    log.info("all processes have ended")
    return status


async def _first_bundles(planned: NodePlan, settings: Settings, bundles: Sequence[Path]) -> None:
    """Return when all repositories have models.

    Then the workers' control processes watch for more; a server without a model has no control process.
    """
    pause = settings.lifecycle.poll_s
    log.info("there is nothing to serve yet: looking for the first bundle every %g s", pause)
    while _is_waiting(planned):
        await asyncio.sleep(pause)
        if repositories.find(bundles)[0].good:
            _generate(planned, settings, bundles)


def _is_waiting(planned: NodePlan) -> bool:
    """Return true while a repository waits for its first bundle."""
    return any(repositories.is_empty(worker.repository) for worker in planned.workers)


def _watch(
    workers: Collection[str], hang_s: float, first: asyncio.Future[None] | None
) -> Callable[[ChildSpec], Awaitable[RestartReason]]:
    """Return a function that waits for a reason to restart a child: it hangs, or `first` is done and it is a worker."""

    async def hung(child: ChildSpec) -> RestartReason:
        if child.pulse is None or not hang_s:
            await asyncio.Event().wait()
        else:
            await wait_for_hang(*child.pulse, hang_s)
        return RestartReason(f"has not answered for {hang_s:g} s")

    async def fed(coming: asyncio.Future[None]) -> RestartReason:
        await asyncio.shield(coming)
        # A server without models has nothing to drain, yet might use its whole drain time.
        return RestartReason("has got models", works=True)

    async def watch(child: ChildSpec) -> RestartReason:
        reasons = [asyncio.ensure_future(hung(child))]
        if child.name in workers and first is not None and not first.done():
            reasons.append(asyncio.ensure_future(fed(first)))
        try:
            done, _ = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for reason in reasons:
                reason.cancel()

    return watch


def _put(lines: bytes) -> None:
    """Write to standard output, which the reader may have closed."""
    with suppress(OSError):
        logs.write(sys.stdout.fileno(), lines)


class _NodeLogHandler(logging.Handler):
    """Writes the node's own log lines among those of its children."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        super().__init__()
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        self._put(LinePrefixer("node").feed(f"{self.format(record)}\n".encode()))


def _log_to_output(format: logs.Format, put: Callable[[bytes], None]) -> None:
    log.handlers = [handler for handler in log.handlers if not isinstance(handler, _NodeLogHandler)]
    handler = _NodeLogHandler(put)
    handler.setFormatter(logs.formatter(format))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
