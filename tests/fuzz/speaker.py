"""Frames of every kind, mostly good or mostly bad, and descriptors that may be sent with them."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rsrv.wire import calls, frames, traces
from rsrv.wire.calls import Where
from rsrv.wire.frames import HEADER, MAX_FRAME, Completion, Kind, ProtocolError, Status, Submission
from rsrv.wire.generation import Generate, pack_tokens
from rsrv.wire.memory import create_sealed

Random = random.Random

#: Kinds of frames for stubs. Other kinds are for runtimes.
_TO_STUB = frozenset(
    {*(kind for kind in Kind if Kind.WELCOME <= kind <= Kind.REPORTED), Kind.COLD, Kind.STARTING, Kind.TOKENS}
)
#: Seconds in frames about starts; 0.0 stands for an unknown value. Limits of less than 0.1 s are missing, because requests that
#: may wait for so short a time cause no start.
_START_S = (0.1, 1.0, 1e9, 0.0)
_WILD_IDS = (0, 1, 2, 77, 2**31, 2**32 - 1, 2**40 - 1, 2**40, 2**63, 2**64 - 1)
#: Fields of a frame's entries: good values and wild values.
_FIELDS: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "deadline_ns": ((0, 0, 1, 2**62), (-1, 2**63 - 1, -(2**63))),
    "rows": ((1, 1, 2, 4, 5), (0, 1000, 2**31, 2**32 - 1)),
    "variant": ((0,), (1, 65535)),
    "segment": ((0,), (1, 2, 2**32 - 1)),
    "inputs_at": ((0, 64, 1024), (1, 65472, 65536, 2**31, 2**63, 2**64 - 64)),
    "outputs_at": ((2048, 4096, 0), (1, 65472, 65536, 2**31, 2**63, 2**64 - 64)),
    "run": ((0,), _WILD_IDS),
    "sequence": ((0,), _WILD_IDS),
    "callee": ((0,), (1, 65535)),
}
_OTHER_FIELDS: tuple[Sequence[int], Sequence[int]] = ((0, 1, 2), (65535,))
_JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 2**64, 10**300, 0.5, float("nan"), float("inf"), "", "x", "x" * 50_000, "\0", "\ud800", "../..", [], {}, [[]],
    {"a": {}}, ["m"] * 1000, {str(i): i for i in range(2000)}, "fair", "device", "fifo",
)  # fmt: skip


class Speaker:
    """Makes the frames of one connection. They are of every kind, and mostly good or mostly bad."""

    def __init__(self, rng: Random, keys: Sequence[str]) -> None:
        self._rng = rng
        self._wildness = rng.choice((0.0, 0.003, 0.03, 0.3))
        #: Key of the model for which the connection registers. It is empty if the speaker plays a runtime.
        self.key = rng.choice(keys) if keys else ""
        self._meta = self.key.startswith("meta")
        self._generates = self.key.startswith("generator")
        self._numbers = itertools.count()
        #: Instance of the control process that the speaker plays. `_revision` is the last revision that it has sent.
        self._instance = f"{rng.getrandbits(64):x}"
        self._revision = 0
        self._runs = [1]

    def is_wild(self) -> bool:
        """Return True if the next action should be one that no good peer does."""
        return self._rng.random() < self._wildness

    def frame(self, kind: Kind | None = None) -> bytes:
        """Return the next frame. Its kind is random, or `kind`."""
        kind = kind or self._rng.choice(tuple(Kind) if self.is_wild() else self._kinds())
        try:
            frame = self._good(kind)
        except (struct.error, ProtocolError):  # A value cannot be packed.
            frame = HEADER.pack(kind, 0, 1)
        return self._spoiled(frame) if self.is_wild() else frame

    def _kinds(self) -> list[Kind]:
        """Return the kinds that may follow a registration."""
        if not self.key:
            return sorted(_TO_STUB)
        never = {Kind.HELLO, Kind.REGISTER, Kind.SEGMENT, Kind.DROP_SEGMENT}
        never |= {Kind.SUBMIT} if self._meta else {Kind.ENTER, Kind.CALL, Kind.LEAVE, Kind.RELEASE}
        never |= set() if self._generates else {Kind.GENERATE}
        return [kind for kind in Kind if kind not in _TO_STUB and kind not in never]

    def _good(self, kind: Kind) -> bytes:
        """Return a frame of this kind as a good peer sends it, except for wild numbers."""
        rng = self._rng
        many = range(rng.choice((1, 1, 3, 20)))
        match kind:
            case Kind.SUBMIT:
                return frames.pack_submissions([Submission(*self._fields(Submission)) for _ in many])
            case Kind.ENTER:
                return calls.pack_entrances([self._entrance() for _ in many])
            case Kind.CALL:
                return calls.pack_calls([self._call() for _ in many])
            case Kind.LEAVE:
                return calls.pack_leavings(
                    [calls.RunExit(self._run(), rng.choice(tuple(Status))) for _ in many]
                )
            case Kind.RELEASE:
                return calls.pack_releases([calls.Release(self._run(), rng.randrange(20)) for _ in many])
            case Kind.TRACE:
                marks = [traces.Mark(self._request(), f"{rng.getrandbits(128):032x}", "0" * 16) for _ in many]
                return traces.pack_marks(marks)
            case Kind.CANCEL | Kind.SEGMENT | Kind.DROP_SEGMENT:
                return frames.pack_ids(kind, [self._one(range(200), _WILD_IDS) for _ in many])
            case Kind.GENERATE:
                return self._generate()
            case Kind.TOKENS:
                return pack_tokens([(self._one((1,), _WILD_IDS), rng.choice((0, -1, 7))) for _ in many])[0]
            case Kind.DONE:
                return frames.pack_completions([_completion(rng)])[0]
            case Kind.COLD:
                return frames.pack_cold(rng.choice(_START_S), flat=not self.is_wild())
            case Kind.STARTING:
                text = rng.choice(("", "3 of its 12 modules are compiled", "\u20ac" * 500))
                step = frames.StartProgress(text, rng.choice(_START_S), rng.choice((0.0, *_START_S)))
                return frames.pack_starting(step, flat=not self.is_wild())
        return HEADER.pack(kind, 0, 0) + json.dumps(self._object()).encode()

    def _generate(self) -> bytes:
        rng = self._rng
        prompt = [rng.randrange(20) for _ in range(rng.choice((1, 1, 5, 30, 39, 40, 2000)))]
        body = Generate(self._request(), prompt)._asdict()
        body |= {
            "max_tokens": rng.choice((None, 1, 30)),
            "stop": rng.choice((None, [], [1, 2])),
            "deadline_ns": self._one(*_FIELDS["deadline_ns"]),
        }
        if self.is_wild():
            body[rng.choice((*body, "extra"))] = rng.choice(_JUNK)
        return HEADER.pack(Kind.GENERATE, 0, 0) + json.dumps(body).encode()

    def _one(self, good: Sequence[int], wild: Sequence[int]) -> int:
        return self._rng.choice(wild if self.is_wild() else good)

    def _request(self) -> int:
        return self._one((next(self._numbers),), _WILD_IDS)

    def _run(self) -> int:
        return self._one(self._runs, _WILD_IDS)

    def _fields(self, of: Any, **known: int) -> list[int]:
        """Return values for the fields of an entry. `known` has the values of some fields; the others are random."""
        known.setdefault("request", self._request())
        return [known.get(name, self._one(*_FIELDS.get(name, _OTHER_FIELDS))) for name in of._fields]

    def _entrance(self) -> calls.Entrance:
        self._runs.append(self._rng.randrange(1, 2**64))
        return calls.Entrance(*self._fields(calls.Entrance, run=self._one(self._runs[-1:], _WILD_IDS)))

    def _call(self) -> calls.Call:
        inputs = [
            self._spot((Where.MEMORY, Where.DEVICE) if self.is_wild() else (Where.MEMORY,), (0, 64, 1024))
        ]
        outputs = [self._spot(tuple(Where), (2048, 4096))]
        if self.is_wild():
            inputs *= self._rng.choice((0, 2, 300))
        request, run, callee, variant, rows, *_ = self._fields(calls.Call, run=self._run())
        return calls.Call(request, run, callee, variant, rows, inputs, outputs)

    def _spot(self, where: Sequence[Where], places: Sequence[int]) -> calls.Spot:
        kind = self._one(where, (3, 65535))
        at = next(self._numbers) if kind == Where.DEVICE else self._rng.choice(places)
        return calls.Spot(kind, self._one(*_FIELDS["segment"]), self._one((at,), _FIELDS["inputs_at"][1]))

    def _object(self) -> Any:
        """Return the object of a JSON frame. A part of the object may be junk."""
        rng = self._rng
        names = ("m", "meta", "nobody", None)
        body: dict[str, Any] = rng.choice(
            (
                {"magic": frames.MAGIC, "version": frames.PROTOCOL_VERSION},
                {"model": "m", "bundle": "/nowhere"},
                {"model": "m", "bundle": "/dev/zero", "calls": {"m": "/", "n": 1}},
                {"key": self.key},
                {"discipline": "fair", "depth": 2},
                {"spans": [["a" * 32, "b" * 16, "", "s", 1, 2, "", {"k": 1}]] * 3, "dropped": 1},
                {"meta_concurrency": 1e308},
                {"meta_concurrency": 0},
                {},
                *(
                    {"command": "follow", "instance": self._instance, **document}
                    for document in self._documents()
                ),
                *(
                    {"command": command, "model": rng.choice(names), **rng.choice(_OPTIONS)}
                    for command in _COMMANDS
                ),
            )
        )
        if rng.random() < 0.3:
            body[rng.choice((*body, "extra", "model", "key", ""))] = rng.choice(_JUNK)
        return rng.choice(_JUNK) if self.is_wild() else body

    def _documents(self) -> list[dict[str, Any]]:
        """Return a change of the desired document, and a whole document. Either may be bad."""
        rng = self._rng
        self._revision += 1
        section = {rng.choice(("residency", "weight", "max_delay_us", "x")): rng.choice(_VALUES)}
        entry = {"settings": section, rng.choice(("paused", "prefetched", "asked")): rng.choice(_VALUES)}
        change = rng.choice(
            ({"models": {"m": rng.choice((entry, None))}}, {"paused": rng.choice(_VALUES)}, {})
        )
        whole = {"scheduler": {}, "runtime": {}, "paused": None, "models": {}, **change}
        number = {"revision": self._revision, "since": rng.choice((self._revision - 1, None, 0))}
        return [{**number, "document": change}, {"revision": self._revision, "document": whole}]

    def _spoiled(self, frame: bytes) -> bytes:
        """Return the frame with random damage."""
        rng = self._rng
        spoiled = bytearray(frame)
        at = rng.randrange(len(spoiled))
        match rng.randrange(10):
            case 0:
                spoiled[at] ^= 1 << rng.randrange(8)
            case 1:
                del spoiled[at:]
            case 2:
                spoiled[at:at] = rng.randbytes(rng.choice((1, 8, 56, 1000)))
            case 3:
                struct.pack_into("<I", spoiled, 4, rng.choice((0, 1, 2, 1025, 2**31, 2**32 - 1)))
            case 4:
                struct.pack_into("<H", spoiled, 0, rng.choice((*map(int, Kind), 0, 30, 65535)))
            case 5:
                spoiled += bytes(MAX_FRAME - len(spoiled) + rng.choice((-1, 0, 1, 1000)))
            case 6:
                spoiled[8:] = rng.choice((b"[", b'{"a":', b"{", b"\xff", b"1", b"[[],")) * rng.choice(
                    (1, 10_000)
                )
            case 7:
                spoiled[8:] = b'{"model":' + b"9" * rng.choice((10, 5000, 100_000)) + b"}"
            case 8:
                spoiled = bytearray(rng.randbytes(rng.choice((1, 7, 8, 9, 64, 4096))))
            case _:
                spoiled[8:] = rng.randbytes(len(spoiled) - 8)
        return bytes(spoiled) or b"\0"  # An empty message would mean the end of the connection.


_COMMANDS = (
    "follow", "follow", "follow", "compact", "ping", "prefetch", "evict", "abort", "history", "load", "profile", "traces", "nothing"
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    "device",
    "unpinned",
    "hold",
    "reject",
    "stop",
    1,
    0,
    -1,
    2**70,
    0.5,
    True,
    None,
    [],
    {"a": 1},
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"request": "a"}, {"request": ["a"]}, {"directory": 1},
)  # fmt: skip


def _completion(rng: Random) -> Completion:
    text = rng.choice(("", "x", "é" * 3000, "\0"))
    return Completion(
        rng.choice(_WILD_IDS), rng.choice(tuple(Status)), rng.choice((0, 8)), rng.choice((0, 8)), 5, text
    )


def some_fds(rng: Random, stack: ExitStack) -> list[int]:
    """Return descriptors of all kinds. They are closed with the stack."""

    def memfd(size: int, seals: int) -> int:
        fd = os.memfd_create("odd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    def some_fd() -> int:
        shrink, write = 2, 8
        match rng.randrange(9):
            case 0:
                return create_sealed(rng.choice((1, 4096, 1 << 20)), "good")
            case 1:
                return memfd(4096, 0)
            case 2:
                return memfd(0, shrink)
            case 3:
                return memfd(rng.choice((1 << 39, 1 << 41, 1 << 46, 2**63 - 1)), shrink)
            case 4:
                return memfd(4096, shrink | write)
            case 5:
                read, written = os.pipe()
                os.close(written)
                return read
            case 6:
                return os.open("/", os.O_RDONLY)
            case 7:
                return os.open("/dev/zero", os.O_RDWR)
            case _:
                return socket.socket(socket.AF_UNIX).detach()

    fds = []
    for _ in range(rng.choice((1, 1, 1, 2, 4, 5, 50))):
        with suppress(OSError):
            fds.append(some_fd())
            stack.callback(os.close, fds[-1])
    return fds
