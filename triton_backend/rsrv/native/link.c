#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "link.h"

#define CHECK_MS ((int)(CHECK_PERIOD_NS / NS_PER_MS))
#define EVENTS 64
// Constants of prctl in Linux 6.16 and later.
enum { FUTEX_HASH = 78, SET_SLOTS = 1, FUTEX_SLOTS = 4096 };

// All models in this process share the reader, its epoll and its eventfd.
static pthread_once_t begun = PTHREAD_ONCE_INIT;
static int epoll_fd = -1, wake_fd = -1;
static _Atomic(struct link*) newly_watched;  // links to watch from now on; the reader takes the whole list at once
static atomic_bool asleep;

void link_hold(struct link* link) { atomic_fetch_add(&link->users, 1); }

void link_drop(struct link* link) {
    if (atomic_fetch_sub(&link->users, 1) != 1) return;
    interface_drop(link->interface);
    if (link->arena) arena_close(link->arena);
    board_unmap(link->board);
    free(link->buckets);
    device_free(&link->device);
    free(link->failure);
    trace_forget(link, UINT32_MAX);
    pthread_mutex_destroy(&link->lock);
    pthread_cond_destroy(&link->changed);
    free(link->model);
    free(link->registration);
    free(link->settings);
    free(link);
}

void link_watch(struct link* link) {
    uint64_t increment = 1;
    if (link->watched) return;
    link->watched = true;
    link_hold(link);
    link->next_watched = atomic_load(&newly_watched);
    while (!atomic_compare_exchange_weak(&newly_watched, &link->next_watched, link)) continue;
    if (atomic_exchange(&asleep, false) && write(wake_fd, &increment, sizeof increment) < 0) return;
}

// --- the runtime comes and goes -------------------------------------------------------------------------------------

// Records that an attempt has failed. The caller holds the lock.
static void fail(struct link* link, const char* why) {
    free(link->failure);
    link->failure = strdup(why);
    link->due_ns = link->device.due_ns;
    pthread_cond_broadcast(&link->changed);
}

// Closes the socket, and frees all that belongs to the connection. No request may be in flight. The caller holds the lock.
static void detach(struct link* link) {
    // Remove the socket from epoll first. A child that was just forked has a copy of the descriptor, so close() alone would
    // not end the socket's events.
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, link->fd, NULL);
    close(link->fd);
    link->fd = -1;
    arena_close(link->arena);
    link->arena = NULL;
    board_unmap(link->board);
    link->board = NULL;
    free(link->buckets);
    link->buckets = NULL;
}

// Disconnects from a runtime that is gone, or that has rejected the model. Called on the reader's thread. This may free the link:
// epoll_wait returns one event per socket, so no later event of the same call refers to the link.
static void lose(struct link* link, const char* why, const char* client) {
    int64_t now = now_ns();
    pthread_mutex_lock(&link->lock);
    struct device* device = &link->device;
    bool closed = device->state == STATE_CLOSED, was_ready = device->state == STATE_READY;
    bool sleeps = was_ready && board_sleeps(link->board);
    bool blames = link->first && board_blames(link->board, link->interface->key);
    struct pending* list = waiting_take_all(link);
    detach(link);
    if (was_ready)
        device_lose(device, sleeps, now);
    else if (client)
        device_reject(device, why, client, *client, now);
    else
        device_fail(device, why, true, now);
    if (!closed) fail(link, why);
    if (was_ready) link->due_ns = now;
    if (was_ready) atomic_fetch_and(&link->owner->ready, ~(UINT64_C(1) << link->number));
    bool mends = !closed && !link->loading && !sleeps, logs = mends;
    pthread_mutex_unlock(&link->lock);
    resubmission_wake();
    if (logs)
        log_line(LOG_ERROR, link->model, client ? REJECTS : LOST, why);
    for (struct pending *pending = list, *next; pending; pending = next) {
        next = pending->next;
        pending->next = NULL;
        if (pending->request) {
            if (blames && request_launched(pending)) resubmission_record(link, pending, ++pending->deaths);
            resubmission_add(link, pending);
        } else
            waiting_finish(link, pending);
    }
    if (mends) mender_add(link);
    link_drop(link);  // drop the socket's reference
}

static void add_demand(struct text* text, struct demand demand) {
    text_add(text, "\"asked\":%s", demand.waits ? "true" : "false");
    if (demand.waits && demand.first_deadline_ns) text_add(text, ",\"deadline_ns\":%" PRId64, demand.first_deadline_ns);
    text_add(text, "}");
}

