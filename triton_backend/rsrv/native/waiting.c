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

static void add_pending(struct link* link, struct pending* pending) {
    pending->id = link->next_id++;
    struct pending** bucket = &link->buckets[pending->id % BUCKETS];
    pending->same_bucket = *bucket;
    *bucket = pending;
    pending->previous = link->last;
    pending->next = NULL;
    *(link->last ? &link->last->next : &link->first) = pending;
    link->last = pending;
    link_watch(link);
}

static void remove_pending(struct link* link, struct pending* pending) {
    struct pending** at = &link->buckets[pending->id % BUCKETS];
    while (*at != pending) at = &(*at)->same_bucket;
    *at = pending->same_bucket;
    *(pending->previous ? &pending->previous->next : &link->first) = pending->next;
    *(pending->next ? &pending->next->previous : &link->last) = pending->previous;
    pending->next = pending->previous = pending->same_bucket = NULL;
}

static struct pending* find_pending(struct link* link, uint64_t id) {
    struct pending* pending = link->buckets[id % BUCKETS];
    while (pending && pending->id != id) pending = pending->same_bucket;
    return pending;
}

struct pending* waiting_take_all(struct link* link) {
    struct pending* list = link->first;
    while (link->first) {
        struct pending *pending = link->first, *next = pending->next;
        remove_pending(link, pending);
        pending->next = next;
    }
    return list;
}

// Learns the duration of an execution. A shorter duration replaces the learned one at once, because no execution is shorter than
// its work. A longer duration changes the learned one only slowly.
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
        struct pending* pending = find_pending(link, done.request);
        if (pending) {
            remove_pending(link, pending);
            if (done.status == OK) learn(link, done.execute_ns);
            if (done.status != OK) request_fail(pending, (enum status)done.status, "%.*s", (int)done.text_bytes, text);
            *end = pending;
            end = &pending->next;
        }
        text += done.text_bytes;
    }
    return list;
}

void waiting_finish(struct link* link, struct pending* list) {
    for (struct pending* pending = list; pending; pending = pending->next) request_answer(pending, link);
    pthread_mutex_lock(&link->lock);
    for (struct pending* pending = list; pending; pending = pending->next) arena_give(&pending->place);
    uint32_t segment;
    while (link->device.state == STATE_READY && arena_dropped(link->arena, &segment)) {
        if (frame_send_id(link->fd, FRAME_DROP_SEGMENT, segment) <= 0) break;
        arena_forget(link->arena);
    }
    pthread_mutex_unlock(&link->lock);
    for (struct pending *pending = list, *next; pending; pending = next) {
        next = pending->next;
        request_free(pending);
    }
}

bool waiting_is_late(const struct pending* pending, int64_t now) {
    // If the deadline had passed when the request arrived, the grace period begins with the arrival. The runtime itself
    // refuses such a request, and gets this time to do so.
    int64_t enforced = pending->deadline_ns > pending->begun_ns ? pending->deadline_ns : pending->begun_ns;
    return pending->deadline_ns && enforced < now - DEADLINE_GRACE_NS;
}

struct pending* waiting_check(struct link* link, int64_t now) {
    struct pending* late = NULL;
    for (struct pending* pending = link->first; pending; pending = pending->next) {
        bool cancelled = false;
        if (!pending->request) continue;
        if (waiting_is_late(pending, now)) {
            struct pending* copy = malloc(sizeof *copy);
            if (!copy) continue;
            *copy = *pending;
            copy->place.arena = NULL;
            copy->failure = NULL;
            pending->trace = NULL;
            interface_hold(copy->interface);
            pending->request = NULL;
            pending->suspect = false;
            copy->next = late;
            late = copy;
            request_fail(copy, DEADLINE, LATE);
            continue;
        }
        if (pending->large) cancelled = large_has_ended(pending->large);
        TRITONSERVER_Error* error = NULL;
        if (!pending->cancelling && !cancelled) error = TRITONBACKEND_RequestIsCancelled(pending->request, &cancelled);
        if (error) TRITONSERVER_ErrorDelete(error);
        if (cancelled && !pending->cancelling) pending->cancelling = frame_send_id(link->fd, FRAME_CANCEL, pending->id) > 0;
    }
    return late;
}

// --- execute() ------------------------------------------------------------------------------------------------------

// Sends a frame. The caller holds the lock. If sending fails, the connection is over, even if the runtime lives. The reader then
// ends the connection, and the next one may work.
static int send_one(struct link* link, const void* frame, size_t length, int descriptor, int patience_ms) {
    int sent = frame_send(link->fd, frame, length, descriptor, link->stuck ? 0 : patience_ms);
    link->stuck = sent == 0 && (link->stuck || patience_ms > 0);
    if (sent < 0) shutdown(link->fd, SHUT_RDWR);
    return sent;
}

