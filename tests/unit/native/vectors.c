// A program that runs conformance vectors (tests/unit/front/vectors.py) through the native front's decisions: front.c, replicas.c
// and resubmission.c, without threads, sockets and the clock. Each line of stdin is an event, with tabs between its fields. For
// each event, the program prints the instructions that follow from it, and then a line with a dot.
#include <stdarg.h>

#include "../../../triton_backend/rsrv/native/resubmission.c"

#include <inttypes.h>
#include <string.h>
#include <time.h>

#define MAX_FIELDS 8
#define MAX_PENDING 10000

int driver_clock(clockid_t, struct timespec*);

static int64_t clock_ns;
static uint64_t table_mask;
static struct replicas* model;
static struct link links[MAX_DEVICES];
static struct pending* pendings[MAX_PENDING];
static bool cancelled[MAX_PENDING], late[MAX_PENDING];

// --- functions of the front's other parts ----------------------------------------------------------------------------

static void say_connect(struct link* link) {
    struct device* one = &link->device;
    bool asked = one->asked || (one->started && model->waiting.first);
    printf("Connect\t%u\t%d\t%d\n", link->number, one->started, asked);
}

// text.c is compiled with this function in clock_gettime's place.
int driver_clock(clockid_t id, struct timespec* now) {
    (void)id;
    *now = (struct timespec){clock_ns / NS_PER_S, clock_ns % NS_PER_S};
    return 0;
}
uint64_t placement_mask(const uint8_t digest[DIGEST_BYTES]) { (void)digest; return table_mask; }
void link_connect(struct link* link, bool asked) { if (device_start(&link->device, asked)) say_connect(link); }
void link_tell(struct link* link, struct demand demand) { link->demand = demand; }
int64_t link_answers_in_ns(struct link* link) { return link->device.state == STATE_READY ? 0 : INT64_MAX; }
void link_resubmit(struct link* link, struct pending* one) { (void)link; printf("Submit\t%" PRIu64 "\n", one->id); }
void waiting_finish(struct link* link, struct pending* one) {
    (void)link;
    printf("Refuse\t%" PRIu64 "\t%d\t%s\n", one->id, (int)one->status, one->failure->bytes);
}
bool waiting_is_late(const struct pending* one, int64_t now) { (void)now; return late[one->id]; }
bool request_read_parameters(struct pending* one) { (void)one; return true; }
uint64_t request_input_bytes(const struct pending* one) { return one->input_bytes; }
void request_fail(struct pending* one, enum status status, const char* format, ...) {
    char buffer[TEXT_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    one->status = status;
    if (!one->failure) one->failure = calloc(1, sizeof *one->failure);
    text_clear(one->failure);
    text_add(one->failure, "%s", buffer);
}
TRITONSERVER_Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request* request, bool* is_cancelled) {
    *is_cancelled = *(bool*)request;
    return NULL;
}

// These functions are not called, or have nothing to do here.
void link_hold(struct link* link) { (void)link; }
void link_drop(struct link* link) { (void)link; }
void link_await(struct link* link, int64_t until_ns) { (void)link, (void)until_ns; }
void link_close(struct link* link) { (void)link; }
uint32_t link_devices(struct link* link) { (void)link; return 1; }
bool link_is_cold(struct link* link) { (void)link; return false; }
bool link_load(struct link* link, struct text* why, bool* barred) { (void)link, (void)why, (void)barred; return false; }
struct link* link_new(struct replicas* all, const char* name, const char* bundle, const char* settings, uint32_t device) {
    (void)all, (void)name, (void)bundle, (void)settings, (void)device;
    return NULL;
}
void link_submit(struct link* link, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) {
    (void)link, (void)instance, (void)request;
}
bool large_has_ended(struct large* large) { (void)large; return false; }
void arena_give(struct place* place) { (void)place; }
void request_digest(const struct pending* one, uint8_t digest[DIGEST_BYTES]) { (void)one, (void)digest; }
int64_t request_run_device(TRITONBACKEND_Request* request) { (void)request; return -1; }
uint32_t crc32_of(uint32_t crc, const void* bytes, size_t length) { (void)bytes, (void)length; return crc; }
bool runtime_directory(uint32_t device, char base[PATH_BYTES], char own[PATH_BYTES]) { (void)device, (void)base, (void)own; return false; }
bool begin_thread(void* (*run)(void*), void* argument) { (void)run, (void)argument; return false; }
void begin_condition(pthread_cond_t* condition) { (void)condition; }
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error) { (void)error; }
TRITONSERVER_Error* TRITONSERVER_LogMessage(int level, const char* file, int line, const char* text) {
    (void)level, (void)file, (void)line, (void)text;
    return NULL;
}

// --- events ---------------------------------------------------------------------------------------------------------

static void begin_life(uint32_t count, uint32_t home, uint64_t mask) {
    for (uint32_t i = 0; model && i < model->count; i++) device_free(&links[i].device);
    for (int i = 0; i < MAX_PENDING; i++) {
        if (pendings[i]) free(pendings[i]->failure);
        free(pendings[i]);
        pendings[i] = NULL;
        cancelled[i] = late[i] = false;
    }
    free(model);
    models = NULL;
    model = calloc(1, sizeof *model);
    model->count = count;
    model->home = home;
    table_mask = mask;
    atomic_store(&model->mask, mask);
    for (uint32_t i = 0; i < count; i++) {
        links[i] = (struct link){.number = i, .owner = model};
        pthread_mutex_init(&links[i].lock, NULL);
        device_init(&links[i].device);
        model->links[i] = &links[i];
    }
}

