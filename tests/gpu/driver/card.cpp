// The cards as a file that tests and processes share, and the record of what was asked of them.
#include "card.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <sstream>

namespace {

// Holds the file's lock for a change of the holders, which several processes make.
class Locked {
  public:
    explicit Locked(int fd) : fd_(fd) { flock(fd_, LOCK_EX); }
    ~Locked() { flock(fd_, LOCK_UN); }

  private:
    int fd_;
};

struct Files {
    int cards_fd = -1, record_fd = -1;
    Cards* cards = nullptr;

    Files() {
        const char* directory = getenv("RSRV_FAKE_GPU");
        if (!directory) return;
        cards_fd = open((std::string(directory) + "/cards").c_str(), O_RDWR | O_CLOEXEC);
        record_fd = open((std::string(directory) + "/record").c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        void* mapped = mmap(nullptr, sizeof(Cards), PROT_READ | PROT_WRITE, MAP_SHARED, cards_fd, 0);
        if (mapped != MAP_FAILED) cards = static_cast<Cards*>(mapped);
    }
};

Files& files() {
    static Files opened;
    return opened;
}

std::atomic<int> the_fault{0};

Holder* holder_of(int card, int64_t pid) {
    for (Holder& one : cards()->holders[card])
        if (one.pid == pid) return &one;
    return nullptr;
}

// Returns whether a process holds no memory any more. A zombie holds none: the kernel frees a process's memory before its
// parent waits for it, and some parents never wait.
bool has_ended(int64_t pid) {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return errno == ESRCH;  // It ended after the call of open.
    text[length] = 0;
    const char* after_name = strrchr(text, ')');
    char state = 0;
    long threads = 0;
    const char* format = ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld";
    // While its other threads end, the first thread of a process is a zombie already.
    return after_name && sscanf(after_name, format, &state, &threads) == 2 && strchr("ZX", state) && threads <= 1;
}

// The caller holds the lock.
int64_t sum_of_living(int card) {
    int64_t sum = physical(card).others_bytes;
    for (Holder& one : cards()->holders[card]) {
        if (one.pid && !one.ended && has_ended(one.pid)) one.ended = now();
        if (one.ended && now() >= one.ended + cards()->held_ns * 1e-9) one = {};
        sum += one.bytes;
    }
    return sum;
}

}  // namespace

Cards* cards() { return files().cards; }

int instances() { return std::max(1, static_cast<int>(cards()->mig_instances)); }

const Card& physical(int card) { return cards()->physical[card / instances()]; }

int64_t memory_bytes(int card) { return physical(card).memory_bytes / instances(); }

std::string uuid_of_physical(int card) {
    char text[64];
    snprintf(text, sizeof text, "GPU-%02d000000-0000-0000-0000-000000000000", card + 1);
    return text;
}

std::string uuid_of(int card) {
    std::string uuid = uuid_of_physical(card / instances());
    return cards()->mig_instances ? "MIG" + uuid.substr(3, uuid.size() - 4) + std::to_string(card % instances()) : uuid;
}

std::vector<int> visible_cards() {
    std::vector<int> all, chosen;
    size_t most = MAX_CARDS;
    for (int card = 0; cards() && card < cards()->count * instances(); ++card) all.push_back(card);
    // A process sees one instance, the first of the list.
    if (cards() && cards()->mig_instances && all.size() > 1) most = 1;
    const char* setting = getenv("CUDA_VISIBLE_DEVICES");
    if (!setting) return {all.begin(), all.begin() + std::min(most, all.size())};
    std::stringstream names(setting);
    for (std::string name; std::getline(names, name, ',');) {
        int found = -1;
        for (int card : all)
            if (name == std::to_string(card) || name == uuid_of(card)) found = card;
        if (found < 0) break;  // the driver ignores what follows a wrong name
        chosen.push_back(found);
    }
    if (chosen.size() > most) chosen.resize(most);
    return chosen;
}

int64_t used_bytes(int card) {
    Locked lock(files().cards_fd);
    return sum_of_living(card);
}

bool take_bytes(int card, int64_t bytes) {
    Locked lock(files().cards_fd);
    if (sum_of_living(card) + bytes > memory_bytes(card)) return false;
    Holder* mine = holder_of(card, getpid());
    if (!mine) mine = holder_of(card, 0);
    if (!mine) return false;
    mine->pid = getpid();
    mine->bytes += bytes;
    return true;
}

bool moves(size_t bytes) {
    return !cards()->moved_bytes_max || bytes <= static_cast<size_t>(cards()->moved_bytes_max);
}

void give_bytes(int card, int64_t bytes) {
    Locked lock(files().cards_fd);
    if (Holder* mine = holder_of(card, getpid())) mine->bytes -= bytes;
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

void sleep_until(double time) {
    double left = time - now();
    if (left <= 0) return;
    timespec duration{static_cast<time_t>(left), static_cast<long>((left - static_cast<time_t>(left)) * 1e9)};
    nanosleep(&duration, nullptr);
}

// One write of one line: lines of threads and processes do not mix.
void record(double start, const char* kind, int64_t bytes, int stream, const char* detail) {
    char line[400];
    int length = snprintf(line, sizeof line, "%.6f %.6f %d %s %lld %d %.200s\n", start, now(), getpid(), kind,
                          static_cast<long long>(bytes), stream, detail);
    if (files().record_fd >= 0 && write(files().record_fd, line, length) < 0) abort();
}

CUresult fault() { return static_cast<CUresult>(the_fault.load()); }

void note_launch() {
    if (cards()->launches_until_fault < 0) return;
    // Below, another process had it at the same time.
    if (__atomic_sub_fetch(&cards()->launches_until_fault, 1, __ATOMIC_SEQ_CST) == -1) {
        the_fault = static_cast<int>(cards()->fault);
        record(now(), "fault", 0, 0, "");
    }
}