// Connects to the runtime and registers the model. The reader gets the answer. False: that failed, for the reason `why`.
static bool attach(struct link* link, struct text* why, bool* final) {
    struct greeted greeted;
    char base[PATH_BYTES], own[PATH_BYTES];
    if (!runtime_open(link->settings, link->number, &greeted, why, final)) return false;
    runtime_directory(link->number, base, own);
    int fd = greeted.fd;
    const _Atomic uint64_t* board = board_map(greeted.board, own);
    struct arena* arena = arena_new();
    struct pending** buckets = calloc(BUCKETS, sizeof *buckets);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = link};
    struct text text;
    text_clear(&text);
    pthread_mutex_lock(&link->lock);
    struct device* device = &link->device;
    // Report the waiting requests only to a device where the model was ready before, or where it is asked for. Otherwise, a
    // device that was never tried would start the model for them.
    struct demand demand = device->started || device->asked ? link->demand : (struct demand){0};
    demand.waits |= device->asked;
    text_add(&text, "%s%s,", link->registration, device->started ? ",\"started\":true" : "");
    add_demand(&text, demand);
    bool goes_on = arena && buckets && board && device->state == STATE_CONNECTING &&
                   frame_send_json(fd, FRAME_REGISTER, text.bytes) > 0;
    if (goes_on) {
        link->fd = fd;
        link->arena = arena;
        link->buckets = buckets;
        link->board = board;
        link->word_at_send = UINT64_MAX;
        link->devices = greeted.devices;
        link->stuck = false;
        link->told = demand;
        link_hold(link);
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
            link->fd = -1;
            link->arena = NULL;
            link->buckets = NULL;
            link->board = NULL;
            atomic_fetch_sub(&link->users, 1);
            goes_on = false;
        }
    }
    pthread_mutex_unlock(&link->lock);
    if (goes_on) return true;
    close(fd);
    if (arena) arena_close(arena);
    free(buckets);
    board_unmap(board);
    text_add(why, board ? "the model cannot be registered" : NO_BOARD);
    return false;
}

bool link_reconnect(struct link* link, atomic_bool* fails) {
    struct text why;
    bool final;
    text_clear(&why);
    pthread_mutex_lock(&link->lock);
    struct device* device = &link->device;
    if (device->state == STATE_BACKING_OFF || device->state == STATE_REJECTED) {
        uint64_t named = placement_mask(link->owner->digest) & ~PINNED & UINT64_C(1) << link->number;
        bool is_wanted = named && atomic_load(&link->owner->ready);
        device_retry(device, is_wanted, link->due_ns);
    }
    bool connects = device->state == STATE_CONNECTING;
    pthread_mutex_unlock(&link->lock);
    if (!connects) return true;
    bool attached = attach(link, &why, &final);
    atomic_store(fails, !attached);  // set this before link_await wakes up
    if (attached) return true;
    pthread_mutex_lock(&link->lock);
    bool is_due = device_fail(&link->device, why.bytes, !final, now_ns());
    if (is_due) fail(link, why.bytes);
    pthread_mutex_unlock(&link->lock);
    if (is_due) log_line(LOG_ERROR, link->model, NOT_REACHED, why.bytes);
    return !is_due;
}

// Handles REGISTERED, which has the description of the model in a descriptor.
static bool take_registered(struct link* link, const struct frame* frame, const char** why) {
    struct stat found;
    *why = "the model's description cannot be read";
    if (frame->fd < 0 || fstat(frame->fd, &found) != 0 || found.st_size <= 0 || found.st_size > 1 << 24) return false;
    size_t length = (size_t)found.st_size;
    uint8_t* bytes = malloc(length);
    // Read a copy, because the runtime could change the memory that it shares.
    struct interface* interface =
        bytes && pread(frame->fd, bytes, length, 0) == (ssize_t)length ? interface_read(bytes, length, why) : NULL;
    free(bytes);
    if (!interface) return false;
    pthread_mutex_lock(&link->lock);
    bool again = link->device.started, ready = device_register(&link->device);
    if (ready) {
        interface_drop(link->interface);
        link->interface = interface;
        if (link->measured) link_watch(link);
        link->execution_ns = interface->cost_ns;
        atomic_store(&link->owner->retry_ns, interface->retry_ns);
        atomic_fetch_or(&link->owner->ready, UINT64_C(1) << link->number);
        pthread_cond_broadcast(&link->changed);
    }
    pthread_mutex_unlock(&link->lock);
    if (!ready) interface_drop(interface);
    resubmission_wake();
    if (ready && again) log_line(LOG_INFO, link->model, RECONNECTED);
    return ready;
}

