"""Frames of meta models: begin and end of their runs, and their sub-calls.

The stub of a meta model registers the meta model with the models that it calls, and gets REGISTERED when all called models are
ready. Each request is a *run*. For each run, the stub chooses a random token, not 0, and sends ENTER. DONE with OK admits the
run; any other status ends the run. The stub may send calls directly after ENTER: they wait for the admission, and fail if the
run is not admitted. LEAVE ends a run. The end of the connection on which the run entered also ends the run.

A plain request's tensors lie in two blocks (`layout`). A sub-call's tensors may lie in earlier results, in buffers of the meta
model, or on the device. So a CALL names the place of each input, and then of each output. A call has the deadline and the
priority of its run. The stub chooses the number of an output on the device, and reuses this number for inputs of the same run.
RELEASE frees a device tensor, and LEAVE frees all tensors of the run. If all runs together keep more than a twentieth of the
device's memory, a call ends with QUEUE_FULL.

A submission with the token of a run is also a sub-call. If no run with this token is admitted, the submission ends with
NOT_FOUND.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from rsrv.wire.frames import (
    HEADER,
    MAX_FRAME,
    Kind,
    ProtocolError,
    Status,
    as_status,
    pack_entries,
    unpack_entries,
)


class Entrance(NamedTuple):
    """Request to admit a run. DONE with `Status.OK` admits it; any other status ends it."""

    request: int  # Number of the run, unique on this connection, also among submissions.
    run: int  # Random token, so that no other client can use the run. Never 0.
    deadline_ns: int  # CLOCK_MONOTONIC, or 0 for none.
    priority: int  # Same meaning as in a submission.
    further: int = 0  # True if the run began on another device, whose runtime counts how the run ends.
    tag: int = 0  # Same meaning as in a submission.


_ENTRANCE = struct.Struct("<QQqHH4xQ")


class Where(IntEnum):
    """Kind of place that a `Spot` names."""

    #: The tensor is in shared memory, row-major, `at` bytes after the start of `segment`.
    MEMORY = 0
    #: The tensor is on the device, where the run keeps it as number `at`.
    DEVICE = 1
    #: The output is not stored, because the caller does not need it.
    NOWHERE = 2


class Spot(NamedTuple):
    """Place of one input of a sub-call, or the place where one output shall be stored."""

    where: int
    segment: int = 0
    at: int = 0


_SPOT = struct.Struct("<HxxIQ")


class Call(NamedTuple):
    """A sub-call. Its spots are in the order of the callee's tensors."""

    request: int  # Unique on this connection, also among submissions.
    run: int
    callee: int  # Index in the list of REGISTERED.
    variant: int
    rows: int
    inputs: Sequence[Spot]
    outputs: Sequence[Spot]
    flags: int = 0  # Same meaning as in a submission.


_CALL = struct.Struct("<QQHHIHHI")


class RunExit(NamedTuple):
    """End of a run. The runtime frees the tensors that the run keeps on the device."""

    run: int
    status: Status  # How the run ended, for the statistics.


_LEAVING = struct.Struct("<QQ")


class Release(NamedTuple):
    """Release of one tensor that a run keeps on the device."""

    run: int
    number: int


_RELEASE = struct.Struct("<QQ")


pack_entrances = partial(pack_entries, Kind.ENTER, _ENTRANCE)
pack_leavings = partial(pack_entries, Kind.LEAVE, _LEAVING)
pack_releases = partial(pack_entries, Kind.RELEASE, _RELEASE)


def unpack_entrances(frame: bytes | memoryview, count: int) -> list[Entrance]:
    return [Entrance(*fields) for fields in unpack_entries(Kind.ENTER, _ENTRANCE, frame, count)]


def unpack_leavings(frame: bytes | memoryview, count: int) -> list[RunExit]:
    entries = unpack_entries(Kind.LEAVE, _LEAVING, frame, count)
    return [RunExit(run, as_status(status)) for run, status in entries]


def unpack_releases(frame: bytes | memoryview, count: int) -> list[Release]:
    return [Release(*fields) for fields in unpack_entries(Kind.RELEASE, _RELEASE, frame, count)]


def pack_calls(calls: Sequence[Call]) -> bytes:
    """Return one CALL frame. Raises ProtocolError if the frame is too large: calls may have any number of tensors."""
    parts = [HEADER.pack(Kind.CALL, 0, len(calls))]
    for call in calls:
        counts = len(call.inputs), len(call.outputs)
        parts.append(
            _CALL.pack(call.request, call.run, call.callee, call.variant, call.rows, *counts, call.flags)
        )
        parts += (_SPOT.pack(*spot) for spot in (*call.inputs, *call.outputs))
    frame = b"".join(parts)
    if len(frame) > MAX_FRAME:
        raise ProtocolError(f"CALL of {len(frame)} bytes exceeds a frame of {MAX_FRAME}")
    return frame


def unpack_calls(frame: bytes | memoryview, count: int) -> list[Call]:
    body = memoryview(frame)[HEADER.size :]
    at, calls = 0, []
    try:
        for _ in range(count):
            request, run, callee, variant, rows, inputs, outputs, flags = _CALL.unpack_from(body, at)
            at += _CALL.size
            spots = [Spot(*_SPOT.unpack_from(body, at + i * _SPOT.size)) for i in range(inputs + outputs)]
            at += len(spots) * _SPOT.size
            calls.append(Call(request, run, callee, variant, rows, spots[:inputs], spots[inputs:], flags))
    except struct.error:
        at = -1
    if at != len(body):
        raise ProtocolError(f"CALL of {count} calls has {len(body)} bytes")
    return calls
