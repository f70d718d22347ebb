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
// Input buffers of one tensor are copied one after the other; a tensor's shape is copied when it is checked.

// --- failures -------------------------------------------------------------------------------------------------------

static const struct { const char* name; int code; bool tagged; } STATUS[STATUSES] = {STATUS_ROWS};

const char* status_name(enum status status) { return STATUS[status].name; }

void request_fail(struct pending* one, enum status status, const char* format, ...) {
    char buffer[TEXT_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    one->status = status;
    if (!one->failure) one->failure = malloc(sizeof *one->failure);
    if (!one->failure) return;
    text_clear(one->failure);
    text_add_bytes(one->failure, buffer, strlen(buffer));
}

static struct text quoted(const char* from, size_t most) {
    struct text text;
    text_clear(&text);
    text_add_quoted(&text, from, most);
    return text;
}

// Triton's functions fail only for arguments that are wrong, or for lack of memory.
static bool worked(struct pending* one, TRITONSERVER_Error* error) {
    if (!error) return true;
    log_line(LOG_ERROR, NULL, "Triton refuses a call: %s", TRITONSERVER_ErrorMessage(error));
    TRITONSERVER_ErrorDelete(error);
    if (one) request_fail(one, INTERNAL, NOT_HANDLED);
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

// Reads an integer from `first` to `last`, which are the texts for an error. A negative `first` admits all numbers.
static bool read_integer(struct pending* one, const char* key, int type, const void* value, const char* first,
                         const char* last, int64_t most, int64_t* number) {
    *number = type == PARAMETER_INT ? *(const int64_t*)value : -1;
    if (type == PARAMETER_INT && (*first == '-' || (*number >= 0 && *number <= most))) return true;
    struct text got;
    text_clear(&got);
    add_value(&got, type, value);
    request_fail(one, INVALID, NO_INTEGER, key, first, last, got.bytes);
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
    request_fail(one, INVALID, NO_RUN, "rsrv_run");
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
        request_fail(one, INVALID, NOT_UTF8);
        return false;
    }
    if (strcmp(key, "rsrv_run") == 0) return read_run(one, type, value);
    if (strcmp(key, "rsrv_priority") == 0) {
        if (!read_integer(one, key, type, value, "0", "65534", 65534, &number)) return false;
        one->priority = (uint16_t)number;
    } else if (strcmp(key, "rsrv_deadline_unix_ns") == 0) {
        struct timespec now;
        if (!read_integer(one, key, type, value, "0", "9223372036854775807", INT64_MAX, &number)) return false;
        // A deadline depends on the calendar only here. The calendar may change later.
        clock_gettime(CLOCK_REALTIME, &now);
        if (number) limit_to(one, (__int128)number - (now.tv_sec * NS_PER_S + now.tv_nsec) + one->begun_ns);
    } else if (strcmp(key, "reactant_timeout_ns") == 0) {
        if (!read_integer(one, key, type, value, "-9223372036854775808", "9223372036854775807", INT64_MAX, &number))
            return false;
        if (number > 0) limit_to(one, (__int128)one->begun_ns + number);
    } else if (strncmp(key, "rsrv_", 5) == 0 && strcmp(key, "rsrv_device") != 0 && strcmp(key, "rsrv_sticky") != 0) {
        request_fail(one, INVALID, UNKNOWN_PARAMETER, quoted(key, MAX_KEY).bytes);
        return false;
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
        request_fail(one, INVALID, NOT_UTF8);
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

// The padded axis fits: `find_length` has checked it.
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

static void fail_shape(struct pending* one, const char* name, const struct tensor* tensor, int axis, struct shape shape) {
    struct text expected, got;
    char batch[sizeof BATCH_AXIS + 12] = "";
    text_clear(&expected);
    add_dims(&expected, tensor->dims, tensor->rank);
    text_clear(&got);
    add_dims(&got, shape.dims, shape.rank);
    if (axis >= 0) snprintf(batch, sizeof batch, BATCH_AXIS, axis);
    request_fail(one, INVALID, WRONG_SHAPE, quoted(name, TEXT_BYTES).bytes, expected.bytes, batch, got.bytes);
}

static void fail_variants(struct pending* one, const struct interface* model, const struct shape* shapes) {
    const struct tensor* first = model->variants[0].inputs;
    if (model->variant_count == 1) {
        for (uint32_t i = 0; i < model->input_count; i++)
            if (!fits(&first[i], shapes[i])) {
                fail_shape(one, first[i].name, &first[i], first[i].batch_axis, shapes[i]);
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
    request_fail(one, INVALID, NO_VARIANT, got.bytes, compiled.bytes);
}

static bool check_rows(struct pending* one, const struct interface* model, const struct variant* variant, int64_t rows) {
    uint32_t largest = variant->sizes[variant->size_count - 1];
    bool compiled = false;
    for (uint32_t i = 0; i < variant->size_count; i++) compiled |= variant->sizes[i] == rows;
    // Triton limits the rows of a request only if it batches the model.
    if (rows <= largest ? compiled || !model->exact : model->batched && !model->exact && !one->large) return true;
    struct text sizes;
    text_clear(&sizes);
    for (uint32_t i = 0; i < variant->size_count; i++)
        text_add(&sizes, "%s%" PRIu32, i ? ", " : "", variant->sizes[i]);
    request_fail(one, INVALID, rows > largest ? TOO_MANY_ROWS : OTHER_SIZE, rows, sizes.bytes);
    return false;
}

// Sets the length of a request along the padded axis; 0 if there is none.
static bool find_length(struct pending* one, const struct shape* shapes) {
    const struct interface* model = one->interface;
    const struct tensor* inputs = model->variants[0].inputs;
    int64_t longest = model->variants[model->variant_count - 1].length, least = INT64_MAX, most = -1;
    one->length = 0;
    if (!longest) return true;
    for (uint32_t i = 0; i < model->input_count; i++) {
        if (inputs[i].padded_axis < 0 || inputs[i].padded_axis >= (int32_t)shapes[i].rank) continue;
        int64_t length = shapes[i].dims[inputs[i].padded_axis];
        least = length < least ? length : least;
        most = length > most ? length : most;
    }
    if (least == most && most > 0 && most <= longest) {
        one->length = (uint32_t)most;
        return true;
    }
    struct text lengths;
    text_clear(&lengths);
    add_dims(&lengths, (const int64_t[]){least, most}, least < most ? 2 : 1);
    request_fail(one, INVALID, WRONG_LENGTH, lengths.bytes, (long)longest);
    return false;
}

// Sets the variant and the number of rows, which is the extent of the batch axes; 1 if there is none.
static bool resolve(struct pending* one, const struct shape* shapes) {
    const struct interface* model = one->interface;
    if (!find_length(one, shapes)) return false;
    for (uint32_t v = 0; v < model->variant_count; v++) {
        const struct variant* variant = &model->variants[v];
        if (variant->length < one->length) continue;
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
            request_fail(one, INVALID, ROWS_DIFFER, counts.bytes);
            return false;
        }
        rows = one->large ? one->rows : rows < 0 ? 1 : rows;
        if (!check_rows(one, model, variant, rows)) return false;
        one->variant = v;
        one->rows = (uint32_t)rows;
        one->input_bytes = block_bytes(variant->inputs, model->input_count, (uint64_t)rows, one->length);
        one->output_bytes = block_bytes(variant->outputs, model->output_count, (uint64_t)rows, one->length);
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
            request_fail(one, INVALID, UNKNOWN_INPUT);
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
            request_fail(one, INVALID, THE_REQUEST "has %s with another type", quoted(name, TEXT_BYTES).bytes);
            return false;
        }
        found[at] = input;
        shapes[at] = shape;
    }
    for (uint32_t i = 0; i < model->input_count; i++)
        if (!found[i]) {
            request_fail(one, INVALID, THE_REQUEST NO_INPUT, quoted(model->variants[0].inputs[i].name, TEXT_BYTES).bytes);
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
    if (!read) request_fail(one, QUEUE_FULL, NO_MEMORY);
    read = read && find_inputs(one, inputs, shapes) && resolve(one, shapes);
    free(inputs);
    free(shapes);
    return read;
}

bool request_is_large(const struct pending* one) {
    const struct variant* variant = &one->interface->variants[one->variant];
    return one->rows > variant->sizes[variant->size_count - 1];
}

uint64_t request_input_bytes(const struct pending* one) {
    if (one->large) return one->input_bytes;
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
    uint64_t expected = tensor_bytes(tensor, one->rows, one->length), copied = 0, bytes;
    // Only a part begins behind other rows. All of its tensors have rows.
    uint64_t before = one->large ? tensor_bytes(tensor, one->first, one->length) : 0;
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
        uint64_t skipped = bytes < before ? bytes : before;
        before -= skipped;
        bytes -= skipped;
        if (bytes > expected - copied) {
            if (!one->large) break;
            bytes = expected - copied;
        }
        memcpy(to + copied, (const uint8_t*)buffer + skipped, bytes);
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
        uint64_t bytes = tensor_bytes(&tensors[i], one->rows, one->length);
        memset(at + bytes, 0, aligned(bytes) - bytes);  // for request_digest
        at += aligned(bytes);
    }
    // The runtime sets this byte when it gives the request to its device.
    if (one->output_bytes) one->place.memory[one->input_bytes] = 0;
}

bool request_launched(const struct pending* one) {
    return one->output_bytes == 0 || one->place.memory[one->input_bytes] != 0;
}

void request_digest(const struct pending* one, uint8_t digest[DIGEST_BYTES]) {
    uint64_t shape = (uint64_t)(one->length ? one->length : one->variant) << 32 | one->rows, head;
    digest_bytes(one->place.memory, one->input_bytes, digest, DIGEST_BYTES);
    memcpy(&head, digest, sizeof head);
    head ^= shape;
    memcpy(digest, &head, sizeof head);
}

void request_submission(const struct pending* one, uint8_t entry[SUBMISSION_BYTES]) {
    memset(entry, 0, SUBMISSION_BYTES);
    put_u64(entry, one->id);
    put_u64(entry + 8, (uint64_t)one->deadline_ns);
    put_u32(entry + 16, one->rows);
    put_u16(entry + 20, (uint16_t)one->variant);
    put_u16(entry + 22, one->priority);
    put_u32(entry + 24, one->place.segment);
    put_u32(entry + 28, (one->deaths ? ALONE : 0) | (one->retry_until_ns || one->admitted ? WAITED : 0));
    put_u64(entry + 32, one->place.offset);
    put_u64(entry + 40, one->place.offset + one->input_bytes);
    put_u64(entry + 48, one->run);
    put_u64(entry + 56, one->tag);
    put_u64(entry + 64, one->whole);  // 0: stateful models, whose requests have sequences, have a Python front
    put_u64(entry + 72, one->length);
}

// --- the answer -----------------------------------------------------------------------------------------------------

// Returns where the runtime has left the client's output `index`.
static const uint8_t* output_at(const struct pending* one, uint32_t index) {
    const struct tensor* tensors = one->interface->variants[one->variant].outputs;
    const uint8_t* at = one->place.memory + one->input_bytes;
    for (uint32_t k = 0; k < one->interface->output_of[index]; k++) at += aligned(tensor_bytes(&tensors[k], one->rows, one->length));
    return at;
}

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

// Adds an output to the response. NULL: the request has failed.
static uint8_t* add_output(struct pending* one, TRITONBACKEND_Response* response, const struct tensor* tensor) {
    int64_t shape[MAX_RANK + 1];
    uint32_t rank = tensor->rank;
    uint64_t bytes = tensor_bytes(tensor, one->rows, one->length);
    TRITONBACKEND_Output* output;
    void* buffer;
    int memory = MEMORY_CPU;
    int64_t memory_id = 0;
    memcpy(shape, tensor->dims, rank * sizeof *shape);
    if (tensor->batch_axis >= 0) shape[tensor->batch_axis] = one->rows;
    if (tensor->padded_axis >= 0) shape[tensor->padded_axis] = one->length;
    if (rank == (one->interface->batched ? 1u : 0u)) shape[rank++] = 1;  // the shape that config.pbtxt has
    if (!worked(one, TRITONBACKEND_ResponseOutput(response, &output, tensor->name, tensor->type, shape, rank)) ||
        !worked(one, TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &memory_id)))
        return NULL;
    if (memory != MEMORY_CPU && memory != MEMORY_CPU_PINNED) {
        request_fail(one, INVALID, "output '%s' is wanted in a GPU's memory, and the native front writes the host's", tensor->name);
        return NULL;
    }
    // Triton has no buffer for an output without elements.
    static uint8_t nothing;
    return bytes ? buffer : &nothing;
}

// Makes the response of a request that the runtime has answered, or, by output, only its buffers. NULL: the request has
// failed since.
static TRITONBACKEND_Response* make_response(struct pending* one, uint8_t** buffers) {
    const struct interface* model = one->interface;
    const struct tensor* tensors = model->variants[one->variant].outputs;
    TRITONBACKEND_Response* response;
    if (!worked(one, TRITONBACKEND_ResponseNew(&response, one->request))) return NULL;
    for (uint32_t i = 0; i < model->output_count; i++) {
        const struct tensor* tensor = &tensors[model->output_of[i]];
        uint8_t* to = NULL;
        if (is_wanted(one, model->client_outputs[i].name)) to = add_output(one, response, tensor);
        if (one->status != OK) {
            worked(NULL, TRITONBACKEND_ResponseDelete(response));
            return NULL;
        }
        if (buffers)
            buffers[i] = to;
        else if (to)
            memcpy(to, output_at(one, i), tensor_bytes(tensor, one->rows, one->length));
    }
    return response;
}

bool request_open_response(struct pending* one, uint8_t** buffers) {
    one->response = make_response(one, buffers);
    if (!one->response && one->status == OK) request_fail(one, INTERNAL, NOT_HANDLED);
    return one->response;
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

static void log_failure(struct pending* one, struct link* link, const char* text) {
    uint32_t left_out = 0;
    const char* id = "";
    struct text line;
    if (!link_logs(link, one->status, &left_out)) return;
    worked(NULL, TRITONBACKEND_RequestId(one->request, &id));
    text_clear(&line);
    text_add(&line, *id ? "request " : NAMELESS);
    if (*id) text_add_quoted(&line, id, MAX_ID);
    bool is_clients = one->status == INVALID || one->status == NOT_FOUND || one->status == CANCELLED;
    int level = one->status == INTERNAL ? LOG_ERROR : is_clients ? LOG_INFO : LOG_WARN;
    text_add(&line, ": %s: %.500s", status_name(one->status), text);
    if (left_out) text_add(&line, MORE, left_out);
    log_line(level, link_model(link), "%s", line.bytes);
}

void request_answer(struct pending* one, struct link* link) {
    if (!one->request) return;
    if (one->suspect) resubmission_ended(link, one);
    if (one->large) {
        large_take(one, link);
        return;
    }
    int64_t done_ns = now_ns();
    TRITONBACKEND_Response* response = one->response;
    if (one->status == OK && !response) response = make_response(one, NULL);
    TRITONSERVER_Error* error = NULL;
    if (one->status != OK) {
        const char* text = one->failure ? one->failure->bytes : NO_MEMORY;
        struct text message;
        text_clear(&message);
        // A sub-call comes through Triton, which makes every code INTERNAL.
        if (STATUS[one->status].tagged || one->run) text_add(&message, "[rsrv:%s] ", status_name(one->status));
        text_add_bytes(&message, text, strlen(text));
        error = TRITONSERVER_ErrorNew(STATUS[one->status].code, message.bytes);
        log_failure(one, link, text);
        if (response) worked(NULL, TRITONBACKEND_ResponseDelete(response));
        if (!worked(NULL, TRITONBACKEND_ResponseNew(&response, one->request))) response = NULL;
    }
    if (one->trace && one->interface) trace_end(link, one);
    // Do this before the answer, because its client may then ask for the figures.
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
