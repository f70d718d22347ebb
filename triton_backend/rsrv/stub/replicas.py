"""A model's replicas in its stub, one per device of the server: which of them answers a batch."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from zlib import crc32

from rsrv.stub.hook_guard import DrainAndExit, HookGuard
from rsrv.stub.metrics import Meters, Reporting, TritonMirror
from rsrv.stub.replies import Responses
from rsrv.stub.session import UNREACHABLE, Session

log = logging.getLogger("rsrv.stub")

#: another replica than the home answers a batch only if its answer is expected within this share of the home's time: noise
#: of measurements must not move traffic, and with it weights
_SOONER = 0.8


class StubProcess:
    """Parts that a model's replicas share in its stub: the guard of hooks, and the process's end."""

    def __init__(self, responses: Responses) -> None:
        self.guard = HookGuard()
        #: those of all replicas
        self.sessions: list[Session] = []
        self.end = DrainAndExit(self._stop, responses)

    def _stop(self) -> None:
        for session in self.sessions:
            session.stop()

    def guard_hooks(self, settings: Mapping[str, Any], threads: int) -> None:
        """Limit the harm that hooks can do to other models; `threads` as in `HookGuard.start`, of each replica."""
        self.guard.start(settings, threads * len(self.sessions), self.end, self._abandon)

    def _abandon(self) -> None:
        for session in self.sessions:
            session.abandon()


class ModelReplica(Protocol):
    """A model on one device: an `Engine` or a `MetaEngine`."""

    session: Session
    meters: Meters

    @property
    def execute(self) -> Callable[[Sequence[Any]], list[Any] | None]:
        """Answer Triton's requests, as `EntryPoint.execute`."""

    @property
    def ready(self) -> bool: ...

    def answers_in_s(self) -> float: ...

    def guard_hooks(self) -> None: ...

    def close(self) -> None: ...


class Replicas:
    """Answers Triton's requests for one model on all devices of the server.

    Each model has a home among the devices, by its name, so that the models of a quiet server are spread over them. A
    batch goes elsewhere if it would be answered sooner there, by the backlogs and the weights of both devices.
    """

    def __init__(self, make: Callable[[int], ModelReplica], name: str) -> None:
        """Make the replicas: the first one alone, because the others then find its compiled modules in the cache.

        `make` makes that of a device, by its number, and raises one of UNREACHABLE. If a further device cannot serve the
        model, the others do.
        """
        first = make(0)
        attachment = first.session.attachment
        count = 1 if attachment is None else attachment.direct.devices
        made: dict[int, ModelReplica] = {0: first}

        def add(device: int) -> None:
            try:
                made[device] = make(device)
            except UNREACHABLE as error:
                log.error("device %d does not serve the model: %s", device, error)
            except Exception:
                log.exception("device %d does not serve the model", device)

        threads = [threading.Thread(target=add, args=(device,)) for device in range(1, count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        home = crc32(name.encode()) % count
        order = sorted(made, key=lambda device: (device - home) % count)
        #: the home first
        self._replicas = [made[device] for device in order]
        #: answers Triton's requests, as `EntryPoint.execute`
        self.execute = self._spread if len(self._replicas) > 1 else first.execute
        self._reporting: list[Reporting] = []

    def _spread(self, requests: Sequence[Any]) -> list[Any] | None:
        chosen, *others = self._replicas
        least = chosen.answers_in_s()
        for one in others:
            seconds = one.answers_in_s()
            if seconds < _SOONER * least:
                chosen, least = one, seconds
        return chosen.execute(requests)

    def start(self, mirror: TritonMirror | None) -> None:
        """Report measurements to the runtimes, mirror their counts, and guard hooks."""
        for number, one in enumerate(self._replicas):
            part = None if mirror is None else mirror.part(number)
            self._reporting.append(Reporting(one.session, one.meters, part))
        # The settings of the process are those of all replicas.
        self._replicas[0].guard_hooks()

    @property
    def ready(self) -> bool:
        """True if a runtime serves the model, and takes requests."""
        return any(one.ready for one in self._replicas)

    @property
    def session(self) -> Session:
        """One with an attachment, if there is one."""
        found = (one.session for one in self._replicas if one.session.attachment is not None)
        return next(found, self._replicas[0].session)

    def close(self) -> None:
        for reporting in self._reporting:
            reporting.close()
        for one in self._replicas:
            one.close()