static void take_rejected(struct link* link, const struct frame* frame) {
    struct text reason, client;
    size_t length = frame->count < frame->length ? frame->count : frame->length;
    text_clear(&reason);
    text_clear(&client);
    text_add_bytes(&reason, (const char*)frame->body, length);
    text_add_bytes(&client, (const char*)frame->body + length, frame->length - length);
    lose(link, reason.bytes, client.bytes);
}

// Handles COLD: the runtime can release the model until a request needs it. If no request is in flight, the link disconnects.
// A request that another thread is about to send then waits and starts the model again. If requests are in flight, the link
// stays connected. Returns false if the link has no socket any more.
static bool take_cold(struct link* link, int64_t start_timeout_ns) {
    pthread_mutex_lock(&link->lock);
    // A closed link may have frames left to read, but its owner is freed.
    if (link->device.state != STATE_CLOSED) atomic_store(&link->owner->start_timeout_ns, start_timeout_ns);
    bool was_ready = link->device.state == STATE_READY, leaves = !link->first && device_cool(&link->device);
    if (leaves) {
        if (was_ready && link->measured) waiting_report(link, now_ns());
        trace_forget(link, UINT32_MAX);
        detach(link);
        interface_drop(link->interface);
        link->interface = NULL;
        atomic_fetch_and(&link->owner->ready, ~(UINT64_C(1) << link->number));
        pthread_cond_broadcast(&link->changed);
    }
    pthread_mutex_unlock(&link->lock);
    if (leaves) link_drop(link);  // drop the socket's reference
    return !leaves;
}

static void take_starting(struct link* link, int64_t least_ns, int64_t limit_ns, const char* step) {
    pthread_mutex_lock(&link->lock);
    if (device_step(&link->device, step, least_ns, now_ns())) atomic_store(&link->owner->start_timeout_ns, limit_ns);
    pthread_mutex_unlock(&link->lock);
    resubmission_wake();
}

static void take_done(struct link* link, const struct frame* frame) {
    pthread_mutex_lock(&link->lock);
    struct pending* list = waiting_take_done(link, frame);
    pthread_mutex_unlock(&link->lock);
    for (struct pending* pending = list; pending; pending = pending->next)
        if (pending->deaths && pending->request && pending->status == OK) resubmission_record(link, pending, 0);
    waiting_finish(link, list);
}

// Reads one frame. Returns false if the link has no socket any more.
static bool take_frame(struct link* link, uint8_t* buffer) {
    struct frame frame;
    const char* why = "the runtime's answer breaks the protocol";
    pthread_mutex_lock(&link->lock);
    int fd = link->fd;
    bool ready = link->device.state == STATE_READY;
    pthread_mutex_unlock(&link->lock);
    int received = frame_receive(fd, buffer, &frame, &why);
    if (received == 0) return true;
    if (received < 0) {
        lose(link, why, NULL);
        return false;
    }
    bool right = true;
    int64_t ns, limit_ns;
    struct text step;
    why = "the runtime's answer breaks the protocol";
    if (frame.kind == FRAME_DONE && ready && completions_check(&frame))
        take_done(link, &frame);
    else if (frame.kind == FRAME_REGISTERED && !ready)
        right = take_registered(link, &frame, &why);
    else if (frame.kind == FRAME_REJECTED && !ready) {
        if (frame.fd >= 0) close(frame.fd);
        take_rejected(link, &frame);
        return false;
    } else if (frame.kind == FRAME_COLD && nanoseconds_read(&frame, &ns)) {
        if (frame.fd >= 0) close(frame.fd);
        return take_cold(link, ns);
    } else if (frame.kind == FRAME_STARTING && !ready && starting_read(&frame, &ns, &limit_ns, &step))
        take_starting(link, ns, limit_ns, step.bytes);
    else
        right = frame.kind == FRAME_REPORTED && ready;
    if (frame.fd >= 0) close(frame.fd);
    // Count the model as rejected if its description is wrong, because the next attempt would get the same description.
    if (!right) lose(link, why, frame.kind == FRAME_REGISTERED && !ready ? "" : NULL);
    return right;
}

// --- the reader -----------------------------------------------------------------------------------------------------

// Answers late requests, cancels requests, and reports measurements that are due, for each link in the list. Removes the links
// that need no further check.
static void check_all(struct link** at, int64_t now) {
    for (struct link* link; (link = *at);) {
        // The lock may be held for long: execute() holds it while a runtime does not read. Check this link the next time.
        if (pthread_mutex_trylock(&link->lock) != 0) {
            at = &link->next_watched;
            continue;
        }
        struct pending* late = link->device.state == STATE_READY ? waiting_check(link, now) : NULL;
        if (link->device.state == STATE_READY && link->measured && now - link->reported_ns >= REPORT_PERIOD_NS)
            waiting_report(link, now);
        // Do not watch a link for measurements while it has no runtime. The measurements wait for the next runtime.
        link->watched = link->first || (link->measured && link->device.state == STATE_READY);
        bool watched = link->watched;
        if (watched)
            at = &link->next_watched;
        else
            *at = link->next_watched;
        pthread_mutex_unlock(&link->lock);
        if (late) waiting_finish(link, late);
        if (!watched) link_drop(link);
    }
}

