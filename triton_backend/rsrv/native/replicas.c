#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"

// Counts the devices in the file that a runtime of this server has written, a JSON list of texts. 1: there is no file. This
// is for a server whose device 0 has no runtime that could report the number.
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

// Opens the link of the first device that serves the model. Other devices are opened later, because they then find the compiled
// modules in the cache.
static bool open_first(struct replicas* all, const char* model, const char* bundle, const char* settings, struct text* why) {
    struct text first, reason;
    bool barred = false, differ = false;
    all->count = 1;
    // Stop if the model is barred, because a model that has ended a runtime would also end the others.
    for (uint32_t device = 0; device < all->count && !barred; device++) {
        struct link* link = link_new(all, model, bundle, settings, device);
        if (link && link_load(link, &reason, &barred)) {
            if (device) log_line(LOG_ERROR, model, "%s", why->bytes);
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
    digest_bytes(model, strlen(model), all->digest, sizeof all->digest);
    all->home = crc32_of(0, model, strlen(model)) % all->count;
    bool is_cold = false;
    for (uint32_t device = 0; device < all->count; device++)
        if (all->links[device]) is_cold = link_is_cold(all->links[device]);
    for (uint32_t device = 0; device < all->count; device++) {
        if (all->links[device]) continue;
        all->links[device] = link_new(all, model, bundle, settings, device);
        // A cold model is cold on all devices, because they have the same settings.
        if (all->links[device] && !is_cold) link_connect(all->links[device], false);
    }
    int64_t until = now_ns() + JOIN_NS;
    for (uint32_t device = 0; device < all->count; device++)
        if (all->links[device]) link_await(all->links[device], until);
    return all;
}

void replicas_close(struct replicas* all) {
    for (uint32_t device = 0; device < all->count; device++)
        if (all->links[device]) link_close(all->links[device]);
    free(all->killers);
    free(all);
}

// Returns the link that would answer first among the devices in `mask`, and sets `least` to its time. If no link is clearly
// sooner, it is the first link from the model's home on. NULL: no device has a runtime that reads.
static struct link* soonest(struct replicas* all, uint64_t mask, int64_t* least) {
    struct link* chosen = NULL;
    *least = INT64_MAX;
    for (uint32_t i = 0; i < all->count; i++) {
        uint32_t device = (all->home + i) % all->count;
        struct link* link = all->links[device];
        if (!link || !(mask >> device & 1)) continue;
        int64_t ns = link_answers_in_ns(link);
        if (ns == INT64_MAX || (chosen && (double)ns >= SOONER * (double)*least)) continue;
        chosen = link;
        *least = ns;
    }
    return chosen;
}

// If a runtime serves the model, connects the model on devices that were not tried yet. Also starts the model where it is cold,
// if a new placement table names the device.
static void spread(struct replicas* all, uint64_t mask) {
    uint64_t ready = atomic_load(&all->ready), named = 0, bit = 1;
    if (atomic_load(&all->mask) != mask && atomic_exchange(&all->mask, mask) != mask) named = mask;
    for (uint32_t device = 0; ready && device < all->count; device++, bit <<= 1)
        if (!(ready & bit) && all->links[device]) link_connect(all->links[device], named & bit);
}

struct link* replicas_soonest(struct replicas* all) {
    uint64_t mask = placement_mask(all->digest);
    int64_t least = INT64_MAX, elsewhere;
    struct link* chosen = mask ? soonest(all, mask, &least) : NULL;
    if (!chosen || !(mask & PINNED)) {
        struct link* other = soonest(all, ~mask, &elsewhere);
        if (!chosen || (double)elsewhere < ELSEWHERE * (double)least) chosen = other;
    }
    spread(all, mask);
    return chosen;
}

// Chooses a link even without a runtime, because the link lets the request wait for one.
static struct link* choose(struct replicas* all) {
    struct link* chosen = replicas_soonest(all);
    for (uint32_t i = 0; !chosen; i++) chosen = all->links[(all->home + i) % all->count];
    return chosen;
}

void replicas_submit(struct replicas* all, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) {
    // Send a sub-call to the device of its run, because only that device's runtime knows the run. If the device has no
    // link, use another link, whose runtime reports that it does not know the run.
    int64_t device = all->count == 1 ? 0 : request_run_device(request);
    struct link* link = device >= 0 && device < all->count ? all->links[device] : NULL;
    link_submit(link ? link : choose(all), instance, request);
}

// Locks the links, and lists their devices in the model's order of preference.
static void lock_devices(struct replicas* all, struct devices* devices, struct link* links[MAX_DEVICES]) {
    devices->count = 0;
    for (uint32_t i = 0; i < all->count; i++) {
        uint32_t number = (all->home + i) % all->count;
        struct link* link = all->links[number];
        if (!link) continue;
        pthread_mutex_lock(&link->lock);
        devices->numbers[devices->count] = number;
        devices->all[devices->count] = &link->device;
        links[devices->count++] = link;
    }
}

static void unlock_devices(const struct devices* devices, struct link* links[MAX_DEVICES]) {
    for (uint32_t i = 0; i < devices->count; i++) pthread_mutex_unlock(&links[i]->lock);
}

void replicas_start(struct replicas* all, int64_t now) {
    struct devices devices;
    struct link* links[MAX_DEVICES];
    uint64_t mask = placement_mask(all->digest);
    lock_devices(all, &devices, links);
    int place = atomic_load(&all->ready) ? -1 : find_start(&devices, mask, now);
    unlock_devices(&devices, links);
    if (place >= 0) link_connect(links[place], true);
}

void replicas_tell(struct replicas* all, struct demand demand) {
    for (uint32_t device = 0; device < all->count; device++)
        if (all->links[device]) link_tell(all->links[device], demand);
}

void replicas_read_outage(struct replicas* all, struct outage* outage, int64_t now) {
    struct devices devices;
    struct link* links[MAX_DEVICES];
    uint64_t mask = placement_mask(all->digest);
    lock_devices(all, &devices, links);
    read_outage(outage, &devices, mask, atomic_load(&all->retry_ns), atomic_load(&all->start_timeout_ns), now);
    unlock_devices(&devices, links);
}