static void arrive(uint64_t number, int64_t deadline_ns, bool is_sub_call, uint64_t bytes, uint32_t deaths) {
    struct pending* one = pendings[number] ? pendings[number] : calloc(1, sizeof *one);
    pendings[number] = one;
    one->id = number;
    one->deadline_ns = deadline_ns;
    one->run = is_sub_call;
    one->input_bytes = bytes;
    one->deaths = deaths;
    one->request = (TRITONBACKEND_Request*)&cancelled[number];
    resubmission_add(&links[0], one);
}

static void pass_time(void) {
    for (uint32_t i = 0; i < model->count; i++) {
        uint32_t number = (model->home + i) % model->count;
        uint64_t named = table_mask & ~PINNED & UINT64_C(1) << number;
        if (device_retry(&links[number].device, named && atomic_load(&model->ready), clock_ns)) say_connect(&links[number]);
    }
}

// In the front, link.c sets these bits.
static void note_ready(void) {
    uint64_t ready = 0;
    for (uint32_t i = 0; i < model->count; i++)
        if (links[i].device.state == STATE_READY) ready |= UINT64_C(1) << i;
    atomic_store(&model->ready, ready);
}

// Divides a request into parts. Each character of `ends` is the outcome of a submitted part: 1 if the part was answered, 0 if it
// failed.
static void divide(uint32_t count, uint32_t largest, const char* ends) {
    struct parts parts = {.rows = count, .largest = largest};
    uint32_t first, rows;
    for (;; ends++) {
        while (parts_take(&parts, &first, &rows)) printf("Take %u %u ", first, rows);
        if (!*ends) break;
        printf("End %d ", parts_end(&parts, *ends == '1'));
    }
    printf("\n");
}

int main(void) {
    char line[4096], *fields[MAX_FIELDS];
    while (fgets(line, sizeof line, stdin)) {
        int count = 0;
        line[strcspn(line, "\n")] = 0;
        for (char* at = line; at && count < MAX_FIELDS; at = count < MAX_FIELDS ? strchr(at, '\t') : NULL) {
            if (count) *at++ = 0;
            fields[count++] = at;
        }
        const char* event = fields[0];
        int64_t values[MAX_FIELDS] = {0};
        for (int i = 1; i < count; i++) values[i] = (int64_t)strtoull(fields[i], NULL, 10);
        if (strcmp(event, "Life") == 0) {
            begin_life((uint32_t)values[1], (uint32_t)values[2], (uint64_t)values[3]);
            continue;
        }
        if (strcmp(event, "Parts") == 0) {
            divide((uint32_t)values[1], (uint32_t)values[2], fields[3]);
            continue;
        }
        clock_ns = values[1];
        pass_time();
        if (models) check_waiting();
        struct link* link = &links[(uint64_t)values[2] % MAX_DEVICES];
        struct device* device = &link->device;
        bool is_known = true;
        if (strcmp(event, "LoadAsked") == 0)
            link_connect(link, false);
        else if (strcmp(event, "StartAsked") == 0)
            link_connect(link, true);
        else if (strcmp(event, "Registered") == 0) {
            is_known = device_register(device);
            atomic_store(&model->retry_ns, values[3]);
        } else if (strcmp(event, "WentCold") == 0)
            is_known = device_cool(device);
        else if (strcmp(event, "StepAnnounced") == 0) {
            is_known = device_step(device, fields[5], values[3], clock_ns);
            atomic_store(&model->start_timeout_ns, values[4]);
        } else if (strcmp(event, "ModelRejected") == 0)
            is_known = device_reject(device, fields[5], fields[4], values[3], clock_ns);
        else if (strcmp(event, "Unreached") == 0)
            is_known = device_fail(device, fields[4], values[3], clock_ns);
        else if (strcmp(event, "RuntimeLost") == 0) {
            is_known = device_lose(device, values[3], clock_ns);
            if (!values[3]) say_connect(link);
        } else if (strcmp(event, "StartTimeoutKnown") == 0)
            atomic_store(&model->start_timeout_ns, values[2]);
        else if (strcmp(event, "PlacementChanged") == 0)
            table_mask = (uint64_t)values[2];
        else if (strcmp(event, "RequestArrived") == 0)
            arrive((uint64_t)values[2], values[3], values[4], (uint64_t)values[5], (uint32_t)values[6]);
        else if (strcmp(event, "RequestCancelled") == 0) {
            cancelled[values[2]] = true;
            pendings[values[2]]->checked_ns = INT64_MIN / 2;
        } else if (strcmp(event, "RequestAnswered") == 0) {
            if (pendings[values[2]]->suspect) resubmission_ended(&links[0], pendings[values[2]]);
            else late[values[2]] = true;
        } else if (strcmp(event, "TimePassed") != 0)
            is_known = false;
        if (!is_known) printf("this event is not known, or the device's state does not allow it\n");
        note_ready();
        if (models) check_waiting();
        replicas_soonest(model);
        printf(".\n");
        fflush(stdout);
    }
    begin_life(0, 0, 0);
    free(model);
    return 0;
}
