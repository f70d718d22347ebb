// The parts of the native front, and their interfaces. docs/protocol.md is the contract with the runtime.
//
//   backend.c   Triton's entry points: they load a model, execute requests, and unload the model
//   request.c   one client's request: parameters, shapes, the copies into and out of shared memory, the answer
//   replicas.c  a model's links, one per device of the server, and the choice of the link that answers a request
//   placement.c the placement table, which names the devices where a model should run
//   link.c      a model's connection to a runtime, and the thread that reads all connections
//   mender.c    the threads that connect models to a runtime again, one per device
//   trace.c     trace contexts of requests, and the ended spans that are not reported yet
//   large.c     requests that are submitted in parts
//   waiting.c   a model's requests from execute() until the runtime has ended them, and the figures about them
//   front.c     decisions about requests without a runtime; it uses no locks and no clocks, and has no effects
//   resubmission.c  a model's requests without a runtime, which are submitted to the next runtime or to another device
//   guard.c     the guard of models with the Python front: a batching strategy of Triton, which no other part uses
//   launch.c    where the runtime listens, and how it is started
//   protocol.c  frames and descriptors, and the description of a model, which is checked before it is used
//   memory.c    the shared memory of a connection, and the runtime's board
//   rules.h     constants, statuses and texts that both fronts share; tools/native_rules.py writes it
//   text.c      texts: UTF-8, quoting, the tag of a request's id, and the log
//
// A fault here ends the server with all of its models. So the bytes of the runtime are checked like the bytes of a client, every
// buffer is passed with its length, and no function keeps a pointer into a frame.
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rules.h"
#include "triton.h"

#define MAX_RANK 32
#define DIGEST_BYTES 16

#define NS_PER_S 1000000000ll
#define NS_PER_MS 1000000ll
int64_t now_ns(void);

// --- text.c -------------------------------------------------------------------------------------------------

#define TEXT_BYTES 4096
#define PATH_BYTES 1024

// A text that is always valid UTF-8 and terminated. A text that would be too long is cut.
struct text {
    char bytes[TEXT_BYTES];
    size_t length;
};

void text_clear(struct text*);
void text_add(struct text*, const char* format, ...) __attribute__((format(printf, 2, 3)));
void text_add_bytes(struct text*, const char* bytes, size_t length);  // adds the bytes, with U+FFFD for broken UTF-8
void text_add_quoted(struct text*, const char*, size_t most);         // adds Python's repr of the text, cut to `most` characters
void text_add_json(struct text*, const char*);                        // adds a JSON string with its quotes
bool is_utf8(const char*);
extern const char OUT_OF_DESCRIPTORS[];
void digest_bytes(const void*, size_t bytes, uint8_t* digest, size_t length);  // digest of at most 64 bytes
uint64_t request_tag(const char* id);
void log_line(int level, const char* model, const char* format, ...) __attribute__((format(printf, 3, 4)));

// --- memory.c -----------------------------------------------------------------------------------------------

struct arena;

// A range of an arena's memory. `memory` points to its first byte in this process.
struct place {
    uint32_t segment;
    uint64_t offset, bytes;
    uint8_t* memory;
    struct arena* arena;
};

// Not thread-safe: the lock of the link that owns an arena guards it. The memory stays mapped until the last place is released.
struct arena* arena_new(void);
bool arena_take(struct arena*, uint64_t bytes, struct place*);
bool arena_lacks_descriptors(const struct arena*);  // true if a lack of descriptors caused the latest failure of arena_take
void arena_give(struct place*);
void arena_close(struct arena*);
bool arena_fresh(struct arena*, uint32_t* segment, int* fd);  // finds a segment that the runtime does not know yet
void arena_announced(struct arena*);                          // records that the runtime knows that segment
bool arena_dropped(struct arena*, uint32_t* segment);         // finds a dropped segment that the runtime still maps
void arena_forget(struct arena*);                             // records that the runtime has unmapped that segment

// Returns the board of the runtime in a directory, mapped for reading. NULL: the descriptor is not a board. Closes the
// descriptor.
const _Atomic uint64_t* board_map(int fd, const char* directory);
// Returns true if executions of the model `key` may have ended the runtime, by its black box, or if there is no black box.
bool board_blames(const _Atomic uint64_t*, const char* key);
// Returns true if the runtime has ended so that its device sleeps.
bool board_sleeps(const _Atomic uint64_t*);
void board_unmap(const _Atomic uint64_t*);

static inline uint64_t aligned(uint64_t bytes) { return (bytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1); }

// --- protocol.c ---------------------------------------------------------------------------------------------

