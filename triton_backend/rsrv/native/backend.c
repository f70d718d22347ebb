#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "native.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_LOCATION 4096

// Triton's entry points. Triton finds them by name, so nothing declares them.
EXPORT TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model*);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model*);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance*);
EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request**, uint32_t count);

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
    uint32_t major = 0, minor = 0;
    (void)backend;
    TRITONSERVER_Error* error = TRITONBACKEND_ApiVersion(&major, &minor);
    if (error || major == 1) return error;
    return TRITONSERVER_ErrorNew(CODE_INTERNAL, "rsrv's native front is for version 1 of Triton's backend API");
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
    const char *name, *location;
    uint64_t version;
    int artifact;
    char folder[MAX_LOCATION], bundle[MAX_LOCATION + 32], settings[MAX_LOCATION + 16];
    struct text why;
    TRITONSERVER_Error* error = TRITONBACKEND_ModelName(model, &name);
    error = error ? error : TRITONBACKEND_ModelVersion(model, &version);
    error = error ? error : TRITONBACKEND_ModelRepository(model, &artifact, &location);
    if (error) return error;
    text_clear(&why);
    size_t length = 0;
    if (*location != '/' && getcwd(folder, MAX_LOCATION)) length = strlen(folder);
    int more = snprintf(folder + length, MAX_LOCATION - length, "%s%s", length ? "/" : "", location);
    if (artifact != ARTIFACT_FILESYSTEM || more >= (int)(MAX_LOCATION - length))
        return TRITONSERVER_ErrorNew(CODE_INTERNAL, "the model's folder is in no file system, or its path is too long");
    for (length = strlen(folder); length > 1 && folder[length - 1] == '/'; length--) folder[length - 1] = 0;
    snprintf(bundle, sizeof bundle, "%s/%lu/bundle", folder, version);
    char* slash = strrchr(folder, '/');
    snprintf(settings, sizeof settings, "%.*s/rsrv.yaml", slash ? (int)(slash - folder) : 1, slash ? folder : ".");
    struct replicas* replicas = replicas_open(name, bundle, settings, &why);
    if (replicas) return TRITONBACKEND_ModelSetState(model, replicas);
    struct text text;
    text_clear(&text);
    text_add(&text, "%s: %s", name, why.bytes);
    return TRITONSERVER_ErrorNew(CODE_INTERNAL, text.bytes);
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
    void* replicas = NULL;
    TRITONSERVER_Error* error = TRITONBACKEND_ModelState(model, &replicas);
    // Triton also calls this for models that could not be opened. They have no state.
    if (!error && replicas) replicas_close(replicas);
    return error;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
    TRITONBACKEND_Model* model;
    void* replicas;
    TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceModel(instance, &model);
    error = error ? error : TRITONBACKEND_ModelState(model, &replicas);
    return error ? error : TRITONBACKEND_ModelInstanceSetState(instance, replicas);
}

// Takes over the requests once it has the model's state, and answers each one. After that, it returns no error, because an
// error would leave the requests to Triton.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count) {
    void* replicas = NULL;
    uint64_t begun = (uint64_t)now_ns();
    TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &replicas);
    if (error) return error;
    // `count` is 1, because rsrv-gen configures no batcher.
    for (uint32_t i = 0; i < count; i++) replicas_submit(replicas, instance, requests[i]);
    uint64_t ended = (uint64_t)now_ns();
    error = TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, count, begun, begun, ended, ended);
    if (error) TRITONSERVER_ErrorDelete(error);
    return NULL;
}
