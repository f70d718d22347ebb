"""`python -m rsrv.control`: the control process of a server, started by the runtime of its first device."""

import argparse
import asyncio
import fcntl
import logging
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsrv import logs
from rsrv.extras import install_command
from rsrv.wire import paths

if TYPE_CHECKING:
    from rsrv.control.exporting import Exporting
    from rsrv.control.runtimes import Runtimes
    from rsrv.settings import Settings

log = logging.getLogger("rsrv.control")

#: Seconds that calls in flight may take after the server's end.
_GRACE_S = 0.2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rsrv.control", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="private directory of the runtime")
    parser.add_argument("--server-pid", type=int, required=True, help="exit when this process ends")
    parser.add_argument(
        "--settings", type=Path, required=True, help="rsrv.yaml, in the model repository's root"
    )
    options = parser.parse_args(argv)

    # The control process must not take processor time from requests.
    os.nice(5)
    # Disable gRPC's own log, which has a line for each client that disconnects.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logs.setup(aside=True)
    # Below this level, watchfiles logs the number of files of each change.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    try:
        server = os.pidfd_open(options.server_pid)
        lock = _claim(options.directory / paths.CONTROL_LOCK)
    except (ProcessLookupError, FileNotFoundError):
        return 0  # The server has already ended, and another process removes its directory.
    if lock is None:
        return 0
    asyncio.run(_control_and_exit(options, server))
    return 0


