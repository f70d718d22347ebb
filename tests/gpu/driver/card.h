// Parts of the fake CUDA driver that its files share: the cards, the record of calls, streams and the sticky fault.
//
// The driver has no kernels: a launch takes the time that the card's settings give it, and computes nothing. Memory of
// the device is memory of the host, so copies are real, unless the settings say otherwise; their times follow the
// settings.
#pragma once

#define __CUDA_API_VERSION_INTERNAL  // With this, cuda.h does not rename functions, such as cuMemAlloc.
#include <cuda.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
// A context with a sticky fault answers every call with it until the process ends.
#define RETURN_FAULT \
    if (CUresult fault_ = fault()) return fault_

constexpr int MAX_CARDS = 8;
constexpr int MAX_PROCESSES = 16;

// A process with a context on a card, and the memory that it has on this card. After the driver has noticed the end of
// the process, the driver waits `held_ns` before it frees the memory.
struct Holder {
    int64_t pid;
    int64_t bytes;
    double ended;  // time at which the driver noticed the end of the process; 0 before that
};

struct Card {
    int64_t memory_bytes;
    int64_t others_bytes;
    int64_t is_t4;
};

// The file that tests write and every process maps. tests/gpu/fake_gpu.py has the same layout, and explains the fields.
struct Cards {
    int64_t count;
    int64_t pinned_bytes_per_s;
    int64_t pageable_bytes_per_s;
    int64_t moved_bytes_max;
    int64_t kernel_ns;
    int64_t launches_until_fault;
    int64_t fault;
    int64_t mig_instances;
    int64_t compute_mode;
    int64_t held_ns;
    int64_t without_vmm;
    int64_t context_bytes;
    Card physical[MAX_CARDS];
    Holder holders[MAX_CARDS][MAX_PROCESSES];
};

Cards* cards();  // Returns null if the environment names no cards.

// For CUDA, each instance of a partitioned card (MIG) is a card. Card numbers count the instances, and not the
// partitioned cards. Only `uuid_of_physical` takes the number of a physical card.
std::vector<int> visible_cards();  // Returns the cards in the order of CUDA_VISIBLE_DEVICES.
int instances();  // Returns the number of instances of each physical card: 1 if the cards are not partitioned.
const Card& physical(int card);
int64_t memory_bytes(int card);
const char* name_of(const Card& card);
std::string uuid_of(int card);
std::string uuid_of_physical(int card);
int64_t used_bytes(int card);
bool take_bytes(int card, int64_t bytes);  // Returns false if the card has too little free memory.
void give_bytes(int card, int64_t bytes);

double now();  // Returns the seconds of CLOCK_MONOTONIC, as Python's time.monotonic() does.
void sleep_until(double time);
void record(double start, const char* kind, int64_t bytes, int stream, const char* detail);

CUresult fault();
void note_launch();  // Counts a launch. When the number in the settings is reached, the fault begins.

int current_card();
CUcontext context_of(int card);

bool is_device_memory(const void* address);
bool is_page_locked(const void* address);
bool is_read_only(const void* address);  // Returns true for page-locked memory that the device may only read.

class Stream;
Stream& stream_of(CUstream handle);
void enqueue(Stream& stream, std::function<void()> work);
void synchronize(Stream& stream);
int number_of(Stream& stream);
// Returns the time at which the current work of a stream begins. The work sets this time to the time of its own end.
// Each work begins at the end of the previous work, even if the stream's thread wakes up late. So a busy machine does
// not slow the card.
double& time_of(Stream& stream);
bool moves(size_t bytes);  // Returns false if a copy of this size only takes time, and moves no bytes.
