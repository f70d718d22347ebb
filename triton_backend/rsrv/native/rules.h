// Constants, statuses and texts that both fronts share. tools/native_rules.py writes this file: change the Python modules.
#pragma once

// rsrv.wire.frames
#define MAGIC 1448235858
#define PROTOCOL_VERSION 13
#define FOREIGN_PEER "the peer does not use rsrv's protocol"
#define MAX_FRAME 131072
#define MAX_PROGRESS 400
#define HEADER_BYTES 8
#define SUBMISSION_BYTES 80
#define COMPLETION_BYTES 32
#define ALONE 1
#define WAITED 2
enum { FRAME_HELLO = 1, FRAME_REGISTER = 2, FRAME_SEGMENT = 3, FRAME_DROP_SEGMENT = 4, FRAME_SUBMIT = 5, FRAME_CANCEL = 6, FRAME_STATUS = 7, FRAME_COMMAND = 9, FRAME_ENTER = 10, FRAME_LEAVE = 11, FRAME_CALL = 12, FRAME_RELEASE = 13, FRAME_WATCH = 14, FRAME_REPORT = 15, FRAME_TRACE = 25, FRAME_SPANS = 26, FRAME_GENERATE = 29, FRAME_DEMAND = 31, FRAME_WELCOME = 16, FRAME_REGISTERED = 17, FRAME_REJECTED = 18, FRAME_DONE = 19, FRAME_STATUS_REPLY = 20, FRAME_COMMANDED = 22, FRAME_STATE = 23, FRAME_REPORTED = 24, FRAME_COLD = 27, FRAME_STARTING = 28, FRAME_TOKENS = 30 };
enum status { OK = 0, INVALID = 1, NOT_FOUND = 2, QUEUE_FULL = 3, DEADLINE = 4, CANCELLED = 5, RUNTIME_DOWN = 6, NOT_RESIDENT = 7, INTERNAL = 8, PAUSED = 9, SEQUENCE_LOST = 10, STARTING = 11 };

// rsrv.wire.layout
#define FLAT_MAGIC 1413565510
#define ALIGNMENT 64

// rsrv.wire.memory
#define BOARD_BYTES 65536
#define SILENT_NS 500000000ll
#define FIRST_BYTES 1048576
#define KEEP_BYTES 67108864

// rsrv.wire.traces
#define MARK_BYTES 32
#define MAX_SPANS 32
#define MAX_SPAN_TEXT 200

// rsrv.wire.blackbox
#define SLOT_BYTES 512
#define BOX_BYTES 3584
#define KEY_AT 10
#define ASLEEP_AT 3583
#define ALONE_BIT 128
enum { PHASE_BUILDING = 1, PHASE_WARMING = 2, PHASE_LOADING = 3, PHASE_EXECUTING = 4, PHASE_LOOPING = 5 };

// rsrv.wire.paths
#define NOT_PRIVATE "%s must be a directory of uid %u with mode 0700; remove it, or set RSRV_RUNTIME_DIR to another place"
#define FAILURE_FILE "failure"

// rsrv.wire.placement_table
#define TABLE_MAGIC "rsrvpt01"
#define TABLE_HEADER_BYTES 64
#define TABLE_RETRY_NS 1000000000ll

// rsrv.placement.device_choice
#define SOONER 0.8
#define ELSEWHERE 0.25
#define PINNED 0x8000000000000000ull

// rsrv.histogram
#define HISTOGRAM_NS {100000ll, 250000ll, 500000ll, 1000000ll, 2500000ll, 5000000ll, 10000000ll, 25000000ll, 50000000ll, 100000000ll, 250000000ll, 500000000ll, 1000000000ll, 2500000000ll, 5000000000ll, 10000000000ll, 30000000000ll, 60000000000ll}

// rsrv.logs
#define NAMELESS "a request without an id"

// rsrv.throttle
#define MORE " (%u more since the last such line)"

