"""Runtimes that misbehave towards the native front. It must answer each request once, and survive.

The front runs in a program that plays tritonserver. The program is built with sanitizers, which end it at the first fault.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil

from rsrv.wire import paths
from rsrv.wire.frames import Kind, pack_json
from rsrv.wire.placement_table import PlacementWriter
from rsrv.wire.socket import send
from tests.fuzz.speaker import Random, Speaker, some_fds
from tests.fuzz.watched import Verdict
from tests.unit.native.front import Behaviour, Connection, Front, behave, described, driver

#: Number of connections that each of the two devices makes for one seed. All of them misbehave.
CONNECTIONS = 30
#: Number of seeds at the same time. Most of the time, they wait for back-offs.
_TOGETHER = 4
#: Time limit in seconds for a seed, and memory limit in bytes for its program, including the sanitizer's own memory.
_SECONDS, _NBYTES = 300.0, 1 << 30
#: Deadline of a request. Without a deadline, a request could wait for one runtime after another, for longer than the time limit.
_DEADLINE = "reactant_timeout_ns=5000000000"


def check_natives(seeds: Sequence[int], scratch: Path) -> Iterator[Verdict]:
    """For every seed, start a new front with runtimes that misbehave."""
    program = driver("address" if shutil.which("cc") else "undefined")
    remaining = iter(seeds)
    with ThreadPoolExecutor(_TOGETHER) as pool:
        while some := list(itertools.islice(remaining, _TOGETHER)):
            yield from pool.map(lambda seed: _judged(program, scratch / f"native{seed}", seed), some)


def _judged(program: Path, folder: Path, seed: int) -> Verdict:
    began = time.monotonic()
    folder.mkdir()
    try:
        case = _describe if seed % 8 == 0 else _talk
        nbytes = case(program, folder, seed)
    except AssertionError as error:
        text = str(error)
        outcome = "crash" if "the front ended" in text else "unanswered"
        return Verdict(seed, outcome, text[-3000:], time.monotonic() - began)
    finally:
        shutil.rmtree(folder)
    outcome = "bloat" if nbytes > _NBYTES else "survived"
    return Verdict(seed, outcome, "", time.monotonic() - began, nbytes)


def _talk(program: Path, folder: Path, seed: int) -> int:
    """Let the runtimes of two devices send frames with random faults. Return the memory of the front in bytes."""
    runtimes, is_over = misbehaving(seed, CONNECTIONS)
    with Front(program, folder, *runtimes) as front:
        _damage_files(front, Random(seed))
        load(front, is_over, _SECONDS)
        return int(psutil.Process(front.process.pid).memory_info().rss)


def misbehaving(seed: int, connections: int) -> tuple[list[list[Behaviour]], Callable[[], bool]]:
    """Return the runtimes of two devices, and a function that returns True when one device has made its last connection.

    The function does not wait for the other device, because a cold model starts on only one device.
    """
    reached = threading.Event()

    def talking(device: int, number: int) -> Behaviour:
        def talk(connection: Connection) -> None:
            if number == connections - 1:
                reached.set()
            _misbehave(connection, Random(f"{seed} {device} {number}"))

        return talk

    return [[talking(device, number) for number in range(connections)] for device in (0, 1)], reached.is_set


def load(front: Front, is_over: Callable[[], bool], seconds: float) -> None:
    """Load the model, and send requests. Unload the model after the first correct answer for which `is_over()` is True.

    Raises AssertionError if a command does not get exactly one answer, or if this takes more than `seconds`.
    """
    deadline = time.monotonic() + seconds
    while front.ask("open") != ["opened - ok 0 0"]:
        assert time.monotonic() < deadline, "the model is never loaded"
    for number in itertools.count():
        rows = 1 + number % 8
        first = 4 * rows * number + 2 * rows * (4 * rows - 1)
        (line,) = front.ask(f"send {number} {rows} {_DEADLINE}")
        if line == f"answer {number} ok {rows} {2 * first:g}" and is_over():
            break
        assert time.monotonic() < deadline, f"no right answer in {seconds:.0f} s; the last: {line}"
    assert front.ask("close") == ["closed - ok 0 0"]


def _misbehave(connection: Connection, rng: Random) -> None:
    """Send frames and descriptors with random faults: before, during and after the registration."""
    speaker = Speaker(rng, ())
    if rng.random() < 0.05:
        with ExitStack() as stack:
            kind = rng.choice((Kind.WELCOME, None))
            send(connection.sock, speaker.frame(kind), some_fds(rng, stack))
    if rng.random() < 0.05:
        connection.devices = rng.choice((0, 1, 63, 64, 2**32 - 1))
    connection.greet()
    while rng.random() < 0.3:
        send(connection.sock, speaker.frame(rng.choice((Kind.COLD, Kind.STARTING))))
    if rng.random() < 0.9:
        connection.register(described())
    else:
        with ExitStack() as stack:
            send(connection.sock, pack_json(Kind.REGISTERED, {}), some_fds(rng, stack))
    connection.board.publish(rng.getrandbits(63), busy=rng.random() < 0.5)
    connection.board.publish_load(rng.randrange(1, 8192), rng.getrandbits(64))
    for _ in range(rng.choice((1, 3, 20))):
        with ExitStack() as stack:
            fds = some_fds(rng, stack) if rng.random() < 0.2 else []
            send(connection.sock, speaker.frame(Kind.DONE if rng.random() < 0.7 else None), fds)


def _damage_files(front: Front, rng: Random) -> None:
    """Write a placement table and black boxes. Each may be right, damaged or missing."""
    for device in (0, 1):
        if rng.random() < 0.3:
            box = front.directory(device) / paths.BLACKBOX
            box.write_bytes(rng.randbytes(rng.choice((0, 1, 64, 4096, 1 << 16))))
    if rng.random() < 0.5:
        path = front.directory(0) / paths.PLACEMENT
        table = PlacementWriter(path)
        table.write({"doubling": rng.getrandbits(63), "another": 3})
        table.close()
        if rng.random() < 0.7:
            content = bytearray(path.read_bytes())
            for _ in range(rng.choice((1, 8, 200))):
                content[rng.randrange(len(content))] = rng.randrange(256)
            path.write_bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])


def _describe(program: Path, folder: Path, seed: int) -> int:
    """Describe the model with random faults, and load it each time. Return the memory of the front in bytes."""
    rng = Random(seed)

    def describing() -> Behaviour:
        document = bytearray(described())
        for _ in range(rng.choice((1, 2, 10))):
            at = rng.randrange(len(document) - 4)
            width = rng.choice((1, 2, 4))
            document[at : at + width] = rng.choice((b"\0" * width, b"\xff" * width, rng.randbytes(width)))
        cut = rng.choice((len(document), len(document), rng.randrange(len(document))))

        def describe(connection: Connection) -> None:
            connection.greet()
            connection.register(bytes(document[:cut]))
            connection.receive()

        return describe

    with Front(program, folder, [describing() for _ in range(CONNECTIONS)]) as front:
        for _ in range(CONNECTIONS):
            (line,) = front.ask("open")
            if line.startswith("opened"):
                assert front.ask("close") == ["closed - ok 0 0"]
            else:
                assert line.startswith("refused - 1 doubling: "), line
        front.behaviours[:] = [behave]
        load(front, lambda: True, 60)
        return int(psutil.Process(front.process.pid).memory_info().rss)
