#include <stdlib.h>

#include "link.h"

// A model's requests without a runtime: those that a death has left, those that come while there is none, and those for a
// cold model, which they start. Inference has no side effects, and Triton keeps a request's inputs until its answer; so a
// death costs time, not answers. The inputs are copied again, to memory that the dead runtime does not have.

// Requests of a model that wait at most, and the bytes of their inputs.
#define MAX_REQUESTS 1000u
#define MAX_BYTES (256ull << 20)
// Deaths of runtimes that executed a request, after which it is not tried again: it may be their cause.
#define MAX_DEATHS 2u
#define TICK_NS (20 * 1000000ll)
#define CANCELLED_EACH_NS (50 * 1000000ll)

static const char SUSPECT[] =
    "two runtimes ended while they executed this request, so it is not tried again. Send other inputs; the server's log has "
    "the stacks of the crash, or says that the execution hung";

static const char CROWDED[] =
    "the model is starting, and no more requests may wait for it. Send it again later, or start the model ahead with "
    "`rsrv prefetch --warm`";

static const char TOO_LONG[] =
    "the model is starting; this request has waited %.1f s for it, and requests wait %g s at most. Send it again later, with "
    "a later deadline, or start the model ahead with `rsrv prefetch --warm`";

static const char TOO_SOON[] =
    "the model is starting, which takes %.1f s more, and this request's deadline is before that. The start goes on: send it "
    "again later, with a later deadline, or start the model ahead with `rsrv prefetch --warm`";

// Guards what waits, of all models; taken before a link's lock.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static struct replicas* models;  // with waiting requests, which keep them loaded

static void append(struct queue* queue, struct pending* one) {
    one->next = NULL;
    *(queue->last ? &queue->last->next : &queue->first) = one;
    queue->last = one;
}

// Why a model has no runtime.
struct outage {
    bool is_down;  // false: it has one
    bool starts;   // it was cold, or its device sleeps
    int64_t limit_ns;  // that requests wait for this reason
    int64_t ready_at_ns;
    struct text why;  // for clients; empty: there may be a runtime soon
};

static void read_outage(struct replicas* all, struct outage* outage) {
    outage->is_down = replicas_down(all, &outage->why, &outage->starts, &outage->ready_at_ns);
    // No runtime has said how long a start takes if it ended before its last frame was read.
    outage->limit_ns = outage->starts ? atomic_load(&all->start_timeout_ns) : 0;
    if (!outage->limit_ns) outage->limit_ns = atomic_load(&all->retry_ns);
}

// Fails a request that cannot wait longer.
static bool is_over(struct pending* one, const struct outage* outage, int64_t now) {
    bool starts = outage->is_down && outage->starts, is_late = starts && one->deadline_ns && one->deadline_ns <= now;
    if (!one->waiting_since_ns) one->waiting_since_ns = now;
    // A death may be followed by a sleep, and a start by a death.
    int64_t until_ns = one->waiting_since_ns + outage->limit_ns;
    if (one->retry_until_ns < until_ns) one->retry_until_ns = until_ns;
    if (one->deaths >= MAX_DEATHS)
        request_fail(one, INTERNAL, "%s", SUSPECT);
    else if (outage->is_down && one->deadline_ns > now && one->deadline_ns < outage->ready_at_ns)
        request_fail(one, DEADLINE, TOO_SOON, (double)(outage->ready_at_ns - now) / NS_PER_S);
    else if (is_late || (starts && now >= one->retry_until_ns))
        request_fail(one, is_late ? DEADLINE : RUNTIME_DOWN, TOO_LONG,
                     (double)(now - one->waiting_since_ns) / NS_PER_S, (double)outage->limit_ns / NS_PER_S);
    else if (waiting_is_late(one, now))
        request_fail(one, DEADLINE, "%s", LATE);
    else if (now >= one->retry_until_ns && (outage->is_down || !one->deaths))
        // A suspect, for which there is a runtime, only waits for its turn.
        request_fail(one, RUNTIME_DOWN, "%s", LINK_DOWN);
    else if (outage->is_down && outage->why.length)
        request_fail(one, RUNTIME_DOWN, "%s", outage->why.bytes);
    else
        return false;
    return true;
}

static bool is_cancelled(struct pending* one, int64_t now) {
    bool cancelled = false;
    if (now - one->checked_ns < CANCELLED_EACH_NS) return false;
    one->checked_ns = now;
    TRITONSERVER_Error* error = TRITONBACKEND_RequestIsCancelled(one->request, &cancelled);
    if (error) TRITONSERVER_ErrorDelete(error);
    if (cancelled) request_fail(one, CANCELLED, "the request was cancelled");
    return cancelled;
}

