"""Output of `rsrv serve`: models as they become ready, the endpoints, and every later change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc

from rsrv.address import Address, parse_address
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.serve.child_probes import listens, takes_requests
from rsrv.serve.node import Serving
from rsrv.serve.plan import NodeWorker
from rsrv.serve.repositories import is_empty
from rsrv.settings import Settings
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory

#: seconds between two polls of the server, and limit of an answer
LOOK_S = 0.5
PATIENCE_S = 5.0
#: seconds for the control service to come up after the server
CONTROL_S = 15.0


class Changes:
    """Changes from one status of the control service to the next, as lines for people. Pure."""

    def __init__(self, broken: Mapping[str, str]) -> None:
        #: the last shown state; bundles that were broken before the start are shown then
        self._shown = {name: ("failed", reason) for name, reason in broken.items()}
        self._met: set[str] = set()

    def update(self, status: pb.GetStatusResponse) -> Iterator[str]:
        """Yield a line for each model whose state has changed."""
        now = dict(_states(status))
        for name, state in sorted(now.items()):
            before = self._shown.get(name)
            if state == before:
                continue
            word, detail = state
            if word == "failed":
                yield f"{name} failed: {' '.join(detail.split())}"
            elif before is not None and before[0] == "ready":
                yield f"{name} serves its new bundle"
            else:
                yield f"{name} is ready"
        # A model that is loading again keeps its last line: it serves, or its failure was shown.
        names = {one.name for one in (*status.models, *status.metas, *status.failures)}
        for name in sorted(self._met - names):
            self._shown.pop(name, None)
            yield f"{name} is removed"
        self._met = names
        self._shown |= now

    def counts(self) -> tuple[int, int]:
        """Return how many models are ready, and how many failed."""
        words = [word for word, _ in self._shown.values()]
        return words.count("ready"), words.count("failed")


def _states(status: pb.GetStatusResponse) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each model that is ready or failed, with its version or the reason; failures of a bundle win."""
    for model in (*status.models, *status.metas):
        for version in reversed(model.versions):
            if version.state == pb.STATE_READY:
                yield model.name, ("ready", version.key)
                break
            if version.state == pb.STATE_FAILED:
                yield model.name, ("failed", version.error)
                break
    for failure in status.failures:
        yield failure.name, ("failed", failure.text)


def endpoints(settings: Settings, pages: Sequence[str], log: Path) -> str:
    """Return the block of endpoints, with the path of the log."""
    gateway = settings.gateway
    rows = [
        ("HTTP", gateway.http and f"http://{local(gateway.http)}"),
        ("gRPC", gateway.grpc and local(gateway.grpc)),
        ("metrics", gateway.admin and f"http://{local(gateway.admin)}/metrics"),
        *(("live page", page) for page in pages),
        ("log", str(log)),
    ]
    return "\n".join(f"  {name:<10} {text}" for name, text in rows if text)


def local(listen: str) -> str:
    """Return the address for clients on this machine."""
    address = parse_address(listen)
    host = "localhost" if address.local in ("127.0.0.1", "::1") else address.local
    return str(Address(host, address.port))


async def follow(
    worker: NodeWorker, pid: int, serving: Serving, log: Path, say: Callable[[str], None], commands: str = ""
) -> None:
    """Show the start of a tritonserver, and then every change, until cancelled.

    `commands`, whole lines, are shown below the endpoints.
    """
    began = time.monotonic()
    changes, serves, patience = Changes(serving.broken), False, CONTROL_S
    gateway = serving.gateway
    # Behind a gateway there are several servers with the same models.
    on = "" if gateway is None else f" on {worker.child.name}"
    socket = runtime_directory(pid, "0") / CONTROL_SOCKET
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        control = control_pb2_grpc.ControlStub(channel)
        while True:
            # Checked first, so that the models ready by then are shown above the endpoints.
            listening = not serves and await listens(worker.ports.http)
            if listening and gateway is not None:
                listening = await takes_requests(gateway)
            lines = await _changes(control, changes)
            for line in lines or ():
                when = time.strftime("%H:%M:%S") if serves else f"{time.monotonic() - began:6.1f} s"
                say(f"{when}  {line}{on}")
            if listening:
                # The control process starts beside the models, and may be later; without a model there is none.
                patience -= LOOK_S
                if lines is not None or is_empty(worker.repository) or patience < 0:
                    serves = True
                    good, failed = changes.counts()
                    # Without its control service, what the server has loaded is not known here.
                    known = lines is not None or is_empty(worker.repository)
                    what = (
                        f" {good} of {good + failed} models"
                        if known
                        else "; which models, only the log shows"
                    )
                    where = endpoints(serving.settings, serving.pages, log)
                    say(f"\nServing{what}{on}:\n{where}\n{commands}Stop with Ctrl-C.\n")
            await asyncio.sleep(LOOK_S)


async def _changes(control: control_pb2_grpc.ControlStub, changes: Changes) -> list[str] | None:
    """Return a line for each change since the last status, or None while there is no control service."""
    try:
        status = await control.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)
    except grpc.RpcError:
        return None
    return list(changes.update(status))
