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

// Nanoseconds between attempts to reach a runtime, doubling; the last limit is for a runtime that rejects the model,
// because it reads the whole bundle each time.
#define FIRST_BACKOFF_NS (50 * 1000000ll)
#define FIRST_START_BACKOFF_NS NS_PER_S  // of a start that failed
#define MAX_BACKOFF_NS (5 * NS_PER_S)
#define MAX_REJECTED_BACKOFF_NS (60 * NS_PER_S)
#define FIRST_ATTEMPTS 10
// Between two looks at waiting requests: for clients that are gone, and for deadlines that the runtime did not enforce.
#define CHECK_MS 50
#define REPORT_NS NS_PER_S
#define EVENTS 64
// Of prctl: Linux 6.16 and later.
enum { FUTEX_HASH = 78, SET_SLOTS = 1, FUTEX_SLOTS = 4096 };
// An idle runtime whose server has several devices has a round each 0.1 s; on a busy machine it waits for a core.
#define SILENT_NS (NS_PER_S / 2)

const char LINK_DOWN[] = "the model runtime is not reachable; it is being restarted, try again";
static const char NOT_AGAIN[] = "the model runtime does not load this model again; the server's log says why";

// Of all models in this process.
static pthread_once_t begun = PTHREAD_ONCE_INIT;
static int epoll_fd = -1, wake_fd = -1;
static _Atomic(struct link*) newly_watched;  // the reader takes them all at once
static atomic_bool asleep;

void link_hold(struct link* link) { atomic_fetch_add(&link->users, 1); }

void link_drop(struct link* link) {
    if (atomic_fetch_sub(&link->users, 1) != 1) return;
    interface_drop(link->interface);
    if (link->arena) arena_close(link->arena);
    board_unmap(link->board);
    free(link->buckets);
    free(link->down);
    free(link->reason);
    trace_forget(link, UINT32_MAX);
    pthread_mutex_destroy(&link->lock);
    pthread_cond_destroy(&link->changed);
    free(link->model);
    free(link->registration);
    free(link->settings);
    free(link);
}

const char* link_model(const struct link* link) { return link->model; }

void link_watch(struct link* link) {
    uint64_t one = 1;
    if (link->watched) return;
    link->watched = true;
    link_hold(link);
    link->next_watched = atomic_load(&newly_watched);
    while (!atomic_compare_exchange_weak(&newly_watched, &link->next_watched, link)) continue;
    if (atomic_exchange(&asleep, false) && write(wake_fd, &one, sizeof one) < 0) return;
}

// --- the runtime comes and goes -------------------------------------------------------------------------------------

static void set_backoff(struct link* link, int64_t least, int64_t most) {
    link->backoff_ns = link->backoff_ns ? 2 * link->backoff_ns : least;
    link->backoff_ns = link->backoff_ns < least ? least : link->backoff_ns;
    link->backoff_ns = link->backoff_ns > most ? most : link->backoff_ns;
    link->due_ns = now_ns() + link->backoff_ns;
    link->attempted = true;
    pthread_cond_broadcast(&link->changed);
}

static void set_text(char** text, const char* value) {
    free(*text);
    *text = value ? strdup(value) : NULL;
}

