"""Conformance vectors: lives of a model, which the Python front and the native front must follow alike.

    python -m tests.unit.front.vectors     # writes vectors.json again, after a rule has changed

A vector is a list of events, each with the instructions that follow from it. Each test of the Python front gives one
vector. Random lives give further vectors, as far as they show something new. The vectors have no events that the native
front does not have: runs of meta models, runtimes that do not read, and runtimes that ask the front to leave.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rsrv.front import events
from rsrv.front.events import Connect, Event, Instruction, Refuse, Registered, RequestArrived, Submit
from rsrv.front.front import Front
from rsrv.placement.device_choice import PINNED
from rsrv.wire.frames import StartProgress
from tests.unit.front import test_front, test_random_events
from tests.unit.front.driver import Driver, Request

#: Number of characters of a client's text that a vector keeps. Longer texts have no fields after this position.
TEXT = 150
PATH = Path(__file__).with_name("vectors.json")

#: Number of random lives, number of events of each, and the largest number of steps of a vector.
_RANDOM_LIVES, _RANDOM_EVENTS, _MOST_STEPS = 1000, 40, 100

#: A time, an event, and the instructions in any order. They follow from the time that has passed since the last step,
#: and from the event.
Step = tuple[float, list[Any], list[list[Any]]]


class Vector:
    """One life of a model."""

    def __init__(self, name: str, devices: int, mask: int, steps: list[Step]) -> None:
        self.name, self.devices, self.mask, self.steps = name, devices, mask, steps

    def to_json(self) -> str:
        return json.dumps([self.name, self.devices, self.mask, self.steps], separators=(",", ":"))


def read() -> list[Vector]:
    return [Vector(*values) for values in json.loads(PATH.read_text())]


# --- events and instructions as lists -------------------------------------------------------------------------


class Requests:
    """Requests of a life by number."""

    def __init__(self) -> None:
        self._all: list[Request] = []

    def number(self, request: object) -> int:
        assert isinstance(request, Request)
        if request not in self._all:
            self._all.append(request)
        return self._all.index(request)

    def get(self, number: int) -> Request:
        while len(self._all) <= number:
            self._all.append(Request())
        return self._all[number]


def pack_event(event: Event, requests: Requests) -> list[Any]:
    if isinstance(event, RequestArrived):
        request = event.request
        number = requests.number(request)
        return [
            "RequestArrived",
            number,
            request.deadline_s,
            request.is_sub_call,
            request.nbytes,
            request.deaths,
        ]
    assert is_dataclass(event)
    values = [getattr(event, field.name) for field in fields(event)]
    return [
        type(event).__name__,
        *(requests.number(value) if isinstance(value, Request) else value for value in values),
    ]


def unpack_event(packed: Sequence[Any], requests: Requests) -> Event:
    name, *values = packed
    if name == "RequestArrived":
        request = requests.get(values[0])
        request.deadline_s, request.is_sub_call, request.nbytes, request.deaths = values[1:]
        return RequestArrived(request)
    if name == "StepAnnounced":
        return events.StepAnnounced(values[0], StartProgress(*values[1]))
    if name in ("RequestCancelled", "RequestAnswered"):
        values = [requests.get(values[0])]
    made: Event = getattr(events, name)(*values)
    return made


def pack_instructions(instructions: Sequence[Instruction], requests: Requests) -> list[list[Any]]:
    """Return the instructions of attempts, submissions and refusals in the form of a vector."""
    packed: list[list[Any]] = []
    for instruction in instructions:
        match instruction:
            case Connect(device, started, by_request):
                packed.append(["Connect", device, int(started), int(by_request)])
            case Submit(request):
                packed.append(["Submit", requests.number(request)])
            case Refuse(request, status, text):
                packed.append(["Refuse", requests.number(request), status.name, text[:TEXT]])
    return sorted(packed, key=str)


# --- the vectors are recorded ---------------------------------------------------------------------------------


class _Recorder:
    """Recorder of the events that all fronts get, and of the instructions that they return."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.vectors: list[Vector] = []
        self._known: set[tuple[object, ...]] = set()
        #: The lives since the latest call of `keep`.
        self._lives: dict[Front, tuple[Vector, Requests]] = {}
        begin, handle, lives = Front.__init__, Front.handle, self._lives

        def begin_recorded(front: Front, model: str, devices: int, mask: int = 0) -> None:
            begin(front, model, devices, mask)
            lives[front] = Vector("", devices, mask, []), Requests()

        def handle_recorded(front: Front, event: Event, now: float) -> list[Instruction]:
            made = handle(front, event, now)
            vector, requests = lives[front]
            packed, then = pack_event(event, requests), pack_instructions(made, requests)
            if vector.steps and vector.steps[-1][0] == now and vector.steps[-1][1] == ["TimePassed"]:
                then = sorted(vector.steps.pop()[2] + then, key=str)
            vector.steps.append((now, packed, then))
            return made

        patch.setattr(Front, "__init__", begin_recorded)
        patch.setattr(Front, "handle", handle_recorded)

    def keep(self, name: str, *, always: bool) -> None:
        """Keep the new lives as far as the native front can follow them.

        Unless `always`, cut each life after its last new feature.
        """
        for number, (vector, _) in enumerate(self._lives.values()):
            vector.name = f"{name} {number}" if number else name
            _cut(vector)
            features = list(_features(vector))
            new = [at for at, feature in features if feature not in self._known]
            if not always:
                del vector.steps[new[-1] + 1 if new else 0 :]
            if 0 < len(vector.steps) <= _MOST_STEPS:
                self._known |= {feature for _, feature in features}
                self.vectors.append(vector)
        self._lives.clear()


