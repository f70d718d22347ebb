#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "link.h"

#define MAX_ID 200
#define MAX_VALUE 50
// Input buffers of one tensor are copied one after the other; a tensor's shape is copied when it is checked.
static const char UNKNOWN_INPUT[] = "the request has an input that the model does not have";

// --- failures -------------------------------------------------------------------------------------------------------

static const struct { const char* name; int code; bool tagged; } STATUS[STATUSES] = {
    [OK] = {"OK", 0, false},
    [INVALID] = {"INVALID", CODE_INVALID_ARG, false},
    [NOT_FOUND] = {"NOT_FOUND", CODE_NOT_FOUND, false},
    [QUEUE_FULL] = {"QUEUE_FULL", CODE_UNAVAILABLE, true},
    [DEADLINE] = {"DEADLINE", CODE_UNAVAILABLE, true},
    [CANCELLED] = {"CANCELLED", CODE_CANCELLED, false},
    [RUNTIME_DOWN] = {"RUNTIME_DOWN", CODE_UNAVAILABLE, true},
    [NOT_RESIDENT] = {"NOT_RESIDENT", CODE_UNAVAILABLE, true},
    [INTERNAL] = {"INTERNAL", CODE_INTERNAL, false},
    [PAUSED] = {"PAUSED", CODE_UNAVAILABLE, true},
    [SEQUENCE_LOST] = {"SEQUENCE_LOST", CODE_NOT_FOUND, true},
};

const char* status_name(enum status status) { return STATUS[status].name; }

static struct text* begin_failure(struct pending* one, enum status status) {
    one->status = status;
    if (!one->failure) one->failure = malloc(sizeof *one->failure);
    if (one->failure) text_clear(one->failure);
    return one->failure;
}