static void* read_all(void* nothing) {
    struct epoll_event events[EVENTS];
    uint8_t* buffer = malloc(MAX_FRAME);
    struct link* watched = NULL;
    int64_t checked = 0;
    (void)nothing;
    while (buffer) {
        // Set `asleep` before checking the list, so that a link that is added after the check wakes the thread.
        atomic_store(&asleep, true);
        bool idle = !watched && !atomic_load(&newly_watched);
        // If links are watched, the thread wakes up regularly, so that submissions need not wake it.
        if (!idle) atomic_store(&asleep, false);
        int count = epoll_wait(epoll_fd, events, EVENTS, idle ? -1 : CHECK_MS);
        atomic_store(&asleep, false);
        for (int i = 0; i < count; i++) {
            uint64_t drained;
            if (events[i].data.ptr)
                take_frame(events[i].data.ptr, buffer);
            else if (read(wake_fd, &drained, sizeof drained) < 0)
                continue;
        }
        int64_t now = now_ns();
        if (idle || now - checked < CHECK_PERIOD_NS) continue;
        checked = now;
        struct link** end = &watched;
        while (*end) end = &(*end)->next_watched;
        *end = atomic_exchange(&newly_watched, NULL);
        check_all(&watched, now);
    }
    return NULL;
}

static void begin(void) {
    struct epoll_event event = {.events = EPOLLIN};
    // Triton has a sleeping thread for each model. New kernels store the sleeping threads of a process in few slots (16 with
    // two CPUs), and each wake-up searches one slot: with 1,000 models, a request took 40 us more. So ask for more slots,
    // which older kernels refuse.
    prctl(FUTEX_HASH, SET_SLOTS, (unsigned long)FUTEX_SLOTS, 0ul, 0ul);
    wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int made = epoll_create1(EPOLL_CLOEXEC);
    if (wake_fd < 0 || made < 0 || epoll_ctl(made, EPOLL_CTL_ADD, wake_fd, &event) != 0) return;
    epoll_fd = made;
    // Begin the reader last, because it would loop without a pause if there were no epoll.
    if (!resubmission_begin() || !begin_thread(read_all, NULL)) epoll_fd = -1;
}

// --- a model is loaded and unloaded ---------------------------------------------------------------------------------

// Connects, and waits until the model is ready or cold, or until the load has failed. If a runtime ends during the load, perhaps
// because of another model, the next runtime is tried. A runtime rejects a model that has crashed runtimes repeatedly.
bool link_load(struct link* link, struct text* why, bool* barred) {
    link->loading = true;
    for (int attempt = 1;; attempt++) {
        bool final = false;
        text_clear(why);
        pthread_mutex_lock(&link->lock);
        if (!device_start(&link->device, false)) device_retry(&link->device, false, link->device.due_ns);
        pthread_mutex_unlock(&link->lock);
        bool attached = attach(link, why, &final);
        pthread_mutex_lock(&link->lock);
        if (!attached && device_fail(&link->device, why->bytes, !final, now_ns())) fail(link, why->bytes);
        // If the runtime dies just after the model is ready, the device's state is STATE_CONNECTING, but no thread connects. Do
        // not wait in this case: the link has no socket.
        while (link->fd >= 0 && device_is_attempting(&link->device)) pthread_cond_wait(&link->changed, &link->lock);
        enum model_state state = link->device.state;
        bool ready = state == STATE_READY || state == STATE_COLD;
        *barred = state == STATE_REJECTED && link->device.barred;
        if (ready) link->loading = false;
        if (attached && !ready) text_add(why, "%s", link->failure ? link->failure : DOWN);
        int64_t pause = link->device.pause_ns;
        pthread_mutex_unlock(&link->lock);
        if (ready || state == STATE_REJECTED || final || attempt == FIRST_ATTEMPTS) return ready;
        log_line(LOG_ERROR, link->model, ENDED_EARLY, why->bytes);
        usleep((useconds_t)(pause / 1000));
    }
}

