"""The conformance vectors, which the Python front and the native front's decisions must follow."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import native_front
from rsrv.front.events import TimePassed
from rsrv.front.front import Front
from rsrv.front.parts import Parts
from rsrv.placement.device_choice import by_preference
from rsrv.wire.frames import Status
from tests.unit.front.vectors import TEXT, Requests, Vector, pack_instructions, read, unpack_event
from tests.unit.native.front import BUILT, HERE, SANITIZERS

#: Name of the model of each vector.
MODEL = "m"


def _python(vectors: list[Vector]) -> Iterator[list[list[Any]]]:
    """Yield the instructions of the Python front for each step of each vector."""
    for vector in vectors:
        front, requests = Front(MODEL, vector.devices, vector.mask), Requests()
        for at, event, _ in vector.steps:
            made = [*front.handle(TimePassed(), at), *front.handle(unpack_event(event, requests), at)]
            yield pack_instructions(made, requests)


def _program() -> Path:
    """Build the program that runs vectors through the native front's decisions."""
    program, sources = BUILT / "vectors", [HERE / "vectors.c"]
    sources += [native_front.SOURCES / f"{name}.c" for name in ("front", "replicas", "text")]
    options = ("-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Dclock_gettime=driver_clock", "-pthread")
    with native_front.one_builds():
        BUILT.mkdir(parents=True, exist_ok=True)
        compiler = (*native_front.compiler(), *options, *SANITIZERS["undefined"])
        subprocess.run([*compiler, "-o", program, *sources, "-lm"], check=True)
    return program


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _line(at: float, event: list[Any]) -> str:
    """Return an event as an input line of vectors.c."""
    name, *values = event
    match name:
        case "RequestArrived":
            number, deadline_s, is_sub_call, nbytes, deaths = values
            values = [number, _ns(deadline_s), int(is_sub_call), nbytes, deaths]
        case "Registered":
            values = [values[0], _ns(values[2])]
        case "StepAnnounced":
            device, (text, limit_s, least_s) = values
            values = [device, _ns(least_s), _ns(limit_s), text]
        case "ModelRejected":
            device, reason, client, barred = values
            values = [device, int(barred), client, reason]
        case "Unreached":
            device, reason, has_ended, *_ = values
            values = [device, int(has_ended), reason]
        case "RuntimeLost":
            values = [values[0], int(values[1])]
        case "StartTimeoutKnown":
            values = [_ns(values[0])]
    return "\t".join(map(str, [name, _ns(at), *values]))


def _native(vectors: list[Vector]) -> Iterator[list[list[Any]]]:
    """Yield the instructions of the native front for each step of each vector."""
    lines = []
    for vector in vectors:
        lines.append(f"Life\t{vector.devices}\t{by_preference(MODEL, vector.devices)[0]}\t{vector.mask}")
        lines += [_line(at, event) for at, event, _ in vector.steps]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run([_program()], input=text, stdout=subprocess.PIPE, text=True, check=True)
    made: list[list[Any]] = []
    for line in done.stdout.splitlines():
        kind, *values = line.split("\t")
        match kind:
            case ".":
                yield sorted(made, key=str)
                made = []
            case "Refuse":
                made.append([kind, int(values[0]), Status(int(values[1])).name, values[2][:TEXT]])
            case _:
                made.append([kind, *map(int, values)])


@pytest.mark.parametrize("run", [_python, _native])
def test_each_front_follows_the_vectors(run: Callable[[list[Vector]], Iterator[list[list[Any]]]]) -> None:
    """Both fronts make the same attempts, submissions and refusals, at the same times and with the same texts.

    After a change of a rule, `python -m tests.unit.front.vectors` records the vectors again.
    """
    vectors = read()
    all_made = run(vectors)
    for vector in vectors:
        for at, (time, event, expected) in enumerate(vector.steps):
            made = next(all_made)
            before = "\n".join(map(str, vector.steps[:at]))
            assert made == expected, f"{vector.name}: at {time}, after {event}; before:\n{before}"
    assert list(all_made) == []


def _divided(random: Random) -> tuple[str, str]:
    """Return a random request as an input line of vectors.c, and the output line with the parts that the Python front makes."""
    rows, largest, ends, then = random.randrange(1, 200), random.randrange(1, 40), "", ""
    parts, submitted, fails = Parts(rows, largest), 0, random.random() < 0.5
    while True:
        taken = parts.take()
        then += "".join(f"Take {part.first} {part.rows} " for part in taken)
        submitted += len(taken)
        if not submitted:
            return f"Parts\t{rows}\t{largest}\t{ends}", then
        answered = not (fails and random.random() < 0.1)
        ends += "01"[answered]
        then += f"End {int(parts.end(answered=answered))} "
        submitted -= 1


def test_both_fronts_divide_requests_alike() -> None:
    """Both fronts divide random requests into the same parts, and end these requests at the same part."""
    lives = [_divided(Random(seed)) for seed in range(200)]
    text = "".join(f"{event}\n" for event, _ in lives)
    done = subprocess.run([_program()], input=text, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == [then for _, then in lives]
