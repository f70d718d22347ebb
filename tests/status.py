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
    request = pack_json(Kind.STATUS, {"since": since})
    return status_of(pb.DeviceRecord.FromString(ask(server_pid, gpu, timeout, request, Kind.STATUS_REPLY)))


def status_of(record: pb.DeviceRecord) -> dict[str, Any]:
    status = plain(record)
    models = status["models"]
    for model in models:
        keys = [
            (f"{executable['variant']}/{executable['size']}", executable)
            for executable in model["executables"]
        ]
        model["sizes"] = {key: executable["count"] for key, executable in keys if executable["count"]}
        model["costs"] = {key: executable["cost_s"] for key, executable in keys}
        model["evictions"] = sum(model["evictions"].values())
        if model["meta"]:
            model |= {
                "waiting": model["queued"],
                "running": model["executing"],
                "models": model["calls_models"],
            }
    status["follows"] = {"instance": record.follows, "revision": record.follows_revision}
    status["metas"] = {entry["name"]: entry for entry in models if entry["meta"]}
    status["models"] = {entry["name"]: entry for entry in models if not entry["meta"]}
    return status


def plain(message: Message) -> dict[str, Any]:
    """Return all fields of a message by name. Absent fields are None; members of enums are words, as in the protocol."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            of = kind.fields_by_name["value"]
            fields[field.name] = {key: _value(of, value[key]) for key in value}
        elif field.is_repeated:
            fields[field.name] = [_value(field, element) for element in value]
        elif field.has_presence and not message.HasField(field.name):
            fields[field.name] = None
        else:
            fields[field.name] = _value(field, value)
    return fields


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return word(field.enum_type, value) if field.enum_type is not None else value
