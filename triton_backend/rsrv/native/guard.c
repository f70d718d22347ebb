// The guard of a model with the Python front. Triton shows each waiting request to the guard before it batches the request.
//
// Triton's Python backend reads all requests of an execute() before the model sees any of them. If the backend cannot read
// one request, it fails all of them, and with dynamic batching the other requests belong to other clients. So Triton also
// loads this library as the batching strategy of the model: batchstrategy.so in the model's directory. The guard does not
// change how readable requests are batched. It finds three kinds of unreadable requests:
//
//   - A string is longer than the rest of its tensor. Triton does not check the last string of a tensor. The guard
//     replaces all strings of the tensor by empty strings and adds a parameter. The stub refuses a request with this parameter.
//   - The number of rows is 0 or a multiple of 2^32, and the data are one row. Triton then drops the batch axis, and the
//     backend mistakes the second axis for the rows.
//   - An extent is negative, or the number of elements overflows. The stub would die.
//
// The guard cancels requests of the last two kinds. Triton has no other way to keep them from the backend.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define EXPORT __attribute__((visibility("default")))
// Maximum number of elements of a request's input.
#define MOST_ELEMENTS (1ll << 48)
#define TYPE_BYTES 13

// Triton's entry points. Triton finds them by name, so nothing declares them.
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher**, TRITONBACKEND_Model*);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelBatcherFinalize(TRITONBACKEND_Batcher*);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelBatchInitialize(const TRITONBACKEND_Batcher*, void** batch);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelBatchFinalize(void* batch);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelBatchIncludeRequest(TRITONBACKEND_Request*, void* batch, bool* include);

// A guarded model. The guard gives it to Triton as the model's batcher, and as the state of each batch.
struct guarded {
    uint32_t axes;   // number of axes of all inputs together, including batch axes
    int64_t logged;  // time of the guard's latest line in the log
    char name[256];
};

static uint32_t axes_in(const char* config) {
    static const char key[] = "\"rsrv_axes\":{\"string_value\":\"";
    const char* at = strstr(config, key);
    return at ? (uint32_t)strtoul(at + sizeof key - 1, NULL, 10) : 0;
}

TRITONSERVER_Error* TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher** batcher, TRITONBACKEND_Model* model) {
    const char *name, *json;
    size_t bytes;
    TRITONSERVER_Message* message = NULL;
    TRITONSERVER_Error* error = TRITONBACKEND_ModelName(model, &name);
    error = error ? error : TRITONBACKEND_ModelConfig(model, 1, &message);
    error = error ? error : TRITONSERVER_MessageSerializeToJson(message, &json, &bytes);
    struct guarded* guarded = error ? NULL : calloc(1, sizeof *guarded);
    char* config = error ? NULL : strndup(json, bytes);
    if (!error && (!guarded || !config)) error = TRITONSERVER_ErrorNew(CODE_UNAVAILABLE, "no memory is left to load the model");
    if (!error) {
        guarded->axes = axes_in(config);
        snprintf(guarded->name, sizeof guarded->name, "%s", name);
        if (!guarded->axes)
            error = TRITONSERVER_ErrorNew(CODE_INTERNAL, "config.pbtxt lacks the parameter rsrv_axes; run rsrv-gen again");
    }
    free(config);
    if (message) TRITONSERVER_MessageDelete(message);
    if (error) free(guarded);
    else *batcher = (TRITONBACKEND_Batcher*)guarded;
    return error;
}

