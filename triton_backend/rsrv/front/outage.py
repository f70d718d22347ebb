"""How long a request waits while no runtime serves its model, and the reason if it cannot wait. Time is an argument."""

from dataclasses import dataclass

from rsrv.front import rules
from rsrv.front.events import FrontRequest
from rsrv.wire.frames import Status

#: The end of a request: its status and the text for its client.
Refusal = tuple[Status, str]


@dataclass(frozen=True, slots=True)
class Outage:
    """Facts about a front's runtimes that decide how long requests wait."""

    #: True if no runtime serves the model.
    is_down: bool
    #: True if the model was ready on a device, and has not been cold there since.
    was_ready: bool
    #: True if no runtime serves the model, and a request can start it or a runtime builds it.
    is_starting: bool
    #: Longest wait for a runtime, in seconds.
    retry_s: float
    #: Longest wait for the next step of a start, in seconds.
    limit_s: float
    #: Time of the latest step of a start. 0: there was none.
    stepped_at: float
    #: Earliest time at which the starting model can serve. 0: not known.
    ready_at: float
    #: Latest step of the start, in words. Empty: not known.
    step: str
    #: The reason for clients if no device will serve the model soon. Otherwise empty.
    why: str


def refuse_arrival(
    request: FrontRequest, outage: Outage, now: float, *, count: int, nbytes: int
) -> Refusal | None:
    """Return why a request cannot begin to wait, or None. `count` requests with inputs of `nbytes` wait already."""
    # Refuse the sub-call, because only the dead runtime knew its run. The meta model repeats the run in the next runtime.
    if request.is_sub_call and outage.was_ready:
        return Status.RUNTIME_DOWN, rules.DOWN
    refusal = refuse_waiting(request, outage, now)
    is_full = count >= rules.MAX_REQUESTS or nbytes + request.nbytes > rules.MAX_REQUEST_BYTES
    if refusal is None and is_full:
        if outage.is_starting:
            return Status.QUEUE_FULL, rules.CROWDED
        return Status.RUNTIME_DOWN, rules.DOWN
    return refusal


def refuse_waiting(request: FrontRequest, outage: Outage, now: float) -> Refusal | None:
    """Return why a request cannot wait any longer, or None. This also sets the time until which it may wait."""
    if request.deaths >= rules.MAX_DEATHS:
        return Status.INTERNAL, rules.SUSPECT
    request.waiting_since = request.waiting_since or now
    # During a start, the limit of the latest step replaces the limits of earlier steps, which may be longer. If the runtime dies
    # during the start, the later of two times applies: that limit, or `retry_s` after the request first waited.
    until = _wait_until(request.waiting_since, outage)
    request.retry_until = until if outage.is_starting else max(request.retry_until, until)
    deadline_s = request.deadline_s
    if outage.is_starting and 0 < deadline_s <= now:
        return Status.DEADLINE, still_starting(request, outage, now)
    if outage.is_down and now < deadline_s < outage.ready_at:
        return Status.DEADLINE, rules.TOO_SOON % (outage.ready_at - now)
    # If a runtime serves the model, a suspect does not time out, because it waits only for the answers of other suspects.
    if now >= request.retry_until and (outage.is_down or not request.deaths):
        if outage.is_starting:
            return Status.STARTING, still_starting(request, outage, now)
        return Status.RUNTIME_DOWN, rules.DOWN
    if outage.is_down and outage.why:
        return Status.RUNTIME_DOWN, outage.why
    return None


def _wait_until(since: float, outage: Outage) -> float:
    if not outage.is_starting:
        return since + outage.retry_s
    step_until = max(since, outage.stepped_at) + outage.limit_s
    return min(step_until, since + rules.MAX_STEPS * outage.limit_s)


def still_starting(request: FrontRequest, outage: Outage, now: float) -> str:
    """Return the text for the client of a request that cannot wait until a model has started."""
    step = rules.STEP % outage.step if outage.step else ""
    left = rules.TIME_LEFT % (outage.ready_at - now) if now < outage.ready_at else ""
    waited_s, limit_s = now - request.waiting_since, outage.limit_s
    return rules.STILL_STARTING % (step, left, waited_s, limit_s, rules.MAX_STEPS * limit_s)
