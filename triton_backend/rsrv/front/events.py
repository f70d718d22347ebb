"""Events and instructions: the input and the output of a front.

`Front.handle` takes one event and returns instructions. The front's thread carries them out in their order. Times are seconds
of one clock, which the caller passes in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rsrv.wire.frames import StartProgress, Status


class FrontRequest(Protocol):
    """The facts about a client's request that the front needs. Requests are compared by identity."""

    #: Number of runtimes that died while they executed the request, or an earlier request with equal inputs.
    deaths: int
    #: Time when the request first waited for a runtime; later deaths do not change it. 0: it has not waited yet.
    waiting_since: float
    #: Time until which the request may wait. 0: it has not waited yet.
    retry_until: float

    @property
    def deadline_s(self) -> float:
        """Time of the request's deadline, or 0 without a deadline."""

    @property
    def is_sub_call(self) -> bool:
        """True if it is a sub-call of a meta model's run."""

    @property
    def nbytes(self) -> int:
        """Size of the request's inputs in bytes."""


# --- events of a device --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """The runtime has the model ready."""

    device: int
    #: Number of the server's devices.
    devices: int
    #: Longest total time that a request waits for runtimes, however many of them die.
    retry_s: float


@dataclass(frozen=True, slots=True)
class WentCold:
    """The model is cold until a request comes: the runtime has reported this, or the idle model has left the runtime."""

    device: int


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The runtime asks the model to leave, because the model is idle or the device is about to sleep."""

    device: int


@dataclass(frozen=True, slots=True)
class StartTimeoutKnown:
    """A runtime has announced how long requests may wait for each step of a start."""

    start_timeout_s: float


@dataclass(frozen=True, slots=True)
class StepAnnounced:
    """The runtime builds the model and has announced a step."""

    device: int
    step: StartProgress


@dataclass(frozen=True, slots=True)
class ModelRejected:
    """The runtime does not load the model, or the model's own code fails."""

    device: int
    reason: str
    #: The text for clients if the model has served before. Empty: clients get a general text.
    client: str = ""
    #: True if no other device shall try the model, because the model would end runtimes there as well.
    barred: bool = False


@dataclass(frozen=True, slots=True)
class Unreached:
    """An attempt to reach a runtime and to register the model failed."""

    device: int
    reason: str
    #: True if there was a runtime, and it ended before the model was ready.
    ended: bool = False
    #: True if this process and the runtime do not understand each other.
    misunderstood: bool = False
    #: True if this process can reach no runtime at all.
    final: bool = False


@dataclass(frozen=True, slots=True)
class RuntimeLost:
    """The runtime that had the model ready has ended."""

    device: int
    #: True if the runtime has ended because its device sleeps.
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """Triton loads the model, and the load tries this device next. The runtime may answer that the model is cold."""

    device: int


@dataclass(frozen=True, slots=True)
class StartAsked:
    """A sub-call must execute on the device of its run. If the model is cold there, the front starts it."""

    device: int


# --- events of requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request needs a runtime: no runtime serves its model, or the request's runtime has died."""

    request: FrontRequest


@dataclass(frozen=True, slots=True)
class NotSubmitted:
    """No runtime took these requests, which are in the order in which they waited."""

    requests: tuple[FrontRequest, ...]


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client of a waiting request has cancelled it."""

    request: FrontRequest


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """The request has been answered: it was the suspect, or the stub ended it after its deadline while it waited."""

    request: FrontRequest


@dataclass(frozen=True, slots=True)
class RunAsks:
    """The runtime of a meta model's run has died, and the run asks whether it may look for another runtime now.

    The answer is Proceed, Hold or Refuse. The run waits on its own thread, and asks again until it may proceed.
    """

    request: FrontRequest


# --- other events --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlacementChanged:
    """The placement table names other devices for the model. Bit n is device n. 0: the table does not name the model."""

    mask: int


@dataclass(frozen=True, slots=True)
class DevicesKnown:
    """The number of the server's devices is known."""

    devices: int


@dataclass(frozen=True, slots=True)
class InputsExecuted:
    """`deaths` runtimes died while they executed inputs with this digest. 0: a request with these inputs was answered."""

    digest: bytes
    deaths: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The model is unloaded."""


DeviceEvent = (
    Registered
    | WentCold
    | Dismissed
    | StepAnnounced
    | ModelRejected
    | Unreached
    | RuntimeLost
    | LoadAsked
    | StartAsked
)
RequestEvent = RequestArrived | NotSubmitted | RequestCancelled | RequestAnswered | RunAsks
Event = (
    DeviceEvent
    | RequestEvent
    | StartTimeoutKnown
    | PlacementChanged
    | DevicesKnown
    | InputsExecuted
    | TimePassed
    | Unloaded
)


# --- instructions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Make one attempt to reach the device's runtime and to register the model.

    It ends with Registered, WentCold, ModelRejected or Unreached.
    """

    device: int
    #: True if the model was ready here before, so that the runtime starts it again.
    started: bool
    #: True if the runtime shall start the model even if the model would otherwise stay cold.
    asked: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the runtime of an idle model. WentCold follows if no request is in flight."""

    device: int


@dataclass(frozen=True, slots=True)
class TellDemand:
    """Report the waiting requests to the runtimes that start the model, in the form of REGISTER."""

    demand: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit a request to the device that answers first. NotSubmitted follows if no device takes it."""

    request: FrontRequest


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a request with a failure."""

    request: FrontRequest
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Proceed:
    """Let a run look for another runtime."""

    request: FrontRequest


@dataclass(frozen=True, slots=True)
class Hold:
    """Let a run ask again after a pause."""

    request: FrontRequest


@dataclass(frozen=True, slots=True)
class ReplaceProcess:
    """End this process because it reaches no runtime. The text is for clients."""

    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Write a line to the log."""

    text: str
    is_error: bool = True


Instruction = Connect | Leave | TellDemand | Submit | Refuse | Proceed | Hold | ReplaceProcess | Report
