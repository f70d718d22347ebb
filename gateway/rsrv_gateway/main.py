"""Process of the gateway: reads the settings, connects the parts, and runs until a signal."""

import asyncio
import logging
import resource
import signal
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rsrv import logs
from rsrv.control.grpc_server import ListenError, listen, listen_locally
from rsrv.limits import raise_limit
from rsrv.live.routes import page_token
from rsrv.placement.options import PlannerOptions
from rsrv.placement.planner import Planner
from rsrv.renewal import Renewals
from rsrv.settings import ControlSection, Settings, SettingsError, read_settings
from rsrv.tokens import TokenError
from rsrv.wire.paths import CONTROL_SOCKET, RuntimeDirectoryError
from rsrv_gateway.admin import Admin
from rsrv_gateway.brain import GatewayLoop, Proxy
from rsrv_gateway.connections import (
    PROBE_S,
    PROBE_TIMEOUT_S,
    ChannelFactory,
    CredentialsError,
    cancel,
    open_ports,
)
from rsrv_gateway.directory import private_directory
from rsrv_gateway.members import Members, MembersError, parse_workers
from rsrv_gateway.picker import Picker
from rsrv_gateway.probes import GrpcProber, Probes
from rsrv_gateway.service import GATEWAY, GatewayHealth, GatewayService

log = logging.getLogger(__name__)

#: When the gateway ends, calls of the control service that are in flight have this many seconds to finish.
_CONTROL_DRAIN_S = 0.2
#: Maximum number of seconds for which a planning thread runs before Python switches to the thread that forwards requests.
#: Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.001


def run(config: Path | None, workers: str | None, picker: str | None = None) -> int:
    """Run the gateway and return the exit status of `rsrv-gateway`."""
    # Write logs on another thread, because this thread forwards requests.
    logs.setup("human", aside=True)
    # Hide the messages of watchfiles about every change.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    try:
        settings = read(config, workers)
    except (SettingsError, MembersError) as error:
        print(f"rsrv-gateway: {error}", file=sys.stderr)
        # Of these errors, only MembersError can be about the command line.
        return 2 if isinstance(error, MembersError) else 1
    logs.setup(settings.logs.format)
    # Each client needs a file descriptor. If none is free, the gateway cannot connect to workers.
    raise_limit(resource.RLIMIT_NOFILE)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        asyncio.run(serve(settings, picker))
    except (ListenError, CredentialsError, TokenError, MembersError, RuntimeDirectoryError) as error:
        print(f"rsrv-gateway: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        log.warning("the gateway ended while requests were in flight")
    return 0


def read(config: Path | None, workers: str | None) -> Settings:
    """Return the settings of rsrv.yaml and the command line. Raises SettingsError, MembersError."""
    settings = read_settings(config)
    if workers is None:
        return settings
    named = {"workers": parse_workers(workers), "workers_dns": None, "workers_file": None}
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update=named)})


async def serve(settings: Settings, picker: str | None) -> None:
    """Serve until SIGTERM or SIGINT. `picker` is the address for Envoy, or None to serve clients.

    Raises ListenError and other errors that name the wrong setting, and CancelledError after a second signal.
    """
    stop, section = _until_signalled(), settings.gateway
    if ports := open_ports(section, picker):
        log.warning(
            "%s: every machine that reaches this one may %s: set gateway.token_file or gateway.tls_client_ca, or listen on "
            "127.0.0.1",
            " and ".join(ports),
            "send requests, and load and unload models" if picker is None else "skew the choice of servers",
        )
    renewals = Renewals()
    members, contacts = Members(section), ChannelFactory(section, renewals)
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(private_directory())
        gateway = GatewayLoop(
            members,
            partial(Probes, lambda worker: GrpcProber(worker, contacts, PROBE_TIMEOUT_S), PROBE_S),
            Planner(PlannerOptions.of(settings.placement, settings.models, mode=section.mode)),
            partial(Proxy, section, renewals=renewals)
            if picker is None
            else partial(Picker, picker, section, renewals=renewals),
            drain=section.drain_s,
        )
        await _serve_operators(stack, settings, gateway, directory, renewals)
        renewing = asyncio.create_task(renewals.run())
        stack.push_async_callback(cancel, [renewing])
        await gateway.run(stop)


async def _serve_operators(
    stack: AsyncExitStack, settings: Settings, gateway: GatewayLoop, directory: Path, renewals: Renewals
) -> None:
    """Open the control service and the admin port for operators. `stack` closes them."""
    section = settings.gateway
    service, health = GatewayService(gateway), GatewayHealth(gateway)
    listener = await listen_locally(directory / CONTROL_SOCKET, service, health, GATEWAY)
    stack.push_async_callback(listener.stop, _CONTROL_DRAIN_S)
    if section.control_listen is not None:
        control = ControlSection(
            listen=section.control_listen,
            tls_certificate=section.tls_certificate,
            tls_key=section.tls_key,
            tls_client_ca=section.tls_client_ca,
            token_file=section.token_file,
        )
        listener, _ = await listen(control, service, health, GATEWAY, renewals)
        stack.push_async_callback(listener.stop, _CONTROL_DRAIN_S)
    if section.admin is not None:
        admin = Admin(gateway, page_token(settings.metrics.token_file, renewals), renewals)
        await admin.start(section.admin)
        log.info("gateway.admin: /metrics and the live page are at port %d", admin.port)
        stack.push_async_callback(admin.stop)


def _until_signalled() -> asyncio.Event:
    """Return an event that the first signal sets. The second signal cancels the calling task."""
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None

    def end() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return stop
