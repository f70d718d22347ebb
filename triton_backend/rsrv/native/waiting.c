#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "link.h"

#define SEND_MS ((int)(SEND_NS / NS_PER_MS))

static const int64_t BOUNDS[] = HISTOGRAM_NS;
_Static_assert(sizeof BOUNDS / sizeof *BOUNDS + 1 == INTERVALS, "each bound ends an interval");

// --- figures -----------------------------------------------------------------------------------------------------

void link_measure(struct link* link, enum status status, int64_t begun_ns) {
    int64_t took = now_ns() - begun_ns;
    size_t interval = 0;
    while (interval < INTERVALS - 1 && took > BOUNDS[interval]) interval++;
    pthread_mutex_lock(&link->lock);
    link->durations[interval]++;
    link->duration_ns += (uint64_t)took;
    link->responses[status]++;
    link->measured = true;
    link_watch(link);
    pthread_mutex_unlock(&link->lock);
}

bool link_logs(struct link* link, enum status status, uint32_t* left_out) {
    int64_t now = now_ns();
    pthread_mutex_lock(&link->lock);
    int64_t burst = status == INTERNAL ? 5 * NS_PER_S : NS_PER_S, budget = link->logged[status].budget_ns;
    budget = link->logged[status].then_ns ? budget + now - link->logged[status].then_ns : burst;
    budget = budget > burst ? burst : budget;
    bool logs = budget >= NS_PER_S;
    *left_out = link->logged[status].left_out;
    link->logged[status].left_out = logs ? 0 : *left_out + 1;
    link->logged[status].budget_ns = logs ? budget - NS_PER_S : budget;
    link->logged[status].then_ns = now;
    pthread_mutex_unlock(&link->lock);
    return logs;
}

void waiting_report(struct link* link, int64_t now) {
    struct text text;
    size_t first = 0, end = INTERVALS;
    const char* comma = "";
    while (first < INTERVALS && !link->durations[first]) first++;
    while (end > first && !link->durations[end - 1]) end--;
    text_clear(&text);
    text_add(&text, "{\"requests\":[%.9f,%zu", (double)link->duration_ns / 1e9, first);
    for (size_t i = first; i < end; i++) text_add(&text, ",%lu", link->durations[i]);
    text_add(&text, "],\"responses\":{");
    for (int i = 0; i < STATUSES; i++) {
        if (!link->responses[i]) continue;
        text_add(&text, "%s\"", comma);
        for (const char* c = status_name((enum status)i); *c; c++) text_add(&text, "%c", *c == '_' ? *c : *c | 32);
        text_add(&text, "\":%lu", link->responses[i]);
        comma = ",";
    }
    text_add(&text, "},\"hooks\":{}}");
    trace_report(link);
    if (frame_send_json(link->fd, FRAME_REPORT, text.bytes) <= 0) return;
    memset(link->durations, 0, sizeof link->durations);
    memset(link->responses, 0, sizeof link->responses);
    link->duration_ns = 0;
    link->reported_ns = now;
    link->measured = false;
}

// --- requests that wait; under the link's lock ----------------------------------------------------------------------

static void add_pending(struct link* link, struct pending* one) {
    one->id = link->next_id++;
    struct pending** bucket = &link->buckets[one->id % BUCKETS];
    one->same_bucket = *bucket;
    *bucket = one;
    one->previous = link->last;
    one->next = NULL;
    *(link->last ? &link->last->next : &link->first) = one;
    link->last = one;
    link_watch(link);
}

static void remove_pending(struct link* link, struct pending* one) {
    struct pending** at = &link->buckets[one->id % BUCKETS];
    while (*at != one) at = &(*at)->same_bucket;
    *at = one->same_bucket;
    *(one->previous ? &one->previous->next : &link->first) = one->next;
    *(one->next ? &one->next->previous : &link->last) = one->previous;
    one->next = one->previous = one->same_bucket = NULL;
}

static struct pending* find_pending(struct link* link, uint64_t id) {
    struct pending* one = link->buckets[id % BUCKETS];
    while (one && one->id != id) one = one->same_bucket;
    return one;
}