def _cut(vector: Vector) -> None:
    """Remove the events that the native front does not have.

    If it cannot follow a life without them, remove all steps of this life.
    """
    names = [event[0] for _, event, _ in vector.steps]
    end = names.index("Unloaded") if "Unloaded" in names else len(names)
    grows = any(event[0] == "Registered" and event[2] > vector.devices for _, event, _ in vector.steps)
    if grows or {"RunAsks", "NotSubmitted"} & {*names[:end]}:
        end = 0
    vector.steps = [step for step in vector.steps[:end] if step[1][0] not in ("Dismissed", "InputsExecuted")]


def _features(vector: Vector) -> Iterator[tuple[int, tuple[object, ...]]]:
    """Yield the features of each step: its event with the resulting instructions, and also the event before it."""
    for at, (_, event, instructions) in enumerate(vector.steps):
        kinds = sorted(
            {
                instruction[0] if instruction[0] != "Refuse" else f"{instruction[2]} {instruction[3][:40]}"
                for instruction in instructions
            }
        )
        yield at, (event[0], *kinds)
        if kinds and at:
            yield at, (vector.steps[at - 1][1][0], event[0], kinds[0])


class _Life(test_random_events.Life):
    """A random life of a model that the native front can follow."""

    def _tick(self) -> None:
        self.driver.tick(self.random.choice([0.0, 0.02, 1.0, 30.0]))

    _run = _ask = _tick

    def _placement(self) -> None:
        mask = self.random.choice([0, 1, 2, 4, 7, PINNED | 2])
        if mask != self.driver.mask:
            self.driver.mask = mask
            self.driver.send(events.PlacementChanged(mask))

    def _dismiss(self) -> None:
        device = self.random.choice(self.ready)
        self.driver.send(events.StartTimeoutKnown(test_random_events.LIMIT_S))
        if not self.driver.front.waiting:
            self.driver.send(events.WentCold(device))


class _Driver(Driver):
    """A driver that lets the time pass before each event, as the threads of the native front do."""

    def send(self, event: Event, after: float = 0.0) -> None:
        if isinstance(event, Registered):
            event = Registered(event.device, self.devices, event.retry_s)
        self.now += after
        for instruction in self.front.handle(events.TimePassed(), self.now):
            self._carry_out(instruction)
        super().send(event)


def record() -> list[Vector]:
    with pytest.MonkeyPatch.context() as patch:
        recorder = _Recorder(patch)
        patch.setattr(test_front, "Driver", _Driver)
        patch.setattr(test_random_events, "Driver", _Driver)
        for name, test in vars(test_front).items():
            if name.startswith("test_") and not inspect.signature(test).parameters:
                test()
                recorder.keep(name.removeprefix("test_").replace("_", " "), always=True)
        for seed in range(_RANDOM_LIVES):
            life = _Life(Random(seed))
            for _ in range(_RANDOM_EVENTS):
                life.step()
            recorder.keep(f"random life {seed}", always=False)
        return recorder.vectors


def main() -> None:
    lines = ",\n".join(vector.to_json() for vector in record())
    PATH.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
