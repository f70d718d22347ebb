"""Devices of the servers, which are what models are placed on. Pure.

A device is called SERVER/NUMBER, and the only one of a server SERVER.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rsrv.placement.contract import Table, WorkerView


class ServerDevice(NamedTuple):
    """A device of a server."""

    server: str
    #: position in the server's runtime.devices; None: its only one
    number: int | None


#: devices by name
ServerDevices = Mapping[str, ServerDevice]
#: numbers of the devices of one server that serve each model
ModelDevices = Mapping[str, tuple[int, ...]]


def devices_of(servers: Mapping[str, tuple[WorkerView, ...]]) -> dict[str, ServerDevice]:
    """Return the devices of these servers, given the views of each."""
    devices: dict[str, ServerDevice] = {}
    for server, views in servers.items():
        if len(views) == 1:
            devices[server] = ServerDevice(server, None)
        else:
            devices |= {f"{server}/{view.device}": ServerDevice(server, view.device) for view in views}
    return devices


def taken_over(before: tuple[WorkerView, ...], now: tuple[WorkerView, ...]) -> tuple[WorkerView, ...]:
    """Return the views of now; a server that does not name its devices has those of before."""
    if len(before) > 1 and len(now) == 1 and now[0].instance is None:
        return tuple([replace(now[0], device=view.device) for view in before])
    return now


def summed(views: tuple[WorkerView, ...]) -> WorkerView:
    """Return the view of a server: it answers if one of its devices does."""
    first = next((view for view in views if view.alive), views[0])
    return replace(first, backlog_s=sum(view.backlog_s for view in views)) if len(views) > 1 else first


def routes_to_servers(table: Table, devices: ServerDevices) -> Table:
    """Return the table with servers in place of their devices: a server itself chooses among the devices of a model."""
    if all(device.number is None for device in devices.values()):
        return table
    same: dict[tuple[str, ...], tuple[str, ...]] = {}

    def servers(names: tuple[str, ...]) -> tuple[str, ...]:
        if names not in same:
            same[names] = tuple(dict.fromkeys(devices[name].server for name in names))
        return same[names]

    return {
        name: replace(routes, ready=servers(routes.ready), placed=servers(routes.placed))
        for name, routes in table.items()
    }


def placements(table: Table, devices: ServerDevices) -> dict[str, ModelDevices]:
    """Return the devices of each placed model, by server, for the servers with several devices."""
    found: dict[str, dict[str, tuple[int, ...]]] = {
        device.server: {} for device in devices.values() if device.number is not None
    }
    for model, routes in table.items():
        for device in map(devices.__getitem__, routes.placed):
            if device.number is not None:
                mine = found[device.server]
                mine[model] = (*mine.get(model, ()), device.number)
    return dict(found)