TRITONSERVER_Error* TRITONBACKEND_ModelBatcherFinalize(TRITONBACKEND_Batcher* batcher) {
    free(batcher);
    return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelBatchInitialize(const TRITONBACKEND_Batcher* batcher, void** batch) {
    *batch = (void*)(uintptr_t)batcher;
    return NULL;
}

TRITONSERVER_Error* TRITONBACKEND_ModelBatchFinalize(void* batch) {
    (void)batch;
    return NULL;
}

// Return false if a string is longer than the rest of its tensor. Triton has checked the number of strings.
static bool strings_fit(TRITONBACKEND_Input* input, uint32_t buffers) {
    uint64_t missing = 0;  // bytes of the current string that are not read yet
    for (uint32_t index = 0; index < buffers; index++) {
        const void* buffer;
        uint64_t bytes;
        int memory = MEMORY_CPU;
        int64_t memory_id = 0;
        TRITONSERVER_Error* error = TRITONBACKEND_InputBuffer(input, index, &buffer, &bytes, &memory, &memory_id);
        if (error) TRITONSERVER_ErrorDelete(error);
        if (error || (memory != MEMORY_CPU && memory != MEMORY_CPU_PINNED)) return true;  // The strings are on a GPU.
        for (const uint8_t* at = buffer; bytes;) {
            if (!missing) {
                uint32_t length;
                if (bytes < sizeof length) return false;
                memcpy(&length, at, sizeof length);
                at += sizeof length, bytes -= sizeof length, missing = length;
            }
            uint64_t step = missing < bytes ? missing : bytes;
            at += step, bytes -= step, missing -= step;
        }
    }
    return !missing;
}

// Replace the strings of an input by empty strings, and add the parameter that makes the stub refuse the request. Return false
// on errors.
static bool refuse_strings(TRITONSERVER_InferenceRequest* request, const char* input, int64_t strings) {
    static const char zeros[1 << 16];
    TRITONSERVER_Error* error = TRITONSERVER_InferenceRequestRemoveAllInputData(request, input);
    for (uint64_t left = (uint64_t)strings * sizeof(uint32_t); left && !error;) {
        uint64_t bytes = left < sizeof zeros ? left : sizeof zeros;
        error = TRITONSERVER_InferenceRequestAppendInputData(request, input, zeros, bytes, MEMORY_CPU, 0);
        left -= bytes;
    }
    error = error ? error : TRITONSERVER_InferenceRequestSetStringParameter(request, "rsrv_incomplete", input);
    if (error) TRITONSERVER_ErrorDelete(error);
    return !error;
}

// Return the reason why a request must not reach the backend, or NULL.
static const char* fault(TRITONBACKEND_Request* request, const struct guarded* model) {
    uint32_t count = 0, axes = 0;
    TRITONSERVER_Error* error = TRITONBACKEND_RequestInputCount(request, &count);
    for (uint32_t index = 0; index < count && !error; index++) {
        TRITONBACKEND_Input* input;
        const char* name;
        int type;
        const int64_t* shape;
        uint32_t rank, buffers;
        uint64_t bytes;
        error = TRITONBACKEND_RequestInputByIndex(request, index, &input);
        error = error ? error : TRITONBACKEND_InputProperties(input, &name, &type, &shape, &rank, &bytes, &buffers);
        if (error) break;
        int64_t elements = 1;
        bool empty = false;
        for (uint32_t axis = 0; axis < rank; axis++) {
            if (shape[axis] < 0) return "an extent below zero";
            // The product leaves out extents of 0: numpy refuses an empty tensor whose other extents overflow.
            if (shape[axis] > 1 && elements > MOST_ELEMENTS / shape[axis]) return "more elements than a request can have";
            if (shape[axis]) elements *= shape[axis];
            else empty = true;
        }
        axes += rank;
        if (type == TYPE_BYTES && !strings_fit(input, buffers) &&
            !refuse_strings((TRITONSERVER_InferenceRequest*)request, name, empty ? 0 : elements))
            return "a string that is longer than its tensor";
    }
    if (error) TRITONSERVER_ErrorDelete(error);
    return error || axes == model->axes ? NULL : "no rows, or with a multiple of 2^32 rows,";
}

TRITONSERVER_Error* TRITONBACKEND_ModelBatchIncludeRequest(TRITONBACKEND_Request* request, void* batch, bool* include) {
    struct guarded* model = batch;
    const char* why = model ? fault(request, model) : NULL;
    *include = !why;
    if (!why) return NULL;
    TRITONSERVER_Error* error = TRITONSERVER_InferenceRequestCancel((TRITONSERVER_InferenceRequest*)request);
    if (error) TRITONSERVER_ErrorDelete(error);
    int64_t now = now_ns();
    if (!model->logged || now - model->logged > NS_PER_S) {
        model->logged = now;
        log_line(LOG_WARN, model->name, "a request with %s was cancelled: it would have failed other clients' requests", why);
    }
    return NULL;
}