void request_fail(struct pending* one, enum status status, const char* format, ...) {
    char buffer[TEXT_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    struct text* text = begin_failure(one, status);
    if (text) text_add_bytes(text, buffer, strlen(buffer));
}

// Triton's functions fail only for arguments that are wrong, or for lack of memory.
static bool worked(struct pending* one, TRITONSERVER_Error* error) {
    if (!error) return true;
    log_line(LOG_ERROR, NULL, "Triton refuses a call: %s", TRITONSERVER_ErrorMessage(error));
    TRITONSERVER_ErrorDelete(error);
    if (one) request_fail(one, INTERNAL, "the request could not be handled; the server's log says why");
    return false;
}

// --- parameters -----------------------------------------------------------------------------------------------------

// The shortest digits that read back as the same number, as Python writes them.
static void add_double(struct text* text, double value) {
    char digits[40];
    int precision = 1;
    do
        snprintf(digits, sizeof digits, "%.*g", precision, value);
    while (strtod(digits, NULL) != value && precision++ < 17);
    text_add(text, "%s%s", digits, isfinite(value) && !strpbrk(digits, ".e") ? ".0" : "");
}

static void add_value(struct text* text, int type, const void* value) {
    switch (type) {
        case PARAMETER_STRING: text_add_quoted(text, value, MAX_VALUE); break;
        case PARAMETER_INT: text_add(text, "%" PRId64, *(const int64_t*)value); break;
        case PARAMETER_BOOL: text_add(text, "%s", *(const bool*)value ? "True" : "False"); break;
        case PARAMETER_DOUBLE: add_double(text, *(const double*)value); break;
        default: text_add(text, "another type");
    }
}

// Reads an integer from `first` below `limit`, both as they are shown; a negative `first` admits all numbers.
static bool read_integer(struct pending* one, const char* key, int type, const void* value, const char* first,
                         const char* limit, int64_t most, int64_t* number) {
    *number = type == PARAMETER_INT ? *(const int64_t*)value : -1;
    if (type == PARAMETER_INT && (*first == '-' || (*number >= 0 && *number <= most))) return true;
    struct text* text = begin_failure(one, INVALID);
    if (text) {
        text_add(text, "parameter %s must be an integer from %s below %s, got ", key, first, limit);
        add_value(text, type, value);
    }
    return false;
}

static bool read_run(struct pending* one, int type, const void* value) {
    char digits[24] = "";
    if (type == PARAMETER_STRING)
        snprintf(digits, sizeof digits, "%s", (const char*)value);
    else if (type == PARAMETER_INT)
        snprintf(digits, sizeof digits, "%" PRId64, *(const int64_t*)value);
    size_t length = strspn(digits, "0123456789");
    unsigned __int128 number = 0;
    for (size_t i = 0; i < length; i++) number = number * 10 + (unsigned)(digits[i] - '0');
    one->run = (uint64_t)number;
    if (length > 0 && length <= 20 && digits[length] == 0 && number <= UINT64_MAX) return true;
    request_fail(one, INVALID, "parameter rsrv_run is for sub-calls of meta models");
    return false;
}

// Sets the deadline to `ns` of CLOCK_MONOTONIC, unless there is an earlier one.
static void limit_to(struct pending* one, __int128 ns) {
    int64_t latest = ns > INT64_MAX ? INT64_MAX : ns < 1 ? 1 : (int64_t)ns;
    if (one->deadline_ns == 0 || latest < one->deadline_ns) one->deadline_ns = latest;
}

static bool read_parameter(struct pending* one, const char* key, int type, const void* value) {
    int64_t number;
    if (!is_utf8(key) || (type == PARAMETER_STRING && !is_utf8(value))) {
        request_fail(one, INVALID, "the request's id and parameters must be UTF-8");
        return false;
    }
    if (strcmp(key, "rsrv_run") == 0) return read_run(one, type, value);
    if (strcmp(key, "rsrv_priority") == 0) {
        if (!read_integer(one, key, type, value, "0", "65535", 65534, &number)) return false;
        one->priority = (uint16_t)number;
    } else if (strcmp(key, "rsrv_deadline_unix_ns") == 0) {
        struct timespec now;
        if (!read_integer(one, key, type, value, "0", "9223372036854775808", INT64_MAX, &number)) return false;
        // Only here does a deadline depend on the calendar, which may change.
        clock_gettime(CLOCK_REALTIME, &now);
        if (number) limit_to(one, (__int128)number - (now.tv_sec * NS_PER_S + now.tv_nsec) + one->begun_ns);
    } else if (strcmp(key, "reactant_timeout_ns") == 0) {
        if (!read_integer(one, key, type, value, "-9223372036854775808", "9223372036854775808", INT64_MAX, &number))
            return false;
        if (number > 0) limit_to(one, (__int128)one->begun_ns + number);
    }
    return true;
}

bool request_read_parameters(struct pending* one) {
    if (one->read) return true;
    one->read = true;
    uint32_t count = 0;
    uint64_t timeout_us = 0;
    const char* id = "";
    if (!worked(one, TRITONBACKEND_RequestId(one->request, &id)) ||
        !worked(one, TRITONBACKEND_InferenceRequestTimeoutMicroseconds(one->request, &timeout_us)) ||
        !worked(one, TRITONBACKEND_RequestParameterCount(one->request, &count)))
        return false;
    if (!is_utf8(id)) {
        request_fail(one, INVALID, "the request's id and parameters must be UTF-8");
        return false;
    }
    one->tag = request_tag(id);
    if (timeout_us) limit_to(one, (__int128)one->begun_ns + (__int128)timeout_us * 1000);
    for (uint32_t i = 0; i < count; i++) {
        const char* key;
        const void* value;
        int type;
        if (!worked(one, TRITONBACKEND_RequestParameter(one->request, i, &key, &type, &value))) return false;
        if (!read_parameter(one, key, type, value)) return false;
    }
    return true;
}

// --- shapes ---------------------------------------------------------------------------------------------------------

struct shape {
    const int64_t* dims;
    uint32_t rank;
};

static bool fits(const int64_t* dims, uint32_t rank, struct shape shape) {
    if (rank != shape.rank) return false;
    for (uint32_t i = 0; i < rank; i++)
        if (dims[i] != -1 && dims[i] != shape.dims[i]) return false;
    return true;
}

static void add_dims(struct text* text, const int64_t* dims, uint32_t rank) {
    text_add(text, "[");
    for (uint32_t i = 0; i < rank; i++) text_add(text, "%s%" PRId64, i ? ", " : "", dims[i]);
    text_add(text, "]");
}

static void add_sizes(struct text* text, const struct variant* variant) {
    for (uint32_t i = 0; i < variant->size_count; i++)
        text_add(text, "%s%" PRIu32, i ? ", " : "", variant->sizes[i]);
}

static void fail_shape(struct pending* one, const char* name, const struct tensor* expected, int64_t axis, struct shape got) {
    struct text* text = begin_failure(one, INVALID);
    if (!text) return;
    text_add(text, "input ");
    text_add_quoted(text, name, TEXT_BYTES);
    text_add(text, ": expected shape ");
    add_dims(text, expected->dims, expected->rank);
    if (axis >= 0) text_add(text, " (axis %" PRId64 " is the batch)", axis);
    text_add(text, ", got ");
    add_dims(text, got.dims, got.rank);
}

static void fail_variants(struct pending* one, const struct interface* model, const struct shape* shapes) {
    const struct tensor* first = model->variants[0].inputs;
    if (model->variant_count == 1) {
        for (uint32_t i = 0; i < model->input_count; i++)
            if (!fits(first[i].dims, first[i].rank, shapes[i])) {
                fail_shape(one, first[i].name, &first[i], first[i].batch_axis, shapes[i]);
                return;
            }
    }
    struct text* text = begin_failure(one, INVALID);
    if (!text) return;
    text_add(text, "no module is compiled for ");
    for (uint32_t i = 0; i < model->input_count; i++) {
        text_add(text, "%s%s ", i ? ", " : "", first[i].name);
        add_dims(text, shapes[i].dims, shapes[i].rank);
    }
    text_add(text, "; compiled are ");
    for (uint32_t v = 0; v < model->variant_count; v++)
        for (uint32_t i = 0; i < model->input_count; i++) {
            const struct tensor* tensor = &model->variants[v].inputs[i];
            text_add(text, "%s%s ", i ? ", " : v ? "; " : "", tensor->name);
            add_dims(text, tensor->dims, tensor->rank);
        }
    text_add(text, " (-1 is the batch)");
}

static bool check_rows(struct pending* one, const struct interface* model, const struct variant* variant, int64_t rows) {
    uint32_t largest = variant->sizes[variant->size_count - 1];
    bool compiled = false;
    for (uint32_t i = 0; i < variant->size_count; i++) compiled |= variant->sizes[i] == rows;
    if (rows <= largest && (compiled || !model->exact)) return true;
    struct text* text = begin_failure(one, INVALID);
    if (!text) return false;
    text_add(text, "%" PRId64 " rows", rows);
    text_add(text, "%s", rows > largest ? " exceed the largest compiled batch size; compiled are "
                                        : ": this model runs at its compiled batch sizes only: ");
    add_sizes(text, variant);
    if (rows > largest) text_add(text, ". Send fewer rows a request");
    return false;
}

// Sets the variant and the number of rows, which is the extent of the batch axes; 1 if there is none.
static bool resolve(struct pending* one, const struct shape* shapes) {
    const struct interface* model = one->interface;
    for (uint32_t v = 0; v < model->variant_count; v++) {
        const struct variant* variant = &model->variants[v];
        int64_t rows = -1, least = -1, most = -1;
        uint32_t i = 0;
        while (i < model->input_count && fits(variant->inputs[i].dims, variant->inputs[i].rank, shapes[i])) i++;
        if (i < model->input_count) continue;
        for (i = 0; i < model->input_count; i++) {
            if (variant->inputs[i].batch_axis < 0) continue;
            rows = shapes[i].dims[variant->inputs[i].batch_axis];
            least = least < 0 || rows < least ? rows : least;
            most = rows > most ? rows : most;
        }
        if (least != most) {
            request_fail(one, INVALID, "the inputs disagree on the number of rows: [%" PRId64 ", %" PRId64 "]", least, most);
            return false;
        }
        rows = rows < 0 ? 1 : rows;
        if (!check_rows(one, model, variant, rows)) return false;
        one->variant = v;
        one->rows = (uint32_t)rows;
        one->input_bytes = block_bytes(variant->inputs, model->input_count, (uint64_t)rows);
        one->output_bytes = block_bytes(variant->outputs, model->output_count, (uint64_t)rows);
        return true;
    }
    fail_variants(one, model, shapes);
    return false;
}

// Finds the client's tensor of each of the module's inputs, and its shape; Triton has checked names and types.
static bool find_inputs(struct pending* one, TRITONBACKEND_Input** found, struct shape* shapes) {
    const struct interface* model = one->interface;
    uint32_t count = 0;
    if (!worked(one, TRITONBACKEND_RequestInputCount(one->request, &count))) return false;
    for (uint32_t i = 0; i < count; i++) {
        TRITONBACKEND_Input* input;
        const char* name;
        struct shape shape;
        int type;
        uint32_t at = 0;
        if (!worked(one, TRITONBACKEND_RequestInputByIndex(one->request, i, &input)) ||
            !worked(one, TRITONBACKEND_InputProperties(input, &name, &type, &shape.dims, &shape.rank, NULL, NULL)))
            return false;
        while (at < model->input_count && strcmp(name, model->variants[0].inputs[at].name) != 0) at++;
        if (at == model->input_count) {
            request_fail(one, INVALID, "%s", UNKNOWN_INPUT);
            return false;
        }
        const struct tensor* expected = &model->client_inputs[model->input_of[at]];
        // Triton has no tensors without an axis of their own: [N] travels as [N, 1].
        if (shape.rank == expected->rank + 1 && shape.dims[shape.rank - 1] == 1) shape.rank--;
        if (shape.rank != expected->rank) {
            fail_shape(one, name, expected, -1, shape);
            return false;
        }
        if (type != expected->type) {
            request_fail(one, INVALID, "the request has '%s' of another type", name);
            return false;
        }
        found[at] = input;
        shapes[at] = shape;
    }
    for (uint32_t i = 0; i < model->input_count; i++)
        if (!found[i]) {
            request_fail(one, INVALID, "the request has no tensor '%s'", model->variants[0].inputs[i].name);
            return false;
        }
    return true;
}

int64_t request_run_device(TRITONBACKEND_Request* request) {
    uint32_t count = 0;
    int64_t device = 0;
    bool has_run = false;
    if (!worked(NULL, TRITONBACKEND_RequestParameterCount(request, &count))) return -1;
    for (uint32_t i = 0; i < count; i++) {
        const char* key;
        const void* value;
        int type;
        if (!worked(NULL, TRITONBACKEND_RequestParameter(request, i, &key, &type, &value))) return -1;
        has_run |= strcmp(key, "rsrv_run") == 0;
        if (strcmp(key, "rsrv_device") != 0) continue;
        if (type == PARAMETER_INT) device = *(const int64_t*)value;
        if (type == PARAMETER_STRING) device = strtol(value, NULL, 10);
    }
    return has_run && device >= 0 ? device : -1;
}

bool request_read(struct pending* one, struct interface* model) {
    interface_hold(model);
    interface_drop(one->interface);
    one->interface = model;
    if (model->traced && !one->trace) one->trace = trace_begin(one->request);
    if (!request_read_parameters(one)) return false;
    TRITONBACKEND_Input** inputs = calloc(model->input_count, sizeof *inputs);
    struct shape* shapes = calloc(model->input_count, sizeof *shapes);
    bool read = inputs && shapes;
    if (!read) request_fail(one, QUEUE_FULL, "the server has no memory for this request; try again later");
    read = read && find_inputs(one, inputs, shapes) && resolve(one, shapes);
    free(inputs);
    free(shapes);
    return read;
}

uint64_t request_input_bytes(const struct pending* one) {
    uint32_t count = 0;
    uint64_t bytes, sum = 0;
    if (!worked(NULL, TRITONBACKEND_RequestInputCount(one->request, &count))) return 0;
    for (uint32_t i = 0; i < count; i++) {
        TRITONBACKEND_Input* input;
        if (!worked(NULL, TRITONBACKEND_RequestInputByIndex(one->request, i, &input)) ||
            !worked(NULL, TRITONBACKEND_InputProperties(input, NULL, NULL, NULL, NULL, &bytes, NULL)))
            break;
        sum += bytes;
    }
    return sum;
}

// --- shared memory --------------------------------------------------------------------------------------------------

static bool write_input(struct pending* one, TRITONBACKEND_Input* input, const struct tensor* tensor, uint8_t* to) {
    uint64_t expected = tensor_bytes(tensor, one->rows), copied = 0, bytes;
    uint32_t buffers = 0;
    if (!worked(one, TRITONBACKEND_InputProperties(input, NULL, NULL, NULL, NULL, NULL, &buffers))) return false;
    for (uint32_t i = 0; i < buffers; i++) {
        const void* buffer;
        int memory = MEMORY_CPU;
        int64_t memory_id = 0;
        if (!worked(one, TRITONBACKEND_InputBuffer(input, i, &buffer, &bytes, &memory, &memory_id))) return false;
        if (memory != MEMORY_CPU && memory != MEMORY_CPU_PINNED) {
            request_fail(one, INVALID, "input '%s' is in a GPU's memory, and the native front reads the host's", tensor->name);
            return false;
        }
        if (bytes > expected - copied) break;
        memcpy(to + copied, buffer, bytes);
        copied += bytes;
    }
    if (copied == expected) return true;
    request_fail(one, INVALID, "input '%s' has another size than its shape says", tensor->name);
    return false;
}

void request_write(struct pending* one) {
    const struct interface* model = one->interface;
    const struct tensor* tensors = model->variants[one->variant].inputs;
    uint8_t* at = one->place.memory;
    uint32_t count = 0;
    if (!worked(one, TRITONBACKEND_RequestInputCount(one->request, &count))) return;
    for (uint32_t i = 0; i < model->input_count; i++) {
        TRITONBACKEND_Input* input = NULL;
        const char* name = "";
        for (uint32_t k = 0; k < count && strcmp(name, tensors[i].name) != 0; k++)
            if (!worked(one, TRITONBACKEND_RequestInputByIndex(one->request, k, &input)) ||
                !worked(one, TRITONBACKEND_InputProperties(input, &name, NULL, NULL, NULL, NULL, NULL)))
                return;
        if (!write_input(one, input, &tensors[i], at)) return;
        at += aligned(tensor_bytes(&tensors[i], one->rows));
    }
    // The runtime sets it when it gives the request to its device.
    if (one->output_bytes) one->place.memory[one->input_bytes] = 0;
}

bool request_launched(const struct pending* one) {
    return one->output_bytes == 0 || one->place.memory[one->input_bytes] != 0;
}

void request_submission(const struct pending* one, uint8_t entry[ENTRY_BYTES]) {
    memset(entry, 0, ENTRY_BYTES);
    put_u64(entry, one->id);
    put_u64(entry + 8, (uint64_t)one->deadline_ns);
    put_u32(entry + 16, one->rows);
    put_u16(entry + 20, (uint16_t)one->variant);
    put_u16(entry + 22, one->priority);
    put_u32(entry + 24, one->place.segment);
    put_u32(entry + 28, (one->deaths ? ALONE : 0) | (one->retry_until_ns ? WAITED : 0));
    put_u64(entry + 32, one->place.offset);
    put_u64(entry + 40, one->place.offset + one->input_bytes);
    put_u64(entry + 48, one->run);
    put_u64(entry + 56, one->tag);
    // entry + 64, the sequence, stays 0: stateful models have a Python front.
}

// --- the answer -----------------------------------------------------------------------------------------------------

static bool is_wanted(struct pending* one, const char* name) {
    uint32_t count = 0;
    const char* wanted;
    if (!worked(one, TRITONBACKEND_RequestOutputCount(one->request, &count))) return false;
    for (uint32_t i = 0; i < count; i++) {
        if (!worked(one, TRITONBACKEND_RequestOutputName(one->request, i, &wanted))) return false;
        if (strcmp(wanted, name) == 0) return true;
    }
    return false;
}

static bool add_output(struct pending* one, TRITONBACKEND_Response* response, const struct tensor* tensor, const uint8_t* from) {
    int64_t shape[MAX_RANK + 1];
    uint32_t rank = tensor->rank;
    uint64_t bytes = tensor_bytes(tensor, one->rows);
    TRITONBACKEND_Output* output;
    void* buffer;
    int memory = MEMORY_CPU;
    int64_t memory_id = 0;
    memcpy(shape, tensor->dims, rank * sizeof *shape);
    if (tensor->batch_axis >= 0) shape[tensor->batch_axis] = one->rows;
    if (rank == (one->interface->batched ? 1u : 0u)) shape[rank++] = 1;  // as config.pbtxt has it
    if (!worked(one, TRITONBACKEND_ResponseOutput(response, &output, tensor->name, tensor->type, shape, rank)) ||
        !worked(one, TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &memory_id)))
        return false;
    if (memory != MEMORY_CPU && memory != MEMORY_CPU_PINNED) {
        request_fail(one, INVALID, "output '%s' is wanted in a GPU's memory, and the native front writes the host's", tensor->name);
        return false;
    }
    if (bytes) memcpy(buffer, from, bytes);
    return true;
}

