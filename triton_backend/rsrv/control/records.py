"""The records of the runtimes in the control process: updates, sums over devices, and messages made from records. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rsrv.control.v1 import control_pb2 as pb

M = TypeVar("M", bound=Message)

#: Precedence among the states of a model's weights on several devices.
_WEIGHT_STATES = (
    *("resident", "evicting", "reserved", "loading", "reading", "queued", "backoff", "absent", "on disk", ""),
)
#: Figures of a model that are not added up over several devices. The figure of the first device is used.
_OF_ONE = ("weight_bytes", "device_bytes", "state_bytes", "host_bytes", "load_seconds", "cost_s", "max_rows")
_NUMBERS = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_DOUBLE)
_FIELDS = pb.ModelRecord.DESCRIPTOR.fields
#: Figures that are added up over the devices, including maps of counts.
_SUMMED = tuple(
    field.name
    for field in _FIELDS
    if field.type in _NUMBERS and not field.is_repeated and field.name not in _OF_ONE
)
_COUNTS = tuple(
    field.name
    for field in _FIELDS
    if field.message_type is not None
    and field.message_type.GetOptions().map_entry
    and field.message_type.fields_by_name["value"].type in _NUMBERS
)


@dataclass(frozen=True, slots=True)
class RuntimeRecords:
    """The latest records of a runtime. Records of models that have not changed stay the same objects."""

    device: pb.DeviceRecord = field(default_factory=pb.DeviceRecord)
    #: Models and meta models by name.
    models: Mapping[str, pb.ModelRecord] = field(default_factory=dict)
    #: Tensors that several models share, from the last whole record.
    shared: Sequence[pb.SharedTensors] = ()

    def updated(self, latest: pb.DeviceRecord) -> "RuntimeRecords":
        """Return the records after an answer of the runtime. This empties the lists in `latest`."""
        models = {model.name: self._detached(model, changed=latest.since > 0) for model in latest.models}
        shared: Sequence[pb.SharedTensors] = list(latest.shared)
        if latest.since:
            # The answer has only the models that changed, but always all meta models.
            models = {name: model for name, model in self.models.items() if not model.meta} | models
            shared = self.shared
        device = pb.DeviceRecord()
        del latest.models[:], latest.shared[:]
        device.CopyFrom(latest)
        return RuntimeRecords(device, models, shared)

    def _detached(self, latest: pb.ModelRecord, *, changed: bool) -> pb.ModelRecord:
        before = self.models.get(latest.name)
        if (latest.meta or not changed) and before == latest:
            return before
        # Copy the record, because a part of an answer would keep the whole answer in memory.
        copy = pb.ModelRecord()
        copy.CopyFrom(latest)
        return copy

    def at_rest(self) -> "RuntimeRecords":
        """Remove waiting requests and weights on the device from the records. Returns the same object."""
        for record in self.models.values():
            for name in ("queued", "executing", "generations", "kept_bytes"):
                record.ClearField(name)
            record.sequences.update(dict.fromkeys(record.sequences, 0))
            if not record.meta:
                record.weights = pb.WEIGHTS_ABSENT
                record.weights_state = "on disk" if record.weights_state == "on disk" else "absent"
        return self


def without_histograms(record: M) -> M:
    """Remove all histograms of a record and of the records in it. Returns the record."""
    for name in _histograms(record.DESCRIPTOR):
        record.ClearField(name)
    if isinstance(record, pb.DeviceRecord):
        for model in record.models:
            without_histograms(model)
    return record


@cache
def _histograms(record: Descriptor) -> list[str]:
    """Return the names of a message's fields that are histograms or maps of histograms."""
    names = []
    for part in record.fields:
        kind = part.message_type
        if kind is not None and kind.GetOptions().map_entry:
            kind = kind.fields_by_name["value"].message_type
        if kind is pb.Histogram.DESCRIPTOR:
            names.append(part.name)
    return names


def total(records: Sequence[pb.ModelRecord]) -> pb.ModelRecord:
    """Return the sum of one model's records on several devices. Do not use its histograms, which are not added up."""
    if len(records) == 1:
        return records[0]
    sums = pb.ModelRecord()
    for record in records:
        if not sums.name:
            sums.CopyFrom(record)
            continue
        for name in _SUMMED:
            setattr(sums, name, getattr(sums, name) + getattr(record, name))
        for name in _COUNTS:
            mine = getattr(sums, name)
            for key, count in getattr(record, name).items():
                mine[key] += count
        counted = {(executable.variant, executable.size): executable for executable in sums.executables}
        for executable in record.executables:
            if (counted_one := counted.get((executable.variant, executable.size))) is not None:
                counted_one.count += executable.count
        sums.weights_state = min(sums.weights_state, record.weights_state, key=_WEIGHT_STATES.index)
    return sums


def select(kind: type[M], record: pb.ModelRecord | pb.DeviceRecord, **others: Any) -> M:
    """Return a message with the fields `others`, and with all other fields that the message and the record have in common.

    If the record has a map of counts and the message has a number, the number is the sum of the counts.
    """
    source: Any = record
    for name, optional, summed in _figures(kind.DESCRIPTOR, source.DESCRIPTOR):
        if name not in others and (not optional or source.HasField(name)):
            value = getattr(source, name)
            others[name] = sum(value.values()) if summed else value
    message: M = kind(**others)
    return message


@cache
def _figures(kind: Descriptor, record: Descriptor) -> list[tuple[str, bool, bool]]:
    """Return the fields that a message and a record have in common: name, whether it may be absent, whether it is a sum."""
    fields = record.fields_by_name
    return [
        (name, fields[name].has_presence, fields[name].is_repeated and not field.is_repeated)
        for name, field in kind.fields_by_name.items()
        if name in fields
    ]


def starting(records: Iterable[RuntimeRecords]) -> dict[str, str]:
    """Return what each starting model waits for, over all devices."""
    return {name: step for record in records for name, step in record.device.starting.items()}


def early_failures(record: pb.ModelRecord) -> int:
    """Return the number of requests that failed before they reached the runtime. Only the fronts count them."""
    ended = sum(record.outcomes.values()) - record.outcomes.get("cancelled", 0)
    return record.errors - int(ended) + record.answered
