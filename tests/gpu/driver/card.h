// Parts of the fake CUDA driver that its files share: the cards, the record of calls, streams and the sticky fault.
//
// The driver has no kernels: a launch takes the time that the card's settings give it, and computes nothing. Memory of
// the device is memory of the host, so copies are real, unless the settings say otherwise; their times follow the
// settings.
#pragma once

#define __CUDA_API_VERSION_INTERNAL  // cuda.h then keeps the names of the symbols as they are
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

// One process with a context on a card, and its memory there. Both are gone `held_ns` after its end was noticed.
struct Holder {
    int64_t pid;
    int64_t bytes;
    double ended;  // time at which its end was noticed; 0: it lives
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

Cards* cards();  // null if the environment names no cards

// For CUDA, an instance of a partitioned card (MIG) is a card: cards are numbered without the partitioned ones.
std::vector<int> visible_cards();  // in the order of CUDA_VISIBLE_DEVICES
int instances();  // of each physical card; 1 if it is not partitioned
const Card& physical(int card);
int64_t memory_bytes(int card);
const char* name_of(const Card& card);
std::string uuid_of(int card);
std::string uuid_of_physical(int card);
int64_t used_bytes(int card);
bool take_bytes(int card, int64_t bytes);  // false: the card has no room
void give_bytes(int card, int64_t bytes);

double now();  // seconds of CLOCK_MONOTONIC, as Python's time.monotonic()
void sleep_until(double time);
void record(double start, const char* kind, int64_t bytes, int stream, const char* detail);

CUresult fault();
void note_launch();  // counts towards the fault of the settings

int current_card();
CUcontext context_of(int card);

bool is_device_memory(const void* address);
bool is_page_locked(const void* address);
bool is_read_only(const void* address);  // page-locked memory that the device may only read

class Stream;
Stream& stream_of(CUstream handle);
void enqueue(Stream& stream, std::function<void()> work);
void synchronize(Stream& stream);
int number_of(Stream& stream);
// The time at which the work that the stream's thread carries out begins; the work sets it to its own end. Work begins
// at the end of the work before, however late the thread woke up, so a busy machine does not slow the card down.
double& time_of(Stream& stream);
bool moves(size_t bytes);  // false: a copy of this size takes its time and moves nothing