struct pending* waiting_take_all(struct link* link) {
    struct pending* list = link->first;
    while (link->first) {
        struct pending *one = link->first, *next = one->next;
        remove_pending(link, one);
        one->next = next;
    }
    return list;
}

// No execution is shorter than the work itself.
static void learn(struct link* link, uint64_t ns) {
    uint64_t known = link->execution_ns, most = known > UINT64_MAX / LONGER_CAP ? UINT64_MAX : LONGER_CAP * known;
    if (ns < known) link->execution_ns = ns;
    if (ns > known) link->execution_ns += (uint64_t)(LONGER_WEIGHT * (double)((ns < most ? ns : most) - known));
}

struct pending* waiting_take_done(struct link* link, const struct frame* frame) {
    struct pending *list = NULL, **end = &list;
    const char* text = (const char*)frame->body + (size_t)frame->count * COMPLETION_BYTES;
    for (uint32_t i = 0; i < frame->count; i++) {
        struct completion done = completion_at(frame, i);
        struct pending* one = find_pending(link, done.request);
        if (one) {
            remove_pending(link, one);
            if (done.status == OK) learn(link, done.execute_ns);
            if (done.status != OK) request_fail(one, (enum status)done.status, "%.*s", (int)done.text_bytes, text);
            *end = one;
            end = &one->next;
        }
        text += done.text_bytes;
    }
    return list;
}

void waiting_finish(struct link* link, struct pending* list) {
    for (struct pending* one = list; one; one = one->next) request_answer(one, link);
    pthread_mutex_lock(&link->lock);
    for (struct pending* one = list; one; one = one->next) arena_give(&one->place);
    uint32_t segment;
    while (link->device.state == STATE_READY && arena_dropped(link->arena, &segment)) {
        if (frame_send_id(link->fd, FRAME_DROP_SEGMENT, segment) <= 0) break;
        arena_forget(link->arena);
    }
    pthread_mutex_unlock(&link->lock);
    for (struct pending *one = list, *next; one; one = next) {
        next = one->next;
        request_free(one);
    }
}

bool waiting_is_late(const struct pending* one, int64_t now) {
    // The runtime also handles deadlines that have passed already.
    int64_t enforced = one->deadline_ns > one->begun_ns ? one->deadline_ns : one->begun_ns;
    return one->deadline_ns && enforced < now - DEADLINE_GRACE_NS;
}

struct pending* waiting_check(struct link* link, int64_t now) {
    struct pending* late = NULL;
    for (struct pending* one = link->first; one; one = one->next) {
        bool cancelled = false;
        if (!one->request) continue;
        if (waiting_is_late(one, now)) {
            struct pending* copy = malloc(sizeof *copy);
            if (!copy) continue;
            *copy = *one;
            copy->place.arena = NULL;
            copy->failure = NULL;
            one->trace = NULL;
            interface_hold(copy->interface);
            one->request = NULL;
            one->suspect = false;
            copy->next = late;
            late = copy;
            request_fail(copy, DEADLINE, LATE);
            continue;
        }
        if (one->large) cancelled = large_has_ended(one->large);
        TRITONSERVER_Error* error = one->cancelling || cancelled ? NULL : TRITONBACKEND_RequestIsCancelled(one->request, &cancelled);
        if (error) TRITONSERVER_ErrorDelete(error);
        if (cancelled && !one->cancelling) one->cancelling = frame_send_id(link->fd, FRAME_CANCEL, one->id) > 0;
    }
    return late;
}

// --- execute() ------------------------------------------------------------------------------------------------------

// Sends a frame. Under the lock. A link that cannot send is over, although the runtime may live. The reader then ends
// the waiting requests, and the next connection may work.
static int send_one(struct link* link, const void* frame, size_t length, int descriptor, int patience_ms) {
    int sent = frame_send(link->fd, frame, length, descriptor, link->stuck ? 0 : patience_ms);
    link->stuck = sent == 0 && (link->stuck || patience_ms > 0);
    if (sent < 0) shutdown(link->fd, SHUT_RDWR);
    return sent;
}

