#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "link.h"

// Requests with more rows than the largest compiled size. Each part is a request of its own for the runtime, and waits for the
// next runtime as other requests do. The outputs of all parts are copied to their rows in one response.

struct large {
    pthread_mutex_t lock;
    struct parts parts;
    uint64_t number;  // the runtime groups the parts of a request by this number; 0: it cannot
    struct pending* whole;  // holds Triton's request, which the parts read
    uint8_t* buffers[];     // buffers of the response, by output; NULL: the client does not want the output
};

bool large_has_ended(struct large* large) {
    pthread_mutex_lock(&large->lock);
    bool ended = large->parts.ended;
    pthread_mutex_unlock(&large->lock);
    return ended;
}

static struct pending* make_part(struct large* large, uint32_t first, uint32_t rows) {
    const struct pending* whole = large->whole;
    struct pending* part = calloc(1, sizeof *part);
    struct trace* trace = whole->trace ? malloc(sizeof *trace) : NULL;
    if (!part || (whole->trace && !trace)) {
        free(part);
        free(trace);
        return NULL;
    }
    if (trace) *trace = *whole->trace;
    *part = (struct pending){
        .tag = whole->tag, .run = whole->run, .request = whole->request, .instance = whole->instance, .rows = rows,
        .priority = whole->priority, .deadline_ns = whole->deadline_ns, .begun_ns = whole->begun_ns, .trace = trace,
        .read = true, .large = large, .first = first, .whole = large->number, .admitted = first > 0 || whole->retry_until_ns,
    };
    return part;
}

// Records the end of a part. The caller holds the lock.
static void end_part(struct large* large, enum status status, struct text** failure) {
    struct pending* whole = large->whole;
    if (!parts_end(&large->parts, status == OK) || status == OK) return;
    whole->status = status;
    whole->failure = *failure;
    *failure = NULL;
}

// Makes the parts that must be submitted now. The caller holds the lock.
static uint32_t make_parts(struct large* large, struct pending* made[MAX_PARTS]) {
    uint32_t count = 0, first, rows;
    while (parts_take(&large->parts, &first, &rows)) {
        struct text* none = NULL;  // no memory: the client gets NO_MEMORY
        if ((made[count] = make_part(large, first, rows)))
            count++;
        else
            end_part(large, QUEUE_FULL, &none);
    }
    return count;
}

// Answers a large request that has ended. No part of it is in progress, so no other thread uses it.
static void finish(struct large* large, struct link* link) {
    pthread_mutex_destroy(&large->lock);
    waiting_finish(link, large->whole);
    free(large);
}

void large_begin(struct link* link, struct pending* whole) {
    const struct variant* variant = &whole->interface->variants[whole->variant];
    struct large* large = calloc(1, sizeof *large + whole->interface->output_count * sizeof *large->buffers);
    if (!large) request_fail(whole, QUEUE_FULL, NO_MEMORY);
    if (!large || !request_open_response(whole, large->buffers)) {
        free(large);
        waiting_finish(link, whole);
        return;
    }
    struct pending* made[MAX_PARTS];
    pthread_mutex_init(&large->lock, NULL);
    large->whole = whole;
    large->parts = (struct parts){.rows = whole->rows, .largest = variant->sizes[variant->size_count - 1]};
    if (getrandom(&large->number, sizeof large->number, 0) != sizeof large->number) large->number = 0;
    uint32_t count = make_parts(large, made);
    if (!count) finish(large, link);
    // Submit the parts in order: the first part takes the request's place in the queue.
    for (uint32_t i = 0; i < count; i++) link_resubmit(link, made[i]);
}

void large_take(struct pending* part, struct link* link) {
    struct large* large = part->large;
    struct pending* made[MAX_PARTS];
    // Copying is safe even if the request has ended, because its response is kept while a part is in progress.
    if (part->status == OK) request_copy_outputs(part, large->buffers);
    part->request = NULL;
    pthread_mutex_lock(&large->lock);
    end_part(large, part->status, &part->failure);
    uint32_t count = make_parts(large, made);
    bool is_over = large->parts.ended && !large->parts.submitted;
    uint64_t run = large->whole->run;
    pthread_mutex_unlock(&large->lock);
    if (is_over) finish(large, link);
    for (uint32_t i = 0; i < count; i++) {
        // Submit the part of a sub-call to the same runtime, because no other runtime knows the run. Submit other parts on the
        // thread that resubmits requests: if this thread, the reader, copied inputs, it would read answers late.
        if (run)
            link_resubmit(link, made[i]);
        else
            resubmission_add_part(link, made[i]);
    }
}
