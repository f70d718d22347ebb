// The part of Triton's C API that this library uses. The server that loads this library has the functions, so no header and no
// library of Triton is needed to build it. Names and values are from tritonbackend.h and tritonserver.h, API 1.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONSERVER_InferenceTrace TRITONSERVER_InferenceTrace;
typedef struct TRITONSERVER_InferenceRequest TRITONSERVER_InferenceRequest;
typedef struct TRITONSERVER_Message TRITONSERVER_Message;
typedef struct TRITONBACKEND_Backend TRITONBACKEND_Backend;
typedef struct TRITONBACKEND_Batcher TRITONBACKEND_Batcher;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
typedef struct TRITONBACKEND_Response TRITONBACKEND_Response;
typedef struct TRITONBACKEND_Input TRITONBACKEND_Input;
typedef struct TRITONBACKEND_Output TRITONBACKEND_Output;

enum {  // TRITONSERVER_Error_Code
    CODE_INTERNAL = 1,
    CODE_NOT_FOUND = 2,
    CODE_INVALID_ARG = 3,
    CODE_UNAVAILABLE = 4,
    CODE_CANCELLED = 7,
};
enum { LOG_INFO = 0, LOG_WARN = 1, LOG_ERROR = 2 };                     // TRITONSERVER_LogLevel
enum { PARAMETER_STRING = 0, PARAMETER_INT = 1, PARAMETER_BOOL = 2, PARAMETER_DOUBLE = 4 };
enum { MEMORY_CPU = 0, MEMORY_CPU_PINNED = 1 };                         // TRITONSERVER_MemoryType
enum { RESPONSE_FINAL = 1, RELEASE_ALL = 1, ARTIFACT_FILESYSTEM = 0 };

TRITONSERVER_Error* TRITONSERVER_ErrorNew(int code, const char* message);
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error*);
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONSERVER_LogMessage(int level, const char* file, int line, const char* message);

TRITONSERVER_Error* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor);
TRITONSERVER_Error* TRITONBACKEND_ModelName(TRITONBACKEND_Model*, const char** name);
TRITONSERVER_Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model*, uint64_t* version);
TRITONSERVER_Error* TRITONBACKEND_ModelRepository(TRITONBACKEND_Model*, int* artifact, const char** location);
TRITONSERVER_Error* TRITONBACKEND_ModelConfig(TRITONBACKEND_Model*, uint32_t version, TRITONSERVER_Message**);
TRITONSERVER_Error* TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message*, const char** base, size_t* bytes);
TRITONSERVER_Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message*);
TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model*, void** state);
TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model*, void* state);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Model**);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance*, void** state);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance*, void* state);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*, bool success, uint64_t begun, uint64_t compute_begun,
    uint64_t compute_ended, uint64_t ended);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance*, uint64_t batch_size, uint64_t begun, uint64_t compute_begun, uint64_t compute_ended,
    uint64_t ended);

TRITONSERVER_Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request*, TRITONSERVER_InferenceTrace**);
TRITONSERVER_Error* TRITONSERVER_InferenceTraceContext(TRITONSERVER_InferenceTrace*, const char** context);
TRITONSERVER_Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request*, const char** id);
TRITONSERVER_Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request*, uint64_t* timeout);
TRITONSERVER_Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request*, uint32_t* count);
TRITONSERVER_Error* TRITONBACKEND_RequestParameter(
    TRITONBACKEND_Request*, uint32_t index, const char** key, int* type, const void** value);
TRITONSERVER_Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request*, bool* cancelled);
TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request*, uint32_t* count);
TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request*, uint32_t index, TRITONBACKEND_Input**);
TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request*, uint32_t* count);
TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request*, uint32_t index, const char** name);
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request*, uint32_t flags);
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input*, const char** name, int* type, const int64_t** shape, uint32_t* rank, uint64_t* bytes,
    uint32_t* buffers);
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input*, uint32_t index, const void** buffer, uint64_t* bytes, int* memory, int64_t* memory_id);
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response**, TRITONBACKEND_Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response*);
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response*, TRITONBACKEND_Output**, const char* name, int type, const int64_t* shape, uint32_t rank);
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output*, void** buffer, uint64_t bytes, int* memory, int64_t* memory_id);
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response*, uint32_t flags, TRITONSERVER_Error*);

// TRITONBACKEND_Request and TRITONSERVER_InferenceRequest are names of the same object in all releases of API 1.
TRITONSERVER_Error* TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest*);
TRITONSERVER_Error* TRITONSERVER_InferenceRequestRemoveAllInputData(TRITONSERVER_InferenceRequest*, const char* name);
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(
    TRITONSERVER_InferenceRequest*, const char* name, const void* base, size_t bytes, int memory, int64_t memory_id);
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetStringParameter(
    TRITONSERVER_InferenceRequest*, const char* key, const char* value);
