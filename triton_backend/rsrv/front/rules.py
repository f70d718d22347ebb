"""The limits, statuses and texts of both fronts. `tools/native_rules.py` writes native/rules.h from them.

Names that end in `_S` are seconds. A text with fields is a format that Python's `%` and C's printf understand alike.
"""

from rsrv.wire.frames import Status

# --- limits -------------------------------------------------------------------------------------------------

#: First and longest pause between two attempts to reach a runtime. Each pause is twice as long as the one before.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 5.0
#: Longest pause if the runtime rejects the model. It is longer, because the runtime reads the whole bundle at each attempt.
MAX_REJECTED_BACKOFF_S = 60.0
#: First and longest pause after a failed start of a cold model. After the pause, a request may start the model again. Each pause
#: is twice as long as the one before.
FIRST_START_PAUSE_S, MAX_START_PAUSE_S = 1.0, 60.0
#: Number of attempts that a model's first load makes while runtimes crash.
FIRST_ATTEMPTS = 10
#: Longest wait until a new runtime process listens. The process listens before it loads jax.
START_TIMEOUT_S = 60.0
#: If the runtime of a device other than device 0 did not start, no front tries to start it again for this time.
FAILURE_COUNTS_S = 60.0
#: Longest wait for the answer to a frame that needs no work.
GREETING_TIMEOUT_S = 60.0
#: When the first device serves a model, the model's load waits at most this long for the first attempts of the other devices.
JOIN_S = 10.0

#: Longest wait to send a request while the runtime does not read its socket.
SEND_S = 0.1
#: Time between two checks of a request for cancellation, and for a deadline that the runtime has not enforced.
CHECK_PERIOD_S = 0.05
#: The front ends a request this long after its deadline. A healthy runtime ends the request before.
DEADLINE_GRACE_S = 0.1
#: LONGER_WEIGHT is the weight of an execution that took longer than the learned duration. The execution counts as at most
#: LONGER_CAP times the learned duration. Both are small, because waiting for a processor makes single executions seem far longer.
LONGER_WEIGHT, LONGER_CAP = 0.01, 4
#: Shortest time between two reports of measurements.
REPORT_PERIOD_S = 1.0

#: Maximum number of waiting requests of a model, and of bytes of their inputs.
MAX_REQUESTS, MAX_REQUEST_BYTES = 1000, 256 << 20
#: Maximum number of parts of a request that are submitted at a time. They keep two devices busy, each with one
#: execution at work and the next one in its queue.
MAX_PARTS = 4
#: Longest wait of a request for a whole start, as a multiple of its longest wait for one step.
MAX_STEPS = 10
#: If this many runtimes have died while they executed a request, the request is not submitted again: it may be the cause.
MAX_DEATHS = 2
#: Maximum number of stored digests of inputs that were executing when runtimes died, and the seconds for which a digest is stored.
#: A model's crashes are remembered for the same time.
MAX_DIGESTS, DIGEST_COUNTS_S = 64, 3600.0
#: If a runtime is down for this time, its model starts on another device. The next runtime usually starts sooner.
ELSEWHERE_S = 3.0
#: Time between two checks for a runtime while requests wait.
TICK_S = 0.02

# --- statuses -----------------------------------------------------------------------------------------------

#: Triton's code of each status. Triton's code of all other statuses is UNAVAILABLE.
CODES = {
    Status.INVALID: "INVALID_ARG",
    Status.NOT_FOUND: "NOT_FOUND",
    Status.SEQUENCE_LOST: "NOT_FOUND",
    Status.CANCELLED: "CANCELLED",
    Status.INTERNAL: "INTERNAL",
}
#: Statuses that Triton has no code for. A tag with the status's name comes before the message.
TAGGED = (
    Status.QUEUE_FULL,
    Status.DEADLINE,
    Status.RUNTIME_DOWN,
    Status.NOT_RESIDENT,
    Status.PAUSED,
    Status.SEQUENCE_LOST,
    Status.STARTING,
)
#: Failures that the client causes.
CLIENT_FAULTS = (Status.INVALID, Status.NOT_FOUND, Status.CANCELLED)

# --- texts for clients --------------------------------------------------------------------------------------

