"""A meta model's stub that misbehaves loses its connection; the runtime and the other stubs go on."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.runtime.device import DeviceError
from rsrv.runtime.runs import Runs
from rsrv.runtime.slices import RequestKind
from rsrv.runtime.transport import Registration
from rsrv.stub.connection import RuntimeConnection
from rsrv.wire import frames
from rsrv.wire.calls import Call, Entrance, Release, RunExit, Spot, Where, pack_entrances
from rsrv.wire.frames import Completion, Status
from rsrv.wire.socket import Closed
from tests.builders import write_meta
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime
from tests.waiting import PATIENCE_S


@dataclass
class Peer:
    """A connection of a meta model that calls `a` and `b`, and memory for one row."""

    lane: RuntimeConnection

    def __post_init__(self) -> None:
        self.memory = self.lane.array((64, 3), np.dtype(np.float32))
        place = self.lane.locate(self.memory)
        assert place is not None
        self.spot = Spot(Where.MEMORY, *place)

    def enter(self, *tokens: int, request: int = 100, deadline_ns: int = 0) -> None:
        self.lane.submit(
            [Entrance(request + i, token, deadline_ns, 0) for i, token in enumerate(tokens)], pack_entrances
        )

    def call(self, token: int, request: int = 0, **changes: Any) -> None:
        self.lane.call([self.a_call(token, request)._replace(**changes)], [])

    def a_call(self, token: int, request: int = 0) -> Call:
        return Call(request, token, 0, 0, 1, [self.spot], [self.spot])

    def answers(self, count: int = 1) -> list[Completion]:
        done: list[Completion] = []
        while len(done) < count:
            done += self.lane.receive(PATIENCE_S)
        return done

    def read_on(self) -> None:
        while True:
            self.lane.receive(PATIENCE_S)

    def works(self, token: int) -> bool:
        """Return whether a run and its call are answered."""
        self.enter(token, request=1000)
        self.call(token, request=1001)
        pending, well = {1000, 1001}, True
        while pending:
            for done in self.answers():
                if done.request in pending:
                    pending.remove(done.request)
                    well = well and done.status is Status.OK
        self.lane.leave(RunExit(token, Status.OK))
        return well


@pytest.fixture
def join(runtime: Runtime, doublings: dict[str, Path], tmp_path: Path) -> Callable[[], Peer]:
    """Return a function that opens one more connection of the same meta model."""
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", ["a", "b"])

    def join() -> Peer:
        lane = runtime.connect()
        lane.register(
            {"model": "meta", "bundle": str(meta), "calls": {name: str(doublings[name]) for name in "ab"}}
        )
        return Peer(lane)

    return join


Deed = Callable[[Peer], object]

ENTER: Deed = lambda p: p.enter(7)
LEAVE: Deed = lambda p: p.lane.leave(RunExit(7, Status.OK))
KEEP: Deed = lambda p: p.call(7, outputs=[Spot(1, 0, 5)])
KEEP_AGAIN: Deed = lambda p: p.call(7, request=1, outputs=[Spot(1, 0, 5)])
HEAR: Deed = lambda p: p.answers()

MISDEEDS: dict[str, list[Deed]] = {
    "no token": [lambda p: p.enter(7, 0)],
    "one token twice": [lambda p: p.enter(7, 7)],
    "a run that is there": [ENTER, lambda p: p.enter(7, request=5)],
    "one request twice": [
        lambda p: p.lane.submit([Entrance(3, 8, 0, 0), Entrance(3, 9, 0, 0)], pack_entrances)
    ],
    "a request that is too large": [lambda p: p.enter(7, 8, request=(1 << 40) - 1)],
    "a callee that is not there": [ENTER, lambda p: p.call(7, callee=2)],
    "a variant that is not there": [ENTER, lambda p: p.call(7, variant=2)],
    "unknown flags": [ENTER, lambda p: p.call(7, flags=2)],
    "too few inputs": [ENTER, lambda p: p.call(7, inputs=[])],
    "too many outputs": [ENTER, lambda p: p.call(7, outputs=[p.spot] * 2)],
    "an unknown segment": [ENTER, lambda p: p.call(7, inputs=[Spot(0, 77, 0)])],
    "beyond the segment": [ENTER, lambda p: p.call(7, inputs=[Spot(0, 0, (1 << 64) - 4)])],
    "rows beyond the segment": [ENTER, lambda p: p.call(7, rows=(1 << 32) - 1)],
    "not aligned": [ENTER, lambda p: p.call(7, inputs=[Spot(0, 0, 2)])],
    "an input from nowhere": [ENTER, lambda p: p.call(7, inputs=[Spot(2)])],
    "an input in an unknown place": [ENTER, lambda p: p.call(7, inputs=[Spot(9)])],
    "an input that is not kept": [ENTER, lambda p: p.call(7, inputs=[Spot(1, 0, 5)])],
    "an output in an unknown place": [ENTER, lambda p: p.call(7, outputs=[Spot(9)])],
    "a number that is kept": [ENTER, HEAR, KEEP, HEAR, KEEP_AGAIN],
    "a number that will be kept": [ENTER, HEAR, KEEP, KEEP_AGAIN],
    "one request of two calls": [ENTER, HEAR, lambda p: p.lane.call([p.a_call(7)] * 2, [])],
    "a submission": [lambda p: p.lane.submit([frames.Submission(0, 0, 1, 0, 0, 0, 0, 0, 64)])],
}


@pytest.mark.parametrize("misdeeds", MISDEEDS.values(), ids=MISDEEDS.keys())
def test_a_misbehaving_stub_of_a_meta_model_loses_its_connection_only(
    join: Callable[[], Peer], misdeeds: list[Deed]
) -> None:
    """A stub that misbehaves loses its connection and its runs. The other stub's runs find all places free."""
    other, culprit = join(), join()
    assert culprit.works(50)

    for misdeed in misdeeds:
        misdeed(culprit)

    with pytest.raises(Closed):
        culprit.read_on()
    assert all(other.works(60 + i) for i in range(4))
    status = read_status(os.getpid())["metas"]["meta"]
    assert (status["waiting"], status["running"]) == (0, 0)


