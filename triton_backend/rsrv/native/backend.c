#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "native.h"

#define EXPORT __attribute__((visibility("default")))
#define PATH_BYTES 4096

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

static TRITONSERVER_Error* open_model(TRITONBACKEND_Model* model) {
    const char *name, *location;
    uint64_t version;
    int artifact;
    char folder[PATH_BYTES], bundle[PATH_BYTES + 32], settings[PATH_BYTES + 16];
    struct text why;
    TRITONSERVER_Error* error = TRITONBACKEND_ModelName(model, &name);
    error = error ? error : TRITONBACKEND_ModelVersion(model, &version);
    error = error ? error : TRITONBACKEND_ModelRepository(model, &artifact, &location);
    if (error) return error;
    text_clear(&why);
    size_t length = 0;
    if (*location != '/' && getcwd(folder, PATH_BYTES)) length = strlen(folder);
    int more = snprintf(folder + length, PATH_BYTES - length, "%s%s", length ? "/" : "", location);
    if (artifact != ARTIFACT_FILESYSTEM || more >= (int)(PATH_BYTES - length))
        return TRITONSERVER_ErrorNew(CODE_INTERNAL, "the model's folder is in no file system, or its path is too long");
    for (length = strlen(folder); length > 1 && folder[length - 1] == '/'; length--) folder[length - 1] = 0;
    snprintf(bundle, sizeof bundle, "%s/%lu/bundle", folder, version);
    char* slash = strrchr(folder, '/');
    snprintf(settings, sizeof settings, "%.*s/rsrv.yaml", slash ? (int)(slash - folder) : 1, slash ? folder : ".");
    struct link* link = link_open(name, bundle, settings, &why);
    if (link) return TRITONBACKEND_ModelSetState(model, link);
    struct text text;
    text_clear(&text);
    text_add(&text, "%s: %s", name, why.bytes);
    return TRITONSERVER_ErrorNew(CODE_INTERNAL, text.bytes);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) { return open_model(model); }

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
    void* link = NULL;
    TRITONSERVER_Error* error = TRITONBACKEND_ModelState(model, &link);
    // Triton also ends models that could not be opened.
    if (!error && link) link_close(link);
    return error;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
    TRITONBACKEND_Model* model;
    void* link;
    TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceModel(instance, &model);
    error = error ? error : TRITONBACKEND_ModelState(model, &link);
    return error ? error : TRITONBACKEND_ModelInstanceSetState(instance, link);
}

// Owns the requests from here on, and answers each: an error would leave them to Triton.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count) {
    void* link = NULL;
    uint64_t begun = (uint64_t)now_ns();
    TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &link);
    if (error) return error;
    link_submit(link, instance, requests, count);
    uint64_t ended = (uint64_t)now_ns();
    error = TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, count, begun, begun, ended, ended);
    if (error) TRITONSERVER_ErrorDelete(error);
    return NULL;
}
