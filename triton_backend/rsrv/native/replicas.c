#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"

// The model's load waits this long for the first attempts of further devices.
#define JOIN_NS (10 * NS_PER_S)
// Another replica than the preferred one answers a batch only if its answer is expected within this share of that one's
// time: noise of measurements must not move traffic, and with it weights.
#define SOONER 0.8
// The same for a device outside of the model's mask, which loads weights for it.
#define ELSEWHERE 0.25
// Bit of a mask whose devices an operator has named: no other live device answers.
#define PINNED (UINT64_C(1) << 63)

// Counts the devices of a server whose device 0 has no runtime; 1 if none was ever there. The file is a list of texts.
static uint32_t count_devices(void) {
    char base[PATH_BYTES], own[PATH_BYTES], path[PATH_BYTES + 16];
    uint32_t quotes = 0;
    if (!runtime_directory(0, base, own)) return 1;
    snprintf(path, sizeof path, "%s/devices.json", own);
    FILE* file = fopen(path, "re");
    for (int c; file && (c = getc(file)) != EOF;) quotes += c == '"';
    if (file) fclose(file);
    return quotes < 2 ? 1 : quotes / 2 > MAX_DEVICES ? MAX_DEVICES : quotes / 2;
}

// Opens the link of the first device that serves the model: the others then find its compiled modules in the cache.
static bool open_first(struct replicas* all, const char* model, const char* bundle, const char* settings, struct text* why) {
    struct text first, reason;
    bool dangerous = false, differ = false;
    all->count = 1;
    // A model that has ended a runtime would end the others, too.
    for (uint32_t device = 0; device < all->count && !dangerous; device++) {
        struct link* link = link_new(all, model, bundle, settings, device);
        if (link && link_load(link, &reason, &dangerous)) {
            if (device) log_line(LOG_ERROR, model, "a device does not serve the model yet: %s", why->bytes);
            uint32_t devices = link_devices(link);
            all->links[device] = link;
            all->count = devices > device ? devices : device + 1;
            return true;
        }
        if (link)
            link_drop(link);
        else {
            text_clear(&reason);
            text_add(&reason, "no memory, or no threads and descriptors are left");
        }
        if (device == 0) {
            first = reason;
            all->count = count_devices();
        }
        differ |= strcmp(first.bytes, reason.bytes) != 0;
        text_add(why, "%sdevice %u: %s", device ? "; " : "", device, reason.bytes);
    }
    if (!differ) *why = first;
    return false;
}

struct replicas* replicas_open(const char* model, const char* bundle, const char* settings, struct text* why) {
    struct replicas* all = calloc(1, sizeof *all);
    text_clear(why);
    if (!all || !open_first(all, model, bundle, settings, why)) {
        if (!all) text_add(why, "no memory");
        free(all);
        return NULL;
    }
    bool is_cold = atomic_load(&all->start_timeout_ns);
    text_digest(model, all->digest, sizeof all->digest);
    all->home = crc32_of(0, model, strlen(model)) % all->count;
    for (uint32_t device = 0; device < all->count; device++) {
        if (all->links[device]) continue;
        all->links[device] = link_new(all, model, bundle, settings, device);
        // A cold model is cold on all devices: they have the same settings.
        if (all->links[device]) (is_cold ? link_begin_cold : link_begin)(all->links[device]);
    }
    int64_t until = now_ns() + JOIN_NS;
    for (uint32_t device = 0; device < all->count; device++)
        if (all->links[device]) link_await(all->links[device], until);
    return all;
}

void replicas_close(struct replicas* all) {
    for (uint32_t device = 0; device < all->count; device++)
        if (all->links[device]) link_close(all->links[device]);
    free(all);
}

// Returns the link that answers first among these devices; the first one from the model's home on if no other is clearly
// sooner, and sets `least` to its time. NULL: none of them has a runtime that reads. `starts`: where the model is cold, it
// starts.
static struct link* soonest(struct replicas* all, uint64_t mask, bool starts, int64_t* least) {
    struct link* chosen = NULL;
    *least = INT64_MAX;
    for (uint32_t i = 0; i < all->count; i++) {
        uint32_t device = (all->home + i) % all->count;
        struct link* link = all->links[device];
        if (!link || !(mask >> device & 1)) continue;
        int64_t ns = link_answers_in_ns(link);
        if (ns == INT64_MAX && starts) link_start(link);
        if (ns == INT64_MAX || (chosen && (double)ns >= SOONER * (double)*least)) continue;
        chosen = link;
        *least = ns;
    }
    return chosen;
}