CONFUSED: dict[str, list[Deed]] = {
    "no rows": [ENTER, lambda p: p.call(7, rows=0)],
    "more rows than fit": [ENTER, lambda p: p.call(7, rows=9)],
    "a run that is not there": [lambda p: p.call(7)],
    "leaving what is not there": [LEAVE],
    "leaving twice": [ENTER, LEAVE, LEAVE],
    "leaving in the middle": [ENTER, lambda p: p.call(7), LEAVE],
    "staying": [ENTER, KEEP],
    "releasing what is not there": [ENTER, lambda p: p.lane.call([], [Release(7, 5), Release(8, 5)])],
    "releasing in the middle": [ENTER, KEEP, lambda p: p.lane.call([], [Release(7, 5)])],
    "the number of an answered entrance": [ENTER, HEAR, lambda p: p.call(7, request=100)],
    "the number of a run": [ENTER, HEAR, lambda p: p.enter(8)],
    "cancelling": [lambda p: p.enter(7, 8, 9), lambda p: p.lane.cancel([100, 101, 102, 0])],
    "long ago": [lambda p: p.enter(7, deadline_ns=-(1 << 63))],
    "far away": [lambda p: p.enter(7, deadline_ns=(1 << 63) - 1)],
}


@pytest.mark.parametrize("deeds", CONFUSED.values(), ids=CONFUSED.keys())
def test_confused_messages_of_a_stub_harm_no_other(join: Callable[[], Peer], deeds: list[Deed]) -> None:
    """Messages in a senseless order are answered or ignored, and other stubs are served.

    When the confused stub has ended, no run and no memory is left.
    """
    other, confused = join(), join()

    for deed in deeds:
        deed(confused)

    confused.call(99, request=2000)
    while all(done.request != 2000 for done in confused.answers()):
        pass
    confused.lane.close()
    assert all(other.works(60 + i) for i in range(4))
    status = read_status(os.getpid())["metas"]["meta"]
    assert (status["waiting"], status["running"], status["kept_bytes"]) == (0, 0, 0)


