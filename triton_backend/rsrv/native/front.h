// The decisions of a front, as in rsrv.front. These functions do not wait, lock or read a clock.
#pragma once
#include "native.h"

#define NEVER INT64_MAX

// A model on one device, as in rsrv.front.device. A text is NULL if there is none.
struct device {
    enum model_state state;
    bool started;         // a runtime had the model ready here, and the model has not been cold since then
    bool asked;           // requests or the placement table require the model here, even if it would otherwise stay cold
    bool barred;          // the model has ended runtimes of this device
    bool is_unreachable;  // the latest attempt found no runtime
    int64_t lost_ns;      // time of the latest death of a runtime that had the model ready
    int64_t pause_ns;     // latest pause before an attempt; 0: there was no pause since the model was last ready or cold
    int64_t due_ns;       // time of the next attempt, or of the end of the pause
    char* reason;         // text for clients while the runtime rejects the model, otherwise the reason of the latest failure
    char* step;           // latest step of a start
    int64_t stepped_ns;   // time of the latest step
    int64_t ready_at_ns;  // earliest time at which the starting model can serve; 0: not known
};

void device_init(struct device*);
void device_free(struct device*);
// Each of these functions is an event. If the table has no such change, the device does not change, and the result is false.
// `device_start` begins an attempt if none was made, or if the model is cold and `asked` is true.
bool device_start(struct device*, bool asked);
bool device_step(struct device*, const char* step, int64_t least_ns, int64_t now);  // `least_ns` 0: the time is not known
bool device_register(struct device*);
bool device_cool(struct device*);
bool device_lose(struct device*, bool sleeps, int64_t now);
bool device_fail(struct device*, const char* reason, bool ended, int64_t now);  // `ended`: there was a runtime
// `client` is the text for clients of a model that has served. If it is empty, clients get a general text.
bool device_reject(struct device*, const char* reason, const char* client, bool barred, int64_t now);
bool device_close(struct device*);
// Begins the next attempt if its time has come. After a failed start of a cold model, the device becomes cold instead, unless
// the model `is_wanted`: it serves elsewhere, and the placement table names this device.
bool device_retry(struct device*, bool is_wanted, int64_t now);

static inline bool device_is_attempting(const struct device* device) {
    return device->state == STATE_CONNECTING || device->state == STATE_STARTING;
}
static inline bool device_is_startable(const struct device* device) {
    return device->state == STATE_UNTRIED || device->state == STATE_COLD;
}

// A model on its devices, in the model's order of preference. `numbers` are the devices' bits in the placement table.
struct devices {
    uint32_t count, numbers[MAX_DEVICES];
    struct device* all[MAX_DEVICES];
};

// Returns the index in `all` of the device where a start of the model should begin, or -1 if a start is under way or no device
// can start the model.
int find_start(const struct devices*, uint64_t mask, int64_t now);

// Facts about a model's runtimes that decide how long requests wait.
struct outage {
    bool is_down;      // false: the model has a runtime
    bool was_ready;    // the model was ready on a device, and has not been cold there since
    bool is_starting;  // no runtime serves the model, and a request can start it or a runtime builds it
    int64_t retry_ns;     // longest wait for a runtime
    int64_t limit_ns;     // longest wait for the next step of a start
    int64_t stepped_ns;   // time of the latest step of a start; 0: there was no step
    int64_t ready_at_ns;  // earliest time at which the starting model can serve; 0: not known
    char step[MAX_PROGRESS + 1];  // latest step of a start; empty: not known
    struct text why;              // the reason for clients if no device will serve the model soon, otherwise empty
};

// `start_timeout_ns` 0: no runtime has announced the longest wait for a step.
void read_outage(
    struct outage*, const struct devices*, uint64_t mask, int64_t retry_ns, int64_t start_timeout_ns, int64_t now);
// Returns true if a request cannot begin to wait, and sets the status and the text for the client. Otherwise, sets the time
// until which the request may wait. `count` other requests with inputs of `bytes` wait already.
bool refuse_arrival(
    struct pending*, const struct outage*, uint32_t count, uint64_t bytes, int64_t now, enum status*, struct text*);
// Does the same for a request that already waits.
bool refuse_waiting(struct pending*, const struct outage*, int64_t now, enum status*, struct text*);

// The parts of a request with more rows than the largest compiled size, as in rsrv.front.parts. The request has ended with its
// last part, or with the first part that failed.
struct parts {
    uint32_t rows, largest;
    uint32_t next;       // first row that was not submitted
    uint32_t submitted;  // number of parts that are submitted and have no answer yet
    bool ended;
};

// Returns true, and the rows of the next part, if the part must be submitted now. The part then counts as submitted.
bool parts_take(struct parts*, uint32_t* first, uint32_t* rows);
// Records the end of a submitted part. Returns true if the request ends with this part.
bool parts_end(struct parts*, bool answered);

// Inputs that were executing when runtimes died, in the order in which they were recorded.
struct killers {
    uint32_t count;
    struct killer { uint8_t digest[DIGEST_BYTES]; uint32_t deaths; int64_t until_ns; } inputs[MAX_DIGESTS];
};

// Records how many runtimes died while they executed these inputs. 0 clears the record: the inputs were answered.
void killers_record(struct killers*, const uint8_t digest[DIGEST_BYTES], uint32_t deaths, int64_t now);
// Returns how many runtimes died while they executed these inputs.
uint32_t killers_deaths(const struct killers*, const uint8_t digest[DIGEST_BYTES], int64_t now);
