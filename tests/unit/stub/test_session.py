"""Coming back after the runtime died: how often it is tried, and what clients are told meanwhile."""

import threading

import pytest

from rsrv.stub.connection import Greeted, LaunchError, Rejected
from rsrv.stub.session import DOWN, Session
from rsrv.wire.socket import Closed


class Pauses(threading.Event):
    """Takes no time, and ends it after 14 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        if len(self.seconds) == 14:
            self.set()
        return True


@pytest.mark.parametrize(
    ("error", "longest", "down"),
    [
        (LaunchError("no Python"), 5, DOWN),
        (RuntimeError("nobody thought of this"), 5, DOWN),
        (Rejected("it hung", "m: it hung"), 60, "m: it hung"),
        (
            Rejected("/models/m: is gone"),
            60,
            "the model runtime does not load this model again; the server's log says why",
        ),
    ],
)
def test_attempts_become_rarer(error: Exception, longest: float, down: str) -> None:
    """At once at first, then every five seconds, and every minute where the runtime has said no."""

    def refuse() -> Greeted:
        raise error

    pauses = Pauses()
    session = Session(refuse, "m", "/models/m")
    session._closed = pauses

    session._reconnect()

    assert pauses.seconds[:4] == [0.05, 0.1, 0.2, 0.4]
    assert pauses.seconds[-1] == longest
    assert session.down == down


def test_a_first_load_outlives_the_deaths_of_runtimes() -> None:
    """It is tried ten times while runtimes end, and not again after another error."""
    attempts = iter([Closed("end of stream"), ConnectionResetError(), Rejected("no")])

    def open_() -> Greeted:
        raise next(attempts)

    session = Session(open_, "m", "/models/m")
    session._closed = pauses = Pauses()

    with pytest.raises(Rejected):
        session.begin()

    assert pauses.seconds == [0.05, 0.1]
    attempts = iter([Closed("end of stream")] * 10)
    with pytest.raises(Closed):
        session.begin()
    assert next(attempts, None) is None