// Reports new segments to the runtime, and submits a request that has its place. Under the lock. True: the reader ends the
// request, even if the link is over. False: the request could not be sent.
static bool send_request(struct link* link, struct pending* one) {
    uint8_t frame[HEADER_BYTES + SUBMISSION_BYTES], mark[HEADER_BYTES + MARK_BYTES];
    uint32_t segment;
    int fd, sent = 1;
    uint64_t word = atomic_load(&link->board[0]);
    if (word != link->word_at_send) {
        link->word_at_send = word;
        link->unnoticed_ns = one->sent_ns;
    }
    while (arena_fresh(link->arena, &segment, &fd)) {
        put_header(frame, FRAME_SEGMENT, 1);
        put_u64(frame + HEADER_BYTES, segment);
        if ((sent = send_one(link, frame, HEADER_BYTES + 8, fd, SEND_MS)) == 0) return false;
        if (sent < 0) break;
        arena_announced(link->arena);
    }
    add_pending(link, one);
    put_header(frame, FRAME_SUBMIT, 1);
    request_submission(one, frame + HEADER_BYTES);
    if (sent > 0 && one->trace) {
        // If the runtime does not read now, the request is not traced.
        put_header(mark, FRAME_TRACE, 1);
        trace_mark(one->trace, one->id, mark + HEADER_BYTES);
        send_one(link, mark, sizeof mark, -1, 0);
    }
    if (sent > 0) sent = send_one(link, frame, sizeof frame, -1, SEND_MS);
    if (sent == 0) remove_pending(link, one);
    return sent != 0;
}

// Sends a request to the runtime with this description, or fails it.
static void submit(struct link* link, struct interface* interface, struct pending* one) {
    pthread_mutex_lock(&link->lock);
    bool same = link->device.state == STATE_READY && link->interface == interface;
    bool placed = same && arena_take(link->arena, one->input_bytes + one->output_bytes, &one->place);
    bool lacks_descriptors = same && !placed && arena_lacks_descriptors(link->arena);
    pthread_mutex_unlock(&link->lock);
    if (!same) {
        resubmission_add(link, one);
        return;
    }
    if (lacks_descriptors)
        request_fail(one, INTERNAL, "%s", OUT_OF_DESCRIPTORS);
    else if (!placed)
        request_fail(one, QUEUE_FULL, NO_MEMORY);
    else
        request_write(one);
    if (one->status == OK) resubmission_check(link, one);
    // Without rows there is nothing to compute.
    if (one->status != OK || one->rows == 0) {
        waiting_finish(link, one);
        return;
    }
    one->sent_ns = now_ns();
    pthread_mutex_lock(&link->lock);
    // The place belongs to the present connection, unless the runtime was lost meanwhile.
    same = link->device.state == STATE_READY && link->arena == one->place.arena;
    bool sent = same && send_request(link, one);
    pthread_mutex_unlock(&link->lock);
    if (sent) return;
    if (same && !one->retry_until_ns) {
        request_fail(one, QUEUE_FULL, STUCK);
        waiting_finish(link, one);
    } else
        resubmission_add(link, one);
}

// Returns the model's description, held. NULL: no runtime serves the model.
static struct interface* hold_interface(struct link* link) {
    pthread_mutex_lock(&link->lock);
    struct interface* interface = link->device.state == STATE_READY ? link->interface : NULL;
    if (interface) interface_hold(interface);
    pthread_mutex_unlock(&link->lock);
    return interface;
}

void link_resubmit(struct link* link, struct pending* one) {
    struct interface* interface = hold_interface(link);
    if (!interface)
        resubmission_add(link, one);
    else if (request_read(one, interface) && !one->large && request_is_large(one))
        large_begin(link, one);
    else if (one->status == OK)
        submit(link, interface, one);
    else
        waiting_finish(link, one);
    interface_drop(interface);
}

void link_submit(struct link* link, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) {
    struct pending* one = calloc(1, sizeof *one);
    // Without memory, not even a failure can be stored, so answer with Triton's request alone.
    struct pending bare = {.request = request, .instance = instance, .begun_ns = now_ns(), .status = QUEUE_FULL};
    link_hold(link);
    if (one) {
        *one = bare;
        one->status = OK;
        link_resubmit(link, one);
    } else
        request_answer(&bare, link);
    link_drop(link);
}
