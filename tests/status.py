"""The record of a runtime as a mapping, for tests without a control process."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rsrv.control.grpc_service import word
from rsrv.control.v1 import control_pb2 as pb
from rsrv.wire.frames import Kind, pack_json
from rsrv.wire.socket import ask
from tests.waiting import PATIENCE_S


def read_status(
    server_pid: int, gpu: str = "0", timeout: float = PATIENCE_S, since: int = 0
) -> dict[str, Any]:
    """Return the record of a tritonserver's runtime, with the records of its models and meta models by name.

    `since` is the `next` of an earlier record. Raises the errors of `rsrv.wire.socket.ask`.
    """
    asked = pack_json(Kind.STATUS, {"since": since})
    return status_of(pb.DeviceRecord.FromString(ask(server_pid, gpu, timeout, asked, Kind.STATUS_REPLY)))


def status_of(record: pb.DeviceRecord) -> dict[str, Any]:
    status = plain(record)
    models = status["models"]
    for model in models:
        keys = [(f"{one['variant']}/{one['size']}", one) for one in model["executables"]]
        model["sizes"] = {key: one["count"] for key, one in keys if one["count"]}
        model["costs"] = {key: one["cost_s"] for key, one in keys}
        model["evictions"] = sum(model["evictions"].values())
        if model["meta"]:
            model |= {
                "waiting": model["queued"],
                "running": model["executing"],
                "models": model["calls_models"],
            }
    status["follows"] = {"instance": record.follows, "revision": record.follows_revision}
    status["metas"] = {one["name"]: one for one in models if one["meta"]}
    status["models"] = {one["name"]: one for one in models if not one["meta"]}
    return status


def plain(message: Message) -> dict[str, Any]:
    """Return all fields of a message by name. Absent fields are None; members of enums are words, as in the protocol."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            of = kind.fields_by_name["value"]
            found[field.name] = {key: _value(of, value[key]) for key in value}
        elif field.is_repeated:
            found[field.name] = [_value(field, one) for one in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = _value(field, value)
    return found


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return word(field.enum_type, value) if field.enum_type is not None else value
