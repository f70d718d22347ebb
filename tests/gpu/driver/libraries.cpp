// What XLA and rsrv call of NVIDIA's other libraries: cudart, cuDNN, cuBLAS, cuBLASLt and NVML.
//
// A library's function that is missing here ends in an error of XLA's that names it. Their types are left out: all that
// matters is the size of an argument.
#include "card.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

namespace {

constexpr int CUDART_VERSION = 13050, CUDNN_VERSION = 92800, CUBLAS_VERSION = 130100;

// An opaque object, whose size the caller does not know.
int make_object(void** object) {
    *object = calloc(1, 512);
    return 0;
}

int free_object(void* object) {
    free(object);
    return 0;
}

// Attributes of cuBLASLt's objects have numbers below 64 and at most eight bytes.
int set_attribute(void* object, int attribute, const void* value, size_t bytes) {
    memcpy(static_cast<char*>(object) + 8 * attribute, value, std::min<size_t>(bytes, 8));
    return 0;
}

int get_attribute(void* object, int attribute, void* value, size_t bytes, size_t* written) {
    memcpy(value, static_cast<char*>(object) + 8 * attribute, std::min<size_t>(bytes, 8));
    if (written) *written = bytes;
    return 0;
}

// A function of a library is a kernel of that name.
int launch(const char* name, CUstream stream) {
    CUfunction function;
    cuModuleGetFunction(&function, nullptr, name);
    return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
}

int version_part(int part, int version, int* value) {
    const int parts[] = {version / 10000, version / 100 % 100, version % 100};
    *value = parts[part];
    return 0;
}

}  // namespace

// --- cudart ---------------------------------------------------------------------------------------------------------

API int cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return 0;
}
API int cudaDriverGetVersion(int* version) { return cuDriverGetVersion(version); }
API int cudaGetDeviceCount(int* count) { return cuDeviceGetCount(count); }
API int cudaGetDevice(int* device) {
    *device = 0;
    return 0;
}
API int cudaSetDevice(int) { return 0; }
API int cudaGetLastError() { return 0; }
API int cudaPeekAtLastError() { return 0; }
API const char* cudaGetErrorName(int) { return "cudaErrorUnknown"; }
API const char* cudaGetErrorString(int) { return "an error of the fake driver"; }
API int cudaDeviceSynchronize() { return fault(); }
API int cudaDeviceGetAttribute(int* value, int attribute, int device) {
    return cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device);
}
// XLA's own kernels, compiled by nvcc, register themselves when the library is loaded.
API void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(calloc(8, sizeof(void*))); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API int cudaGetFuncBySymbol(CUfunction* function, const void*) { return cuModuleGetFunction(function, nullptr, "xla"); }
API int cudaFuncSetAttribute(const void*, int, int) { return 0; }
API int cudaFuncGetAttributes(void* attributes, const void*) {
    memset(attributes, 0, 144);
    return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return 0;
}

// --- cuDNN: every graph of operations has one plan, which takes no workspace, and the time of a kernel ---------------------

API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
API size_t cudnnGetMaxDeviceVersion() { return 1200; }
API int cudnnGetProperty(int part, int* value) { return version_part(part, CUDNN_VERSION, value); }
API int cudnnCreate(void** handle) { return make_object(handle); }
API int cudnnSetStream(CUstream* handle, CUstream stream) {
    *handle = stream;
    return 0;
}
API int cudnnDestroy(void*) { return 0; }
API const char* cudnnGetErrorString(int) { return "not supported by the fake cuDNN"; }
API int cudnnBackendCreateDescriptor(int, void** descriptor) { return make_object(descriptor); }
API int cudnnBackendDestroyDescriptor(void* descriptor) { return free_object(descriptor); }
API int cudnnBackendSetAttribute(void*, int, int, int64_t, const void*) { return 0; }
API int cudnnBackendGetAttribute(void*, int attribute, int type, int64_t wanted, int64_t* count, void* values) {
    // One result of the heuristics, one engine and its number 0; no knobs, and no notes about numerics and behaviour.
    constexpr int INT64 = 3, KNOBS = 302, NUMERICS = 1303, BEHAVIOUR = 1305;
    if (count) *count = attribute != KNOBS && attribute != NUMERICS && attribute != BEHAVIOUR;
    if (type == INT64 && wanted) *static_cast<int64_t*>(values) = 0;
    return 0;
}
API int cudnnBackendFinalize(void*) { return 0; }
API int cudnnBackendExecute(CUstream* handle, void*, void*) { return launch("cudnn", *handle); }

