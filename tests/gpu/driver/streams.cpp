// Streams, events, copies and launches. Each stream is a thread that carries out its work in order.
#include "card.h"

#include <string.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

// The driver copies pageable memory up to this size at once into memory of its own; a larger copy makes the caller wait
// for the stream's earlier work, and for the copy (CUDA's documentation, "API synchronization behavior").
constexpr size_t COPIED_AT_ONCE = 64 << 10;
constexpr auto FAULT_POLL = std::chrono::milliseconds(5);

class Stream {
  public:
    explicit Stream(int number) : number(number) {
        std::thread([this] { run(); }).detach();
    }

    void put(std::function<void()> work) {
        std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back({std::move(work), now()});
        changed_.notify_all();
    }

    void wait_until_idle() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return idle(); });
    }

    bool is_idle() {
        std::lock_guard<std::mutex> lock(mutex_);
        return idle();
    }

    void end() { put(nullptr); }

    const int number;
    double time = 0;  // see time_of()

  private:
    struct Item {
        std::function<void()> work;
        double enqueued;
    };

    bool idle() const { return queue_.empty() && !busy_; }

    void run() {
        for (;;) {
            std::function<void()> work;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                busy_ = false;
                changed_.notify_all();
                changed_.wait(lock, [this] { return !queue_.empty(); });
                work = std::move(queue_.front().work);
                time = std::max(time, queue_.front().enqueued);
                queue_.pop_front();
                busy_ = true;
            }
            if (!work) break;
            if (!fault()) work();  // after a fault, not even host functions are called
        }
        delete this;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Item> queue_;
    bool busy_ = false;
};

Stream& stream_of(CUstream handle) {
    static Stream* legacy = new Stream(0);
    // The handles 1 and 2 are CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    return reinterpret_cast<uintptr_t>(handle) > 2 ? *reinterpret_cast<Stream*>(handle) : *legacy;
}

void enqueue(Stream& stream, std::function<void()> work) { stream.put(std::move(work)); }
void synchronize(Stream& stream) { stream.wait_until_idle(); }
int number_of(Stream& stream) { return stream.number; }
double& time_of(Stream& stream) { return stream.time; }

API CUresult cuStreamCreate(CUstream* stream, unsigned) {
    RETURN_FAULT;
    static std::atomic<int> made{0};
    *stream = reinterpret_cast<CUstream>(new Stream(++made));
    return CUDA_SUCCESS;
}
API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
API CUresult cuStreamDestroy_v2(CUstream stream) {
    stream_of(stream).end();
    return CUDA_SUCCESS;
}
API CUresult cuStreamSynchronize(CUstream stream) {
    stream_of(stream).wait_until_idle();
    return fault();
}
API CUresult cuStreamQuery(CUstream stream) {
    RETURN_FAULT;
    return stream_of(stream).is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API CUresult cuStreamGetCtx(CUstream, CUcontext* context) {
    *context = context_of(current_card());
    return CUDA_SUCCESS;
}
API CUresult cuStreamGetPriority(CUstream, int* priority) {
    *priority = 0;
    return CUDA_SUCCESS;
}
API CUresult cuStreamGetFlags(CUstream, unsigned* flags) {
    *flags = CU_STREAM_NON_BLOCKING;
    return CUDA_SUCCESS;
}
API CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

namespace {

// A pending record keeps the event alive after cuEventDestroy.
struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    long recorded = 0, completed = 0;
    double at = 0;

    void wait_for(long number) {
        std::unique_lock<std::mutex> lock(mutex);
        while (completed < number && !fault()) changed.wait_for(lock, FAULT_POLL);
    }
};
using EventHandle = std::shared_ptr<Event>;

EventHandle& event_of(CUevent handle) { return *reinterpret_cast<EventHandle*>(handle); }

long last_record(const EventHandle& event) {
    std::lock_guard<std::mutex> lock(event->mutex);
    return event->recorded;
}

}  // namespace

API CUresult cuEventCreate(CUevent* event, unsigned) {
    RETURN_FAULT;
    *event = reinterpret_cast<CUevent>(new EventHandle(std::make_shared<Event>()));
    return CUDA_SUCCESS;
}
API CUresult cuEventDestroy_v2(CUevent event) {
    delete &event_of(event);
    return CUDA_SUCCESS;
}
API CUresult cuEventRecord(CUevent handle, CUstream stream) {
    RETURN_FAULT;
    EventHandle event = event_of(handle);
    long number;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        number = ++event->recorded;
    }
    Stream& owner = stream_of(stream);
    enqueue(owner, [event, number, &owner] {
        std::lock_guard<std::mutex> lock(event->mutex);
        event->completed = number;
        event->at = owner.time;
        event->changed.notify_all();
    });
    return CUDA_SUCCESS;
}
API CUresult cuEventQuery(CUevent handle) {
    RETURN_FAULT;
    Event& event = *event_of(handle);
    std::lock_guard<std::mutex> lock(event.mutex);
    return event.completed >= event.recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API CUresult cuEventSynchronize(CUevent handle) {
    EventHandle event = event_of(handle);
    event->wait_for(last_record(event));
    return fault();
}
API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    RETURN_FAULT;
    // XLA's autotuner divides by it.
    *milliseconds = static_cast<float>(std::max(1e-3, (event_of(end)->at - event_of(start)->at) * 1e3));
    return CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
API CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned) {
    RETURN_FAULT;
    EventHandle event = event_of(handle);
    long number = last_record(event);
    Stream& owner = stream_of(stream);
    enqueue(owner, [event, number, &owner] {
        event->wait_for(number);
        std::lock_guard<std::mutex> lock(event->mutex);
        owner.time = std::max(owner.time, event->at);
    });
    return CUDA_SUCCESS;
}

