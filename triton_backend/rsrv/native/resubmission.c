#include <stdio.h>
#include <stdlib.h>

#include "link.h"

// A model's requests without a runtime: requests whose runtime has died, requests that arrive while there is no runtime, and
// requests that start a cold model. Inference has no side effects, and Triton keeps a request's inputs until it is answered, so
// a death costs time, not answers. The inputs are copied again, to memory that the dead runtime does not have.

// Guards the waiting requests of all models. It must be locked before the lock of a link.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static struct replicas* models;  // models with waiting requests, which keep the models loaded
static struct queue parts;       // parts of large requests, for the thread that copies their inputs

static void append(struct queue* queue, struct pending* pending) {
    pending->next = NULL;
    *(queue->last ? &queue->last->next : &queue->first) = pending;
    queue->last = pending;
}

// Fails a request that cannot wait longer.
static bool is_over(struct pending* pending, const struct outage* outage, int64_t now) {
    struct text text;
    enum status status;
    if (refuse_waiting(pending, outage, now, &status, &text))
        request_fail(pending, status, "%s", text.bytes);
    else if (waiting_is_late(pending, now))
        request_fail(pending, DEADLINE, LATE);
    else
        return false;
    return true;
}

static bool is_cancelled(struct pending* pending, int64_t now) {
    bool cancelled = pending->large && large_has_ended(pending->large);
    if (cancelled) request_fail(pending, CANCELLED, CLIENT_CANCELLED);
    if (cancelled || now - pending->checked_ns < CHECK_PERIOD_NS) return cancelled;
    pending->checked_ns = now;
    TRITONSERVER_Error* error = TRITONBACKEND_RequestIsCancelled(pending->request, &cancelled);
    if (error) TRITONSERVER_ErrorDelete(error);
    if (cancelled) request_fail(pending, CANCELLED, CLIENT_CANCELLED);
    return cancelled;
}

// Returns true if the request changes the demand that the runtimes must know.
static bool add_to_demand(struct demand* demand, const struct pending* pending) {
    int64_t first_ns = demand->first_deadline_ns;
    bool is_first = !demand->waits, is_earlier = pending->deadline_ns && (!first_ns || pending->deadline_ns < first_ns);
    demand->waits = true;
    if (is_earlier) demand->first_deadline_ns = pending->deadline_ns;
    return is_first || is_earlier;
}

void resubmission_add(struct link* link, struct pending* pending) {
    struct replicas* all = link->owner;
    struct outage outage;
    struct text text;
    enum status status;
    int64_t now = now_ns();
    pthread_mutex_lock(&link->lock);
    arena_give(&pending->place);
    pthread_mutex_unlock(&link->lock);
    pending->next = NULL;
    pending->link = link;
    pending->cancelling = false;
    pending->checked_ns = now;
    pending->waiting_bytes = request_input_bytes(pending);
    replicas_read_outage(all, &outage, now);
    bool is_read = request_read_parameters(pending), waits = false;
    pthread_mutex_lock(&lock);
    if (pending->suspect) pending->suspect = all->has_suspect = false;
    if (is_read && refuse_arrival(pending, &outage, all->waiting_count, all->waiting_bytes, now, &status, &text))
        request_fail(pending, status, "%s", text.bytes);
    else
        waits = is_read;
    if (waits) {
        if (!all->waiting.first) {
            all->next_waiting = models;
            models = all;
            pthread_cond_signal(&changed);
        }
        append(&all->waiting, pending);
        all->waiting_count++;
        all->waiting_bytes += pending->waiting_bytes;
        // Report the demand now. If a link has just lost its runtime and this request, its next attempt must send the demand.
        if (add_to_demand(&all->demand, pending)) replicas_tell(all, all->demand);
    }
    pthread_mutex_unlock(&lock);
    if (!waits) waiting_finish(link, pending);
}