void link_connect(struct link* link, bool asked) {
    int64_t now = now_ns();
    pthread_mutex_lock(&link->lock);
    bool connects = device_start(&link->device, asked);
    if (connects) link->due_ns = now;
    pthread_mutex_unlock(&link->lock);
    if (connects) mender_add(link);
}

bool link_is_cold(struct link* link) {
    pthread_mutex_lock(&link->lock);
    bool is_cold = link->device.state == STATE_COLD;
    pthread_mutex_unlock(&link->lock);
    return is_cold;
}

void link_tell(struct link* link, struct demand demand) {
    pthread_mutex_lock(&link->lock);
    link->demand = demand;
    bool differs = demand.waits != link->told.waits || demand.first_deadline_ns != link->told.first_deadline_ns;
    if (differs && link->fd >= 0 && device_is_attempting(&link->device)) {
        struct text text;
        text_clear(&text);
        text_add(&text, "{");
        add_demand(&text, demand);
        if (frame_send_json(link->fd, FRAME_DEMAND, text.bytes) > 0) link->told = demand;
    }
    pthread_mutex_unlock(&link->lock);
}

void link_await(struct link* link, int64_t until_ns) {
    struct timespec until = {until_ns / NS_PER_S, until_ns % NS_PER_S};
    int waited = 0;
    pthread_mutex_lock(&link->lock);
    // Do not wait if the latest attempt to reach the device's runtime, for whichever model, failed.
    while (device_is_attempting(&link->device) && !mender_fails(link->number) && waited == 0)
        waited = pthread_cond_timedwait(&link->changed, &link->lock, &until);
    pthread_mutex_unlock(&link->lock);
}

struct link* link_new(
    struct replicas* owner, const char* model, const char* bundle, const char* settings, uint32_t device) {
    struct text registration;
    pthread_once(&begun, begin);
    struct link* link = epoll_fd < 0 || !mender_begin(device) ? NULL : calloc(1, sizeof *link);
    if (!link) return NULL;
    text_clear(&registration);
    text_add(&registration, "{\"model\":");
    text_add_json(&registration, model);
    text_add(&registration, ",\"bundle\":");
    text_add_json(&registration, bundle);
    text_add(&registration, ",\"flat\":true");
    atomic_init(&link->users, 1);
    pthread_mutex_init(&link->lock, NULL);
    begin_condition(&link->changed);
    link->owner = owner;
    link->number = device;
    device_init(&link->device);
    link->model = strdup(model);
    link->registration = strdup(registration.bytes);
    link->settings = strdup(settings);
    link->fd = -1;
    if (link->model && link->registration && link->settings) return link;
    link_drop(link);
    return NULL;
}

uint32_t link_devices(struct link* link) {
    pthread_mutex_lock(&link->lock);
    uint32_t devices = link->devices;
    pthread_mutex_unlock(&link->lock);
    return devices;
}

// The estimate for anything overdue is its delay so far. If the end of the runtime's work, the runtime's next round, or its
// notice of a request is overdue by s seconds, the runtime is expected to need s more seconds.
int64_t link_answers_in_ns(struct link* link) {
    const uint64_t most = 3600 * (uint64_t)NS_PER_S;  // do not trust the board's numbers, which the runtime writes
    uint64_t now = (uint64_t)now_ns(), expected = UINT64_MAX;
    pthread_mutex_lock(&link->lock);
    struct pollfd writable = {link->fd, POLLOUT, 0};
    if (link->device.state == STATE_READY && (!link->stuck || poll(&writable, 1, 0) > 0)) {
        uint64_t word = atomic_load(&link->board[0]), passed = now > word ? now - word : 0, free = 0;
        if (word & 1) free = passed ? passed : word - now;
        if (!(word & 1) && passed > SILENT_NS) free = passed - SILENT_NS;
        uint64_t unnoticed = word == link->word_at_send ? now - (uint64_t)link->unnoticed_ns : 0;
        uint64_t load = link->interface->slot ? atomic_load(&link->board[link->interface->slot]) : 0;
        expected = unnoticed > free ? unnoticed : free;
        expected = (expected > most ? most : expected) + (load > most ? most : load) +
                   (link->execution_ns > most ? most : link->execution_ns);
    }
    pthread_mutex_unlock(&link->lock);
    return expected == UINT64_MAX ? INT64_MAX : (int64_t)expected;
}

void link_close(struct link* link) {
    pthread_mutex_lock(&link->lock);
    if (link->device.state == STATE_READY && link->measured) waiting_report(link, now_ns());
    device_close(&link->device);
    if (link->fd >= 0) shutdown(link->fd, SHUT_RDWR);  // the reader then closes the socket
    pthread_mutex_unlock(&link->lock);
    link_drop(link);
}

