"""One thread of a stub tells the runtime what was measured, and shows a few of the runtime's figures in Triton's metrics.

It is on no request's way: it has a connection of its own, and whatever goes wrong costs figures and nothing else.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from rsrv.stub.lane import Lane
from rsrv.stub.meters import Meters, Report
from rsrv.stub.session import UNREACHABLE, Link, Session

log = logging.getLogger("rsrv.stub")

#: seconds between two reports, at least; and between two looks at figures that stood still, which only others'
#: requests can change
_PAUSE, _LONG_PAUSE = 1.0, 10.0
#: seconds that the runtime may take to answer
_PATIENCE = 5.0
#: seconds that the end of the model waits for the thread
_GRACE = 2.0


class Mirror(Protocol):
    """Where figures are shown. For one thread at a time; raises nothing."""

    def show(self, figures: Mapping[str, Any] | None) -> None:
        """As REPORTED has them (docs/protocol.md); None: there is no runtime."""

    def clear(self) -> None:
        """The model ends: nothing waits, and no runtime is seen any more."""


class Reporting:
    """From its making until `close`. `mirror` None: figures are shown nowhere."""

    def __init__(
        self,
        session: Session,
        meters: Meters,
        mirror: Mirror | None,
        *,
        pause: float = _PAUSE,
        long_pause: float = _LONG_PAUSE,
    ) -> None:
        self._session = session
        self._meters = meters
        self._mirror = mirror
        self._pause, self._long_pause = pause, long_pause
        self._link: Link | None = None
        self._lane: Lane | None = None
        self._closed = threading.Event()
        #: what was shown last
        self._shown: Mapping[str, Any] | None = None
        if mirror is not None:
            # Before the first request: what is counted by now is not this stub's.
            self._tell()
        session.on_change = meters.some.set
        self._thread = threading.Thread(target=self._run, name="reporting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._meters.some.set()
        self._thread.join(_GRACE)
        if self._thread.is_alive():
            return  # it holds the mirror
        self._drop()
        if self._mirror is not None:
            self._mirror.clear()

    def _run(self) -> None:
        pause = None if self._mirror is None else self._pause
        while True:
            self._meters.some.wait(pause)
            if self._closed.is_set():
                return
            changed = self._tell()
            if self._mirror is not None:
                pause = self._pause if changed else self._long_pause
            if self._closed.wait(self._pause):
                return

    def _tell(self) -> bool:
        """Report, and show; whether there was something new to be shown."""
        try:
            figures = self._report(self._meters.take())
            if self._mirror is not None:
                self._mirror.show(figures)
        except Exception:
            log.exception("what was measured cannot be reported")
            self._drop()  # an answer that was not read must not be taken for the next one
            return False
        changed, self._shown = figures != self._shown, figures
        return changed

    def _report(self, report: Report) -> dict[str, Any] | None:
        """The runtime's figures. None: it does not answer, and what was to be reported is lost."""
        link = self._session.link
        if link is not self._link:
            self._drop()
        if link is None:
            return None
        try:
            if self._lane is None:
                self._lane, self._link = self._session.open_lane(link.key), link
            self._tell_spans(self._lane)
            return self._lane.report({**report, "figures": self._mirror is not None}, _PATIENCE)
        except (TimeoutError, *UNREACHABLE) as error:
            log.info("a report is lost: %s", error)
            self._drop()
            return None

    def _tell_spans(self, lane: Lane) -> None:
        while (told := self._meters.spans.take()) != ([], 0):
            try:
                lane.tell_spans(*told, _PATIENCE)
            except Exception:
                spans, dropped = told
                self._meters.spans.lost(len(spans) + dropped)
                raise

    def _drop(self) -> None:
        lane, self._lane, self._link = self._lane, None, None
        if lane is not None:
            lane.close()
