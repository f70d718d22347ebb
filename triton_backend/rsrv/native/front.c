#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "front.h"

// --- a device -------------------------------------------------------------------------------------------------------

static const uint8_t NEXT[STATE_COUNT][EVENT_COUNT] = TRANSITIONS;

static void set_text(char** text, const char* value) {
    free(*text);
    *text = value ? strdup(value) : NULL;
}

static bool move(struct device* device, enum model_event event) {
    uint8_t next = NEXT[device->state][event];
    if (!next) return false;
    device->state = (enum model_state)(next - 1);
    device->due_ns = NEVER;
    if (device->state != STATE_STARTING) {
        set_text(&device->step, NULL);
        device->ready_at_ns = 0;
    }
    return true;
}

// Begins a pause that is twice as long as the latest one, within limits.
static void pause_device(struct device* device, int64_t first_ns, int64_t most_ns, int64_t now) {
    device->pause_ns = 2 * device->pause_ns < first_ns ? first_ns : 2 * device->pause_ns;
    device->pause_ns = device->pause_ns > most_ns ? most_ns : device->pause_ns;
    device->due_ns = now + device->pause_ns;
}

void device_init(struct device* device) { *device = (struct device){.state = STATE_UNTRIED, .due_ns = NEVER}; }

void device_free(struct device* device) {
    free(device->reason);
    free(device->step);
}

bool device_start(struct device* device, bool asked) {
    if (device->state != STATE_UNTRIED && !(asked && device->state == STATE_COLD)) return false;
    if (!move(device, EVENT_CONNECT)) return false;
    device->asked = asked;
    return true;
}

bool device_step(struct device* device, const char* step, int64_t least_ns, int64_t now) {
    if (!move(device, EVENT_STEP)) return false;
    set_text(&device->step, step);
    device->stepped_ns = now;
    device->is_unreachable = false;
    if (least_ns) device->ready_at_ns = now + least_ns;
    return true;
}

bool device_register(struct device* device) {
    if (!move(device, EVENT_REGISTERED)) return false;
    device->started = true;
    device->asked = device->barred = device->is_unreachable = false;
    device->pause_ns = 0;
    set_text(&device->reason, NULL);
    return true;
}

bool device_cool(struct device* device) {
    if (!move(device, EVENT_COOL)) return false;
    device->started = device->asked = device->is_unreachable = false;
    device->pause_ns = 0;
    return true;
}

bool device_lose(struct device* device, bool sleeps, int64_t now) {
    if (sleeps ? !device_cool(device) : !move(device, EVENT_LOSE)) return false;
    device->lost_ns = now;
    return true;
}

bool device_fail(struct device* device, const char* reason, bool ended, int64_t now) {
    if (!move(device, EVENT_FAIL)) return false;
    device->is_unreachable = !ended;
    set_text(&device->reason, reason);
    if (device->started || device->asked || ended)
        pause_device(device, FIRST_BACKOFF_NS, MAX_BACKOFF_NS, now);
    else
        pause_device(device, FIRST_START_PAUSE_NS, MAX_START_PAUSE_NS, now);
    return true;
}

bool device_reject(struct device* device, const char* reason, const char* client, bool barred, int64_t now) {
    struct text text;
    if (!move(device, EVENT_REJECT)) return false;
    device->barred = barred;
    device->is_unreachable = false;
    text_clear(&text);
    if (device->started) {
        text_add(&text, "%s", *client ? client : NOT_AGAIN);
        pause_device(device, FIRST_BACKOFF_NS, MAX_REJECTED_BACKOFF_NS, now);
    } else {
        text_add(&text, NOT_STARTED, reason);
        pause_device(device, FIRST_START_PAUSE_NS, MAX_START_PAUSE_NS, now);
    }
    set_text(&device->reason, text.bytes);
    return true;
}

bool device_close(struct device* device) { return move(device, EVENT_CLOSE); }

bool device_retry(struct device* device, bool is_wanted, int64_t now) {
    if (now < device->due_ns) return false;
    if (device->state != STATE_REJECTED || !device->asked || device->started || is_wanted) return move(device, EVENT_CONNECT);
    move(device, EVENT_FORGIVE);
    return false;
}

// --- the devices of a model -----------------------------------------------------------------------------------------

// Returns true if the model should start elsewhere: this device rejects it, or has had no runtime for some time. After a
// runtime's death, the front gives up the device only after some seconds. It gives up the device at once if no runtime can
// be started.
static bool is_given_up(const struct device* device, int64_t now) {
    if (device->state == STATE_REJECTED) return true;
    if (device->state != STATE_CONNECTING && device->state != STATE_BACKING_OFF) return false;
    return device->started ? now - device->lost_ns >= ELSEWHERE_NS : device->is_unreachable;
}

