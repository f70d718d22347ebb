"""Sequences of a stateful model in its stub: a request's parameters about its sequence, and the devices of sequences."""

from collections import Counter, OrderedDict
from typing import Any, NamedTuple

from rsrv.stub.replies import invalid
from rsrv.wire.frames import END, START, request_tag

#: Triton's flags of a request, TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END.
_TRITON_START, _TRITON_END = 1, 2
_NO_ID = (
    "a request of this model belongs to a sequence and needs its id: set sequence_id, and sequence_start in the sequence's "
    "first request"
)
LOST = (
    "the model runtime that had the sequence's state has ended; start the sequence again, from its first request, with "
    "sequence_start"
)


class SequenceStep(NamedTuple):
    """One request of a sequence."""

    #: The sequence's id in 64 bits. It is never 0.
    sequence: int
    start: bool
    end: bool

    @property
    def flags(self) -> int:
        """Flags of a submission."""
        return START * self.start | END * self.end


def read_step(triton: Any) -> SequenceStep:
    """Return the sequence parameters of Triton's request. Raises RequestFailure if the id is missing or is not text."""
    try:
        id, flags = triton.correlation_id(), triton.flags()
    except UnicodeDecodeError:
        raise invalid("the request's sequence_id must be UTF-8") from None
    if isinstance(id, str) and id:
        id = request_tag(id) or 1
    if not isinstance(id, int) or not id:
        raise invalid(_NO_ID)
    return SequenceStep(id % (1 << 64), bool(flags & _TRITON_START), bool(flags & _TRITON_END))


class SequenceHomes:
    """The devices of live sequences, by sequence. The caller passes the time, and holds a lock.

    This object forgets an idle sequence later than Triton and the runtime, so that these report why the sequence was lost.
    """

    def __init__(self, idle_timeout_s: float) -> None:
        self._keep_s = 2 * idle_timeout_s
        #: For each sequence: its device, and the time of its latest request. The sequence with the earliest time is first.
        self._homes: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._counts: Counter[int] = Counter()

    def find(self, sequence: int, default: int) -> int:
        """Return the device that has a sequence's state, or `default` if the sequence is not known."""
        return self._homes.get(sequence, (default, 0.0))[0]

    def is_lost(self, sequence: int, since: float) -> bool:
        """Return whether a sequence's latest request arrived before `since`, the start of its device's current runtime."""
        home = self._homes.get(sequence)
        return home is not None and home[1] < since

    def count(self, device: int) -> int:
        """Return the number of sequences on a device."""
        return self._counts[device]

    def keep(self, step: SequenceStep, device: int, now: float) -> None:
        """Record that a request of a sequence is sent to a device. Forget sequences that have been idle for too long."""
        self._forget(step.sequence)
        if not step.end:
            self._homes[step.sequence] = device, now
            self._counts[device] += 1
        while self._homes and next(iter(self._homes.values()))[1] < now - self._keep_s:
            self._forget(next(iter(self._homes)))

    def _forget(self, sequence: int) -> None:
        home = self._homes.pop(sequence, None)
        if home is not None:
            self._counts[home[0]] -= 1