// --- cuBLAS and cuBLASLt, which has one algorithm for every product, without a workspace ----------------------------------------------------------------------------------------------

API int cublasCreate_v2(void** handle) { return make_object(handle); }
API int cublasDestroy_v2(void*) { return 0; }
API int cublasSetStream_v2(void*, void*) { return 0; }
API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
API int cublasSetMathMode(void*, int) { return 0; }
API int cublasGetVersion_v2(void*, int* version) {
    *version = CUBLAS_VERSION;
    return 0;
}
API int cublasGetProperty(int part, int* value) { return version_part(part, CUBLAS_VERSION, value); }
API const char* cublasGetStatusString(int) { return "not supported by the fake cuBLAS"; }
API const char* cublasGetStatusName(int) { return "CUBLAS_STATUS_NOT_SUPPORTED"; }
API int cublasLtCreate(void** handle) { return make_object(handle); }
API size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
API size_t cublasLtGetCudartVersion() { return CUDART_VERSION; }
API int cublasLtGetProperty(int part, int* value) { return version_part(part, CUBLAS_VERSION, value); }
API const char* cublasLtGetStatusString(int) { return "not supported by the fake cuBLASLt"; }
API const char* cublasLtGetStatusName(int) { return "CUBLAS_STATUS_NOT_SUPPORTED"; }
API int cublasLtMatmulDescCreate(void** object, int compute, int scale) {
    make_object(object);
    set_attribute(*object, 0, &compute, sizeof compute);
    return set_attribute(*object, 1, &scale, sizeof scale);
}
API int cublasLtMatmulDescSetAttribute(void* object, int attribute, const void* value, size_t bytes) {
    return set_attribute(object, attribute, value, bytes);
}
API int cublasLtMatmulDescGetAttribute(void* object, int attribute, void* value, size_t bytes, size_t* written) {
    return get_attribute(object, attribute, value, bytes, written);
}
API int cublasLtMatmulDescDestroy(void* object) { return free_object(object); }
API int cublasLtMatrixLayoutCreate(void** object, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    make_object(object);
    set_attribute(*object, 0, &type, sizeof type);
    set_attribute(*object, 2, &rows, sizeof rows);
    set_attribute(*object, 3, &columns, sizeof columns);
    return set_attribute(*object, 4, &leading, sizeof leading);
}
API int cublasLtMatrixLayoutSetAttribute(void* object, int attribute, const void* value, size_t bytes) {
    return set_attribute(object, attribute, value, bytes);
}
API int cublasLtMatrixLayoutGetAttribute(void* object, int attribute, void* value, size_t bytes, size_t* written) {
    return get_attribute(object, attribute, value, bytes, written);
}
API int cublasLtMatrixLayoutDestroy(void* object) { return free_object(object); }
API int cublasLtMatmulPreferenceCreate(void** object) { return make_object(object); }
API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulPreferenceDestroy(void* object) { return free_object(object); }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
    memset(results, 0, 96);
    *found = 1;
    return 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                       void*, const void*, void*, size_t, CUstream stream) {
    return launch("cublasLt", stream);
}
API int cublasLtDestroy(void* handle) { return free_object(handle); }

// --- NVML: what rsrv and XLA ask --------------------------------------------------------------------------------------

