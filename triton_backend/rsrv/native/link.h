// The common declarations of link.c, mender.c, waiting.c and replicas.c: a model's link to the runtime of one device.
#pragma once
#include <pthread.h>

#include "front.h"
#include "native.h"

#define BUCKETS 256u
#define INTERVALS 19u

// Requests in order, by `next`.
struct queue {
    struct pending *first, *last;
};

// Whether requests wait for a model, and the earliest of their deadlines.
struct demand {
    bool waits;
    int64_t first_deadline_ns;  // 0: none
};

// A model's link. `lock` guards all fields below it. The socket and the requests that were sent have one owner: only the reader
// closes the socket and ends these requests. When the last user drops the link, it is freed.
struct link {
    atomic_int users;
    struct replicas* owner;  // exists until the link is closed and all requests of the model are answered
    uint32_t number;  // number of the device
    char *model, *registration, *settings;
    struct link *next_due, *next_watched;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct device device;  // its state determines whether the link has a socket; STATE_CONNECTING begins without one
    bool loading;  // true while link_load waits for the state; link_load then reconnects the link, and no mender does
    int fd;
    bool stuck;  // the runtime did not read in time; until it reads again, sending a frame does not wait for it
    struct arena* arena;
    uint32_t devices;  // number of the server's devices
    const _Atomic uint64_t* board;  // NULL without a connection
    // The board's first word, and the time, when the earliest request was sent that the runtime may not have noticed yet.
    uint64_t word_at_send;
    int64_t unnoticed_ns;
    uint64_t execution_ns;  // learned duration of an execution
    struct interface* interface;
    char* failure;  // why the latest attempt failed; NULL: no attempt has failed
    struct demand demand, told;  // the current demand, and the demand that was reported to the runtime
    int64_t due_ns;  // time of the next attempt; it does not change while a mender has the link
    uint64_t next_id;
    struct pending *first, *last, **buckets;  // buckets: NULL without a connection
    struct { int64_t budget_ns; int64_t then_ns; uint32_t left_out; } logged[STATUSES];
    uint64_t durations[INTERVALS], responses[STATUSES], duration_ns;
    struct span *first_span, *last_span;  // ended spans that are not reported yet
    uint32_t span_count, dropped_spans;
    bool measured, watched;
    int64_t reported_ns;
};

// A model's links: `links` has `count` entries, by device. An entry is never replaced, so no lock is needed. It is NULL if the
// link could not be made.
struct replicas {
    uint8_t digest[16];
    uint32_t count, home;
    struct link* links[MAX_DEVICES];
    _Atomic uint64_t ready;  // devices whose runtime serves the model, bit n for device n
    _Atomic uint64_t mask;   // the placement table's mask when the model was last spread over its devices
    _Atomic int64_t retry_ns, start_timeout_ns;  // arguments of read_outage
    // Requests that wait for a runtime, under the lock of resubmission.c.
    struct queue waiting;
    struct demand demand;
    uint32_t waiting_count;
    uint64_t waiting_bytes;
    bool has_suspect;  // a suspect was submitted and has no answer yet
    struct killers* killers;  // inputs that were executing when runtimes died; NULL until a request has ended a runtime
    _Atomic int64_t killers_until_ns;  // time when the last record in `killers` expires
    struct replicas* next_waiting;
};

// Returns the link that gets a request, by the placement table and by the expected time of the answer. NULL: no runtime
// reads.
struct link* replicas_soonest(struct replicas*);
void replicas_read_outage(struct replicas*, struct outage*, int64_t now);
// Starts the model on one device if none serves it and no start is under way.
void replicas_start(struct replicas*, int64_t now);
// Reports the waiting requests to the runtimes that start the model.
void replicas_tell(struct replicas*, struct demand);

