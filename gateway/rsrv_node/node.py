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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rsrv.settings import Settings, SettingsError, load_settings
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory
from rsrv_node import cores, nvml, repositories
from rsrv_node.devices import choose
from rsrv_node.errors import NodeError
from rsrv_node.logs import Prefixer
from rsrv_node.plan import WORKERS_FILE, Child, Plan, describe, plan, workers_file
from rsrv_node.restarts import Restarts
from rsrv_node.supervise import House, Orders, supervise

log = logging.getLogger("rsrv.node")

#: how a stub names the device of its runtime: each worker has but one
_GPU = "0"


def run(options: Namespace) -> int:
    """Does what the command line says; returns the exit status."""
    try:
        settings = _settings(options)
        planned = _plan(settings)
        if options.dry_run:
            sys.stdout.write(describe(planned))
            return 0
        _log_to_output()
        with alone(settings.node.directory):
            _prepare(planned, settings, options.bundles)
            return asyncio.run(_serve(planned, settings))
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


def _prepare(planned: Plan, settings: Settings, bundles: Sequence[Path]) -> None:
    """Writes the repositories and what the gateway reads."""
    sources, problems = repositories.find(bundles)
    for worker in planned.workers:
        problems += repositories.generate(worker.repository, sources, settings)
    for problem in problems:
        log.error("%s", problem)
    for file, text in planned.files.items():
        _write(file, text)
    log.info("%d models for each of %d workers", len(sources.good), len(planned.workers))


async def _serve(planned: Plan, settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    orders = Orders.none()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, orders.once_more)
    list_file = settings.node.directory / WORKERS_FILE
    names = {worker.child.name for worker in planned.workers}
    controls: dict[str, str] = {}

    def started(child: Child, pid: int) -> None:
        log.info("%s is process %d", child.name, pid)
        if child.name in names and settings.control.enabled:
            controls[child.name] = f"unix:{runtime_directory(pid, _GPU) / CONTROL_SOCKET}"
            _write(list_file, workers_file(planned, controls))

    for note in planned.notes:
        log.info("note: %s", note)
    for worker in planned.workers:
        log.info("%s on %s, %s", worker.child.name, worker.device.name, worker.ports)
    _write(list_file, workers_file(planned, controls))
    status = await supervise(
        [worker.child for worker in planned.workers],
        planned.gateway,
        House(_put, started),
        orders,
        lambda: Restarts(settings.node.max_restarts, settings.node.stable_s),
    )
    log.info("all processes have ended")
    return status


def _write(file: Path, text: str) -> None:
    """In one step: who watches it never sees a part."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def _put(lines: bytes) -> None:
    """To the node's own output; who has closed that does not want to know."""
    left = memoryview(lines)
    while left:
        try:
            left = left[os.write(sys.stdout.fileno(), left) :]
        except OSError:
            return


class _Lines(logging.Handler):
    """The node's own lines among those of its children."""

    def emit(self, record: logging.LogRecord) -> None:
        _put(Prefixer("node").feed(f"{self.format(record)}\n".encode()))


def _log_to_output() -> None:
    handler = _Lines()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