struct link* replicas_soonest(struct replicas* all) {
    uint64_t mask = placement_mask(all->digest);
    int64_t least = INT64_MAX, elsewhere;
    struct link* chosen = mask ? soonest(all, mask, all->count > 1, &least) : NULL;
    if (!chosen || !(mask & PINNED)) {
        struct link* other = soonest(all, ~mask, false, &elsewhere);
        if (!chosen || (double)elsewhere < ELSEWHERE * (double)least) chosen = other;
    }
    return chosen;
}

// Also without a runtime: a link has the batch wait for one.
static struct link* choose(struct replicas* all) {
    struct link* chosen = replicas_soonest(all);
    for (uint32_t i = 0; !chosen; i++) chosen = all->links[(all->home + i) % all->count];
    return chosen;
}

void replicas_submit(
    struct replicas* all, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count) {
    if (all->count == 1) {
        link_submit(all->links[0], instance, requests, count);
        return;
    }
    // A sub-call goes to the device of its run, whose runtime alone knows the run. If the device has no link, any other
    // one says so. Most batches are one part.
    for (uint32_t from = 0, to; from < count; from = to) {
        int64_t device = request_run_device(requests[from]);
        for (to = from + 1; to < count && request_run_device(requests[to]) == device; to++) continue;
        struct link* link = device >= 0 && device < all->count ? all->links[device] : NULL;
        link_submit(link ? link : choose(all), instance, requests + from, to - from);
    }
}

// Returns the device on which a cold model starts: one of the table's, or the home, unless its runtime was not reached or
// rejects the model.
static struct link* starting_link(struct replicas* all) {
    uint64_t mask = placement_mask(all->digest) & ~PINNED;
    struct link* chosen = NULL;
    int best = -1;
    for (uint32_t i = 0; i < all->count; i++) {
        uint32_t device = (all->home + i) % all->count;
        struct link* link = all->links[device];
        bool dangerous = false;
        if (!link) continue;
        int rank = link_rejects(link, &dangerous) || !link_is_reachable(link) ? 0 : !mask || mask >> device & 1 ? 2 : 1;
        if (dangerous) return link;
        if (rank > best) chosen = link;
        best = rank > best ? rank : best;
    }
    return chosen;
}

void replicas_ask(struct replicas* all, bool waits, int64_t first_deadline_ns) {
    struct link* starting = waits ? starting_link(all) : NULL;
    for (uint32_t device = 0; device < all->count; device++) {
        struct link* link = all->links[device];
        if (!link) continue;
        if (link == starting) link_start(link);
        link_ask(link, waits, first_deadline_ns);
    }
}

bool replicas_down(struct replicas* all, struct text* why, bool* starts, int64_t* ready_at_ns) {
    bool is_down = true, is_soon = false, may_start = false, is_dangerous = false;
    int64_t now = now_ns();
    text_clear(why);
    *starts = true;
    *ready_at_ns = INT64_MAX;
    for (uint32_t device = 0; device < all->count && is_down; device++) {
        struct link* link = all->links[device];
        if (!link) continue;
        pthread_mutex_lock(&link->lock);
        bool is_cold = link->state == IS_COLD;
        is_down = link->state != READY;
        *starts = *starts && !link->started;
        if (link->state == REGISTERING && link->ready_at_ns < *ready_at_ns) *ready_at_ns = link->ready_at_ns;
        // A device that has never served the model is not expected to; a cold model waits after a start that failed.
        bool serves = is_cold ? link->due_ns > now : link->interface || link->asked;
        if (serves && link->down && !why->length) text_add(why, "%s", link->down);
        is_soon |= serves && !is_cold && !link->down;
        // One that another device has rejected starts here.
        may_start |= is_cold && !serves && link_is_reachable(link);
        is_dangerous |= link->down && link->dangerous;
        pthread_mutex_unlock(&link->lock);
    }
    if (*ready_at_ns == INT64_MAX) *ready_at_ns = 0;
    if (is_soon || (may_start && !is_dangerous)) text_clear(why);
    return is_down;
}