int find_start(const struct devices* devices, uint64_t mask, int64_t now) {
    bool is_barred = false;
    uint64_t candidates = 0;
    // A model that has ended runtimes starts only on the devices of those runtimes.
    for (uint32_t i = 0; i < devices->count; i++) is_barred |= devices->all[i]->barred;
    for (uint32_t i = 0; i < devices->count; i++)
        if (!is_barred || devices->all[i]->barred) candidates |= UINT64_C(1) << devices->numbers[i];
    uint64_t named = candidates & mask & ~PINNED ? candidates & mask & ~PINNED : candidates;
    for (int part = 0; part < 2; part++)
        for (uint32_t i = 0; i < devices->count; i++) {
            uint64_t bit = UINT64_C(1) << devices->numbers[i];
            if (!((part ? candidates & ~named : named) & bit) || is_given_up(devices->all[i], now)) continue;
            return device_is_startable(devices->all[i]) ? (int)i : -1;
        }
    return -1;
}

// Returns the reason for clients if no device will serve the model soon, and otherwise NULL.
static const char* find_reason(const struct devices* devices, uint64_t mask, int64_t now) {
    const char* reason = NULL;
    for (uint32_t i = 0; i < devices->count; i++) {
        const struct device* device = devices->all[i];
        if (device_is_attempting(device)) return NULL;
        if (device->state == STATE_BACKING_OFF && (device->started || device->asked)) return NULL;
        if (device->state == STATE_REJECTED && !reason) reason = device->reason;
    }
    return find_start(devices, mask, now) < 0 ? reason : NULL;
}

void read_outage(struct outage* outage, const struct devices* devices, uint64_t mask, int64_t retry_ns,
                 int64_t start_timeout_ns, int64_t now) {
    bool is_built = false;
    outage->is_down = true;
    outage->was_ready = false;
    outage->retry_ns = retry_ns;
    // If no runtime's limit is known, use the general limit. A runtime may end before its announcement of the limit is read.
    outage->limit_ns = start_timeout_ns ? start_timeout_ns : retry_ns;
    outage->stepped_ns = outage->ready_at_ns = 0;
    *outage->step = 0;
    text_clear(&outage->why);
    for (uint32_t i = 0; i < devices->count; i++) {
        const struct device* device = devices->all[i];
        outage->is_down &= device->state != STATE_READY;
        outage->was_ready |= device->started;
        if (device->stepped_ns > outage->stepped_ns) outage->stepped_ns = device->stepped_ns;
        if (device->state != STATE_STARTING) continue;
        if (!is_built && device->step) snprintf(outage->step, sizeof outage->step, "%s", device->step);
        is_built = true;
        if (device->ready_at_ns && (!outage->ready_at_ns || device->ready_at_ns < outage->ready_at_ns))
            outage->ready_at_ns = device->ready_at_ns;
    }
    outage->is_starting = outage->is_down && (is_built || !outage->was_ready);
    const char* reason = outage->is_down ? find_reason(devices, mask, now) : NULL;
    if (reason) text_add(&outage->why, "%s", reason);
}

// --- a request without a runtime ------------------------------------------------------------------------------------

static int64_t wait_until_ns(int64_t since_ns, const struct outage* outage) {
    int64_t most_ns;
    if (!outage->is_starting) return since_ns + outage->retry_ns;
    if (__builtin_mul_overflow(outage->limit_ns, MAX_STEPS, &most_ns) ||
        __builtin_add_overflow(since_ns, most_ns, &most_ns))
        most_ns = INT64_MAX;
    int64_t step_ns = (outage->stepped_ns > since_ns ? outage->stepped_ns : since_ns) + outage->limit_ns;
    return step_ns < most_ns ? step_ns : most_ns;
}

static double seconds(int64_t ns) { return (double)ns / NS_PER_S; }

static void add_still_starting(struct text* text, const struct pending* pending, const struct outage* outage, int64_t now) {
    char step[sizeof outage->step + sizeof STEP] = "", left[64] = "";
    double limit_s = seconds(outage->limit_ns);
    if (*outage->step) snprintf(step, sizeof step, STEP, outage->step);
    if (now < outage->ready_at_ns) snprintf(left, sizeof left, TIME_LEFT, seconds(outage->ready_at_ns - now));
    text_add(text, STILL_STARTING, step, left, seconds(now - pending->waiting_since_ns), limit_s, MAX_STEPS * limit_s);
}