// rsrv.front.rules
#define FIRST_BACKOFF_NS 50000000ll
#define MAX_BACKOFF_NS 5000000000ll
#define MAX_REJECTED_BACKOFF_NS 60000000000ll
#define FIRST_START_PAUSE_NS 1000000000ll
#define MAX_START_PAUSE_NS 60000000000ll
#define FIRST_ATTEMPTS 10
#define START_TIMEOUT_NS 60000000000ll
#define FAILURE_COUNTS_NS 60000000000ll
#define GREETING_TIMEOUT_NS 60000000000ll
#define JOIN_NS 10000000000ll
#define SEND_NS 100000000ll
#define CHECK_PERIOD_NS 50000000ll
#define DEADLINE_GRACE_NS 100000000ll
#define LONGER_WEIGHT 0.01
#define LONGER_CAP 4
#define REPORT_PERIOD_NS 1000000000ll
#define MAX_REQUESTS 1000
#define MAX_REQUEST_BYTES 268435456
#define MAX_PARTS 4
#define MAX_STEPS 10
#define MAX_DEATHS 2
#define MAX_DIGESTS 64
#define DIGEST_COUNTS_NS 3600000000000ll
#define ELSEWHERE_NS 3000000000ll
#define TICK_NS 20000000ll
#define DOWN "the model runtime is not reachable; it is being restarted, try again"
#define UNLOADED "the model is being unloaded"
#define NOT_AGAIN "the model runtime does not load this model again; the server's log says why"
#define NOT_STARTED "the model could not be started: %s"
#define LATE "the deadline passed before the answer was ready"
#define CLIENT_CANCELLED "the request was cancelled"
#define STUCK "the model runtime accepts no requests at the moment; try again later"
#define NO_DESCRIPTORS "has reached its limit of open files (ulimit -n)"
#define NO_MEMORY "the server has no memory for this request; try again later"
#define NOT_HANDLED "the request could not be handled; the server's log says why"
#define SUSPECT "two runtimes ended while they executed this request, so it is not tried again. Send other inputs; the server's log has the stacks of the crash, or says that the execution hung"
#define EQUAL "two runtimes ended while they executed a request with equal inputs, so this one is not tried. Send other inputs; the server's log has the stacks of the crash, or says that the execution hung"
#define CROWDED "the model is starting, and no more requests may wait for it. Send the request again later, or start the model in advance with `rsrv prefetch --warm`"
#define STILL_STARTING "the model is starting%s%s. This request has waited for %.1f s; requests wait at most %g s without progress, and at most %g s in all. The start continues: send the request again later or with a later deadline, or start the model in advance with `rsrv prefetch --warm`"
#define STEP ": %s"
#define TIME_LEFT ", and about %.0f s are left"
#define TOO_SOON "the model is starting, which takes %.1f s more, and this request's deadline is earlier. The start continues: send the request again later or with a later deadline, or start the model in advance with `rsrv prefetch --warm`"
#define NOT_UTF8 "the request's id and parameters must be UTF-8"
#define UNKNOWN_PARAMETER "unknown parameter %s; the parameters of rsrv are rsrv_deadline_unix_ns, rsrv_priority and rsrv_sticky"
#define NO_INTEGER "parameter %s must be a whole number from %s to %s, got %s"
#define NO_RUN "parameter %s is for sub-calls of meta models"
#define THE_REQUEST "the request "
#define UNKNOWN_INPUT "the request has an input that the model does not have"
#define NO_INPUT "has no tensor %s"
#define WRONG_SHAPE "input %s: expected shape %s%s, got %s"
#define BATCH_AXIS " (axis %d is the batch)"
#define NO_VARIANT "no module is compiled for %s; compiled are %s (-1 is the batch)"
#define WRONG_LENGTH "the inputs have the lengths %s along the padded axis; give all of them one length, from 1 to %ld"
#define ROWS_DIFFER "the inputs disagree on the number of rows: %s"
#define TOO_MANY_ROWS "%ld rows exceed the largest compiled batch size; compiled are %s. Send fewer rows per request"
#define OTHER_SIZE "%ld rows: this model runs at its compiled batch sizes only: %s"
#define SET_PYTHON "RSRV_RUNTIME_PYTHON must name a Python where 'rsrv[serve]' is installed"
#define CANNOT_START "the runtime cannot be started with %s: %s. RSRV_RUNTIME_PYTHON must name a Python where 'rsrv[serve]' is installed"
#define ENDED_SILENTLY "the runtime did not start with %s: it ended without a message; the server's log may say more. RSRV_RUNTIME_PYTHON must name a Python where 'rsrv[serve]' is installed"
#define DID_NOT_START "the runtime did not start: %s"
#define WAS_KILLED "the runtime was killed while it started; the server's log may say more"
#define NOT_READY "it was not ready in time"
#define DOES_NOT_READ "the runtime does not read its socket"
#define NOT_ACCEPTED "the runtime accepted no connection within %.0f s: it is stopped, or it has reached its limit of open files. If the server's log reports that limit, raise it (ulimit -Hn, a container's --ulimit nofile)"
#define NO_BOARD "the runtime's first message lacks its board or the number of devices"
#define LOST "lost the runtime: %s"
#define NOT_REACHED "no connection to the runtime yet: %s"
#define RECONNECTED "reconnected to the runtime"
#define REJECTS "the runtime rejects the model: %s"
#define ENDED_EARLY "the runtime ended before the model was ready: %s"
#define NOT_SERVED "device %d does not serve the model yet: %s"

