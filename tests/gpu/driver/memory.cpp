// Memory of the cards, by each of the ways that XLA and rsrv allocate it, and page-locked memory of the host.
#include "card.h"

#include <sys/mman.h>

#include <map>
#include <mutex>
#include <set>

namespace {

constexpr size_t GRANULARITY = 2 << 20;

using Ranges = std::map<uintptr_t, size_t>;

// Guards everything below.
std::mutex mutex;
Ranges device_ranges, page_locked_ranges;
std::set<uintptr_t> read_only_ranges;  // of page-locked memory, by address
std::map<uintptr_t, int> cards_of_ranges;

Ranges::iterator range_of(Ranges& ranges, uintptr_t address) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return ranges.end();
    auto found = std::prev(after);
    return address < found->first + found->second ? found : ranges.end();
}

bool contains(Ranges& ranges, const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    return range_of(ranges, reinterpret_cast<uintptr_t>(address)) != ranges.end();
}

// Addresses with pages behind them as soon as they are written, aligned as a device's; 0: the host has none.
uintptr_t reserve(size_t bytes) {
    void* mapped = mmap(nullptr, bytes + GRANULARITY, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return 0;
    return (reinterpret_cast<uintptr_t>(mapped) + GRANULARITY - 1) & ~(GRANULARITY - 1);
}

CUresult allocate(CUdeviceptr* address, size_t bytes, const char* how) {
    RETURN_FAULT;
    double start = now();
    int card = current_card();
    if (!take_bytes(card, bytes)) {
        record(start, "no-room", bytes, card, how);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = reserve(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    device_ranges[*address] = bytes;
    cards_of_ranges[*address] = card;
    record(start, "alloc", bytes, card, how);
    return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address, const char* how) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = device_ranges.find(address);
    if (found == device_ranges.end()) return CUDA_ERROR_INVALID_VALUE;
    give_bytes(cards_of_ranges[address], found->second);
    record(now(), "free", found->second, 0, how);
    madvise(reinterpret_cast<void*>(address), found->second, MADV_DONTNEED);
    device_ranges.erase(found);
    return CUDA_SUCCESS;
}

}  // namespace

bool is_device_memory(const void* address) { return contains(device_ranges, address); }
bool is_page_locked(const void* address) { return contains(page_locked_ranges, address); }
bool is_read_only(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = range_of(page_locked_ranges, reinterpret_cast<uintptr_t>(address));
    return found != page_locked_ranges.end() && read_only_ranges.count(found->first);
}

API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) { return allocate(address, bytes, "cuMemAlloc"); }
API CUresult cuMemFree_v2(CUdeviceptr address) { return release(address, "cuMemFree"); }
API CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream) {
    return allocate(address, bytes, "cuMemAllocAsync");
}
API CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool, CUstream) {
    return allocate(address, bytes, "cuMemAllocFromPoolAsync");
}
API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    RETURN_FAULT;
    enqueue(stream_of(stream), [=] { release(address, "cuMemFreeAsync"); });
    return CUDA_SUCCESS;
}
API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    RETURN_FAULT;
    int card = current_card();
    *total = memory_bytes(card);
    *free = std::max<int64_t>(0, memory_bytes(card) - used_bytes(card));
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice) {
    *pool = reinterpret_cast<CUmemoryPool>(1);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }
API CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps*) { return cuDeviceGetDefaultMemPool(pool, 0); }
API CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) { return fault(); }
API CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void* value) {
    *static_cast<uint64_t*>(value) = 0;
    return fault();
}
API CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) { return fault(); }
API CUresult cuMemPoolSetAccess(CUmemoryPool, const CUmemAccessDesc*, size_t) { return fault(); }

// --- page-locked memory of the host ---------------------------------------------------------------------------------

API CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    RETURN_FAULT;
    *address = reinterpret_cast<void*>(reserve(bytes));
    std::lock_guard<std::mutex> lock(mutex);
    page_locked_ranges[reinterpret_cast<uintptr_t>(*address)] = bytes;
    return CUDA_SUCCESS;
}
API CUresult cuMemFreeHost(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = page_locked_ranges.find(reinterpret_cast<uintptr_t>(address));
    if (found == page_locked_ranges.end()) return CUDA_ERROR_INVALID_VALUE;
    madvise(address, found->second, MADV_DONTNEED);
    page_locked_ranges.erase(found);
    return CUDA_SUCCESS;
}
API CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
    RETURN_FAULT;
    std::lock_guard<std::mutex> lock(mutex);
    auto first = reinterpret_cast<uintptr_t>(address);
    auto next = page_locked_ranges.lower_bound(first);
    bool overlaps = range_of(page_locked_ranges, first) != page_locked_ranges.end() ||
                    (next != page_locked_ranges.end() && next->first < first + bytes);
    if (overlaps) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    page_locked_ranges[first] = bytes;
    if (flags & CU_MEMHOSTREGISTER_READ_ONLY) read_only_ranges.insert(first);
    record(now(), "register", bytes, 0, "");
    return CUDA_SUCCESS;
}
API CUresult cuMemHostUnregister(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = page_locked_ranges.find(reinterpret_cast<uintptr_t>(address));
    if (found == page_locked_ranges.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    record(now(), "unregister", found->second, 0, "");
    read_only_ranges.erase(found->first);
    page_locked_ranges.erase(found);
    return CUDA_SUCCESS;
}
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host, unsigned) {
    *device = reinterpret_cast<CUdeviceptr>(host);
    return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = range_of(device_ranges, address);
    if (found == device_ranges.end()) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = found->first;
    if (bytes) *bytes = found->second;
    return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    const void* pointer = reinterpret_cast<const void*>(address);
    bool on_device = is_device_memory(pointer);
    if (!on_device && !is_page_locked(pointer)) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(value) = on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(value) = 0;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            *static_cast<CUcontext*>(value) = context_of(current_card());
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            *static_cast<unsigned*>(value) = 0;
            return CUDA_SUCCESS;
        default:
            return CUDA_ERROR_NOT_SUPPORTED;
    }
}

// --- virtual memory management: addresses and the memory behind them are made apart ----------------------------------

namespace {

struct Physical {
    int card;
    size_t bytes;  // 0: memory of the host
    int references;
};

std::map<uintptr_t, Physical*> mapped;

// The caller holds the lock.
void drop(Physical* physical) {
    if (--physical->references) return;
    if (physical->bytes) {
        give_bytes(physical->card, physical->bytes);
        record(now(), "free", physical->bytes, 0, "cuMemRelease");
    }
    delete physical;
}

}  // namespace

API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    RETURN_FAULT;
    *address = reserve(bytes);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                         unsigned long long) {
    RETURN_FAULT;
    double start = now();
    bool on_device = !properties || properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    int card = current_card();
    if (on_device && !take_bytes(card, bytes)) {
        record(start, "no-room", bytes, card, "cuMemCreate");
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (on_device) record(start, "alloc", bytes, card, "cuMemCreate");
    *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{card, on_device ? bytes : 0, 1});
    return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                      unsigned long long) {
    RETURN_FAULT;
    std::lock_guard<std::mutex> lock(mutex);
    auto* physical = reinterpret_cast<Physical*>(handle);
    ++physical->references;
    (physical->bytes ? device_ranges : page_locked_ranges)[address] = bytes;
    mapped[address] = physical;
    return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = mapped.find(address);
    if (found == mapped.end()) return CUDA_ERROR_INVALID_VALUE;
    drop(found->second);
    mapped.erase(found);
    device_ranges.erase(address);
    page_locked_ranges.erase(address);
    madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex);
    drop(reinterpret_cast<Physical*>(handle));
    return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return fault(); }
API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = mapped.find(reinterpret_cast<uintptr_t>(address));
    if (found == mapped.end()) return CUDA_ERROR_INVALID_VALUE;
    ++found->second->references;
    *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found->second);
    return CUDA_SUCCESS;
}
