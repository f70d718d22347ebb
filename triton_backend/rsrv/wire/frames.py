"""Frames: the messages on the socket, for programs in any language.

The structs define the bytes. docs/protocol.md explains the use of frames.

A frame is one SEQPACKET message: an 8-byte header (kind u16, reserved u16, count u32; little endian) and
a body. Rare frames carry one JSON object. Frequent frames, such as SUBMIT and DONE, carry `count` entries of a fixed
size. Frames carry the places of tensors in shared memory, never the tensors.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

#: The bytes "RSRV".
MAGIC = 0x56525352
#: Version of this protocol. It must be the same on both sides.
PROTOCOL_VERSION = 13
FOREIGN_PEER = "the peer does not use rsrv's protocol"

#: Bytes of the largest frame. It is well below the kernel's default socket buffer, so one frame always fits.
MAX_FRAME = 128 * 1024

#: Maximum number of characters of a failure's reason in a report.
REASON_CHARACTERS = 200

HEADER = struct.Struct("<HHI")


class Kind(IntEnum):
    # From stub to runtime.
    HELLO = 1
    REGISTER = 2
    SEGMENT = 3
    DROP_SEGMENT = 4
    SUBMIT = 5
    CANCEL = 6
    STATUS = 7
    COMMAND = 9
    # Frames of meta models (`calls`).
    ENTER = 10
    LEAVE = 11
    CALL = 12
    RELEASE = 13
    # Subscribes to changes. The runtime sends a snapshot first, then every change.
    WATCH = 14
    # Measurements of the stub.
    REPORT = 15
    # Frames of traced requests (`traces`).
    TRACE = 25
    SPANS = 26
    # Frames of generations (`generation`).
    GENERATE = 29
    # Reports a change of the demand while the runtime has not answered REGISTER.
    DEMAND = 31
    # From runtime to stub.
    WELCOME = 16
    REGISTERED = 17
    REJECTED = 18
    DONE = 19
    STATUS_REPLY = 20
    COMMANDED = 22
    STATE = 23
    REPORTED = 24
    COLD = 27
    STARTING = 28
    TOKENS = 30


class Status(IntEnum):
    """Outcome of a request. The stub turns it into one of Triton's codes."""

    OK = 0
    INVALID = 1
    NOT_FOUND = 2
    QUEUE_FULL = 3
    DEADLINE = 4
    CANCELLED = 5
    RUNTIME_DOWN = 6
    NOT_RESIDENT = 7
    INTERNAL = 8
    PAUSED = 9
    #: The request belongs to a sequence that the runtime does not know, or no longer knows.
    SEQUENCE_LOST = 10
    #: The model was cold, or its runtime has died. A runtime is building the model.
    STARTING = 11


class ProtocolError(Exception):
    """The peer broke the protocol: close the connection."""


class OtherVersionError(ProtocolError):
    """The peer speaks another version of the protocol. The message names the remedy."""


#: Flag of a submission that must execute alone on the device, because a runtime died during an earlier execution.
ALONE = 1
#: Flag of a submission whose request has waited for this runtime, so that a full queue does not refuse it.
WAITED = 2
#: Flags of a submission: START begins a sequence, and END ends it.
START, END = 4, 8


class Submission(NamedTuple):
    """One request. Its inputs lie at `inputs_at` of the segment. The runtime writes its outputs at `outputs_at`."""

    request: int  # Unique among the open requests of this connection, below 2**40.
    deadline_ns: int  # CLOCK_MONOTONIC, or 0 for none.
    rows: int
    variant: int
    priority: int  # Triton's priority: 0 default, 1 highest.
    segment: int
    flags: int  # ALONE, WAITED, START and END.
    inputs_at: int  # Byte offsets, multiples of layout.ALIGNMENT.
    outputs_at: int
    run: int = 0  # Token of the meta model's run that makes this sub-call, or 0.
    tag: int = 0  # `request_tag` of the client's id, or 0. The command "abort" uses it.
    #: Number of the sequence of a stateful model, or of the large request to which this request belongs. Otherwise 0.
    sequence: int = 0
    #: Length of the request's tensors along the padded axis. 0: the model has no padded axis.
    length: int = 0


SUBMISSION = struct.Struct("<QqIHHIIQQQQQQ")