def test_calls_of_a_run_that_is_not_let_in_are_not_kept_without_end(
    join: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub that sends too many calls before its run is admitted loses its connection."""
    monkeypatch.setattr("rsrv.runtime.runs._MAX_HELD", 3)
    other, culprit = join(), join()
    culprit.enter(7, 8, 9)
    culprit.lane.call([culprit.a_call(9, request) for request in range(4)], [])

    with pytest.raises(Closed):
        culprit.read_on()
    assert other.works(10)


def test_what_calls_under_way_will_keep_counts_already(join: Callable[[], Peer], runtime: Runtime) -> None:
    """Memory for the kept output of a call is reserved when the call begins, so a second such call gets QUEUE_FULL."""
    peer = join()
    for step in (ENTER, HEAR):
        step(peer)
    runtime.device.memory_limit = 1000  # Runs may keep 50 bytes of this memory, and four rows take 48.
    runtime.device.gate.clear()

    peer.call(7, rows=4, outputs=[Spot(1, 0, 5)])
    peer.call(7, request=1, rows=4, outputs=[Spot(1, 0, 6)])

    (refused,) = peer.answers()
    assert (refused.request, refused.status) == (1, Status.QUEUE_FULL)
    runtime.device.gate.set()
    (answer,) = peer.answers()
    assert (answer.request, answer.status) == (0, Status.OK)


def test_a_call_that_fails_keeps_nothing(join: Callable[[], Peer], runtime: Runtime) -> None:
    """A call that fails keeps no memory, and the number of its output can be used again."""
    peer = join()
    for step in (ENTER, HEAR):
        step(peer)
    runtime.device.fail_next("read", error=DeviceError("told to"))

    KEEP(peer)

    assert peer.answers()[0].status is Status.INTERNAL
    assert read_status(os.getpid())["metas"]["meta"]["kept_bytes"] == 0
    KEEP_AGAIN(peer)
    assert peer.answers()[0].status is Status.OK
    assert read_status(os.getpid())["metas"]["meta"]["kept_bytes"] > 0


def test_a_connection_ends_while_the_scheduler_expires_its_runs(
    join: Callable[[], Peer], runtime: Runtime
) -> None:
    """A connection closes after the deadline of its waiting run. While the runtime ends its other runs, this run expires.

    The runtime then handles the end of a run that the scheduler does not know any more. Other stubs are served.
    """
    other, leaving = join(), join()
    deadline_s = time.monotonic() + 100
    leaving.enter(7, 8, 9, deadline_ns=int(deadline_s * 1e9))
    leaving.answers(2)
    loop = runtime.loop

    def close() -> None:
        loop._clock = lambda: time.monotonic() + 200
        _, connection = loop._transport.connections
        loop._transport._close(connection)

    loop._inbox.post(close)

    with pytest.raises(Closed):
        leaving.read_on()
    assert all(other.works(60 + i) for i in range(4))
    status = read_status(os.getpid())["metas"]["meta"]
    assert (status["waiting"], status["running"]) == (0, 0)


def test_a_token_is_good_for_the_models_that_its_meta_model_calls() -> None:
    """A token is valid while its run is admitted, and for the callees of its meta model, in any version."""
    group = Registration("meta@1", "meta", "d1", ("a@1",), {}, is_meta=True, calls=("a",))
    runs = Runs()
    connection: Any = object()
    run = runs.enter(connection, group, Entrance(1, 7, 0, 0), 100, RequestKind())

    assert runs.find(7, "a") is None
    run.admitted = True
    assert runs.find(7, "a") is run
    assert runs.find(7, "b") is None
    assert runs.find(8, "a") is None
    runs.remove(run, Status.OK)
    assert runs.find(7, "a") is None