bool resubmission_begin(void);
// Lets a request, which the caller owns, wait for a runtime. If it cannot wait, ends it with the reason. No lock is
// held.
void resubmission_add(struct link*, struct pending*);
// Submits a part of a large request on the thread that resubmits requests. The limits of waiting requests do not apply to it.
void resubmission_add_part(struct link*, struct pending*);
void resubmission_ended(struct link*, struct pending*);  // records that the submitted suspect has its answer
// Records for a request's inputs how many runtimes died while they executed them. 0: the request was answered.
void resubmission_record(struct link*, const struct pending*, uint32_t deaths);
// Fails a request if requests with equal inputs have ended too many runtimes. Its inputs must be in its place.
void resubmission_check(struct link*, struct pending*);
void resubmission_wake(void);  // called when a model has a runtime, or cannot have one

// Returns a link that is not used yet. The caller drops it, or closes it after loading or connecting. NULL: no memory.
struct link* link_new(struct replicas*, const char* model, const char* bundle, const char* settings, uint32_t device);
// Waits until the runtime serves the model, however long compiling takes. False: the runtime does not serve it, for the reason
// `why`. `barred` is then true if no other runtime should load the model.
bool link_load(struct link*, struct text* why, bool* barred);
// Begins an attempt to reach the runtime, and does not wait for its end. If there was an attempt before, does nothing, unless the
// model is cold and `asked` is true.
void link_connect(struct link*, bool asked);
bool link_is_cold(struct link*);
// Reports the waiting requests to the runtime that starts the model.
void link_tell(struct link*, struct demand);
void link_await(struct link*, int64_t until_ns);     // waits for the end of the current attempt, if there is one
uint32_t link_devices(struct link*);
// Returns the nanoseconds until the device would answer a request that arrived now. INT64_MAX: no runtime serves the model, or
// the runtime does not read.
int64_t link_answers_in_ns(struct link*);
void link_resubmit(struct link*, struct pending*);   // submits a request that has waited for a runtime
void link_close(struct link*);
void link_hold(struct link*);
void link_drop(struct link*);
// Makes the reader check the link regularly while the link has requests in flight, or measurements to report. The caller holds
// the lock.
void link_watch(struct link*);
// Connects to the runtime, unless the link is closed. False: there is no runtime, and the next attempt is due after the
// back-off.
bool link_reconnect(struct link*, atomic_bool* fails);

bool mender_begin(uint32_t device);  // starts the device's thread; false: the thread cannot be started
void mender_add(struct link*);       // makes the device's thread reconnect the link when that is due
bool mender_fails(uint32_t device);  // true if the last attempt to reach the device's runtime failed
bool begin_thread(void* (*run)(void*), void* argument);
void begin_condition(pthread_cond_t*);  // its timeouts are times of CLOCK_MONOTONIC

// Removes all requests in flight from the link, and returns them as a list by `next`. The caller holds the lock.
struct pending* waiting_take_all(struct link*);
// Removes the requests of a checked DONE frame from the link, and returns them with their outcomes. The caller holds the lock.
struct pending* waiting_take_done(struct link*, const struct frame*);
// Asks the runtime to cancel requests that clients have cancelled. Returns copies of the requests whose deadline passed long ago,
// to be answered. The requests themselves stay, because the runtime may write to their memory until it has ended them. The
// caller holds the lock.
struct pending* waiting_check(struct link*, int64_t now);
bool waiting_is_late(const struct pending*, int64_t now);  // true if the grace period after the request's deadline is over
// Answers requests, a list by `next`, and frees their memory.
void waiting_finish(struct link*, struct pending*);
// Sends the figures since the last report. If the runtime does not read now, a later call sends them. The caller holds the lock.
void waiting_report(struct link*, int64_t now);

// Ends the span of a traced request, before its answer.
void trace_end(struct link*, const struct pending*);
// Sends the ended spans. If the runtime does not read now, a later call sends them. The caller holds the lock.
void trace_report(struct link*);
void trace_forget(struct link*, uint32_t count);