void resubmission_add(struct link* link, struct pending* one) {
    struct replicas* all = link->owner;
    struct outage outage;
    int64_t now = now_ns();
    pthread_mutex_lock(&link->lock);
    arena_give(&one->place);
    pthread_mutex_unlock(&link->lock);
    one->next = NULL;
    one->link = link;
    one->cancelling = false;
    one->checked_ns = now;
    one->waiting_bytes = request_input_bytes(one);
    read_outage(all, &outage);
    bool is_read = request_read_parameters(one), waits = false;
    pthread_mutex_lock(&lock);
    if (one->suspect) one->suspect = all->has_suspect = false;
    // First: a request that has ended two runtimes gets that reason, however many wait.
    waits = is_read && !is_over(one, &outage, now);
    bool has_run = one->run && !outage.starts;
    if (waits && (has_run || all->waiting_count >= MAX_REQUESTS || all->waiting_bytes + one->waiting_bytes > MAX_BYTES)) {
        // Only the runtime that is gone knows the run of a sub-call.
        request_fail(one, outage.starts ? QUEUE_FULL : RUNTIME_DOWN, "%s", outage.starts ? CROWDED : LINK_DOWN);
        waits = false;
    }
    if (waits) {
        if (!all->waiting.first) {
            all->next_waiting = models;
            models = all;
            pthread_cond_signal(&changed);
        }
        append(&all->waiting, one);
        all->waiting_count++;
        all->waiting_bytes += one->waiting_bytes;
    }
    pthread_mutex_unlock(&lock);
    if (!waits) waiting_finish(link, one);
}

void resubmission_ended(struct link* link, struct pending* one) {
    pthread_mutex_lock(&lock);
    one->suspect = link->owner->has_suspect = false;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

void resubmission_wake(void) {
    pthread_mutex_lock(&lock);
    if (models) pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

// Takes a model's requests that wait no longer: failed ones, and those for a runtime. Suspects go one after another, so that
// the one that ends the next runtime has no company of the same model. Under the lock.
static void look(struct replicas* all, int64_t now, struct queue* failed, struct queue* ready) {
    struct outage outage;
    read_outage(all, &outage);
    bool reads = !outage.is_down && replicas_soonest(all);
    int64_t first_deadline_ns = 0;
    struct pending *one = all->waiting.first, *next;
    all->waiting = (struct queue){0};
    for (; one; one = next) {
        next = one->next;
        bool ends = is_over(one, &outage, now) || is_cancelled(one, now);
        if (!ends && (!reads || (one->deaths && all->has_suspect))) {
            append(&all->waiting, one);
            if (one->deadline_ns && (!first_deadline_ns || one->deadline_ns < first_deadline_ns))
                first_deadline_ns = one->deadline_ns;
            continue;
        }
        if (!ends && one->deaths) one->suspect = all->has_suspect = true;
        all->waiting_count--;
        all->waiting_bytes -= one->waiting_bytes;
        append(ends ? failed : ready, one);
    }
    if (outage.is_down) replicas_ask(all, all->waiting.first, first_deadline_ns);
}

// The model may be unloaded as soon as its last request is answered; the link lives until it is dropped.
static void answer(struct pending* one) {
    struct link* link = one->link;
    link_hold(link);
    waiting_finish(link, one);
    link_drop(link);
}

static void resubmit(struct pending* one) {
    struct link *found = replicas_soonest(one->link->owner), *link = found ? found : one->link;
    link_hold(link);
    if (found)
        link_resubmit(link, one);
    else
        resubmission_add(link, one);
    link_drop(link);
}

static void each(struct queue* queue, void (*act)(struct pending*)) {
    for (struct pending *one = queue->first, *next; one; one = next) {
        next = one->next;
        one->next = NULL;
        act(one);
    }
}

static void* resubmit_all(void* nothing) {
    (void)nothing;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct queue failed = {0}, ready = {0};
        int64_t now = now_ns();
        for (struct replicas **at = &models, *all; (all = *at);) {
            look(all, now, &failed, &ready);
            if (all->waiting.first)
                at = &all->next_waiting;
            else
                *at = all->next_waiting;
        }
        pthread_mutex_unlock(&lock);
        each(&failed, answer);
        each(&ready, resubmit);
        pthread_mutex_lock(&lock);
        int64_t until_ns = now_ns() + TICK_NS;
        struct timespec until = {until_ns / NS_PER_S, until_ns % NS_PER_S};
        if (models)
            pthread_cond_timedwait(&changed, &lock, &until);
        else
            pthread_cond_wait(&changed, &lock);
    }
    return NULL;
}

bool resubmission_begin(void) {
    begin_condition(&changed);
    return begin_thread(resubmit_all, NULL);
}
