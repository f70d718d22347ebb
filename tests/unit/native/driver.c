// A program that plays tritonserver for the native front. It reads commands from the lines of stdin, and prints their
// outcomes as lines of stdout. It is linked with the front's sources, so that a sanitizer checks both.
//
//   use NUMBER              the next commands are for the model of this number; until the first `use`, for number 0
//   open                    -> opened | refused TEXT
//   send ID ROWS [KEY=VALUE] -> answer ID ok ROWS SUM | answer ID CODE TEXT    (when the front answers)
//   batch ID COUNT          sends COUNT requests of one row in one call, with numbers from ID on
//   like ID OTHER           sends a request of one row with the inputs of request OTHER
//   cancel ID               cancels the request
//   jam                     lets the next submission fail as if the kernel had no memory
//   hold                    -> holds     (the front's reader thread keeps the next frame until the next `close` has ended)
//   copy                    copies all sockets, as a fork() of another thread does until its child calls exec()
//   close                   -> closed    (after the last answer)
//
// A value that consists of digits is an integer. The parameter `triton` also becomes Triton's own trace context. Each request
// must be answered and released once.
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../../triton_backend/rsrv/native/triton.h"

#define COLUMNS 4
#define MAX_REQUESTS 100000
#define MAX_MODELS 64
#define SUBMIT 5
#define COPIES 512  // Descriptors of copied sockets begin here.

struct TRITONSERVER_Error { int code; char* text; };
struct TRITONSERVER_InferenceTrace { char context[128]; };
struct TRITONBACKEND_Model { void* state; const char* folder; };
struct TRITONBACKEND_ModelInstance { void* state; TRITONBACKEND_Model* model; };
struct TRITONBACKEND_Input { int64_t shape[2]; float* values; };
struct TRITONBACKEND_Request {
    char id[32], key[64], text[64];
    int64_t number;
    bool has_parameter, is_number;
    TRITONSERVER_InferenceTrace trace;
    atomic_bool cancelled;
    atomic_int answers, releases;
    TRITONBACKEND_Input input;
};
struct TRITONBACKEND_Output { float* values; uint64_t bytes; };
struct TRITONBACKEND_Response { TRITONBACKEND_Request* request; TRITONBACKEND_Output output; int64_t rows; };

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*);
TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model*);
TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model*);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance*);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request**, uint32_t);

static TRITONBACKEND_Request* requests[MAX_REQUESTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static int outstanding;
static atomic_bool jammed;
// PASSES: the reader thread handles each frame at once. HOLDS: it will keep the next frame. HELD: it keeps a frame.
static enum { PASSES, HOLDS, HELD } gate;
static pthread_cond_t gate_changed = PTHREAD_COND_INITIALIZER;

static void fail(const char* what) {
    fprintf(stderr, "driver: %s\n", what);
    abort();
}

static void say(const char* format, const char* id, const char* text, int64_t rows, double sum, int code) {
    pthread_mutex_lock(&lock);
    if (text) {
        printf("%s %s %d ", format, id, code);
        // Print the text on one line.
        for (; *text; text++) putchar((unsigned char)*text < ' ' ? ' ' : *text);
        putchar('\n');
    } else
        printf("%s %s ok %" PRId64 " %g\n", format, id, rows, sum);
    fflush(stdout);
    pthread_mutex_unlock(&lock);
}

// The front is compiled with this function in sendmsg's place.
ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
    const uint8_t* frame = message->msg_iov->iov_base;
    if (frame[0] == SUBMIT && atomic_exchange(&jammed, false)) {
        errno = ENOBUFS;
        return -1;
    }
    return syscall(SYS_sendmsg, fd, message, flags);
}