// Makes the response of a request that the runtime has answered. NULL: it has failed since.
static TRITONBACKEND_Response* make_response(struct pending* one) {
    const struct interface* model = one->interface;
    const struct tensor* tensors = model->variants[one->variant].outputs;
    TRITONBACKEND_Response* response;
    if (!worked(one, TRITONBACKEND_ResponseNew(&response, one->request))) return NULL;
    for (uint32_t i = 0; i < model->output_count; i++) {
        const uint8_t* from = one->place.memory + one->input_bytes;
        if (!is_wanted(one, model->client_outputs[i].name)) {
            if (one->status == OK) continue;
        } else {
            for (uint32_t k = 0; k < model->output_of[i]; k++) from += aligned(tensor_bytes(&tensors[k], one->rows));
            if (add_output(one, response, &tensors[model->output_of[i]], from)) continue;
        }
        worked(NULL, TRITONBACKEND_ResponseDelete(response));
        return NULL;
    }
    return response;
}

static void log_failure(struct pending* one, struct link* link, const char* text) {
    uint32_t left_out = 0;
    const char* id = "";
    struct text line;
    if (!link_logs(link, one->status, &left_out)) return;
    worked(NULL, TRITONBACKEND_RequestId(one->request, &id));
    text_clear(&line);
    text_add_quoted(&line, id, MAX_ID);
    bool is_clients = one->status == INVALID || one->status == NOT_FOUND || one->status == CANCELLED;
    int level = one->status == INTERNAL ? LOG_ERROR : is_clients ? LOG_INFO : LOG_WARN;
    if (left_out)
        log_line(level, link_model(link), "request %s: %s: %.500s (%u more since the last such line)", line.bytes,
                 status_name(one->status), text, left_out);
    else
        log_line(level, link_model(link), "request %s: %s: %.500s", line.bytes, status_name(one->status), text);
}

