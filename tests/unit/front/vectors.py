"""Conformance vectors: events of a model, to which the Python front and the native front must react alike.

    python -m tests.unit.front.vectors     # writes vectors.json again, after a rule has changed

A vector is a life of a model: a list of events from the model's load on, each with the instructions that follow from it.
Each test of the Python front gives one vector. Lives with random events give further vectors if they show something new.
The vectors have no events that the native front does not have: runs of meta models, runtimes that do not read, and
runtimes that ask the front to leave.
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

#: A time, an event, and the resulting instructions, whose order does not matter. They result from the time that has passed
#: since the last step, and from the event.
Step = tuple[float, list[Any], list[list[Any]]]


class Vector:
    """The life of one model, as a list of steps."""

    def __init__(self, name: str, devices: int, mask: int, steps: list[Step]) -> None:
        self.name, self.devices, self.mask, self.steps = name, devices, mask, steps

    def to_json(self) -> str:
        return json.dumps([self.name, self.devices, self.mask, self.steps], separators=(",", ":"))


def read() -> list[Vector]:
    return [Vector(*values) for values in json.loads(PATH.read_text())]


# --- events and instructions as lists -------------------------------------------------------------------------


class Requests:
    """The requests of one life, by number."""

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
    """Records the events that all fronts get, and the instructions that the fronts return."""

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
        """Add the recorded lives to the vectors, without the steps that the native front cannot follow.

        Unless `always`, also remove the steps after the last new feature of each life.
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

    If the native front cannot follow the life without these events, remove all steps.
    """
    names = [event[0] for _, event, _ in vector.steps]
    end = names.index("Unloaded") if "Unloaded" in names else len(names)
    grows = any(event[0] == "Registered" and event[2] > vector.devices for _, event, _ in vector.steps)
    if grows or {"RunAsks", "NotSubmitted"} & {*names[:end]}:
        end = 0
    vector.steps = [step for step in vector.steps[:end] if step[1][0] not in ("Dismissed", "InputsExecuted")]


def _features(vector: Vector) -> Iterator[tuple[int, tuple[object, ...]]]:
    """Yield the index and the features of each step.

    The first feature of a step is its event with the kinds of the resulting instructions. If there are instructions, the second
    one is the previous event, this event, and the first of these kinds.
    """
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
        # The native front has no NotSubmitted, so a vector ends before this event.
        if not self.takes_none:
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
