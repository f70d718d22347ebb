// What link.c and waiting.c share: a model's link to the runtime.
#pragma once
#include <pthread.h>

#include "native.h"

#define BUCKETS 256u
#define INTERVALS 19u

enum state { MISSING, REGISTERING, READY, CLOSED };

// A model's link. `lock` guards all below it. The reader closes the socket and ends requests that were sent, so that
// each has one owner; whoever is the last to drop the link frees it.
struct link {
    atomic_int users;
    char *model, *registration, *settings;
    struct link *next_link, *next_due;
    struct link* next_late;  // of the reader alone, like the copies of late requests
    struct pending* late;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum state state;
    bool loading;  // link_open waits for the state, and mends the link itself
    int fd;
    bool stuck;  // the runtime did not read in time: until it reads again, frames do not wait for it
    struct arena* arena;
    struct interface* interface;
    struct text down;    // for clients while no runtime serves the model
    struct text reason;  // for the log
    bool rejected;
    int64_t backoff_ns, due_ns;
    uint64_t next_id;
    struct pending *first, *last, *buckets[BUCKETS];
    struct { int64_t budget_ns; int64_t then_ns; uint32_t left_out; } logged[STATUSES];
    uint64_t durations[INTERVALS], responses[STATUSES], duration_ns;
    bool measured;
    int64_t reported_ns;
};

extern const char LINK_DOWN[];

void link_hold(struct link*);
void link_drop(struct link*);
// Something waits now, or no longer: the reader looks at what waits from time to time.
void link_wait_more(void);
void link_wait_less(void);

// Under the lock: takes all requests that wait, a list by `next`.
struct pending* waiting_take_all(struct link*);
// Under the lock: takes those of a DONE frame, which was checked, with their outcomes.
struct pending* waiting_take_done(struct link*, const struct frame*);
// Under the lock: has the runtime cancel what clients have cancelled, and takes those whose deadline passed long ago.
// These are copies, because the runtime may write to their memory until it has ended them.
struct pending* waiting_check(struct link*, int64_t now);
// Answers requests, a list by `next`, and gives their memory back.
void waiting_finish(struct link*, struct pending*);
// Under the lock: sends the figures since the last report. If the runtime does not read now, they wait.
void waiting_report(struct link*, int64_t now);
