"""Loads of a server's devices: messages made from the runtimes' records, and views for placement made from messages. Pure."""

from collections.abc import Iterable, Mapping

from rsrv.control.records import select
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.contract import ModelView, WeightsView, WorkerView
from rsrv.settings import Shares

_WEIGHTS = {pb.WEIGHTS_LOADING: WeightsView.LOADING, pb.WEIGHTS_RESIDENT: WeightsView.RESIDENT}


def load(
    devices: Iterable[int],
    records: Mapping[int, pb.DeviceRecord],
    placement_mode: str,
    aliases: Mapping[str, Shares],
) -> pb.GetLoadResponse:
    """Return the loads of all `devices`. `records` has the records of the runtimes that answer."""
    metas = {
        model.name: model.calls_models for record in records.values() for model in record.models if model.meta
    }
    return pb.GetLoadResponse(
        devices=[
            _device_load(number, records[number]) if number in records else pb.DeviceLoad(number=number)
            for number in devices
        ],
        metas=[pb.MetaLoad(name=name, models=models) for name, models in metas.items()],
        placement_mode=placement_mode,
        aliases={name: _heaviest(shares) for name, shares in aliases.items()},
    )


def _heaviest(shares: Shares) -> str:
    return max(shares, key=lambda name: -1.0 if shares[name] == "shadow" else float(shares[name]))


def _device_load(number: int, record: pb.DeviceRecord) -> pb.DeviceLoad:
    memory = record.memory
    limits = {}
    if memory.HasField("budget_bytes"):
        limits["budget_bytes"] = memory.budget_bytes
        limits["free_bytes"] = max(0, memory.budget_bytes - memory.physical_bytes)
    return select(
        pb.DeviceLoad,
        record,
        number=number,
        models=[
            select(pb.ModelLoad, model, requests=model.answered) for model in record.models if not model.meta
        ],
        **limits,
    )


def view_of(
    device: pb.DeviceLoad, server: pb.GetLoadResponse, ready: frozenset[str], before: WorkerView | None
) -> WorkerView:
    """Return placement's view of a device with these ready models.

    `before` is the previous view. Views of models that have not changed since then stay the same objects.
    """
    known = before.models if before is not None and device.since else {}
    changed = {model.name: _model(model) for model in device.models}
    return WorkerView(
        # A device whose runtime does not answer is not alive. The server's other devices serve the device's models.
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
        bytes=load.device_bytes,
        weights=_WEIGHTS.get(load.weights, WeightsView.ABSENT),
        pinned=load.pinned,
        item_s=load.cost_s if load.HasField("cost_s") else None,
        queued=load.queued,
        executing=load.executing,
        requests=load.requests,
        items=load.useful_rows,
        device_seconds=load.device_seconds,
        max_items=load.max_rows if has_batch_axis else 0,
        batch_input=(load.batch_input.name, load.batch_input.axis) if has_batch_axis else None,
    )