class Completion(NamedTuple):
    """End of one request. If the status is OK, its outputs are written. Otherwise, `text` is the error text for the client."""

    request: int
    status: Status
    size: int = 0  # Compiled batch size of the execution.
    rows: int = 0  # Useful rows in that execution.
    execute_ns: int = 0  # Duration of that execution.
    text: str = ""


COMPLETION = struct.Struct("<QHHIIIQ")

#: Maximum number of entries in one frame. This many entries of each kind of frame fit into MAX_FRAME bytes.
MAX_ENTRIES = 1024


def request_tag(id: str) -> int:
    """Return the number that stands for a client's request id in frames. 0 stands for an empty id."""
    if not id:
        return 0
    # Clients may send ids with lone surrogates.
    return int.from_bytes(blake2b(id.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def pack_entries(kind: Kind, entry: struct.Struct, values: Sequence[tuple[Any, ...]]) -> bytes:
    """Return one frame of entries of a fixed size. `values` has at most MAX_ENTRIES entries."""
    frame = bytearray(HEADER.size + entry.size * len(values))
    HEADER.pack_into(frame, 0, kind, 0, len(values))
    at = HEADER.size
    for value in values:
        entry.pack_into(frame, at, *value)
        at += entry.size
    return bytes(frame)


def unpack_entries(
    kind: Kind, entry: struct.Struct, frame: bytes | memoryview, count: int
) -> Iterator[tuple[Any, ...]]:
    """Return the entries of a frame of `pack_entries`. Raises ProtocolError if the frame has another length."""
    body = memoryview(frame)[HEADER.size :]
    if len(body) != count * entry.size:
        raise ProtocolError(f"{kind.name} of {count} entries has {len(body)} bytes")
    return entry.iter_unpack(body)


pack_submissions = partial(pack_entries, Kind.SUBMIT, SUBMISSION)
#: Reads each `Submission` as a plain tuple, because this is the runtime's most frequent loop.
unpack_submissions = partial(unpack_entries, Kind.SUBMIT, SUBMISSION)


def pack_completions(completions: Sequence[Completion]) -> list[bytes]:
    """Return the fewest DONE frames that hold these completions."""
    frames: list[bytes] = []
    entries: list[bytes] = []
    texts: list[bytes] = []
    size = HEADER.size
    for done in completions:
        text = done.text.encode()[:4096]
        more = COMPLETION.size + len(text)
        if entries and size + more > MAX_FRAME:
            frames.append(_done_frame(entries, texts))
            entries, texts, size = [], [], HEADER.size
        entries.append(
            COMPLETION.pack(done.request, done.status, 0, done.size, done.rows, len(text), done.execute_ns)
        )
        if text:
            texts.append(text)
        size += more
    if entries:
        frames.append(_done_frame(entries, texts))
    return frames


def _done_frame(entries: list[bytes], texts: list[bytes]) -> bytes:
    return b"".join((HEADER.pack(Kind.DONE, 0, len(entries)), *entries, *texts))


def unpack_completions(frame: bytes | memoryview, count: int) -> list[Completion]:
    body = memoryview(frame)[HEADER.size :]
    text_at = count * COMPLETION.size
    if len(body) < text_at:
        raise ProtocolError(f"DONE of {count} requests has {len(body)} bytes")
    out = []
    for request, status, _, size, rows, length, execute_ns in COMPLETION.iter_unpack(body[:text_at]):
        text = ""
        if length:
            text = bytes(body[text_at : text_at + length]).decode(errors="replace")
            text_at += length
        out.append(Completion(request, as_status(status), size, rows, execute_ns, text))
    if text_at != len(body):
        raise ProtocolError("DONE: the texts' lengths do not add up to the frame's")
    return out


_STATUSES = {int(status): status for status in Status}
_KINDS = {int(kind): kind for kind in Kind}


def as_status(value: int) -> Status:
    try:
        return _STATUSES[value]
    except KeyError:
        raise ProtocolError(f"unknown status {value}") from None


def pack_ids(kind: Kind, ids: Iterable[int]) -> bytes:
    """Return a CANCEL (request ids) or DROP_SEGMENT (segment ids) frame."""
    values = list(ids)
    return HEADER.pack(kind, 0, len(values)) + struct.pack(f"<{len(values)}Q", *values)


def unpack_ids(frame: bytes | memoryview, count: int) -> tuple[int, ...]:
    body = memoryview(frame)[HEADER.size :]
    if len(body) != 8 * count:
        raise ProtocolError(f"{count} ids in {len(body)} bytes")
    return struct.unpack(f"<{count}Q", body)


def pack_json(kind: Kind, value: dict[str, Any], count: int = 0) -> bytes:
    frame = HEADER.pack(kind, 0, count) + json.dumps(value, separators=(",", ":")).encode()
    if len(frame) > MAX_FRAME:
        raise ProtocolError(f"{kind.name} of {len(frame)} bytes exceeds a frame of {MAX_FRAME}")
    return frame


def pack_rejected(reason: str, client: str) -> bytes:
    """Return REJECTED in flat form: `count` bytes of the reason, then the text for clients."""
    text = reason.encode(errors="replace")
    return HEADER.pack(Kind.REJECTED, 0, len(text)) + text + client.encode(errors="replace")


def pack_cold(start_timeout_s: float, *, flat: bool = False) -> bytes:
    """Return COLD: the model starts when a request waits for it. The start may take `start_timeout_s`."""
    if flat:
        return HEADER.pack(Kind.COLD, 0, 0) + struct.pack("<q", int(min(1e9 * start_timeout_s, 2**63 - 1)))
    return pack_json(Kind.COLD, {"start_timeout_s": start_timeout_s, "retry_after_s": 0})


class StartProgress(NamedTuple):
    """A step of a model's start in the runtime."""

    #: Progress of the start, for clients.
    text: str
    #: Seconds that requests may wait for the next step.
    limit_s: float
    #: Least number of seconds until the model can serve, or 0.0 if unknown.
    least_s: float = 0.0


#: Maximum number of bytes of a step's text.
MAX_PROGRESS = 400


def pack_starting(progress: StartProgress, *, flat: bool = False) -> bytes:
    """Return STARTING, which announces a step of a start."""
    text = progress.text.encode(errors="replace")[:MAX_PROGRESS].decode(errors="ignore")
    if flat:
        times = (int(min(1e9 * seconds, 2**63 - 1)) for seconds in (progress.least_s, progress.limit_s))
        return HEADER.pack(Kind.STARTING, 0, 0) + struct.pack("<qq", *times) + text.encode()
    value = {"start_s": progress.least_s, "limit_s": progress.limit_s, "progress": text}
    return pack_json(Kind.STARTING, value)


def unpack_starting(frame: bytes | memoryview) -> StartProgress:
    """Read STARTING in JSON. Raises ProtocolError."""
    match unpack_json(frame):
        case {
            "start_s": int() | float() as least_s,
            "limit_s": int() | float() as limit_s,
            "progress": str(text),
        }:
            return StartProgress(text, float(limit_s), float(least_s))
    raise ProtocolError("STARTING without its times or its progress")


def unpack_json(frame: bytes | memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(frame[HEADER.size :]))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame's JSON cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError("a frame's JSON is not an object")
    return value


def read_header(frame: bytes | memoryview) -> tuple[Kind, int]:
    """Return the kind and the count of a frame. Raises ProtocolError."""
    if len(frame) < HEADER.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes has no header")
    kind, _, count = HEADER.unpack_from(frame)
    try:
        return _KINDS[kind], count
    except KeyError:
        raise ProtocolError(f"unknown kind of frame {kind}") from None


def hello() -> bytes:
    return pack_json(Kind.HELLO, {"magic": MAGIC, "version": PROTOCOL_VERSION})


def check_hello(frame: bytes | memoryview) -> None:
    """Check the first frame of a connection, in either direction. Raises ProtocolError.

    If the versions differ, the error is an OtherVersionError, and its message names both.
    """
    kind, _ = read_header(frame)
    body = unpack_json(frame) if kind in (Kind.HELLO, Kind.WELCOME) else {}
    if body.get("magic") != MAGIC:
        raise ProtocolError(FOREIGN_PEER)
    if body.get("version") != PROTOCOL_VERSION:
        raise OtherVersionError(
            f"the peer uses version {body.get('version')!r} of the protocol, and this side uses {PROTOCOL_VERSION}: "
            "install the same rsrv for the stubs and for the runtime, and restart tritonserver"
        )