struct tensor {
    char* name;
    int type;  // Triton's number of the element type
    uint32_t item_bytes, rank;
    int32_t batch_axis, padded_axis;  // -1: none
    int64_t dims[MAX_RANK];  // -1 on axes that vary
    uint64_t row_bytes;  // bytes of one row; bytes of the whole tensor if it has no batch axis
};

struct variant {
    uint32_t* sizes;
    uint32_t size_count, length;  // length of the padded axis; 0: there is none
    struct tensor *inputs, *outputs;
};

// The description of a model that a runtime has sent. Requests hold the description with which they were read, because the next
// runtime may send another one.
struct interface {
    atomic_int users;
    bool batched, exact, traced;
    char* key;         // NAME@VERSION
    uint32_t slot;     // number of the model's cell on the runtime's board; 0: it has none
    uint64_t cost_ns;  // duration of the shortest execution, as measured
    int64_t retry_ns;  // longest time that requests wait for a runtime
    uint32_t input_count, output_count, variant_count;
    struct tensor *client_inputs, *client_outputs;
    struct variant* variants;
    uint32_t* input_of;   // module input -> the client's input of that name
    uint32_t* output_of;  // client's output -> the module's output of that name
};

struct interface* interface_read(const uint8_t* bytes, size_t length, const char** why);  // NULL: the description is wrong
void interface_hold(struct interface*);
void interface_drop(struct interface*);
uint64_t tensor_bytes(const struct tensor*, uint64_t rows, uint64_t length);
uint64_t block_bytes(const struct tensor*, uint32_t count, uint64_t rows, uint64_t length);

struct frame {
    uint16_t kind;
    uint32_t count;
    const uint8_t* body;
    size_t length;
    int fd;  // -1: none; the receiver closes it
};

struct completion {
    uint64_t request;
    uint16_t status;
    uint32_t text_bytes;
    uint64_t execute_ns;
};

// Returns 1 for a frame, 0 if there is none now, and -1 if the connection is over, with the reason `why`.
int frame_receive(int fd, uint8_t buffer[MAX_FRAME], struct frame*, const char** why);
// Returns 1 if the frame was sent, 0 if the runtime did not read in time, and -1 if the connection is over.
int frame_send(int fd, const void* frame, size_t length, int descriptor, int patience_ms);
int frame_send_id(int fd, uint16_t kind, uint64_t id);
int frame_send_json(int fd, uint16_t kind, const char* json);
void put_u16(uint8_t*, uint16_t);
void put_u32(uint8_t*, uint32_t);
void put_u64(uint8_t*, uint64_t);
void put_header(uint8_t*, uint16_t kind, uint32_t count);
// Returns true if all entries and texts of a DONE frame are valid and fill the frame.
bool completions_check(const struct frame*);
// Returns entry `index` of a DONE frame.
struct completion completion_at(const struct frame*, uint32_t index);
// Reads the body of COLD: how long requests may wait for a step of the model's start. False: the frame is wrong.
bool nanoseconds_read(const struct frame*, int64_t* ns);
// Reads the body of STARTING: the shortest time that the start can take (0: not known), how long requests may wait for the
// next step, and the text of this step. False: the frame is wrong.
bool starting_read(const struct frame*, int64_t* least_ns, int64_t* limit_ns, struct text* step);

// --- launch.c -----------------------------------------------------------------------------------------------

#define MAX_DEVICES 63u

// A socket of a runtime after the first frames, the descriptor of its board, and the number of the server's devices.
struct greeted {
    int fd, board;
    uint32_t devices;
};

// Writes the path of the directory of a device's runtime. False: the path is too long.
bool runtime_directory(uint32_t device, char base[PATH_BYTES], char own[PATH_BYTES]);
// Connects to the runtime of a device, and starts it if there is none. False: that failed, with a reason. `final`:
// trying again is useless until somebody removes the cause.
bool runtime_open(const char* settings, uint32_t device, struct greeted*, struct text* why, bool* final);

// --- placement.c --------------------------------------------------------------------------------------------

// Returns the devices of the model whose name has this digest of 16 bytes, bit n for device n. 0: the table does not
// name it.
uint64_t placement_mask(const uint8_t digest[DIGEST_BYTES]);
uint32_t crc32_of(uint32_t crc, const void* bytes, size_t length);  // same as crc32 of zlib

// --- trace.c ------------------------------------------------------------------------------------------------

// A request's span that has not ended.
struct trace {
    uint8_t trace[16], parent[8], id[8];
};