void request_answer(struct pending* one, struct link* link) {
    if (!one->request) return;
    int64_t done_ns = now_ns();
    TRITONBACKEND_Response* response = one->status == OK ? make_response(one) : NULL;
    TRITONSERVER_Error* error = NULL;
    if (one->status != OK) {
        const char* text = one->failure ? one->failure->bytes : "the server has no memory";
        struct text message;
        text_clear(&message);
        // A sub-call comes through Triton, which makes every code INTERNAL.
        if (STATUS[one->status].tagged || one->run) text_add(&message, "[rsrv:%s] ", status_name(one->status));
        text_add_bytes(&message, text, strlen(text));
        error = TRITONSERVER_ErrorNew(STATUS[one->status].code, message.bytes);
        log_failure(one, link, text);
        if (!worked(NULL, TRITONBACKEND_ResponseNew(&response, one->request))) response = NULL;
    }
    if (one->trace && one->interface) trace_end(link, one);
    if (one->suspect) resubmission_ended(link, one);
    // Before the answer: its client may ask for the figures.
    link_measure(link, one->status, one->begun_ns);
    if (response) worked(NULL, TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error));
    if (error) TRITONSERVER_ErrorDelete(error);
    int64_t sent_ns = one->sent_ns ? one->sent_ns : one->begun_ns;
    worked(NULL, TRITONBACKEND_ModelInstanceReportStatistics(one->instance, one->request, one->status == OK,
                                                             (uint64_t)one->begun_ns, (uint64_t)sent_ns, (uint64_t)done_ns,
                                                             (uint64_t)now_ns()));
    // Triton may unload the model from here on.
    TRITONBACKEND_Request* request = one->request;
    one->request = NULL;
    worked(NULL, TRITONBACKEND_RequestRelease(request, RELEASE_ALL));
}

void request_free(struct pending* one) {
    interface_drop(one->interface);
    free(one->failure);
    free(one->trace);
    free(one);
}