namespace {

enum Direction { TO_DEVICE, TO_HOST, ON_DEVICE };
const char* const KINDS[] = {"h2d", "d2h", "d2d"};

// The link of a card has one engine for each direction: it carries out the copies of all streams one at a time, in the
// order in which they become ready. A real card has several engines that share the link, and may interleave copies.
class Engine {
  public:
    // Returns the time at which a copy of this duration that is ready at a time ends.
    double end_of(double ready, double seconds) {
        std::lock_guard<std::mutex> lock(mutex_);
        return free_at_ = std::max(ready, free_at_) + seconds;
    }

  private:
    std::mutex mutex_;
    double free_at_ = 0;
};

Engine engines[2];

// Carries out a copy that is ready at `time`, and sets `time` to its end.
void transfer(Direction direction, void* to, const void* from, size_t bytes, int64_t bytes_per_s, int stream,
              const char* detail, double& time) {
    double seconds = bytes_per_s ? static_cast<double>(bytes) / bytes_per_s : 0;
    if (direction != ON_DEVICE) time = engines[direction].end_of(time, seconds);
    double start = time - seconds;
    if (moves(bytes)) memmove(to, from, bytes);
    if (direction == ON_DEVICE) return;
    sleep_until(time);
    record(start, KINDS[direction], bytes, stream, detail);
}

CUresult copy(Direction direction, CUdeviceptr to_address, CUdeviceptr from_address, size_t bytes, CUstream handle) {
    RETURN_FAULT;
    void* to = reinterpret_cast<void*>(to_address);
    const void* from = reinterpret_cast<const void*>(from_address);
    Stream& stream = stream_of(handle);
    const void* host = direction == TO_DEVICE ? from : to;
    if (direction == TO_HOST && is_read_only(host)) return CUDA_ERROR_INVALID_VALUE;
    if (direction == ON_DEVICE || is_page_locked(host)) {
        enqueue(stream, [=, &stream] {
            int64_t rate = cards()->pinned_bytes_per_s;
            transfer(direction, to, from, bytes, rate, stream.number, "page-locked", stream.time);
        });
    } else if (direction == TO_DEVICE && bytes <= COPIED_AT_ONCE) {
        auto copied = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
        enqueue(stream, [=, &stream] {
            int64_t rate = cards()->pinned_bytes_per_s;
            transfer(direction, to, copied->data(), bytes, rate, stream.number, "copied", stream.time);
        });
    } else {
        synchronize(stream);
        double time = now();
        transfer(direction, to, from, bytes, cards()->pageable_bytes_per_s, stream.number, "pageable", time);
    }
    return CUDA_SUCCESS;
}

// A function of the host takes the time that it takes.
void call_host(Stream& stream, std::function<void()> function) {
    enqueue(stream, [function, &stream] {
        function();
        stream.time = std::max(stream.time, now());
    });
}

template <typename T>
CUresult fill(CUdeviceptr to, T value, size_t count, CUstream stream) {
    RETURN_FAULT;
    if (moves(count * sizeof(T)))
        enqueue(stream_of(stream), [=] { std::fill_n(reinterpret_cast<T*>(to), count, value); });
    return CUDA_SUCCESS;
}

}  // namespace

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    return copy(TO_DEVICE, to, reinterpret_cast<CUdeviceptr>(from), bytes, stream);
}
API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(TO_HOST, reinterpret_cast<CUdeviceptr>(to), from, bytes, stream);
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(ON_DEVICE, to, from, bytes, stream);
}
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(ON_DEVICE, to, from, bytes, stream);
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    memcpy(reinterpret_cast<void*>(to), from, bytes);
    return fault();
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    memcpy(to, reinterpret_cast<void*>(from), bytes);
    return fault();
}
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return fill(to, value, count, stream);
}
API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    return fill(to, value, count, stream);
}
API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    memset(reinterpret_cast<void*>(to), value, count);
    return fault();
}
API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
    return fault();
}
API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    RETURN_FAULT;
    call_host(stream_of(stream), [=] { function(data); });
    return CUDA_SUCCESS;
}
API CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void* data, unsigned) {
    RETURN_FAULT;
    call_host(stream_of(stream), [=] { function(stream, CUDA_SUCCESS, data); });
    return CUDA_SUCCESS;
}