void resubmission_add_part(struct link* link, struct pending* part) {
    part->next = NULL;
    part->link = link;
    pthread_mutex_lock(&lock);
    append(&parts, part);
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

void resubmission_record(struct link* link, const struct pending* pending, uint32_t deaths) {
    struct replicas* all = link->owner;
    uint8_t digest[DIGEST_BYTES];
    int64_t now = now_ns();
    request_digest(pending, digest);
    pthread_mutex_lock(&lock);
    if (!all->killers) all->killers = calloc(1, sizeof *all->killers);
    if (all->killers) killers_record(all->killers, digest, deaths, now);
    if (all->killers && deaths) atomic_store(&all->killers_until_ns, now + DIGEST_COUNTS_NS);
    pthread_mutex_unlock(&lock);
}

void resubmission_check(struct link* link, struct pending* pending) {
    struct replicas* all = link->owner;
    uint8_t digest[DIGEST_BYTES];
    int64_t until_ns = atomic_load(&all->killers_until_ns), now = until_ns ? now_ns() : 0;
    // Do not hash the inputs if no inputs are recorded.
    if (now >= until_ns) return;
    request_digest(pending, digest);
    pthread_mutex_lock(&lock);
    uint32_t deaths = killers_deaths(all->killers, digest, now);
    pthread_mutex_unlock(&lock);
    if (deaths > pending->deaths) pending->deaths = deaths;
    if (deaths >= MAX_DEATHS) request_fail(pending, INTERNAL, EQUAL);
}

void resubmission_ended(struct link* link, struct pending* pending) {
    pthread_mutex_lock(&lock);
    pending->suspect = link->owner->has_suspect = false;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

void resubmission_wake(void) {
    pthread_mutex_lock(&lock);
    if (models) pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

// Starts the model if requests wait and no runtime serves it. Moves requests that need not wait any more to `failed` or `ready`.
// Only one suspect of the model is submitted at a time. So if a suspect ends the next runtime, no other suspect of the model is
// blamed. The caller holds the lock.
static void check_model(struct replicas* all, int64_t now, struct queue* failed, struct queue* ready) {
    struct outage outage;
    struct demand demand = {0};
    if (all->waiting.first) replicas_start(all, now);
    replicas_read_outage(all, &outage, now);
    bool reads = !outage.is_down && replicas_soonest(all);
    struct pending *pending = all->waiting.first, *next;
    all->waiting = (struct queue){0};
    for (; pending; pending = next) {
        next = pending->next;
        bool ends = is_over(pending, &outage, now) || is_cancelled(pending, now);
        if (!ends && (!reads || (pending->deaths && all->has_suspect))) {
            append(&all->waiting, pending);
            add_to_demand(&demand, pending);
            continue;
        }
        if (!ends && pending->deaths) pending->suspect = all->has_suspect = true;
        all->waiting_count--;
        all->waiting_bytes -= pending->waiting_bytes;
        append(ends ? failed : ready, pending);
    }
    all->demand = demand;
    replicas_tell(all, demand);
}

// Answers a request. The model may be unloaded as soon as its last request is answered, so hold the link until the end of this
// function.
static void answer(struct pending* pending) {
    struct link* link = pending->link;
    link_hold(link);
    waiting_finish(link, pending);
    link_drop(link);
}

static void resubmit(struct pending* pending) {
    struct link *found = replicas_soonest(pending->link->owner), *link = found ? found : pending->link;
    link_hold(link);
    if (found)
        link_resubmit(link, pending);
    else
        resubmission_add(link, pending);
    link_drop(link);
}

static void submit_part(struct pending* part) {
    if (is_cancelled(part, now_ns()))
        answer(part);
    else
        resubmit(part);
}

static void each(struct queue* queue, void (*act)(struct pending*)) {
    for (struct pending *pending = queue->first, *next; pending; pending = next) {
        next = pending->next;
        pending->next = NULL;
        act(pending);
    }
}

// Submits parts, resubmits requests that have a runtime, and answers requests that cannot wait longer.
static void check_waiting(void) {
    struct queue failed = {0}, ready = {0}, submitted;
    int64_t now = now_ns();
    pthread_mutex_lock(&lock);
    submitted = parts;
    parts = (struct queue){0};
    for (struct replicas **at = &models, *all; (all = *at);) {
        check_model(all, now, &failed, &ready);
        if (all->waiting.first)
            at = &all->next_waiting;
        else
            *at = all->next_waiting;
    }
    pthread_mutex_unlock(&lock);
    each(&submitted, submit_part);
    each(&failed, answer);
    each(&ready, resubmit);
}

static void* resubmit_all(void* nothing) {
    (void)nothing;
    for (;;) {
        check_waiting();
        pthread_mutex_lock(&lock);
        int64_t until_ns = now_ns() + TICK_NS;
        struct timespec until = {until_ns / NS_PER_S, until_ns % NS_PER_S};
        if (models && !parts.first)
            pthread_cond_timedwait(&changed, &lock, &until);
        else if (!parts.first)
            pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

bool resubmission_begin(void) {
    begin_condition(&changed);
    return begin_thread(resubmit_all, NULL);
}
