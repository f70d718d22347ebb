"""Loads of a server's devices: messages of what the runtimes say, and the views that placement has of them. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from rsrv.control.grpc_service import member
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.contract import ModelView, WeightsView, WorkerView
from rsrv.settings import Shares

Json = Mapping[str, Any]

_WEIGHTS = {pb.WEIGHTS_LOADING: WeightsView.LOADING, pb.WEIGHTS_RESIDENT: WeightsView.RESIDENT}


def load(
    devices: Iterable[int], said: Mapping[int, Json], placement_mode: str, aliases: Mapping[str, Shares]
) -> pb.GetLoadResponse:
    """`devices`: the numbers of all; `said`: the loads of those whose runtimes answer."""
    metas = {name: models for one in said.values() for name, models in one["metas"].items()}
    return pb.GetLoadResponse(
        devices=[
            _device_load(number, said[number]) if number in said else pb.DeviceLoad(number=number)
            for number in devices
        ],
        metas=[pb.MetaLoad(name=name, models=models) for name, models in metas.items()],
        placement_mode=placement_mode,
        aliases={name: _heaviest(shares) for name, shares in aliases.items()},
    )


def _heaviest(shares: Shares) -> str:
    return max(shares, key=lambda name: -1.0 if shares[name] == "shadow" else float(shares[name]))


def _device_load(number: int, said: Json) -> pb.DeviceLoad:
    # Called many times a second: spelled out for speed.
    return pb.DeviceLoad(
        number=number,
        instance=said["instance"],
        backlog_s=said["backlog_s"],
        free_bytes=said["free_bytes"],
        budget_bytes=said["budget_bytes"],
        since=said["since"],
        next=said["next"],
        models=[
            pb.ModelLoad(
                name=name,
                queued=model["queued"],
                executing=model["executing"],
                weights=member(pb.Weights, model["weights"]),
                bytes=model["bytes"],
                cost_s=model["cost_s"],
                misses=model["misses"],
                device_seconds=model["device_seconds"],
                rows=model["rows"],
                requests=model["requests"],
                pinned=model["pinned"],
                max_rows=model["max_rows"],
                batch_input=_batch_input(model["batch_input"]),
                sequences=model["sequences"],
            )
            for name, model in said["models"].items()
        ],
    )


def _batch_input(said: tuple[str, int] | None) -> pb.BatchInput | None:
    return None if said is None else pb.BatchInput(name=said[0], axis=said[1])


def view_of(
    device: pb.DeviceLoad, server: pb.GetLoadResponse, ready: frozenset[str], before: WorkerView | None
) -> WorkerView:
    """Return the view of a device with these ready models.

    `before`: its last one, whose models that have not changed since stay the same objects.
    """
    known = before.models if before is not None and device.since else {}
    changed = {model.name: _model(model) for model in device.models}
    return WorkerView(
        # Without its runtime the server's other devices serve its models.
        alive=bool(device.instance),
        ready=ready,
        device=device.number,
        instance=device.instance or None,
        budget_bytes=device.budget_bytes if device.HasField("budget_bytes") else None,
        free_bytes=device.free_bytes if device.HasField("free_bytes") else None,
        backlog_s=device.backlog_s,
        models={**known, **changed} if changed else known,
        calls={meta.name: frozenset(meta.models) for meta in server.metas},
        aliases=dict(server.aliases),
        measurement=1 if before is None else before.measurement + 1,
    )


def _model(load: pb.ModelLoad) -> ModelView:
    has_batch_axis = load.HasField("batch_input")
    return ModelView(
        bytes=load.bytes,
        weights=_WEIGHTS.get(load.weights, WeightsView.ABSENT),
        pinned=load.pinned,
        item_s=load.cost_s if load.HasField("cost_s") else None,
        queued=load.queued,
        executing=load.executing,
        requests=load.requests,
        items=load.rows,
        device_seconds=load.device_seconds,
        max_items=load.max_rows if has_batch_axis else 0,
        batch_input=(load.batch_input.name, load.batch_input.axis) if has_batch_axis else None,
    )