// Closes the socket, and gives back all that a connection needs; no request is in flight. Under the lock.
static void detach(struct link* link) {
    // If a child has just been forked, it has the socket, too, and closing it here would not end its events.
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

// Leaves a runtime that is gone, or that has rejected the model. On the reader, which has no other event of the socket.
static void lose(struct link* link, const char* why, const char* client) {
    struct text down;
    pthread_mutex_lock(&link->lock);
    bool sleeps = !client && link->started && board_sleeps(link->board);
    bool blames = link->first && board_blames(link->board, link->interface->key);
    struct pending* list = waiting_take_all(link);
    detach(link);
    bool closed = link->state == CLOSED, mends = !closed && !link->loading;
    if (!closed) {
        // Nothing but a request starts the model again: its start has failed, or its device sleeps.
        bool is_cold = sleeps || (client && !link->started && atomic_load(&link->owner->start_timeout_ns));
        link->state = is_cold ? IS_COLD : MISSING;
        mends = mends && !is_cold;
        link->rejected = client != NULL;
        link->dangerous = client && *client;
        set_text(&link->reason, why);
        text_clear(&down);
        text_add(&down, "the model could not be started: %s", why);
        set_text(&link->down, client == NULL ? NULL : is_cold ? down.bytes : *client ? client : NOT_AGAIN);
        set_backoff(link, is_cold ? FIRST_START_BACKOFF_NS : FIRST_BACKOFF_NS,
                    client ? MAX_REJECTED_BACKOFF_NS : MAX_BACKOFF_NS);
        if (sleeps) {
            link->started = link->asked = false;
            link->backoff_ns = link->due_ns = 0;
        }
    }
    bool logs = !closed && !link->loading && !sleeps;
    pthread_mutex_unlock(&link->lock);
    resubmission_wake();
    if (logs)
        log_line(LOG_ERROR, link->model, client ? "the runtime rejects the model: %s" : "lost the runtime: %s", why);
    for (struct pending *one = list, *next; one; one = next) {
        next = one->next;
        one->next = NULL;
        if (one->request) {
            one->deaths += blames && request_launched(one);
            resubmission_add(link, one);
        } else
            waiting_finish(link, one);
    }
    if (mends) mender_add(link);
    link_drop(link);  // the socket's
}

static void add_demand(struct text* text, bool asked, int64_t first_deadline_ns) {
    text_add(text, "\"asked\":%s", asked ? "true" : "false");
    if (asked && first_deadline_ns) text_add(text, ",\"deadline_ns\":%" PRId64, first_deadline_ns);
    text_add(text, "}");
}

// Connects to the runtime and asks for the model; the reader gets the answer. False: no runtime, and `why`.
static bool attach(struct link* link, struct text* why, bool* final) {
    struct greeted greeted;
    char base[PATH_BYTES], own[PATH_BYTES];
    if (!runtime_open(link->settings, link->device, &greeted, why, final)) return false;
    runtime_directory(link->device, base, own);
    int fd = greeted.fd;
    const _Atomic uint64_t* board = board_map(greeted.board, own);
    struct arena* arena = arena_new();
    struct pending** buckets = calloc(BUCKETS, sizeof *buckets);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = link};
    struct text text;
    text_clear(&text);
    pthread_mutex_lock(&link->lock);
    text_add(&text, "%s%s,", link->registration, link->started ? ",\"started\":true" : "");
    add_demand(&text, link->asked, link->first_deadline_ns);
    bool goes_on = arena && buckets && board && link->state == MISSING && frame_send_json(fd, REGISTER, text.bytes) > 0;
    if (goes_on) {
        link->fd = fd;
        link->arena = arena;
        link->buckets = buckets;
        link->board = board;
        link->word_at_send = UINT64_MAX;
        link->devices = greeted.devices;
        link->stuck = false;
        link->ready_at_ns = 0;
        link->state = REGISTERING;
        link_hold(link);
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
            link->fd = -1;
            link->arena = NULL;
            link->buckets = NULL;
            link->board = NULL;
            link->state = MISSING;
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
    text_add(why, board ? "the model cannot be registered" : "the runtime's greeting comes without its board");
    return false;
}

bool link_reconnect(struct link* link, atomic_bool* fails) {
    struct text why;
    bool final;
    text_clear(&why);
    pthread_mutex_lock(&link->lock);
    bool closed = link->state == CLOSED;
    pthread_mutex_unlock(&link->lock);
    if (closed) return true;
    bool attached = attach(link, &why, &final);
    atomic_store(fails, !attached);  // before link_await is woken
    if (attached) return true;
    pthread_mutex_lock(&link->lock);
    set_backoff(link, FIRST_BACKOFF_NS, MAX_BACKOFF_NS);
    set_text(&link->down, NULL);
    pthread_mutex_unlock(&link->lock);
    log_line(LOG_ERROR, link->model, "no runtime yet: %s", why.bytes);
    return false;
}

// Takes REGISTERED: the description of the model in a descriptor.
static bool take_registered(struct link* link, const struct frame* frame, const char** why) {
    struct stat found;
    *why = "the model's description cannot be read";
    if (frame->fd < 0 || fstat(frame->fd, &found) != 0 || found.st_size <= 0 || found.st_size > 1 << 24) return false;
    size_t length = (size_t)found.st_size;
    uint8_t* bytes = malloc(length);
    // A copy: the runtime could change what it shares.
    struct interface* interface =
        bytes && pread(frame->fd, bytes, length, 0) == (ssize_t)length ? interface_read(bytes, length, why) : NULL;
    free(bytes);
    if (!interface) return false;
    pthread_mutex_lock(&link->lock);
    bool ready = link->state == REGISTERING, again = ready && link->interface;
    if (ready) {
        interface_drop(link->interface);
        link->interface = interface;
        link->state = READY;
        link->started = true;
        link->asked = false;
        link->backoff_ns = 0;
        set_text(&link->down, NULL);
        if (link->measured) link_watch(link);
        link->execution_ns = interface->cost_ns;
        atomic_store(&link->owner->retry_ns, interface->retry_ns);
        link->attempted = true;
        pthread_cond_broadcast(&link->changed);
    }
    pthread_mutex_unlock(&link->lock);
    if (!ready) interface_drop(interface);
    resubmission_wake();
    if (again) log_line(LOG_INFO, link->model, "reconnected to the runtime");
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

// Takes COLD: the runtime need not have the model until a request waits. False: the link has no socket any more. If
// requests are in flight, the runtime sees them, unless its device is to sleep; those that are about to be sent wait, and
// start the model again.
static bool take_cold(struct link* link, int64_t start_timeout_ns) {
    pthread_mutex_lock(&link->lock);
    atomic_store(&link->owner->start_timeout_ns, start_timeout_ns);
    bool leaves = !link->first && (link->state == READY || link->state == REGISTERING);
    if (leaves) {
        if (link->state == READY && link->measured) waiting_report(link, now_ns());
        trace_forget(link, UINT32_MAX);
        detach(link);
        interface_drop(link->interface);
        link->interface = NULL;
        link->state = IS_COLD;
        link->started = link->asked = false;
        link->backoff_ns = link->due_ns = 0;
        set_text(&link->down, NULL);
        link->attempted = true;
        pthread_cond_broadcast(&link->changed);
    }
    pthread_mutex_unlock(&link->lock);
    if (leaves) link_drop(link);  // the socket's
    return !leaves;
}

static void take_starting(struct link* link, int64_t start_ns) {
    pthread_mutex_lock(&link->lock);
    link->ready_at_ns = now_ns() + start_ns;
    pthread_mutex_unlock(&link->lock);
    resubmission_wake();
}

static void take_done(struct link* link, const struct frame* frame) {
    pthread_mutex_lock(&link->lock);
    struct pending* list = waiting_take_done(link, frame);
    pthread_mutex_unlock(&link->lock);
    waiting_finish(link, list);
}

// Reads one frame. Returns false if the link has no socket any more.
static bool take_frame(struct link* link, uint8_t* buffer) {
    struct frame frame;
    const char* why = "the runtime's answer breaks the protocol";
    pthread_mutex_lock(&link->lock);
    int fd = link->fd;
    bool ready = link->state == READY;
    pthread_mutex_unlock(&link->lock);
    int received = frame_receive(fd, buffer, &frame, &why);
    if (received == 0) return true;
    if (received < 0) {
        lose(link, why, NULL);
        return false;
    }
    bool right = true;
    int64_t ns;
    why = "the runtime's answer breaks the protocol";
    if (frame.kind == DONE && ready && completions_check(&frame))
        take_done(link, &frame);
    else if (frame.kind == REGISTERED && !ready)
        right = take_registered(link, &frame, &why);
    else if (frame.kind == REJECTED && !ready) {
        if (frame.fd >= 0) close(frame.fd);
        take_rejected(link, &frame);
        return false;
    } else if (frame.kind == COLD && nanoseconds_read(&frame, &ns)) {
        if (frame.fd >= 0) close(frame.fd);
        return take_cold(link, ns);
    } else if (frame.kind == STARTING && !ready && nanoseconds_read(&frame, &ns))
        take_starting(link, ns);
    else
        right = frame.kind == REPORTED && ready;
    if (frame.fd >= 0) close(frame.fd);
    // A description that is wrong once is wrong again: the model counts as rejected.
    if (!right) lose(link, why, frame.kind == REGISTERED && !ready ? "" : NULL);
    return right;
}

// --- the reader -----------------------------------------------------------------------------------------------------

// Looks at links on which something waits, and leaves out those on which nothing does any more.
static void check_all(struct link** at, int64_t now) {
    for (struct link* link; (link = *at);) {
        // execute() may hold it while a runtime does not read. The next look has it.
        if (pthread_mutex_trylock(&link->lock) != 0) {
            at = &link->next_watched;
            continue;
        }
        struct pending* late = link->state == READY ? waiting_check(link, now) : NULL;
        if (link->state == READY && link->measured && now - link->reported_ns >= REPORT_NS) waiting_report(link, now);
        // What is measured without a runtime waits for the next one.
        link->watched = link->first || (link->measured && link->state == READY);
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
        // Set before the look: a link that comes in between wakes the thread.
        atomic_store(&asleep, true);
        bool idle = !watched && !atomic_load(&newly_watched);
        // It wakes by itself: no submission needs to.
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
        if (idle || now - checked < CHECK_MS * (NS_PER_S / 1000)) continue;
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
    // In Triton, a thread of each model sleeps. New kernels keep those of a process in few slots, 16 with two CPUs, and each
    // wake-up searches one: with 1,000 models, a request took 40 us more. Older kernels refuse.
    prctl(FUTEX_HASH, SET_SLOTS, (unsigned long)FUTEX_SLOTS, 0ul, 0ul);
    wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int made = epoll_create1(EPOLL_CLOEXEC);
    if (wake_fd < 0 || made < 0 || epoll_ctl(made, EPOLL_CTL_ADD, wake_fd, &event) != 0) return;
    epoll_fd = made;
    // The reader last: without an epoll it would not rest.
    if (!resubmission_begin() || !begin_thread(read_all, NULL)) epoll_fd = -1;
}

// --- a model is loaded and unloaded ---------------------------------------------------------------------------------

// If runtimes end meanwhile, perhaps because of another model, the next one is tried; a runtime rejects a model that
// crashes it repeatedly.
bool link_load(struct link* link, struct text* why, bool* dangerous) {
    link->loading = true;
    for (int attempt = 1;; attempt++) {
        bool final = false;
        text_clear(why);
        bool attached = attach(link, why, &final);
        pthread_mutex_lock(&link->lock);
        while (attached && link->state == REGISTERING) pthread_cond_wait(&link->changed, &link->lock);
        bool ready = link->state == READY || link->state == IS_COLD;
        bool rejected = attached && link->rejected;
        *dangerous = rejected && link->dangerous;
        if (ready) link->loading = false;
        if (attached && !ready) text_add(why, "%s", link->reason ? link->reason : LINK_DOWN);
        if (!attached) set_backoff(link, FIRST_BACKOFF_NS, MAX_BACKOFF_NS);
        int64_t pause = link->backoff_ns > MAX_BACKOFF_NS ? MAX_BACKOFF_NS : link->backoff_ns;
        pthread_mutex_unlock(&link->lock);
        if (ready || rejected || final || attempt == FIRST_ATTEMPTS) return ready;
        log_line(LOG_ERROR, link->model, "the runtime ended before the model was ready: %s", why->bytes);
        usleep((useconds_t)(pause / 1000));
    }
}

void link_begin(struct link* link) { mender_add(link); }

void link_begin_cold(struct link* link) {
    pthread_mutex_lock(&link->lock);
    link->state = IS_COLD;
    link->attempted = true;
    pthread_mutex_unlock(&link->lock);
}

void link_start(struct link* link) {
    int64_t now = now_ns();
    pthread_mutex_lock(&link->lock);
    bool starts = link->state == IS_COLD && link->due_ns <= now;
    if (starts) {
        link->state = MISSING;
        link->asked = true;
        link->first_deadline_ns = 0;
        link->due_ns = now;
        set_text(&link->down, NULL);
    }
    pthread_mutex_unlock(&link->lock);
    if (starts) mender_add(link);
}

void link_ask(struct link* link, bool waits, int64_t first_deadline_ns) {
    pthread_mutex_lock(&link->lock);
    bool takes = link->state == MISSING;
    if (link->state == REGISTERING && (waits != link->asked || first_deadline_ns != link->first_deadline_ns)) {
        struct text text;
        text_clear(&text);
        text_add(&text, "{");
        add_demand(&text, waits, first_deadline_ns);
        takes = frame_send_json(link->fd, DEMAND, text.bytes) > 0;
    }
    if (takes) {
        link->asked = waits;
        link->first_deadline_ns = first_deadline_ns;
    }
    pthread_mutex_unlock(&link->lock);
}

bool link_is_reachable(const struct link* link) { return !mender_fails(link->device); }

bool link_rejects(struct link* link, bool* dangerous) {
    int64_t now = now_ns();
    pthread_mutex_lock(&link->lock);
    bool rejects = link->down && (link->state != IS_COLD || link->due_ns > now);
    *dangerous = rejects && link->dangerous;
    pthread_mutex_unlock(&link->lock);
    return rejects;
}

void link_await(struct link* link, int64_t until_ns) {
    struct timespec until = {until_ns / NS_PER_S, until_ns % NS_PER_S};
    int waited = 0;
    pthread_mutex_lock(&link->lock);
    // A device that serves no other model either does not delay the load.
    while (!link->attempted && !mender_fails(link->device) && waited == 0)
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
    link->device = device;
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

// A runtime whose work or next round is overdue, or that does not notice requests, is expected to need as long again.
int64_t link_answers_in_ns(struct link* link) {
    const uint64_t most = 3600 * (uint64_t)NS_PER_S;  // the board's numbers are foreign
    uint64_t now = (uint64_t)now_ns(), expected = UINT64_MAX;
    pthread_mutex_lock(&link->lock);
    struct pollfd writable = {link->fd, POLLOUT, 0};
    if (link->state == READY && (!link->stuck || poll(&writable, 1, 0) > 0)) {
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
    if (link->state == READY && link->measured) waiting_report(link, now_ns());
    link->state = CLOSED;
    if (link->fd >= 0) shutdown(link->fd, SHUT_RDWR);  // the reader closes it
    pthread_mutex_unlock(&link->lock);
    link_drop(link);
}

