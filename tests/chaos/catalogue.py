"""Faults on a catalogue of lazy models. Clients ask them by Zipf's law, and limits of memory and time make them cold again.

Only requests for deleted bundles are refused. All other requests wait until their models have started, and no limit causes an
error.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from tests.chaos.bundles import put_item
from tests.chaos.endurance import Usage, usage
from tests.chaos.faults import Fault, kill
from tests.chaos.figures import RIGHT, UNANSWERED, WRONG, Expected
from tests.chaos.house import LAZY, House, fill
from tests.chaos.load import Connection, Load, ask_at_once, clients
from tests.chaos.questions import ITEMS, QUESTIONS, item, item_factor, item_name
from tests.waiting import wait_until

#: Numbers of items that only faults ask.
_DELETED, _DELETED_STARTING, _CHANGED, _CHANGED_STARTING = range(ITEMS, ITEMS + 4)
#: Seconds after which hasty clients give up.
_HASTE_S = 0.05
#: Time limit in seconds of a start that compiles, on a busy machine and after other starts.
_PATIENCE_S = 90.0
#: Memory may grow during this share of the run, and must not grow afterwards.
_GROWN = 0.3


class _Catalogue(Fault):
    #: The clients' patience is long, because a start may wait for another start that compiles.
    load = clients("catalogue", grpc=4, http=2, pause=0.01, patience=_PATIENCE_S)
    expected = Expected(())
    patience = 60.0
    house = "catalogue"


class _CompilingStarts(_Catalogue):
    """A fault during the start of a model that takes seconds to compile. The request for this model is answered."""

    def prepare(self, house: House) -> None:
        self._known = set(house.disk.iterdir())
        house.add("compiling")
        house.load_model("compiling")
        self._question = QUESTIONS["compiling"](np.random.default_rng(0))

    def tidy(self, house: House) -> None:
        house.remove("compiling")
        for entry in set(house.disk.iterdir()) - self._known:
            entry.unlink(missing_ok=True)


class FullDiskStarting(_CompilingStarts):
    name = "a catalogue: full disk for executables during a start"

    def strike(self, house: House, load: Load) -> float:
        give_back = fill(house.small_disk)
        struck = house.strike(load, "compiling", self._question, wait=True, patience=_PATIENCE_S)
        give_back()
        return struck


class KillStarting(_CompilingStarts):
    name = "a catalogue: kill -9 the runtime during a start"
    unhealthy = ""

    def strike(self, house: House, load: Load) -> float:
        mark = house.log_mark()
        house.strike(load, "compiling", self._question, patience=_PATIENCE_S)
        house.wait_log("compiling: compiled 1/", mark, _PATIENCE_S)
        return kill(house.runtime_pid(), signal.SIGKILL)


class BundlesChange(_Catalogue):
    """Requests for a deleted bundle are refused.

    A changed bundle first answers as before or as after the change, and in the end as after it.
    """

    name = "a catalogue: bundles deleted and changed while cold and while starting"
    expected = Expected({item_name(number) for number in (_DELETED, _DELETED_STARTING)})

    def prepare(self, house: House) -> None:
        self._problems: list[str] = []
        self._outcomes: dict[str, str] = {}

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        shutil.rmtree(house.bundles / item_name(_DELETED))
        self._ask(house, _DELETED, _DELETED)
        put_item(house.bundles, _CHANGED, factor_of=0)
        self._change(house, _CHANGED)
        for number, act in (
            (_DELETED_STARTING, lambda: shutil.rmtree(house.bundles / item_name(_DELETED_STARTING))),
            (_CHANGED_STARTING, lambda: put_item(house.bundles, _CHANGED_STARTING, factor_of=0)),
        ):
            thread = threading.Thread(target=self._ask, args=(house, number, number))
            thread.start()
            time.sleep(0.005)
            act()
            thread.join()
        self._change(house, _CHANGED_STARTING)
        return struck

    def relieve(self, house: House, load: Load) -> None:
        for number in (_DELETED, _DELETED_STARTING, _CHANGED, _CHANGED_STARTING):
            put_item(house.bundles, number)
            self._change(house, number, number)

    def _change(self, house: House, number: int, like: int = 0) -> None:
        """Send requests until the item `number` answers with the weights of the item `like`."""
        try:
            wait_until(
                lambda: self._ask(house, number, like) == RIGHT, 30, what="answers of the changed bundle"
            )
        except AssertionError as error:
            self._problems.append(f"{item_name(number)}: {error}: {self._outcomes}")

    def _ask(self, house: House, number: int, like: int) -> str:
        """Ask an item, and expect the weights of the item `like`. Return the outcome."""
        question = item(np.random.default_rng(number), number)
        connection = Connection("grpc", house.server.server.grpc_url)
        at = question.inputs["at"].astype(np.uint32)
        expected = {"y": at * np.uint32(item_factor(like))}
        outcome, detail = connection.ask(item_name(number), question._replace(wanted=expected))
        connection.close()
        self._outcomes[item_name(number)] = f"{outcome} {detail[:150]}"
        if outcome == UNANSWERED:
            self._problems.append(f"{item_name(number)} never answered")
        return outcome

    def check(self, house: House) -> Iterable[str]:
        yield from self._problems


class FirstRequestsAtOnce(_Catalogue):
    expected = Expected({"catalogue"}, excuse="a client gave up before the turn of its model's start")
    name = "a catalogue: 1,000 requests at once, most for cold models"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        rng = np.random.default_rng(0)
        questions = [item(rng, number % ITEMS) for number in range(1000)]
        for record in ask_at_once(house.server.server.grpc_url, "catalogue", questions, patience=240):
            load.note(record)
        return struck


class ClientsGiveUp(_Catalogue):
    expected = FirstRequestsAtOnce.expected
    name = f"a catalogue: 1,000 clients that give up after {_HASTE_S * 1e3:.0f} ms"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        rng = np.random.default_rng(0)
        questions = [item(rng, number % ITEMS) for number in range(1000)]
        url = house.server.server.grpc_url
        outcomes = [record.outcome for record in ask_at_once(url, "catalogue", questions, patience=_HASTE_S)]
        self._gave_up = outcomes.count(UNANSWERED)
        self._wrong = outcomes.count(WRONG)
        return struck

    def check(self, house: House) -> Iterable[str]:
        if self._wrong:
            yield f"{self._wrong} wrong answers"

    def notes(self) -> Iterable[str]:
        yield f"{self._gave_up} gave up"


class SleepsAndWakes(_Catalogue):
    name = "a catalogue: three times rsrv sleep --force, under requests that wake the device"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        for _ in range(3):
            house.rsrv("sleep", "--force")
            house.rsrv("wake")
        return struck


class SettingsChange(_Catalogue):
    name = "a catalogue: rsrv.yaml rewritten twelve times, and broken in between"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        texts = (
            LAZY.replace("2s", "0.1s").replace("4s", "0.2s").replace("8s", "0.3s"),
            "runtime: {{start: soon}}",
            LAZY.replace("start: lazy", "start: eager"),
            LAZY.replace("22000000", "1000000"),
        )
        for text in texts * 3:
            house.configure(text)
            time.sleep(1)
        return struck

    def relieve(self, house: House, load: Load) -> None:
        house.configure(LAZY)


class ComesAndGoes(_Catalogue):
    """Without a fault, models start and become cold again for minutes. The memory does not grow."""

    name = "a catalogue: comes and goes"

    def __init__(self, minutes: float = 0.0) -> None:
        self._seconds = 60 * max(0.5, minutes)
        self._used: list[dict[str, Usage]] = []
        self._notes: list[str] = []

    @classmethod
    def planned(cls, minutes: float, seed: int) -> Self:
        return cls(minutes)

    def strike(self, house: House, load: Load) -> float:
        began, mark = time.monotonic(), house.log_mark()
        beats = max(10, round(self._seconds / 60))
        for beat in range(1, beats + 1):
            time.sleep(max(0.0, began + beat * self._seconds / beats - time.monotonic()))
            log = house.log_from(mark)
            ends = [record.outcome for record in load.records]
            right, wrong = ends.count(RIGHT), ends.count(WRONG)
            self._used.append(usage(house))
            used = "; ".join(f"{role} {figure}" for role, figure in self._used[-1].items())
            line = (
                f"{time.monotonic() - began:5.0f} s: {right} right, {len(ends) - right - wrong} failed, {wrong} wrong; "
                f"{log.count(': built in ')} starts, {log.count('falls back to cold')} falls, "
                f"{len(house.status()['models'])} models; {used}"
            )
            print(line, flush=True)
            self._notes = [line]
        return began

    def check(self, house: House) -> Iterable[str]:
        before, after = self._used[round(_GROWN * len(self._used))], self._used[-1]
        for role, used in after.items():
            if used.grew(before[role]):
                yield f"{role} grew: {before[role]}, then {used}"

    def notes(self) -> Iterable[str]:
        return self._notes


CATALOGUE: Sequence[type[Fault]] = (
    FirstRequestsAtOnce,
    ClientsGiveUp,
    FullDiskStarting,
    KillStarting,
    BundlesChange,
    SleepsAndWakes,
    SettingsChange,
)
