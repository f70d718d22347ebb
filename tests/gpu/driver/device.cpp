// Devices, contexts, and the names of errors and functions.
#include "card.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <map>

namespace {

// A context is known by the number of its device among the visible ones, from 1.
thread_local std::vector<CUcontext> contexts;

CUdevice device_of(CUcontext context) { return static_cast<CUdevice>(reinterpret_cast<uintptr_t>(context)) - 1; }

// Figures of an H100, by XLA's own description of the card; an attribute that is named nowhere is 0.
const std::map<int, int> ATTRIBUTES = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 52428800},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
};

// Where a T4 differs, by NVIDIA's data sheet.
const std::map<int, int> T4_ATTRIBUTES = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 7},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 5},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1590000},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 5001000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 256},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 4194304},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 40},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 1024},
};

const std::map<int, const char*> ERRORS = {
    {CUDA_SUCCESS, "CUDA_SUCCESS"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
};

bool others_have_a_context(int card) {
    used_bytes(card);  // forgets processes that have ended
    return std::any_of(std::begin(cards()->holders[card]), std::end(cards()->holders[card]),
                       [](const Holder& one) { return one.pid && one.pid != getpid(); });
}

}  // namespace

const char* name_of(const Card& card) { return card.is_t4 ? "Tesla T4" : "NVIDIA H100 80GB HBM3"; }

CUcontext context_of(int card) {
    std::vector<int> visible = visible_cards();
    auto found = std::find(visible.begin(), visible.end(), card);
    return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(found - visible.begin()) + 1);
}

int current_card() {
    CUdevice device = 0;
    if (cuCtxGetDevice(&device) != CUDA_SUCCESS) device = 0;
    return visible_cards()[device];
}

API CUresult cuInit(unsigned) { return visible_cards().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
    *count = static_cast<int>(visible_cards().size());
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (ordinal >= static_cast<int>(visible_cards().size())) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    const char* instance = cards()->mig_instances ? " MIG 1g.10gb" : "";
    snprintf(name, length, "%s%s", name_of(physical(visible_cards()[device])), instance);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    *bytes = memory_bytes(visible_cards()[device]);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = static_cast<char>(visible_cards()[device] + 1);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
    snprintf(id, length, "0000:%02x:00.0", visible_cards()[device] / instances() + 1);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
        *value = visible_cards()[device] / instances() + 1;
    } else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) {
        *value = static_cast<int>(cards()->compute_mode);
    } else if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        *value = !cards()->without_vmm;
    } else {
        *value = 0;
        if (auto found = ATTRIBUTES.find(attribute); found != ATTRIBUTES.end()) *value = found->second;
        if (!physical(visible_cards()[device]).is_t4) return CUDA_SUCCESS;
        if (auto found = T4_ATTRIBUTES.find(attribute); found != T4_ATTRIBUTES.end()) *value = found->second;
    }
    return CUDA_SUCCESS;
}
API CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
    cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    return cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
}
API CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
    *can = 0;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGraphMemTrim(CUdevice) { return CUDA_SUCCESS; }

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    RETURN_FAULT;
    int card = visible_cards()[device];
    if (cards()->compute_mode == CU_COMPUTEMODE_PROHIBITED ||
        (cards()->compute_mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS && others_have_a_context(card)))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    // Lists this process among the holders. It has one context for each card.
    static bool has_context[MAX_CARDS];
    if (!take_bytes(card, has_context[card] ? 0 : cards()->context_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!has_context[card]) record(now(), "context", cards()->context_bytes, card, "");
    has_context[card] = true;
    *context = context_of(card);
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 0;
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice, unsigned) { return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext context) {
    if (contexts.empty()) contexts.push_back(context);
    contexts.back() = context;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = contexts.empty() ? nullptr : contexts.back();
    return CUDA_SUCCESS;
}
API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    contexts.push_back(context);
    return CUDA_SUCCESS;
}
API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = contexts.back();
    contexts.pop_back();
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* device) {
    if (contexts.empty() || !contexts.back()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = device_of(contexts.back());
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
    *id = reinterpret_cast<uintptr_t>(context);
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
API CUresult cuCtxSynchronize() { return fault(); }
API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
    *value = 1024;
    return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}
API CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) { return CUDA_SUCCESS; }

API CUresult cuGetErrorName(CUresult error, const char** name) {
    auto found = ERRORS.find(error);
    *name = found == ERRORS.end() ? "CUDA_ERROR_UNKNOWN" : found->second;
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the fake driver";
    return CUDA_SUCCESS;
}
API CUresult cuGetExportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_FOUND; }