bool refuse_waiting(
    struct pending* pending, const struct outage* outage, int64_t now, enum status* status, struct text* text) {
    text_clear(text);
    *status = INTERNAL;
    if (pending->deaths >= MAX_DEATHS) {
        text_add(text, SUSPECT);
        return true;
    }
    if (!pending->waiting_since_ns) pending->waiting_since_ns = now;
    // During a start, the limit of the latest step replaces the limits of earlier steps, which may be longer. If the runtime
    // dies during the start, the later of two times applies: that limit, or `retry_ns` after the request first waited.
    int64_t until_ns = wait_until_ns(pending->waiting_since_ns, outage);
    if (outage->is_starting || pending->retry_until_ns < until_ns) pending->retry_until_ns = until_ns;
    // If a runtime serves the model, a suspect does not time out, because it waits only for the answers of other suspects.
    bool is_over = now >= pending->retry_until_ns && (outage->is_down || !pending->deaths);
    if (outage->is_starting && pending->deadline_ns && pending->deadline_ns <= now) {
        *status = DEADLINE;
        add_still_starting(text, pending, outage, now);
    } else if (outage->is_down && now < pending->deadline_ns && pending->deadline_ns < outage->ready_at_ns) {
        *status = DEADLINE;
        text_add(text, TOO_SOON, seconds(outage->ready_at_ns - now));
    } else if (is_over && outage->is_starting) {
        *status = STARTING;
        add_still_starting(text, pending, outage, now);
    } else if (is_over) {
        *status = RUNTIME_DOWN;
        text_add(text, DOWN);
    } else if (outage->is_down && outage->why.length) {
        *status = RUNTIME_DOWN;
        *text = outage->why;
    } else
        return false;
    return true;
}

bool refuse_arrival(struct pending* pending, const struct outage* outage, uint32_t count, uint64_t bytes, int64_t now,
                    enum status* status, struct text* text) {
    // Refuse the sub-call, because only the dead runtime knew its run. The meta model repeats the run in the next runtime.
    bool is_lost = pending->run && outage->was_ready;
    if (!is_lost) {
        if (refuse_waiting(pending, outage, now, status, text)) return true;
        if (count < MAX_REQUESTS && bytes + pending->waiting_bytes <= MAX_REQUEST_BYTES) return false;
    }
    text_clear(text);
    *status = !is_lost && outage->is_starting ? QUEUE_FULL : RUNTIME_DOWN;
    text_add(text, "%s", *status == QUEUE_FULL ? CROWDED : DOWN);
    return true;
}

// --- parts of a request ---------------------------------------------------------------------------------------------

bool parts_take(struct parts* parts, uint32_t* first, uint32_t* rows) {
    if (parts->ended || parts->next == parts->rows || parts->submitted == MAX_PARTS) return false;
    uint32_t left = parts->rows - parts->next;
    *first = parts->next;
    *rows = left < parts->largest ? left : parts->largest;
    parts->next += *rows;
    parts->submitted++;
    return true;
}

bool parts_end(struct parts* parts, bool answered) {
    parts->submitted--;
    if (parts->ended || (answered && (parts->submitted || parts->next < parts->rows))) return false;
    return parts->ended = true;
}

// --- inputs that end runtimes ---------------------------------------------------------------------------------------

static void remove_killer(struct killers* all, uint32_t at) {
    memmove(all->inputs + at, all->inputs + at + 1, (--all->count - at) * sizeof *all->inputs);
}

void killers_record(struct killers* all, const uint8_t digest[DIGEST_BYTES], uint32_t deaths, int64_t now) {
    for (uint32_t i = all->count; i-- > 0;)
        if (now >= all->inputs[i].until_ns || memcmp(all->inputs[i].digest, digest, DIGEST_BYTES) == 0) remove_killer(all, i);
    if (!deaths) return;
    if (all->count == MAX_DIGESTS) {
        uint32_t harmless = 0;
        while (harmless < MAX_DIGESTS && all->inputs[harmless].deaths >= MAX_DEATHS) harmless++;
        remove_killer(all, harmless < MAX_DIGESTS ? harmless : 0);
    }
    struct killer* added = &all->inputs[all->count++];
    *added = (struct killer){.deaths = deaths, .until_ns = now + DIGEST_COUNTS_NS};
    memcpy(added->digest, digest, DIGEST_BYTES);
}

uint32_t killers_deaths(const struct killers* all, const uint8_t digest[DIGEST_BYTES], int64_t now) {
    for (uint32_t i = 0; i < all->count; i++)
        if (memcmp(all->inputs[i].digest, digest, DIGEST_BYTES) == 0)
            return now < all->inputs[i].until_ns ? all->inputs[i].deaths : 0;
    return 0;
}