DOWN = "the model runtime is not reachable; it is being restarted, try again"
UNLOADED = "the model is being unloaded"
NOT_AGAIN = "the model runtime does not load this model again; the server's log says why"
NOT_STARTED = "the model could not be started: %s"
LATE = "the deadline passed before the answer was ready"
CLIENT_CANCELLED = "the request was cancelled"
STUCK = "the model runtime accepts no requests at the moment; try again later"
#: This text follows the name of the process.
NO_DESCRIPTORS = "has reached its limit of open files (ulimit -n)"
NO_MEMORY = "the server has no memory for this request; try again later"
NOT_HANDLED = "the request could not be handled; the server's log says why"

_CRASH = "inputs; the server's log has the stacks of the crash, or says that the execution hung"
SUSPECT = (
    f"two runtimes ended while they executed this request, so it is not tried again. Send other {_CRASH}"
)
EQUAL = f"two runtimes ended while they executed a request with equal inputs, so this one is not tried. Send other {_CRASH}"
CROWDED = (
    "the model is starting, and no more requests may wait for it. Send the request again later, or start the model in "
    "advance with `rsrv prefetch --warm`"
)
#: The fields are STEP and TIME_LEFT, as far as they are known, and three times in seconds: how long the request has waited, may
#: wait for a step, and may wait in all.
STILL_STARTING = (
    "the model is starting%s%s. This request has waited for %.1f s; requests wait at most %g s without progress, and at most "
    "%g s in all. The start continues: send the request again later or with a later deadline, or start the model in advance "
    "with `rsrv prefetch --warm`"
)
STEP = ": %s"
TIME_LEFT = ", and about %.0f s are left"
TOO_SOON = (
    "the model is starting, which takes %.1f s more, and this request's deadline is earlier. The start continues: send the "
    "request again later or with a later deadline, or start the model in advance with `rsrv prefetch --warm`"
)

NOT_UTF8 = "the request's id and parameters must be UTF-8"
UNKNOWN_PARAMETER = (
    "unknown parameter %s; the parameters of rsrv are rsrv_deadline_unix_ns, rsrv_priority and rsrv_sticky"
)
NO_INTEGER = "parameter %s must be a whole number from %s to %s, got %s"
NO_RUN = "parameter %s is for sub-calls of meta models"
THE_REQUEST = "the request "
UNKNOWN_INPUT = f"{THE_REQUEST}has an input that the model does not have"
#: This text follows THE_REQUEST, unless a hook made the inputs.
NO_INPUT = "has no tensor %s"
WRONG_SHAPE = "input %s: expected shape %s%s, got %s"
BATCH_AXIS = " (axis %d is the batch)"
NO_VARIANT = "no module is compiled for %s; compiled are %s (-1 is the batch)"
WRONG_LENGTH = (
    "the inputs have the lengths %s along the padded axis; give all of them one length, from 1 to %ld"
)
ROWS_DIFFER = "the inputs disagree on the number of rows: %s"
TOO_MANY_ROWS = (
    "%ld rows exceed the largest compiled batch size; compiled are %s. Send fewer rows per request"
)
OTHER_SIZE = "%ld rows: this model runs at its compiled batch sizes only: %s"

# --- texts for operators ------------------------------------------------------------------------------------

SET_PYTHON = "RSRV_RUNTIME_PYTHON must name a Python where 'rsrv[serve]' is installed"
CANNOT_START = f"the runtime cannot be started with %s: %s. {SET_PYTHON}"
ENDED_SILENTLY = (
    "the runtime did not start with %s: it ended without a message; the server's log may say more. "
    + SET_PYTHON
)
DID_NOT_START = "the runtime did not start: %s"
WAS_KILLED = "the runtime was killed while it started; the server's log may say more"
NOT_READY = "it was not ready in time"
DOES_NOT_READ = "the runtime does not read its socket"
#: The field is GREETING_TIMEOUT_S.
NOT_ACCEPTED = (
    "the runtime accepted no connection within %.0f s: it is stopped, or it has reached its limit of open files. If the "
    "server's log reports that limit, raise it (ulimit -Hn, a container's --ulimit nofile)"
)
NO_BOARD = "the runtime's first message lacks its board or the number of devices"
LOST = "lost the runtime: %s"
NOT_REACHED = "no connection to the runtime yet: %s"
RECONNECTED = "reconnected to the runtime"
REJECTS = "the runtime rejects the model: %s"
ENDED_EARLY = "the runtime ended before the model was ready: %s"
NOT_SERVED = "device %d does not serve the model yet: %s"