def _claim(path: Path) -> int | None:
    """Lock the file for as long as this process lives. Return its descriptor, or None if another process has the lock.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


async def _control_and_exit(options: argparse.Namespace, server: int) -> None:
    # Exit without cleanup, because the loop and the interpreter would wait for threads, and a disk may block a thread forever.
    try:
        await _control(options, server)
    except Exception:
        log.critical("the control process failed; the runtime starts another one", exc_info=True)
        os._exit(70)
    log.info("tritonserver has ended, so the control process ends")
    paths.remove(options.directory)
    logs.flush()
    os._exit(0)


async def _control(options: argparse.Namespace, server: int) -> None:
    """Run until the server with the pidfd `server` ends. Raises the error of a task that ends before that."""
    # Import these after the claim, so that a superfluous control process loads nothing.
    from rsrv.control.card_memory import Cards
    from rsrv.control.diagnosis import Diagnosis
    from rsrv.control.grpc_server import ListenError, listen, listen_locally
    from rsrv.control.health import Health
    from rsrv.control.live import Live, OneServer
    from rsrv.control.metrics import Metrics
    from rsrv.control.placing import Placing
    from rsrv.control.prewarming import Prewarming
    from rsrv.control.reconciler import Reconciler
    from rsrv.control.runtimes import Runtimes, device_directories, server_devices
    from rsrv.control.service import ControlledServer, ControlService, Monitoring
    from rsrv.control.settings_file import Rereading, SettingsFile
    from rsrv.control.stub_monitor import stub_processes
    from rsrv.control.triton import Triton, facts
    from rsrv.renewal import Renewals
    from rsrv.settings_changes import read_or_keep
    from rsrv.triton_command_line import Options, open_apis_warning, read_command_line
    from rsrv_gen.write import carried

    settings, broken = read_or_keep(options.settings, options.directory / paths.SETTINGS)
    logs.setup(settings.logs.format)
    repository = options.settings.parent
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(server, ended.set)

    devices = server_devices(options.directory)
    directories = device_directories(options.server_pid, options.directory, len(devices))
    runtimes = Runtimes(
        directories,
        settings,
        launch=partial(_launch, options),
        callees=lambda name: carried(repository / name),
    )
    cards = Cards(devices)
    processes = partial(stub_processes, options.server_pid, repository.absolute())
    triton = Triton.of(options.server_pid)
    reconciler = Reconciler(settings, repository, runtimes, triton, processes)
    decides = settings.lifecycle.mode != "explicit"
    health = Health(runtimes, repository, reconciler, decides=decides)
    exporting = _exporting(settings, runtimes)
    placing = Placing(runtimes, settings, options.directory / paths.PLACEMENT)
    file = SettingsFile(options.settings, settings, len(devices))
    file.error = broken
    renewals = Renewals()
    spans = {} if exporting is None else exporting.counts
    diagnosis = Diagnosis(runtimes, file, reconciler, health, spans, triton.queues, renewals)
    metrics = Metrics(runtimes, reconciler, diagnosis, spans)
    live = Live(runtimes, cards, facts(options.server_pid), reconciler, diagnosis)
    prewarming = Prewarming(file, runtimes)
    served = ControlledServer(options.server_pid, file, prewarming)
    service = ControlService(
        served, runtimes, reconciler, placing, Monitoring(metrics, live, cards, diagnosis)
    )
    listeners: list[Any] = [await listen_locally(options.directory / paths.CONTROL_SOCKET, service, health)]
    if settings.control.listen is not None:
        try:
            listeners.append((await listen(settings.control, service, health, renewals=renewals))[0])
        except ListenError as error:
            log.error("%s. The control service listens on its Unix socket only", error)
    if settings.metrics.listen is not None:
        # Import aiohttp only here, because that takes a tenth of a second.
        from rsrv.control import trial
        from rsrv.control.http import HttpServer
        from rsrv.live.routes import LivePage, page_token

        try:
            token = page_token(settings.metrics.token_file, renewals)
            source = OneServer(live, service, triton.tensors, partial(trial.infer, triton.http))
            http = HttpServer(metrics.text, LivePage(source, token))
            port = await http.start(settings.metrics.listen)
            listeners.append(http)
            log.info("metrics.listen: /metrics and the live page are at port %d", port)
        except (OSError, ValueError) as error:
            log.warning(
                "rsrv's metrics and live page are not served: %s. Set metrics.listen to a free port, or to null",
                error,
            )
    log.info(
        "control process %d of tritonserver %d listens in %s",
        os.getpid(),
        options.server_pid,
        options.directory,
    )
    if warning := open_apis_warning(Options(read_command_line(options.server_pid))):
        log.warning("%s", warning)
    works = [
        ended.wait(),
        runtimes.run(),
        health.run(),
        reconciler.run(),
        live.run(),
        placing.run(),
        renewals.run(),
    ]
    works.append(diagnosis.run())
    works += [Rereading(file, runtimes, placing, reconciler, live.note).run(), prewarming.run()]
    if exporting is not None:
        works.append(exporting.run())
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        for listener in listeners:
            with suppress(TimeoutError):
                await asyncio.wait_for(listener.stop(_GRACE_S), 10 * _GRACE_S)


def _launch(options: argparse.Namespace, number: int) -> None:
    """Start the runtime of a device if none listens, in the same way as a stub does. Raises StatusError."""
    # Import this only here, because it imports numpy, which takes memory.
    from rsrv.control.grpc_service import StatusError
    from rsrv.stub.session import UNREACHABLE, Launcher

    launcher = Launcher(options.server_pid, str(number), options.settings, Path.cwd(), os.environ)
    try:
        launcher.start()
    except UNREACHABLE as error:
        raise StatusError(
            "UNAVAILABLE", f"the runtime of device {number} cannot be started: {error}"
        ) from None


def _exporting(settings: "Settings", runtimes: "Runtimes") -> "Exporting | None":
    """Return the exporter of traces, or None if no collector is set or OpenTelemetry is missing."""
    endpoint = settings.traces.endpoint
    if endpoint is None:
        return None
    try:
        # Import OpenTelemetry only here, because it takes memory.
        from rsrv.control.exporting import Collector, Exporting
    except ImportError as error:
        log.error(
            "traces.endpoint: no spans are exported: %s. For the Python %s, run %s",
            error,
            sys.executable,
            install_command("serve"),
        )
        return None

    return Exporting(runtimes, Collector(endpoint).send)


if __name__ == "__main__":
    sys.exit(main())