// Reports new segments to the runtime, and submits a request that has its place. The caller holds the lock. True: the reader ends
// the request, even if the link is over. False: the request could not be sent.
static bool send_request(struct link* link, struct pending* pending) {
    uint8_t frame[HEADER_BYTES + SUBMISSION_BYTES], mark[HEADER_BYTES + MARK_BYTES];
    uint32_t segment;
    int fd, sent = 1;
    uint64_t word = atomic_load(&link->board[0]);
    if (word != link->word_at_send) {
        link->word_at_send = word;
        link->unnoticed_ns = pending->sent_ns;
    }
    while (arena_fresh(link->arena, &segment, &fd)) {
        put_header(frame, FRAME_SEGMENT, 1);
        put_u64(frame + HEADER_BYTES, segment);
        if ((sent = send_one(link, frame, HEADER_BYTES + 8, fd, SEND_MS)) == 0) return false;
        if (sent < 0) break;
        arena_announced(link->arena);
    }
    add_pending(link, pending);
    put_header(frame, FRAME_SUBMIT, 1);
    request_submission(pending, frame + HEADER_BYTES);
    if (sent > 0 && pending->trace) {
        // If the runtime does not read now, the request is not traced.
        put_header(mark, FRAME_TRACE, 1);
        trace_mark(pending->trace, pending->id, mark + HEADER_BYTES);
        send_one(link, mark, sizeof mark, -1, 0);
    }
    if (sent > 0) sent = send_one(link, frame, sizeof frame, -1, SEND_MS);
    if (sent == 0) remove_pending(link, pending);
    return sent != 0;
}

// Sends a request to the runtime, or fails the request. If the runtime's description of the model is not `interface` any more,
// the request waits, and is read again with the new description.
static void submit(struct link* link, struct interface* interface, struct pending* pending) {
    pthread_mutex_lock(&link->lock);
    bool same = link->device.state == STATE_READY && link->interface == interface;
    bool placed = same && arena_take(link->arena, pending->input_bytes + pending->output_bytes, &pending->place);
    bool lacks_descriptors = same && !placed && arena_lacks_descriptors(link->arena);
    pthread_mutex_unlock(&link->lock);
    if (!same) {
        resubmission_add(link, pending);
        return;
    }
    if (lacks_descriptors)
        request_fail(pending, INTERNAL, "%s", OUT_OF_DESCRIPTORS);
    else if (!placed)
        request_fail(pending, QUEUE_FULL, NO_MEMORY);
    else
        request_write(pending);
    if (pending->status == OK) resubmission_check(link, pending);
    // Without rows there is nothing to compute.
    if (pending->status != OK || pending->rows == 0) {
        waiting_finish(link, pending);
        return;
    }
    pending->sent_ns = now_ns();
    pthread_mutex_lock(&link->lock);
    // Check again that the place belongs to the current connection, because the runtime may have been lost since the place was
    // taken.
    same = link->device.state == STATE_READY && link->arena == pending->place.arena;
    bool sent = same && send_request(link, pending);
    pthread_mutex_unlock(&link->lock);
    if (sent) return;
    if (same && !pending->retry_until_ns) {
        request_fail(pending, QUEUE_FULL, STUCK);
        waiting_finish(link, pending);
    } else
        resubmission_add(link, pending);
}

// Returns the model's description. The caller drops it. NULL: no runtime serves the model.
static struct interface* hold_interface(struct link* link) {
    pthread_mutex_lock(&link->lock);
    struct interface* interface = link->device.state == STATE_READY ? link->interface : NULL;
    if (interface) interface_hold(interface);
    pthread_mutex_unlock(&link->lock);
    return interface;
}

void link_resubmit(struct link* link, struct pending* pending) {
    struct interface* interface = hold_interface(link);
    if (!interface)
        resubmission_add(link, pending);
    else if (request_read(pending, interface) && !pending->large && request_is_large(pending))
        large_begin(link, pending);
    else if (pending->status == OK)
        submit(link, interface, pending);
    else
        waiting_finish(link, pending);
    interface_drop(interface);
}

void link_submit(struct link* link, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) {
    struct pending* pending = calloc(1, sizeof *pending);
    // This request is on the stack, so it can be answered even if there is no memory for `pending`.
    struct pending bare = {.request = request, .instance = instance, .begun_ns = now_ns(), .status = QUEUE_FULL};
    link_hold(link);
    if (pending) {
        *pending = bare;
        pending->status = OK;
        link_resubmit(link, pending);
    } else
        request_answer(&bare, link);
    link_drop(link);
}