// rsrv.front.states: the states of a model on one device, the events that change them, and the table
enum model_state { STATE_UNTRIED, STATE_CONNECTING, STATE_STARTING, STATE_READY, STATE_COLD, STATE_BACKING_OFF, STATE_REJECTED, STATE_CLOSED };
#define STATE_COUNT 8
enum model_event { EVENT_CONNECT, EVENT_STEP, EVENT_REGISTERED, EVENT_COOL, EVENT_LOSE, EVENT_FAIL, EVENT_REJECT, EVENT_FORGIVE, EVENT_CLOSE };
#define EVENT_COUNT 9
// 0 where the table has no change, and otherwise the next state plus 1.
#define TRANSITIONS \
    {[STATE_UNTRIED][EVENT_CONNECT] = STATE_CONNECTING + 1, \
     [STATE_CONNECTING][EVENT_STEP] = STATE_STARTING + 1, \
     [STATE_CONNECTING][EVENT_REGISTERED] = STATE_READY + 1, \
     [STATE_CONNECTING][EVENT_COOL] = STATE_COLD + 1, \
     [STATE_CONNECTING][EVENT_FAIL] = STATE_BACKING_OFF + 1, \
     [STATE_CONNECTING][EVENT_REJECT] = STATE_REJECTED + 1, \
     [STATE_STARTING][EVENT_STEP] = STATE_STARTING + 1, \
     [STATE_STARTING][EVENT_REGISTERED] = STATE_READY + 1, \
     [STATE_STARTING][EVENT_COOL] = STATE_COLD + 1, \
     [STATE_STARTING][EVENT_FAIL] = STATE_BACKING_OFF + 1, \
     [STATE_STARTING][EVENT_REJECT] = STATE_REJECTED + 1, \
     [STATE_READY][EVENT_LOSE] = STATE_CONNECTING + 1, \
     [STATE_READY][EVENT_COOL] = STATE_COLD + 1, \
     [STATE_COLD][EVENT_CONNECT] = STATE_CONNECTING + 1, \
     [STATE_BACKING_OFF][EVENT_CONNECT] = STATE_CONNECTING + 1, \
     [STATE_REJECTED][EVENT_CONNECT] = STATE_CONNECTING + 1, \
     [STATE_REJECTED][EVENT_FORGIVE] = STATE_COLD + 1, \
     [STATE_UNTRIED][EVENT_CLOSE] = STATE_CLOSED + 1, \
     [STATE_CONNECTING][EVENT_CLOSE] = STATE_CLOSED + 1, \
     [STATE_STARTING][EVENT_CLOSE] = STATE_CLOSED + 1, \
     [STATE_READY][EVENT_CLOSE] = STATE_CLOSED + 1, \
     [STATE_COLD][EVENT_CLOSE] = STATE_CLOSED + 1, \
     [STATE_BACKING_OFF][EVENT_CLOSE] = STATE_CLOSED + 1, \
     [STATE_REJECTED][EVENT_CLOSE] = STATE_CLOSED + 1}

// The name of each status, its code in Triton, and whether a tag names it before the message.
#define STATUSES 12
#define STATUS_ROWS \
    [OK] = {"OK", 0, false}, \
    [INVALID] = {"INVALID", CODE_INVALID_ARG, false}, \
    [NOT_FOUND] = {"NOT_FOUND", CODE_NOT_FOUND, false}, \
    [QUEUE_FULL] = {"QUEUE_FULL", CODE_UNAVAILABLE, true}, \
    [DEADLINE] = {"DEADLINE", CODE_UNAVAILABLE, true}, \
    [CANCELLED] = {"CANCELLED", CODE_CANCELLED, false}, \
    [RUNTIME_DOWN] = {"RUNTIME_DOWN", CODE_UNAVAILABLE, true}, \
    [NOT_RESIDENT] = {"NOT_RESIDENT", CODE_UNAVAILABLE, true}, \
    [INTERNAL] = {"INTERNAL", CODE_INTERNAL, false}, \
    [PAUSED] = {"PAUSED", CODE_UNAVAILABLE, true}, \
    [SEQUENCE_LOST] = {"SEQUENCE_LOST", CODE_NOT_FOUND, true}, \
    [STARTING] = {"STARTING", CODE_UNAVAILABLE, true}