// The front is compiled with this function in recvmsg's place.
ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
    ssize_t length = syscall(SYS_recvmsg, fd, message, flags);
    pthread_mutex_lock(&lock);
    if (length > 0 && gate == HOLDS) {
        gate = HELD;
        pthread_cond_broadcast(&gate_changed);
        while (gate == HELD) pthread_cond_wait(&gate_changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return length;
}

// --- Triton's functions ---------------------------------------------------------------------------------------------

TRITONSERVER_Error* TRITONSERVER_ErrorNew(int code, const char* text) {
    TRITONSERVER_Error* error = malloc(sizeof *error);
    *error = (TRITONSERVER_Error){code, strdup(text)};
    return error;
}
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error) { free(error->text); free(error); }
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error* error) { return error->text; }
TRITONSERVER_Error* TRITONSERVER_LogMessage(int level, const char* file, int line, const char* text) {
    (void)level, (void)file, (void)line;
    fprintf(stderr, "%s\n", text);
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) { *major = 1; *minor = 19; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelName(TRITONBACKEND_Model* m, const char** name) { (void)m; *name = "doubling"; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model* m, uint64_t* version) { (void)m; *version = 1; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelRepository(TRITONBACKEND_Model* m, int* artifact, const char** location) {
    *artifact = ARTIFACT_FILESYSTEM;
    *location = m->folder;
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model* m, void** state) { *state = m->state; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model* m, void* state) { m->state = state; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance* i, TRITONBACKEND_Model** m) { *m = i->model; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance* i, void** state) { *state = i->state; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance* i, void* state) { i->state = state; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance* i, TRITONBACKEND_Request* r, bool success, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    (void)i, (void)success;
    if (atomic_load(&r->releases)) fail("statistics of a released request");
    if (a > b || c > d) fail("times are out of order");
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance* i, uint64_t size, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    (void)i, (void)size, (void)a, (void)b, (void)c, (void)d;
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request* r, const char** id) { *id = r->id; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request* r, uint64_t* timeout) { (void)r; *timeout = 0; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* r, uint32_t* count) { *count = r->has_parameter; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_RequestParameter(
    TRITONBACKEND_Request* r, uint32_t index, const char** key, int* type, const void** value) {
    (void)index;
    *key = r->key;
    *type = r->is_number ? PARAMETER_INT : PARAMETER_STRING;
    *value = r->is_number ? (const void*)&r->number : r->text;
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request* r, TRITONSERVER_InferenceTrace** trace) {
    *trace = *r->trace.context ? &r->trace : NULL;
    return NULL;
}
TRITONSERVER_Error* TRITONSERVER_InferenceTraceContext(TRITONSERVER_InferenceTrace* trace, const char** context) { *context = trace->context; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request* r, bool* cancelled) {
    if (atomic_load(&r->releases)) fail("a released request is asked whether it is cancelled");
    *cancelled = atomic_load(&r->cancelled);
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* r, uint32_t* count) { (void)r; *count = 1; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request* r, uint32_t index, TRITONBACKEND_Input** input) { (void)index; *input = &r->input; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request* r, uint32_t* count) { (void)r; *count = 1; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request* r, uint32_t index, const char** name) { (void)r, (void)index; *name = "y"; return NULL; }
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input* in, const char** name, int* type, const int64_t** shape, uint32_t* rank, uint64_t* bytes, uint32_t* buffers) {
    if (name) *name = "x";
    if (type) *type = 11;
    if (shape) *shape = in->shape;
    if (rank) *rank = 2;
    if (bytes) *bytes = (uint64_t)in->shape[0] * COLUMNS * sizeof(float);
    if (buffers) *buffers = in->shape[0] > 1 ? 2 : 1;
    return NULL;
}
// An input of two or more rows has two buffers of different lengths.
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input* in, uint32_t index, const void** buffer, uint64_t* bytes, int* memory, int64_t* id) {
    uint64_t all = (uint64_t)in->shape[0] * COLUMNS * sizeof(float), first = in->shape[0] > 1 ? 4 : all;
    *buffer = (char*)in->values + (index ? first : 0);
    *bytes = index ? all - first : first;
    *memory = MEMORY_CPU;
    *id = 0;
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response** response, TRITONBACKEND_Request* r) {
    *response = calloc(1, sizeof **response);
    (*response)->request = r;
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response* response) {
    free(response->output.values);
    free(response);
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response* response, TRITONBACKEND_Output** output, const char* name, int type, const int64_t* shape, uint32_t rank) {
    if (strcmp(name, "y") != 0 || type != 11 || rank != 2 || shape[1] != COLUMNS) fail("an output is not the model's");
    response->rows = shape[0];
    *output = &response->output;
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output* output, void** buffer, uint64_t bytes, int* memory, int64_t* id) {
    output->values = malloc(bytes ? bytes : 1);
    output->bytes = bytes;
    *buffer = output->values;
    *memory = MEMORY_CPU;
    *id = 0;
    return NULL;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response* response, uint32_t flags, TRITONSERVER_Error* error) {
    TRITONBACKEND_Request* r = response->request;
    double sum = 0;
    if (flags != RESPONSE_FINAL) fail("a response that is not final");
    if (atomic_fetch_add(&r->answers, 1)) fail("a request is answered twice");
    for (uint64_t i = 0; i < response->output.bytes / sizeof(float); i++) sum += response->output.values[i];
    say("answer", r->id, error ? error->text : NULL, response->rows, sum, error ? error->code : 0);
    return TRITONBACKEND_ResponseDelete(response);
}
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* r, uint32_t flags) {
    if (flags != RELEASE_ALL || atomic_load(&r->answers) != 1) fail("a request is released without an answer");
    if (atomic_fetch_add(&r->releases, 1)) fail("a request is released twice");
    pthread_mutex_lock(&lock);
    outstanding--;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
    return NULL;
}

// --- commands -------------------------------------------------------------------------------------------------------

