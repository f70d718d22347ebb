"""Lines of `rsrv serve`: models as they become ready, the endpoints, and every later change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from rsrv.address import Address
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.serve.child_probes import listens
from rsrv.serve.plan import ServerPlan
from rsrv.serve.repositories import is_empty
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory

#: seconds between two polls of the server, and limit of an answer
LOOK_S = 0.5
PATIENCE_S = 5.0
#: seconds for the control service to come up after the server
CONTROL_S = 15.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the operator."""

    text: str
    #: serves: the server takes requests from now on
    kind: Literal["change", "serves", "note"] = "change"


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


def endpoints(ports: Mapping[str, Address], page: str | None, log: Path) -> str:
    """Return the block of endpoints, with the path of the log."""
    rows = [
        ("HTTP", f"http://{local(ports['http'])}"),
        ("gRPC", local(ports["grpc"])),
        ("metrics", f"http://{local(ports['metrics'])}/metrics"),
        ("live page", page),
        ("log", str(log)),
    ]
    return "\n".join(f"  {name:<10} {text}" for name, text in rows if text)


def local(address: Address) -> str:
    """Return the address for clients on this machine."""
    host = "localhost" if address.local in ("127.0.0.1", "::1") else address.local
    return str(Address(host, address.port))


async def follow(planned: ServerPlan, pid: int, broken: Mapping[str, str]) -> AsyncGenerator[Line, None]:
    """Yield a line for each change of a tritonserver's models, and one when it serves; never end."""
    changes, serves, patience = Changes(broken), False, CONTROL_S
    socket = runtime_directory(pid, "0") / CONTROL_SOCKET
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        control = control_pb2_grpc.ControlStub(channel)
        while True:
            # Checked first, so that the models ready by then come before the line.
            listening = not serves and await listens(planned.ports["http"])
            lines = await _changes(control, changes)
            for line in lines or ():
                yield Line(line)
            if listening:
                # Without its control service, what the server has loaded is not known here.
                known = lines is not None or is_empty(planned.repository)
                # The control process starts beside the models, and may be later; without a model there is none.
                patience -= LOOK_S
                if known or patience < 0:
                    serves = True
                    good, failed = changes.counts()
                    what = (
                        f" {good} of {good + failed} models"
                        if known
                        else "; which models, only the log shows"
                    )
                    yield Line(f"Serving{what}", "serves")
            await asyncio.sleep(LOOK_S)


async def _changes(control: control_pb2_grpc.ControlStub, changes: Changes) -> list[str] | None:
    """Return a line for each change since the last status, or None while there is no control service."""
    try:
        status = await control.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)
    except grpc.RpcError:
        return None
    return list(changes.update(status))
