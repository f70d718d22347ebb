// What link.c, mender.c, waiting.c and replicas.c share: a model's link to the runtime of one device.
#pragma once
#include <pthread.h>

#include "native.h"

#define BUCKETS 256u
#define INTERVALS 19u

// IS_COLD: no runtime has the model, and the link has no socket, until a request waits.
enum state { MISSING, REGISTERING, READY, IS_COLD, CLOSED };

// Requests in order, by `next`.
struct queue {
    struct pending *first, *last;
};

// A model's link. `lock` guards all below it. The reader closes the socket and ends requests that were sent, so that
// each has one owner; whoever is the last to drop the link frees it.
struct link {
    atomic_int users;
    struct replicas* owner;  // lives while a request of the model is not answered
    uint32_t device;
    char *model, *registration, *settings;
    struct link *next_due, *next_watched;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum state state;
    bool loading;  // link_load waits for the state, and mends the link itself
    bool attempted;  // the first attempt is over
    int fd;
    bool stuck;  // the runtime did not read in time: until it reads again, frames do not wait for it
    struct arena* arena;
    uint32_t devices;  // of the server
    const _Atomic uint64_t* board;  // NULL without a connection
    // The board's first word when requests were sent that the runtime had not noticed yet, and the time then.
    uint64_t word_at_send;
    int64_t unnoticed_ns;
    uint64_t execution_ns;  // learned
    struct interface* interface;
    char* down;    // for clients while no runtime serves the model; NULL: one is expected
    char* reason;  // for the log; NULL: none
    bool rejected, dangerous;  // the runtime does not load the model; because it ended runtimes
    bool started;  // a runtime had the model when the link last had one: the next one shall have it, too
    bool asked;    // requests wait for the model, or the placement table wants it here, although it may be cold
    int64_t first_deadline_ns;  // of these requests; 0: none
    int64_t ready_at_ns;  // a model that starts does not serve before; 0: not known
    int64_t backoff_ns, due_ns;
    uint64_t next_id;
    struct pending *first, *last, **buckets;  // buckets: NULL without a connection
    struct { int64_t budget_ns; int64_t then_ns; uint32_t left_out; } logged[STATUSES];
    uint64_t durations[INTERVALS], responses[STATUSES], duration_ns;
    struct span *first_span, *last_span;  // ended, not reported yet
    uint32_t span_count, dropped_spans;
    bool measured, watched;
    int64_t reported_ns;
};

extern const char LINK_DOWN[];
extern const char LATE[];

// `count` links, by device. A link is never replaced, so that no lock is needed; it is missing if there was no memory.
struct replicas {
    uint8_t digest[16];
    uint32_t count, home;
    struct link* links[MAX_DEVICES];
    _Atomic int64_t retry_ns, start_timeout_ns;  // the second is 0 until a runtime says that the model is cold
    // Requests that wait for a runtime, under the lock of resubmission.c.
    struct queue waiting;
    uint32_t waiting_count;
    uint64_t waiting_bytes;
    bool has_suspect;  // a suspect is under way
    struct replicas* next_waiting;
};

// The link that gets a batch, by the placement table and by when its device answers. NULL: no runtime reads.
struct link* replicas_soonest(struct replicas*);
// False: a runtime serves the model. Otherwise `why`, for clients, is empty if there may be one soon, and `starts` says
// that the model was cold, not that its runtime died. If a runtime starts it, and has said how long that takes at least,
// `ready_at_ns` is not 0.
bool replicas_down(struct replicas*, struct text* why, bool* starts, int64_t* ready_at_ns);
// Has runtimes know whether requests wait, the earliest deadline (0: none) included. Starts a cold model on one device.
void replicas_ask(struct replicas*, bool waits, int64_t first_deadline_ns);

bool resubmission_begin(void);
// Has a request, which the caller owns, wait for a runtime; or ends it with the reason why it cannot. No lock is held.
void resubmission_add(struct link*, struct pending*);
void resubmission_ended(struct link*, struct pending*);  // the suspect that is under way has its answer
void resubmission_wake(void);  // a model has a runtime, or cannot have one

// A link that is not used yet; the caller drops it, or closes it once it was loaded or begun. NULL: no memory.
struct link* link_new(struct replicas*, const char* model, const char* bundle, const char* settings, uint32_t device);
// Waits until the runtime serves the model, however long compiling takes. False: it does not, and `why`.
bool link_load(struct link*, struct text* why, bool* dangerous);
void link_begin(struct link*);                       // reaches for the runtime without waiting
void link_begin_cold(struct link*);                  // reaches for it when the model is asked for
void link_start(struct link*);                       // starts the model if it is cold and its back-off is over
// Has the runtime that starts the model know whether requests wait.
void link_ask(struct link*, bool waits, int64_t first_deadline_ns);
bool link_is_reachable(const struct link*);          // false: the last attempt to reach the device's runtime failed
// The runtime does not load the model now; `dangerous`: because it ended runtimes, so no other one shall try.
bool link_rejects(struct link*, bool* dangerous);
void link_await(struct link*, int64_t until_ns);     // waits for the first attempt
uint32_t link_devices(struct link*);
// Nanoseconds until its device would have answered a batch that came now; INT64_MAX without a runtime that reads.
int64_t link_answers_in_ns(struct link*);
void link_resubmit(struct link*, struct pending*);   // a request that has waited for a runtime
void link_close(struct link*);
void link_hold(struct link*);
void link_drop(struct link*);
// Under the lock: something waits on the link. The reader looks at it from time to time, until nothing does.
void link_watch(struct link*);
// Connects to the runtime, unless the link is closed. False: there is none; the next attempt is due after the back-off.
bool link_reconnect(struct link*, atomic_bool* fails);

bool mender_begin(uint32_t device);  // false: its thread cannot be started
void mender_add(struct link*);       // has the device's thread reconnect the link when that is due
bool mender_fails(uint32_t device);  // the last attempt to reach the device's runtime failed
bool begin_thread(void* (*run)(void*), void* argument);
void begin_condition(pthread_cond_t*);  // by CLOCK_MONOTONIC

// Under the lock: takes all requests that wait, a list by `next`.
struct pending* waiting_take_all(struct link*);
// Under the lock: takes those of a DONE frame, which was checked, with their outcomes.
struct pending* waiting_take_done(struct link*, const struct frame*);
// Under the lock: has the runtime cancel what clients have cancelled, and takes those whose deadline passed long ago.
// These are copies, because the runtime may write to their memory until it has ended them.
struct pending* waiting_check(struct link*, int64_t now);
bool waiting_is_late(const struct pending*, int64_t now);  // its deadline passed long ago
// Answers requests, a list by `next`, and gives their memory back.
void waiting_finish(struct link*, struct pending*);
// Under the lock: sends the figures since the last report. If the runtime does not read now, they wait.
void waiting_report(struct link*, int64_t now);

// Ends the span of a traced request, before its answer.
void trace_end(struct link*, const struct pending*);
// Under the lock: sends the ended spans. If the runtime does not read now, they wait.
void trace_report(struct link*);
void trace_forget(struct link*, uint32_t count);