// Opens the span of a request that must be traced. NULL: the request is not traced. If both Triton and the client have
// a context, Triton's is used, because its own span is the client's child.
struct trace* trace_begin(TRITONBACKEND_Request*);
void trace_mark(const struct trace*, uint64_t request, uint8_t mark[MARK_BYTES]);

// --- request.c ----------------------------------------------------------------------------------------------

struct link;
struct large;

// A client's request, from execute() until its answer. Its place in shared memory stays until the runtime has ended the
// request.
struct pending {
    struct pending *previous, *next, *same_bucket;
    uint64_t id, tag, run;
    TRITONBACKEND_Request* request;  // NULL: answered
    TRITONBACKEND_ModelInstance* instance;
    struct interface* interface;
    uint32_t variant, rows, length;  // length along the padded axis; 0: there is none
    uint16_t priority;
    int64_t deadline_ns, begun_ns, sent_ns;
    uint64_t input_bytes, output_bytes;  // bytes of the blocks in shared memory
    struct place place;
    struct trace* trace;  // NULL: not traced
    bool cancelling;
    bool read;  // the parameters were read
    // If this request is a part of a large request, it has `rows` rows of Triton's request, from the row `first` on.
    struct large* large;  // NULL: this request is not a part
    uint32_t first;       // row where the part begins
    uint64_t whole;       // number that all parts of the large request have in common
    bool admitted;        // a full queue does not refuse it
    TRITONBACKEND_Response* response;  // response of a large request; NULL: it is not made yet
    // The following fields are for resubmission.c. A request that was executing when a runtime died is a suspect.
    struct link* link;  // link on which the request waits; it lives until the answer
    bool suspect;  // this request is the suspect that was submitted and has no answer yet
    uint32_t deaths;  // number of runtimes that died while they executed this request
    uint64_t waiting_bytes;
    int64_t waiting_since_ns, retry_until_ns, checked_ns;  // 0: it has not waited yet
    enum status status;
    struct text* failure;  // NULL: none
};

// Returns the number of the device where the run of a sub-call is. -1: the request is not a sub-call.
int64_t request_run_device(TRITONBACKEND_Request*);
// Reads the parameters, unless they were read before. False: the request has failed, with `status` and `failure`.
bool request_read_parameters(struct pending*);
// Checks the request against the description of a model, and sets its variant, its rows and the bytes of its place. False: the
// request has failed.
bool request_read(struct pending*, struct interface*);
bool request_is_large(const struct pending*);  // true if it has more rows than the largest compiled size
uint64_t request_input_bytes(const struct pending*);  // bytes of the inputs, as far as they can be read
// Makes the response of a large request, with a buffer for each output that the client wants. False: the request has
// failed.
bool request_open_response(struct pending*, uint8_t** buffers);
void request_copy_outputs(const struct pending* part, uint8_t* const* buffers);  // copies to the part's rows
void request_fail(struct pending*, enum status, const char* format, ...) __attribute__((format(printf, 3, 4)));
void request_write(struct pending*);  // copies the inputs to the request's place; may fail the request
bool request_launched(const struct pending*);  // false: the runtime never gave the request to its device
// Computes the digest of the inputs, which are in the request's place.
void request_digest(const struct pending*, uint8_t digest[DIGEST_BYTES]);
void request_submission(const struct pending*, uint8_t entry[SUBMISSION_BYTES]);
// Answers the request with its outputs or its failure, and releases Triton's request. Does nothing if it is already answered.
void request_answer(struct pending*, struct link*);
void request_free(struct pending*);
const char* status_name(enum status);

// --- large.c --------------------------------------------------------------------------------------------------------

// Submits the first parts of a request that was read. The request is answered when it has ended and no part is in progress.
void large_begin(struct link*, struct pending*);
void large_take(struct pending* part, struct link*);  // handles the outcome of a part
bool large_has_ended(struct large*);                  // true if the request has ended, so that its other parts are useless

// --- link.c and waiting.c -------------------------------------------------------------------------------------

void link_submit(struct link*, TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*);
void link_measure(struct link*, enum status, int64_t begun_ns);
// Limits the log lines about failed requests. True: the caller must write this line. `left_out` is the number of lines left out
// before it.
bool link_logs(struct link*, enum status, uint32_t* left_out);

// --- replicas.c -----------------------------------------------------------------------------------------------

struct replicas;

// Opens a model's links to the runtimes, and waits until a runtime serves the model. NULL: no runtime can, for the reason `why`.
struct replicas* replicas_open(const char* model, const char* bundle, const char* settings, struct text* why);
void replicas_close(struct replicas*);
void replicas_submit(struct replicas*, TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*);