namespace {

constexpr int NVML_INVALID_ARGUMENT = 2, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7;

struct NvmlProcess {  // nvmlProcessInfo_t
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

using NvmlDevice = uintptr_t;  // 1 + card, + 100 per instance of a partitioned card, from the first

int card_of(NvmlDevice device) { return static_cast<int>(device % 100) - 1; }

}  // namespace

API int nvmlInit_v2() { return cards() && cards()->count ? 0 : 9; }  // NVML_ERROR_DRIVER_NOT_LOADED
API int nvmlInit() { return nvmlInit_v2(); }
API int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
API int nvmlShutdown() { return 0; }
API const char* nvmlErrorString(int) { return "an error of the fake NVML"; }
API int nvmlSystemGetDriverVersion(char* version, unsigned length) {
    snprintf(version, length, "580.82.07");
    return 0;
}
API int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = static_cast<unsigned>(cards()->count);
    return 0;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, NvmlDevice* device) {
    if (index >= cards()->count) return NVML_INVALID_ARGUMENT;
    *device = index + 1;
    return 0;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, NvmlDevice* device) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || bus < 1 || bus > cards()->count) return NVML_NOT_FOUND;
    *device = bus;
    return 0;
}
API int nvmlDeviceGetUUID(NvmlDevice device, char* uuid, unsigned length) {
    int card = card_of(device), instance = static_cast<int>(device / 100) - 1;
    std::string text = instance < 0 ? uuid_of_physical(card) : uuid_of(card * instances() + instance);
    snprintf(uuid, length, "%s", text.c_str());
    return 0;
}
API int nvmlDeviceGetHandleByUUID(const char* wanted, NvmlDevice* device) {
    for (int64_t card = 1; card <= cards()->count; card++)
        for (int64_t instance = 0; instance <= cards()->mig_instances; instance++) {
            char uuid[96];
            *device = static_cast<NvmlDevice>(card + 100 * instance);
            nvmlDeviceGetUUID(*device, uuid, sizeof uuid);
            if (!strcmp(uuid, wanted)) return 0;
        }
    return NVML_NOT_FOUND;
}
API int nvmlDeviceGetName(NvmlDevice device, char* name, unsigned length) {
    snprintf(name, length, "%s", name_of(cards()->physical[card_of(device)]));
    return 0;
}
API int nvmlDeviceGetMemoryInfo(NvmlDevice device, unsigned long long* total_free_used) {
    unsigned long long total = cards()->physical[card_of(device)].memory_bytes, used = used_bytes(card_of(device));
    total_free_used[0] = total;
    total_free_used[1] = total - std::min(total, used);
    total_free_used[2] = used;
    return 0;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(NvmlDevice device, unsigned* count, NvmlProcess* processes) {
    int card = card_of(device);
    used_bytes(card);  // forgets processes that have ended
    unsigned found = 0;
    for (const Holder& holder : cards()->holders[card]) {
        if (!holder.pid) continue;
        if (found < *count) processes[found] = {static_cast<unsigned>(holder.pid), static_cast<uint64_t>(holder.bytes), 0, 0};
        found++;
    }
    bool fits = found <= *count;
    *count = found;
    return fits ? 0 : NVML_INSUFFICIENT_SIZE;
}
API int nvmlDeviceGetMigMode(NvmlDevice, unsigned* present, unsigned* pending) {
    *present = *pending = cards()->mig_instances > 0;
    return 0;
}
API int nvmlDeviceGetMaxMigDeviceCount(NvmlDevice, unsigned* count) {
    *count = 7;
    return 0;
}
API int nvmlDeviceGetMigDeviceHandleByIndex(NvmlDevice device, unsigned index, NvmlDevice* instance) {
    if (index >= cards()->mig_instances) return NVML_NOT_FOUND;
    *instance = device + 100 * (index + 1);
    return 0;
}
API int nvmlDeviceGetCpuAffinity(NvmlDevice, unsigned words, unsigned long* mask) {
    memset(mask, 0xff, words * sizeof *mask);
    return 0;
}
