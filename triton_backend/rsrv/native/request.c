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
#define MAX_KEY 80

// --- failures -------------------------------------------------------------------------------------------------------

static const struct { const char* name; int code; bool tagged; } STATUS[STATUSES] = {STATUS_ROWS};

const char* status_name(enum status status) { return STATUS[status].name; }

void request_fail(struct pending* pending, enum status status, const char* format, ...) {
    char buffer[TEXT_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    pending->status = status;
    if (!pending->failure) pending->failure = malloc(sizeof *pending->failure);
    if (!pending->failure) return;
    text_clear(pending->failure);
    text_add_bytes(pending->failure, buffer, strlen(buffer));
}

static struct text quoted(const char* from, size_t most) {
    struct text text;
    text_clear(&text);
    text_add_quoted(&text, from, most);
    return text;
}

// Returns true if a call of Triton has worked. Otherwise, logs the error, and fails the request if there is one. Triton's
// functions fail only for wrong arguments, or for lack of memory.
static bool worked(struct pending* pending, TRITONSERVER_Error* error) {
    if (!error) return true;
    log_line(LOG_ERROR, NULL, "Triton refuses a call: %s", TRITONSERVER_ErrorMessage(error));
    TRITONSERVER_ErrorDelete(error);
    if (pending) request_fail(pending, INTERNAL, NOT_HANDLED);
    return false;
}

// --- parameters -----------------------------------------------------------------------------------------------------

// Adds the shortest digits that read back as the same number, as Python does.
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

// Reads an integer from 0 to `most`, or any integer if `first` is negative. `first` and `last` are the limits in the text of an
// error.
static bool read_integer(struct pending* pending, const char* key, int type, const void* value, const char* first,
                         const char* last, int64_t most, int64_t* number) {
    *number = type == PARAMETER_INT ? *(const int64_t*)value : -1;
    if (type == PARAMETER_INT && (*first == '-' || (*number >= 0 && *number <= most))) return true;
    struct text got;
    text_clear(&got);
    add_value(&got, type, value);
    request_fail(pending, INVALID, NO_INTEGER, key, first, last, got.bytes);
    return false;
}

static bool read_run(struct pending* pending, int type, const void* value) {
    char digits[24] = "";
    if (type == PARAMETER_STRING)
        snprintf(digits, sizeof digits, "%s", (const char*)value);
    else if (type == PARAMETER_INT)
        snprintf(digits, sizeof digits, "%" PRId64, *(const int64_t*)value);
    size_t length = strspn(digits, "0123456789");
    unsigned __int128 number = 0;
    for (size_t i = 0; i < length; i++) number = number * 10 + (unsigned)(digits[i] - '0');
    pending->run = (uint64_t)number;
    if (length > 0 && length <= 20 && digits[length] == 0 && number <= UINT64_MAX) return true;
    request_fail(pending, INVALID, NO_RUN, "rsrv_run");
    return false;
}

// Sets the deadline to `ns` of CLOCK_MONOTONIC, unless there is an earlier one.
static void limit_to(struct pending* pending, __int128 ns) {
    int64_t latest = ns > INT64_MAX ? INT64_MAX : ns < 1 ? 1 : (int64_t)ns;
    if (pending->deadline_ns == 0 || latest < pending->deadline_ns) pending->deadline_ns = latest;
}

static bool read_parameter(struct pending* pending, const char* key, int type, const void* value) {
    int64_t number;
    if (!is_utf8(key) || (type == PARAMETER_STRING && !is_utf8(value))) {
        request_fail(pending, INVALID, NOT_UTF8);
        return false;
    }
    if (strcmp(key, "rsrv_run") == 0) return read_run(pending, type, value);
    if (strcmp(key, "rsrv_priority") == 0) {
        if (!read_integer(pending, key, type, value, "0", "65534", 65534, &number)) return false;
        pending->priority = (uint16_t)number;
    } else if (strcmp(key, "rsrv_deadline_unix_ns") == 0) {
        struct timespec now;
        if (!read_integer(pending, key, type, value, "0", "9223372036854775807", INT64_MAX, &number)) return false;
        // Convert the deadline now, because the machine's calendar time may be changed later.
        clock_gettime(CLOCK_REALTIME, &now);
        if (number) limit_to(pending, (__int128)number - (now.tv_sec * NS_PER_S + now.tv_nsec) + pending->begun_ns);
    } else if (strcmp(key, "reactant_timeout_ns") == 0) {
        if (!read_integer(pending, key, type, value, "-9223372036854775808", "9223372036854775807", INT64_MAX, &number))
            return false;
        if (number > 0) limit_to(pending, (__int128)pending->begun_ns + number);
    } else if (strncmp(key, "rsrv_", 5) == 0 && strcmp(key, "rsrv_device") != 0 && strcmp(key, "rsrv_sticky") != 0) {
        request_fail(pending, INVALID, UNKNOWN_PARAMETER, quoted(key, MAX_KEY).bytes);
        return false;
    }
    return true;
}

bool request_read_parameters(struct pending* pending) {
    if (pending->read) return true;
    pending->read = true;
    uint32_t count = 0;
    uint64_t timeout_us = 0;
    const char* id = "";
    if (!worked(pending, TRITONBACKEND_RequestId(pending->request, &id)) ||
        !worked(pending, TRITONBACKEND_InferenceRequestTimeoutMicroseconds(pending->request, &timeout_us)) ||
        !worked(pending, TRITONBACKEND_RequestParameterCount(pending->request, &count)))
        return false;
    if (!is_utf8(id)) {
        request_fail(pending, INVALID, NOT_UTF8);
        return false;
    }
    pending->tag = request_tag(id);
    if (timeout_us) limit_to(pending, (__int128)pending->begun_ns + (__int128)timeout_us * 1000);
    for (uint32_t i = 0; i < count; i++) {
        const char* key;
        const void* value;
        int type;
        if (!worked(pending, TRITONBACKEND_RequestParameter(pending->request, i, &key, &type, &value))) return false;
        if (!read_parameter(pending, key, type, value)) return false;
    }
    return true;
}

// --- shapes ---------------------------------------------------------------------------------------------------------

struct shape {
    const int64_t* dims;
    uint32_t rank;
};

// Returns true if a shape fits a tensor. `find_length` has checked the padded axis.
static bool fits(const struct tensor* tensor, struct shape shape) {
    if (tensor->rank != shape.rank) return false;
    for (uint32_t i = 0; i < tensor->rank; i++)
        if (tensor->dims[i] != -1 && (int32_t)i != tensor->padded_axis && tensor->dims[i] != shape.dims[i]) return false;
    return true;
}

static void add_dims(struct text* text, const int64_t* dims, uint32_t rank) {
    text_add(text, "[");
    for (uint32_t i = 0; i < rank; i++) text_add(text, "%s%" PRId64, i ? ", " : "", dims[i]);
    text_add(text, "]");
}

static void fail_shape(struct pending* pending, const char* name, const struct tensor* tensor, int axis, struct shape shape) {
    struct text expected, got;
    char batch[sizeof BATCH_AXIS + 12] = "";
    text_clear(&expected);
    add_dims(&expected, tensor->dims, tensor->rank);
    text_clear(&got);
    add_dims(&got, shape.dims, shape.rank);
    if (axis >= 0) snprintf(batch, sizeof batch, BATCH_AXIS, axis);
    request_fail(pending, INVALID, WRONG_SHAPE, quoted(name, TEXT_BYTES).bytes, expected.bytes, batch, got.bytes);
}

static void fail_variants(struct pending* pending, const struct interface* model, const struct shape* shapes) {
    const struct tensor* first = model->variants[0].inputs;
    if (model->variant_count == 1) {
        for (uint32_t i = 0; i < model->input_count; i++)
            if (!fits(&first[i], shapes[i])) {
                fail_shape(pending, first[i].name, &first[i], first[i].batch_axis, shapes[i]);
                return;
            }
    }
    struct text got, compiled;
    text_clear(&got);
    for (uint32_t i = 0; i < model->input_count; i++) {
        text_add(&got, "%s%s ", i ? ", " : "", first[i].name);
        add_dims(&got, shapes[i].dims, shapes[i].rank);
    }
    text_clear(&compiled);
    for (uint32_t v = 0; v < model->variant_count; v++)
        for (uint32_t i = 0; i < model->input_count; i++) {
            const struct tensor* tensor = &model->variants[v].inputs[i];
            text_add(&compiled, "%s%s ", i ? ", " : v ? "; " : "", tensor->name);
            add_dims(&compiled, tensor->dims, tensor->rank);
        }
    request_fail(pending, INVALID, NO_VARIANT, got.bytes, compiled.bytes);
}

static bool check_rows(struct pending* pending, const struct interface* model, const struct variant* variant, int64_t rows) {
    uint32_t largest = variant->sizes[variant->size_count - 1];
    bool compiled = false;
    for (uint32_t i = 0; i < variant->size_count; i++) compiled |= variant->sizes[i] == rows;
    // Triton limits the rows of a request only if it batches the model.
    if (rows <= largest ? compiled || !model->exact : model->batched && !model->exact && !pending->large) return true;
    struct text sizes;
    text_clear(&sizes);
    for (uint32_t i = 0; i < variant->size_count; i++)
        text_add(&sizes, "%s%" PRIu32, i ? ", " : "", variant->sizes[i]);
    request_fail(pending, INVALID, rows > largest ? TOO_MANY_ROWS : OTHER_SIZE, rows, sizes.bytes);
    return false;
}

// Sets the length of a request along the padded axis; 0 if there is none.
static bool find_length(struct pending* pending, const struct shape* shapes) {
    const struct interface* model = pending->interface;
    const struct tensor* inputs = model->variants[0].inputs;
    int64_t longest = model->variants[model->variant_count - 1].length, least = INT64_MAX, most = -1;
    pending->length = 0;
    if (!longest) return true;
    for (uint32_t i = 0; i < model->input_count; i++) {
        if (inputs[i].padded_axis < 0 || inputs[i].padded_axis >= (int32_t)shapes[i].rank) continue;
        int64_t length = shapes[i].dims[inputs[i].padded_axis];
        least = length < least ? length : least;
        most = length > most ? length : most;
    }
    if (least == most && most > 0 && most <= longest) {
        pending->length = (uint32_t)most;
        return true;
    }
    struct text lengths;
    text_clear(&lengths);
    add_dims(&lengths, (const int64_t[]){least, most}, least < most ? 2 : 1);
    request_fail(pending, INVALID, WRONG_LENGTH, lengths.bytes, (long)longest);
    return false;
}

// Sets the variant and the number of rows, which is the extent of the batch axes; 1 if there is none.
static bool resolve(struct pending* pending, const struct shape* shapes) {
    const struct interface* model = pending->interface;
    if (!find_length(pending, shapes)) return false;
    for (uint32_t v = 0; v < model->variant_count; v++) {
        const struct variant* variant = &model->variants[v];
        if (variant->length < pending->length) continue;
        int64_t rows = -1, least = -1, most = -1;
        uint32_t i = 0;
        while (i < model->input_count && fits(&variant->inputs[i], shapes[i])) i++;
        if (i < model->input_count) continue;
        for (i = 0; i < model->input_count; i++) {
            if (variant->inputs[i].batch_axis < 0) continue;
            rows = shapes[i].dims[variant->inputs[i].batch_axis];
            least = least < 0 || rows < least ? rows : least;
            most = rows > most ? rows : most;
        }
        if (least != most) {
            struct text counts;
            text_clear(&counts);
            add_dims(&counts, (const int64_t[]){least, most}, 2);
            request_fail(pending, INVALID, ROWS_DIFFER, counts.bytes);
            return false;
        }
        rows = pending->large ? pending->rows : rows < 0 ? 1 : rows;
        if (!check_rows(pending, model, variant, rows)) return false;
        pending->variant = v;
        pending->rows = (uint32_t)rows;
        pending->input_bytes = block_bytes(variant->inputs, model->input_count, (uint64_t)rows, pending->length);
        pending->output_bytes = block_bytes(variant->outputs, model->output_count, (uint64_t)rows, pending->length);
        return true;
    }
    fail_variants(pending, model, shapes);
    return false;
}

// Finds the client's tensor for each of the module's inputs, and its shape. False: the request has failed.
static bool find_inputs(struct pending* pending, TRITONBACKEND_Input** found, struct shape* shapes) {
    const struct interface* model = pending->interface;
    uint32_t count = 0;
    if (!worked(pending, TRITONBACKEND_RequestInputCount(pending->request, &count))) return false;
    for (uint32_t i = 0; i < count; i++) {
        TRITONBACKEND_Input* input;
        const char* name;
        struct shape shape;
        int type;
        uint32_t at = 0;
        if (!worked(pending, TRITONBACKEND_RequestInputByIndex(pending->request, i, &input)) ||
            !worked(pending, TRITONBACKEND_InputProperties(input, &name, &type, &shape.dims, &shape.rank, NULL, NULL)))
            return false;
        while (at < model->input_count && strcmp(name, model->variants[0].inputs[at].name) != 0) at++;
        if (at == model->input_count) {
            request_fail(pending, INVALID, UNKNOWN_INPUT);
            return false;
        }
        const struct tensor* expected = &model->client_inputs[model->input_of[at]];
        // In Triton, a tensor needs an axis after the batch axis, so [N] is sent as [N, 1].
        if (shape.rank == expected->rank + 1 && shape.dims[shape.rank - 1] == 1) shape.rank--;
        if (shape.rank != expected->rank) {
            fail_shape(pending, name, expected, -1, shape);
            return false;
        }
        if (type != expected->type) {
            request_fail(pending, INVALID, THE_REQUEST "has input %s with another type than the model's",
                         quoted(name, TEXT_BYTES).bytes);
            return false;
        }
        found[at] = input;
        shapes[at] = shape;
    }
    for (uint32_t i = 0; i < model->input_count; i++)
        if (!found[i]) {
            request_fail(pending, INVALID, THE_REQUEST NO_INPUT, quoted(model->variants[0].inputs[i].name, TEXT_BYTES).bytes);
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

bool request_read(struct pending* pending, struct interface* model) {
    interface_hold(model);
    interface_drop(pending->interface);
    pending->interface = model;
    if (model->traced && !pending->trace) pending->trace = trace_begin(pending->request);
    if (!request_read_parameters(pending)) return false;
    TRITONBACKEND_Input** inputs = calloc(model->input_count, sizeof *inputs);
    struct shape* shapes = calloc(model->input_count, sizeof *shapes);
    bool read = inputs && shapes;
    if (!read) request_fail(pending, QUEUE_FULL, NO_MEMORY);
    read = read && find_inputs(pending, inputs, shapes) && resolve(pending, shapes);
    free(inputs);
    free(shapes);
    return read;
}

bool request_is_large(const struct pending* pending) {
    const struct variant* variant = &pending->interface->variants[pending->variant];
    return pending->rows > variant->sizes[variant->size_count - 1];
}

uint64_t request_input_bytes(const struct pending* pending) {
    if (pending->large) return pending->input_bytes;
    uint32_t count = 0;
    uint64_t bytes, sum = 0;
    if (!worked(NULL, TRITONBACKEND_RequestInputCount(pending->request, &count))) return 0;
    for (uint32_t i = 0; i < count; i++) {
        TRITONBACKEND_Input* input;
        if (!worked(NULL, TRITONBACKEND_RequestInputByIndex(pending->request, i, &input)) ||
            !worked(NULL, TRITONBACKEND_InputProperties(input, NULL, NULL, NULL, NULL, &bytes, NULL)))
            break;
        sum += bytes;
    }
    return sum;
}

// --- shared memory --------------------------------------------------------------------------------------------------

static bool write_input(struct pending* pending, TRITONBACKEND_Input* input, const struct tensor* tensor, uint8_t* to) {
    uint64_t expected = tensor_bytes(tensor, pending->rows, pending->length), copied = 0, bytes;
    // Skip the rows before a part. All tensors of a request with parts have a batch axis.
    uint64_t before = pending->large ? tensor_bytes(tensor, pending->first, pending->length) : 0;
    uint32_t buffers = 0;
    if (!worked(pending, TRITONBACKEND_InputProperties(input, NULL, NULL, NULL, NULL, NULL, &buffers))) return false;
    for (uint32_t i = 0; i < buffers; i++) {
        const void* buffer;
        int memory = MEMORY_CPU;
        int64_t memory_id = 0;
        if (!worked(pending, TRITONBACKEND_InputBuffer(input, i, &buffer, &bytes, &memory, &memory_id))) return false;
        if (memory != MEMORY_CPU && memory != MEMORY_CPU_PINNED) {
            request_fail(
                pending, INVALID, "input '%s' is in a GPU's memory, but the native front reads host memory only", tensor->name);
            return false;
        }
        uint64_t skipped = bytes < before ? bytes : before;
        before -= skipped;
        bytes -= skipped;
        if (bytes > expected - copied) {
            if (!pending->large) break;
            bytes = expected - copied;
        }
        memcpy(to + copied, (const uint8_t*)buffer + skipped, bytes);
        copied += bytes;
    }
    if (copied == expected) return true;
    request_fail(pending, INVALID, "the size of input '%s' does not match its shape", tensor->name);
    return false;
}

void request_write(struct pending* pending) {
    const struct interface* model = pending->interface;
    const struct tensor* tensors = model->variants[pending->variant].inputs;
    uint8_t* at = pending->place.memory;
    uint32_t count = 0;
    if (!worked(pending, TRITONBACKEND_RequestInputCount(pending->request, &count))) return;
    for (uint32_t i = 0; i < model->input_count; i++) {
        TRITONBACKEND_Input* input = NULL;
        const char* name = "";
        for (uint32_t k = 0; k < count && strcmp(name, tensors[i].name) != 0; k++)
            if (!worked(pending, TRITONBACKEND_RequestInputByIndex(pending->request, k, &input)) ||
                !worked(pending, TRITONBACKEND_InputProperties(input, &name, NULL, NULL, NULL, NULL, NULL)))
                return;
        if (!write_input(pending, input, &tensors[i], at)) return;
        uint64_t bytes = tensor_bytes(&tensors[i], pending->rows, pending->length);
        memset(at + bytes, 0, aligned(bytes) - bytes);  // request_digest reads these bytes
        at += aligned(bytes);
    }
    // The runtime sets this byte when it gives the request to its device.
    if (pending->output_bytes) pending->place.memory[pending->input_bytes] = 0;
}

bool request_launched(const struct pending* pending) {
    return pending->output_bytes == 0 || pending->place.memory[pending->input_bytes] != 0;
}

void request_digest(const struct pending* pending, uint8_t digest[DIGEST_BYTES]) {
    uint64_t shape = (uint64_t)(pending->length ? pending->length : pending->variant) << 32 | pending->rows, head;
    digest_bytes(pending->place.memory, pending->input_bytes, digest, DIGEST_BYTES);
    memcpy(&head, digest, sizeof head);
    head ^= shape;
    memcpy(digest, &head, sizeof head);
}

void request_submission(const struct pending* pending, uint8_t entry[SUBMISSION_BYTES]) {
    memset(entry, 0, SUBMISSION_BYTES);
    put_u64(entry, pending->id);
    put_u64(entry + 8, (uint64_t)pending->deadline_ns);
    put_u32(entry + 16, pending->rows);
    put_u16(entry + 20, (uint16_t)pending->variant);
    put_u16(entry + 22, pending->priority);
    put_u32(entry + 24, pending->place.segment);
    put_u32(entry + 28, (pending->deaths ? ALONE : 0) | (pending->retry_until_ns || pending->admitted ? WAITED : 0));
    put_u64(entry + 32, pending->place.offset);
    put_u64(entry + 40, pending->place.offset + pending->input_bytes);
    put_u64(entry + 48, pending->run);
    put_u64(entry + 56, pending->tag);
    put_u64(entry + 64, pending->whole);  // this is never a sequence, because stateful models have the Python front
    put_u64(entry + 72, pending->length);
}

// --- the answer -----------------------------------------------------------------------------------------------------

// Returns the place in shared memory where the runtime has written the client's output `index`.
static const uint8_t* output_at(const struct pending* pending, uint32_t index) {
    const struct tensor* tensors = pending->interface->variants[pending->variant].outputs;
    const uint8_t* at = pending->place.memory + pending->input_bytes;
    for (uint32_t k = 0; k < pending->interface->output_of[index]; k++)
        at += aligned(tensor_bytes(&tensors[k], pending->rows, pending->length));
    return at;
}

static bool is_wanted(struct pending* pending, const char* name) {
    uint32_t count = 0;
    const char* wanted;
    if (!worked(pending, TRITONBACKEND_RequestOutputCount(pending->request, &count))) return false;
    for (uint32_t i = 0; i < count; i++) {
        if (!worked(pending, TRITONBACKEND_RequestOutputName(pending->request, i, &wanted))) return false;
        if (strcmp(wanted, name) == 0) return true;
    }
    return false;
}

// Adds an output to the response. NULL: the request has failed.
static uint8_t* add_output(struct pending* pending, TRITONBACKEND_Response* response, const struct tensor* tensor) {
    int64_t shape[MAX_RANK + 1];
    uint32_t rank = tensor->rank;
    uint64_t bytes = tensor_bytes(tensor, pending->rows, pending->length);
    TRITONBACKEND_Output* output;
    void* buffer;
    int memory = MEMORY_CPU;
    int64_t memory_id = 0;
    memcpy(shape, tensor->dims, rank * sizeof *shape);
    if (tensor->batch_axis >= 0) shape[tensor->batch_axis] = pending->rows;
    if (tensor->padded_axis >= 0) shape[tensor->padded_axis] = pending->length;
    if (rank == (pending->interface->batched ? 1u : 0u)) shape[rank++] = 1;  // config.pbtxt has the same axis
    if (!worked(pending, TRITONBACKEND_ResponseOutput(response, &output, tensor->name, tensor->type, shape, rank)) ||
        !worked(pending, TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &memory_id)))
        return NULL;
    if (memory != MEMORY_CPU && memory != MEMORY_CPU_PINNED) {
        request_fail(
            pending, INVALID, "output '%s' is requested in a GPU's memory, but the native front writes to host memory only",
            tensor->name);
        return NULL;
    }
    // Triton has no buffer for an output without elements.
    static uint8_t nothing;
    return bytes ? buffer : &nothing;
}

// Makes the response of a request. If `buffers` is NULL, copies the outputs from shared memory into it. Otherwise, sets the
// buffer of each output that the client wants. NULL: the request has failed.
static TRITONBACKEND_Response* make_response(struct pending* pending, uint8_t** buffers) {
    const struct interface* model = pending->interface;
    const struct tensor* tensors = model->variants[pending->variant].outputs;
    TRITONBACKEND_Response* response;
    if (!worked(pending, TRITONBACKEND_ResponseNew(&response, pending->request))) return NULL;
    for (uint32_t i = 0; i < model->output_count; i++) {
        const struct tensor* tensor = &tensors[model->output_of[i]];
        uint8_t* to = NULL;
        if (is_wanted(pending, model->client_outputs[i].name)) to = add_output(pending, response, tensor);
        if (pending->status != OK) {
            worked(NULL, TRITONBACKEND_ResponseDelete(response));
            return NULL;
        }
        if (buffers)
            buffers[i] = to;
        else if (to)
            memcpy(to, output_at(pending, i), tensor_bytes(tensor, pending->rows, pending->length));
    }
    return response;
}

bool request_open_response(struct pending* pending, uint8_t** buffers) {
    pending->response = make_response(pending, buffers);
    if (!pending->response && pending->status == OK) request_fail(pending, INTERNAL, NOT_HANDLED);
    return pending->response;
}

void request_copy_outputs(const struct pending* part, uint8_t* const* buffers) {
    const struct interface* model = part->interface;
    for (uint32_t i = 0; i < model->output_count; i++) {
        const struct tensor* tensor = &model->variants[part->variant].outputs[model->output_of[i]];
        if (!buffers[i]) continue;
        uint64_t before = tensor_bytes(tensor, part->first, part->length), bytes = tensor_bytes(tensor, part->rows, part->length);
        memcpy(buffers[i] + before, output_at(part, i), bytes);
    }
}

static void log_failure(struct pending* pending, struct link* link, const char* text) {
    uint32_t left_out = 0;
    const char* id = "";
    struct text line;
    if (!link_logs(link, pending->status, &left_out)) return;
    worked(NULL, TRITONBACKEND_RequestId(pending->request, &id));
    text_clear(&line);
    text_add(&line, *id ? "request " : NAMELESS);
    if (*id) text_add_quoted(&line, id, MAX_ID);
    bool is_clients = pending->status == INVALID || pending->status == NOT_FOUND || pending->status == CANCELLED;
    int level = pending->status == INTERNAL ? LOG_ERROR : is_clients ? LOG_INFO : LOG_WARN;
    text_add(&line, ": %s: %.500s", status_name(pending->status), text);
    if (left_out) text_add(&line, MORE, left_out);
    log_line(level, link->model, "%s", line.bytes);
}

void request_answer(struct pending* pending, struct link* link) {
    if (!pending->request) return;
    if (pending->suspect) resubmission_ended(link, pending);
    if (pending->large) {
        large_take(pending, link);
        return;
    }
    int64_t done_ns = now_ns();
    TRITONBACKEND_Response* response = pending->response;
    if (pending->status == OK && !response) response = make_response(pending, NULL);
    TRITONSERVER_Error* error = NULL;
    if (pending->status != OK) {
        const char* text = pending->failure ? pending->failure->bytes : NO_MEMORY;
        struct text message;
        text_clear(&message);
        // Triton replaces the code of a failed sub-call by INTERNAL, so the message names the status.
        if (STATUS[pending->status].tagged || pending->run) text_add(&message, "[rsrv:%s] ", status_name(pending->status));
        text_add_bytes(&message, text, strlen(text));
        error = TRITONSERVER_ErrorNew(STATUS[pending->status].code, message.bytes);
        log_failure(pending, link, text);
        if (response) worked(NULL, TRITONBACKEND_ResponseDelete(response));
        if (!worked(NULL, TRITONBACKEND_ResponseNew(&response, pending->request))) response = NULL;
    }
    if (pending->trace && pending->interface) trace_end(link, pending);
    // Measure before the answer is sent, because its client may ask for the figures right after it.
    link_measure(link, pending->status, pending->begun_ns);
    if (response) worked(NULL, TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error));
    if (error) TRITONSERVER_ErrorDelete(error);
    int64_t sent_ns = pending->sent_ns ? pending->sent_ns : pending->begun_ns;
    worked(NULL, TRITONBACKEND_ModelInstanceReportStatistics(pending->instance, pending->request, pending->status == OK,
                                                             (uint64_t)pending->begun_ns, (uint64_t)sent_ns, (uint64_t)done_ns,
                                                             (uint64_t)now_ns()));
    // Once the request is released, Triton may unload the model.
    TRITONBACKEND_Request* request = pending->request;
    pending->request = NULL;
    worked(NULL, TRITONBACKEND_RequestRelease(request, RELEASE_ALL));
}

void request_free(struct pending* pending) {
    interface_drop(pending->interface);
    free(pending->failure);
    free(pending->trace);
    free(pending);
}
