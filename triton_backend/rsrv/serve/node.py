"""A node, from its settings to its end: devices, repositories, processes."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rsrv import logs
from rsrv.serve import cores, nvml, repositories, starting
from rsrv.serve.devices import choose
from rsrv.serve.errors import NodeError
from rsrv.serve.logs import Prefixer
from rsrv.serve.plan import WORKERS_FILE, Child, Plan, describe, plan
from rsrv.serve.pulse import hangs
from rsrv.serve.restarts import Restarts
from rsrv.serve.roll import Roll, write
from rsrv.serve.supervise import Anew, House, Orders, supervise
from rsrv.settings import Settings, SettingsError, load_settings

log = logging.getLogger("rsrv.node")


def run(options: Namespace) -> int:
    """Does what the command line says; returns the exit status."""
    try:
        settings = _settings(options)
        planned = _plan(settings)
        if options.dry_run:
            sys.stdout.write(describe(planned))
            return 0
        _log_to_output(settings.logs.format)
        with alone(settings.node.directory):
            repositories.check(options.bundles, settings)
            for file, text in planned.files.items():
                write(file, text)
            _generate(planned, settings, options.bundles)
            return asyncio.run(_serve(planned, settings, options.bundles))
    except (NodeError, SettingsError, OSError) as error:
        print(f"rsrv-node: {error}", file=sys.stderr)
        return 1


def _settings(options: Namespace) -> Settings:
    """Of the file and the environment; what the command line says wins."""
    text = options.config.read_text(encoding="utf-8") if options.config else ""
    settings = load_settings(text, str(options.config or "rsrv.yaml"))
    said = {"directory": options.directory, "tritonserver": options.tritonserver}
    changes = {key: value for key, value in said.items() if value is not None}
    if options.gpus is not None:
        changes |= {"gpus": options.gpus, "cpu_workers": 0}
    if options.cpu_workers is not None:
        changes |= {"gpus": None, "cpu_workers": options.cpu_workers}
    node = settings.node.model_copy(update=changes)
    node = node.model_copy(update={"directory": Path(os.path.abspath(node.directory.expanduser()))})
    return repositories.watched(settings.model_copy(update={"node": node}), options.bundles)


def _plan(settings: Settings) -> Plan:
    node = settings.node
    devices = choose(node.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), nvml.look, node.cpu_workers)
    shares = cores.share(cores.look(), [device.near for device in devices], node.threads)
    tritonserver = shutil.which(node.tritonserver)
    if tritonserver is None:
        raise NodeError(
            f"node.tritonserver: there is no program {node.tritonserver}; name its path, or run this where Triton is"
        )
    return plan(
        settings,
        devices,
        shares,
        os.environ,
        tritonserver=os.path.abspath(tritonserver),
        python=sys.executable,
    )


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """The node's directory for this process only. Raises NodeError, OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise NodeError(f"another node uses {directory}: end it, or set another node.directory") from None
    finally:
        os.close(fd)


def _generate(planned: Plan, settings: Settings, bundles: Sequence[Path]) -> None:
    """Writes the repositories."""
    sources, problems = repositories.find(bundles)
    for worker in planned.workers:
        problems += repositories.generate(worker.repository, sources, settings)
    for problem in problems:
        log.error("%s", problem)
    log.info("%d models for each of %d workers", len(sources.good), len(planned.workers))


async def _serve(planned: Plan, settings: Settings, bundles: Sequence[Path]) -> int:
    loop = asyncio.get_running_loop()
    orders = Orders.none()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, orders.once_more)
    for note in planned.notes:
        log.info("note: %s", note)
    for worker in planned.workers:
        log.info("%s on %s, %s", worker.child.name, worker.device.name, worker.ports)
    for page in planned.pages:
        log.info("live page: %s", page)
    # The node's own gateway has ended by the time that its workers do.
    elsewhere = settings.gateway.grpc is None and settings.gateway.http is None
    roll = Roll(planned, settings.node.directory / WORKERS_FILE, settings.control.enabled, elsewhere)
    workers = {worker.child.name: worker for worker in planned.workers}
    telling: dict[str, asyncio.Future[None]] = {}

    def started(child: Child, pid: int) -> None:
        roll.started(child, pid)
        if child.name in telling:
            telling.pop(child.name).cancel()
        if child.name in workers:
            telling[child.name] = asyncio.ensure_future(starting.tell(workers[child.name], pid))

    first = None
    if _is_waiting(planned):
        first = asyncio.ensure_future(_first_bundles(planned, settings, bundles))
    try:
        status = await supervise(
            [worker.child for worker in planned.workers],
            planned.gateway,
            House(_put, started, watch=_watch(roll.names, settings.node.hang_s, first), leaves=roll.leaves),
            orders,
            lambda: Restarts(settings.node.max_restarts, settings.node.stable_s),
        )
    finally:
        for task in (first, *telling.values()):
            if task is not None:
                task.cancel()
    log.info("all processes have ended")
    return status


async def _first_bundles(planned: Plan, settings: Settings, bundles: Sequence[Path]) -> None:
    """Returns when all repositories have models.

    Afterwards the workers' control processes watch for more; a server without a model has no such process.
    """
    pause = settings.lifecycle.poll_s
    log.info("there is nothing to serve yet: looking for the first bundle every %g s", pause)
    while _is_waiting(planned):
        await asyncio.sleep(pause)
        if repositories.find(bundles)[0].good:
            _generate(planned, settings, bundles)


def _is_waiting(planned: Plan) -> bool:
    """For the first bundle."""
    return any(repositories.is_empty(worker.repository) for worker in planned.workers)


def _watch(
    workers: Collection[str], hang_s: float, first: asyncio.Future[None] | None
) -> Callable[[Child], Awaitable[Anew]]:
    """When a child is to be started again: it hangs, or it is a worker and `first`, the coming of bundles, is done."""

    async def hung(child: Child) -> Anew:
        if child.pulse is None or not hang_s:
            await asyncio.Event().wait()
        else:
            await hangs(*child.pulse, hang_s)
        return Anew(f"has not answered for {hang_s:g} s")

    async def fed(coming: asyncio.Future[None]) -> Anew:
        await asyncio.shield(coming)
        # It has nothing to finish, and yet might take all its time for that.
        return Anew("has got models", works=True)

    async def watch(child: Child) -> Anew:
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
    """To the node's own output; who has closed that does not want to know."""
    with suppress(OSError):
        logs.write(sys.stdout.fileno(), lines)


class _Lines(logging.Handler):
    """The node's own lines among those of its children."""

    def emit(self, record: logging.LogRecord) -> None:
        _put(Prefixer("node").feed(f"{self.format(record)}\n".encode()))


def _log_to_output(format: logs.Format) -> None:
    handler = _Lines()
    handler.setFormatter(logs.formatter(format))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