static TRITONBACKEND_Request* make(int number, int64_t rows, const char* parameter) {
    TRITONBACKEND_Request* r = calloc(1, sizeof *r);
    if (number < 0 || number >= MAX_REQUESTS || requests[number]) fail("a number of a request is wrong");
    snprintf(r->id, sizeof r->id, "%d", number);
    const char* value = parameter ? strchr(parameter, '=') : NULL;
    if (value) {
        r->has_parameter = true;
        snprintf(r->key, sizeof r->key, "%.*s", (int)(value - parameter), parameter);
        snprintf(r->text, sizeof r->text, "%s", value + 1);
        char* end;
        r->number = strtoll(value + 1, &end, 10);
        r->is_number = *end == 0;
        if (strcmp(r->key, "triton") == 0)
            snprintf(r->trace.context, sizeof r->trace.context, "{\"traceparent\":\"%s\"}", r->text);
    }
    r->input.shape[0] = rows;
    r->input.shape[1] = COLUMNS;
    r->input.values = malloc((size_t)rows * COLUMNS * sizeof(float) + 1);
    for (int64_t i = 0; i < rows * COLUMNS; i++) r->input.values[i] = (float)(number + i);
    pthread_mutex_lock(&lock);
    outstanding++;
    pthread_mutex_unlock(&lock);
    return requests[number] = r;
}

static void execute(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** batch, uint32_t count) {
    if (TRITONBACKEND_ModelInstanceExecute(instance, batch, count)) fail("execute() returned an error");
}

// Looks at the descriptor's path. Reading the descriptor itself would be a data race for ThreadSanitizer, because the front may
// close it at the same time.
static bool is_socket(int fd) {
    char path[32];
    struct stat found;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return stat(path, &found) == 0 && S_ISSOCK(found.st_mode);
}

int main(int count, char** arguments) {
    static TRITONBACKEND_Model models[MAX_MODELS], *model = models;
    static TRITONBACKEND_ModelInstance instances[MAX_MODELS], *instance = instances;
    char line[512], parameter[256];
    int number, more;
    if (TRITONBACKEND_Initialize(NULL)) fail("the front does not start");
    for (int i = 0; i < MAX_MODELS; i++) {
        models[i].folder = count > 1 ? arguments[1] : ".";
        instances[i].model = &models[i];
    }
    while (fgets(line, sizeof line, stdin)) {
        int64_t rows;
        *parameter = 0;
        if (sscanf(line, "use %d", &number) == 1 && number >= 0 && number < MAX_MODELS) {
            model = &models[number];
            instance = &instances[number];
        } else if (strncmp(line, "jam", 3) == 0) {
            atomic_store(&jammed, true);
        } else if (strncmp(line, "hold", 4) == 0) {
            pthread_mutex_lock(&lock);
            gate = HOLDS;
            pthread_mutex_unlock(&lock);
            say("holds", "-", NULL, 0, 0, 0);
        } else if (strncmp(line, "copy", 4) == 0) {
            for (int fd = 3; fd < COPIES; fd++)
                if (is_socket(fd) && dup2(fd, COPIES + fd) < 0) fail("a socket is not copied");
        } else if (strncmp(line, "open", 4) == 0) {
            TRITONSERVER_Error* error = TRITONBACKEND_ModelInitialize(model);
            if (!error && TRITONBACKEND_ModelInstanceInitialize(instance)) fail("an instance does not start");
            if (error)
                say("refused", "-", error->text, 0, 0, error->code);
            else
                say("opened", "-", NULL, 0, 0, 0);
            if (error) TRITONSERVER_ErrorDelete(error);
        } else if (sscanf(line, "send %d %" SCNd64 " %255s", &number, &rows, parameter) >= 2) {
            TRITONBACKEND_Request* one = make(number, rows, *parameter ? parameter : NULL);
            execute(instance, &one, 1);
        } else if (sscanf(line, "batch %d %d", &number, &more) == 2) {
            for (int i = 0; i < more; i++) make(number + i, 1, NULL);
            execute(instance, requests + number, (uint32_t)more);
        } else if (sscanf(line, "like %d %d", &number, &more) == 2) {
            TRITONBACKEND_Request* one = make(number, 1, NULL);
            memcpy(one->input.values, requests[more]->input.values, COLUMNS * sizeof(float));
            execute(instance, &one, 1);
        } else if (sscanf(line, "cancel %d", &number) == 1) {
            atomic_store(&requests[number]->cancelled, true);
        } else if (strncmp(line, "close", 5) == 0) {
            pthread_mutex_lock(&lock);
            while (outstanding) pthread_cond_wait(&released, &lock);
            while (gate == HOLDS) pthread_cond_wait(&gate_changed, &lock);
            pthread_mutex_unlock(&lock);
            if (TRITONBACKEND_ModelFinalize(model)) fail("the model does not end");
            model->state = NULL;
            pthread_mutex_lock(&lock);
            gate = PASSES;
            pthread_cond_broadcast(&gate_changed);
            pthread_mutex_unlock(&lock);
            say("closed", "-", NULL, 0, 0, 0);
        } else
            fail("no such command");
    }
    // After the end of its model, a link is freed by the front's reader thread. Until then, the only pointer to the link may be
    // in the kernel, and the sanitizer would report a leak. So wait until all sockets are closed.
    for (int fd = 3; fd < COPIES; fd++)
        for (int tries = 0; tries < 1000 && is_socket(fd); tries++) usleep(10000);
    for (int i = 0; i < MAX_REQUESTS; i++) {
        if (!requests[i]) continue;
        if (atomic_load(&requests[i]->releases) != 1) fail("a request was not answered");
        free(requests[i]->input.values);
        free(requests[i]);
    }
    return 0;
}
