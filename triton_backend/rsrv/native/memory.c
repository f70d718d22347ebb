#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "native.h"

// The runtime's limits.
#define MAX_SEGMENTS 1024u
#define MAX_BYTES (1ull << 40)

// Folder of the container's control group.
#ifndef CGROUP
#define CGROUP "/sys/fs/cgroup"
#endif

struct range {
    uint64_t offset, bytes;
};

// A mapped memfd. Its free ranges are in ascending order, and never adjacent.
struct segment {
    uint32_t id;
    int fd;  // -1: closed, because the runtime has a copy
    uint8_t* memory;
    uint64_t bytes;
    struct range* free;
    size_t free_count, free_space;
};

struct arena {
    struct segment* segments;
    uint32_t count, next_id;
    uint64_t bytes, places;
    uint32_t* dropped;
    uint32_t dropped_count;
    bool closed, lacks_descriptors;
};

// --- the board ------------------------------------------------------------------------------------------------------

// All links to a runtime share the mapping of its board. The kernel limits the mappings of a process (vm.max_map_count), and
// each of thousands of models has a link per device.
struct board {
    struct board* next;
    dev_t filesystem;
    ino_t file;
    uint32_t users;
    int blackbox;  // -1: none
    void* memory;
};

static pthread_mutex_t board_lock = PTHREAD_MUTEX_INITIALIZER;
static struct board* boards;

// Maps a board that no link has mapped yet. The caller holds the lock.
static struct board* map_new(int fd, const struct stat* found, const char* directory) {
    char path[PATH_BYTES + 16];
    void* memory = mmap(NULL, BOARD_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    struct board* board = memory == MAP_FAILED ? NULL : malloc(sizeof *board);
    if (!board) {
        if (memory != MAP_FAILED) munmap(memory, BOARD_BYTES);
        return NULL;
    }
    snprintf(path, sizeof path, "%s/blackbox", directory);
    *board = (struct board){boards, found->st_dev, found->st_ino, 0, open(path, O_RDONLY | O_CLOEXEC), memory};
    return boards = board;
}

const _Atomic uint64_t* board_map(int fd, const char* directory) {
    struct stat found;
    void* memory = NULL;
    // Refuse a file that can shrink, because this process would die if it read the missing part later.
    if (fd >= 0 && fstat(fd, &found) == 0 && found.st_size == BOARD_BYTES && fcntl(fd, F_GET_SEALS) > 0 &&
        (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)) {
        pthread_mutex_lock(&board_lock);
        struct board* board = boards;
        while (board && (board->filesystem != found.st_dev || board->file != found.st_ino)) board = board->next;
        board = board ? board : map_new(fd, &found, directory);
        if (board) {
            board->users++;
            memory = board->memory;
        }
        pthread_mutex_unlock(&board_lock);
    }
    if (fd >= 0) close(fd);
    return memory;
}

void board_unmap(const _Atomic uint64_t* memory) {
    if (!memory) return;
    pthread_mutex_lock(&board_lock);
    struct board **at = &boards, *board;
    while ((board = *at)->memory != memory) at = &board->next;
    if (--board->users == 0) {
        *at = board->next;
        munmap(board->memory, BOARD_BYTES);
        if (board->blackbox >= 0) close(board->blackbox);
        free(board);
    }
    pthread_mutex_unlock(&board_lock);
}

bool board_blames(const _Atomic uint64_t* memory, const char* key) {
    uint8_t box[BOX_BYTES + 1];  // the extra byte is read only if a text about a crash follows the slots
    pthread_mutex_lock(&board_lock);
    struct board* board = boards;
    while (board->memory != memory) board = board->next;
    ssize_t length = pread(board->blackbox, box, sizeof box, 0);
    pthread_mutex_unlock(&board_lock);
    if (length < (ssize_t)BOX_BYTES) return true;
    bool crashed = length > (ssize_t)BOX_BYTES, hung = false, loop_hung = false, found = false, blamed = false;
    for (const uint8_t* slot = box; slot < box + BOX_BYTES; slot += SLOT_BYTES) {
        hung |= slot[1] == 1;
        loop_hung |= slot[0] == PHASE_LOOPING && slot[1] == 1;
    }
    if (!crashed && !hung) return false;
    for (const uint8_t* slot = box; slot < box + BOX_BYTES && !loop_hung; slot += SLOT_BYTES) {
        int phase = slot[0] & ~ALONE_BIT;
        if (phase == 0 || phase > PHASE_EXECUTING || !slot[KEY_AT]) continue;
        found = true;
        bool same = strncmp(key, (const char*)slot + KEY_AT, SLOT_BYTES - KEY_AT) == 0;
        blamed |= phase == PHASE_EXECUTING && same && (slot[1] || !hung);
    }
    return blamed || !found;
}

bool board_sleeps(const _Atomic uint64_t* memory) {
    uint8_t sleeps = 0;
    pthread_mutex_lock(&board_lock);
    struct board* board = boards;
    while (board->memory != memory) board = board->next;
    bool is_read = pread(board->blackbox, &sleeps, 1, ASLEEP_AT) == 1;
    pthread_mutex_unlock(&board_lock);
    return is_read && sleeps == 1;
}

// --- the arena ------------------------------------------------------------------------------------------------------

struct arena* arena_new(void) { return calloc(1, sizeof(struct arena)); }

static void unmap(struct segment* segment) {
    munmap(segment->memory, segment->bytes);
    if (segment->fd >= 0) close(segment->fd);
    free(segment->free);
}

static void end(struct arena* arena) {
    for (uint32_t i = 0; i < arena->count; i++) unmap(&arena->segments[i]);
    free(arena->segments);
    free(arena->dropped);
    free(arena);
}

void arena_close(struct arena* arena) {
    arena->closed = true;
    if (arena->places == 0) end(arena);
}

// Returns the free bytes of the machine or, if the container has fewer, of the container. The caller checks them, because a
// segment's pages are allocated only when they are touched: without memory, the kernel would then kill a process. As in
// rsrv.limits, file cache of the container that was read only once counts as free, and so does half of the other file cache.
static uint64_t spare_memory(void) {
    uint64_t spare = UINT64_MAX, kilobytes, limit, used, bytes, cache = 0;
    char line[128];
    FILE* file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lu", &kilobytes) == 1) spare = kilobytes * 1024;
    if (file) fclose(file);
    FILE* most = fopen(CGROUP "/memory.max", "re");
    FILE* now = fopen(CGROUP "/memory.current", "re");
    FILE* parts = fopen(CGROUP "/memory.stat", "re");
    while (parts && fgets(line, sizeof line, parts)) {
        if (sscanf(line, "inactive_file %lu", &bytes) == 1) cache += bytes;
        if (sscanf(line, "active_file %lu", &bytes) == 1) cache += bytes / 2;
    }
    if (most && now && fscanf(most, "%lu", &limit) == 1 && fscanf(now, "%lu", &used) == 1) {
        used -= cache < used ? cache : used;
        uint64_t left = limit > used ? limit - used : 0;
        spare = left < spare ? left : spare;
    }
    if (most) fclose(most);
    if (now) fclose(now);
    if (parts) fclose(parts);
    return spare;
}

static bool take_from(struct segment* segment, uint64_t bytes, uint64_t* offset) {
    for (size_t i = 0; i < segment->free_count; i++) {
        struct range* range = &segment->free[i];
        if (range->bytes < bytes) continue;
        *offset = range->offset;
        range->offset += bytes;
        range->bytes -= bytes;
        if (range->bytes == 0)
            memmove(range, range + 1, (--segment->free_count - i) * sizeof *range);
        return true;
    }
    return false;
}

static bool add_segment(struct arena* arena, uint64_t bytes) {
    uint64_t size = FIRST_BYTES;
    arena->lacks_descriptors = false;
    while (size < bytes || (size < arena->bytes && arena->bytes < KEEP_BYTES)) size *= 2;
    if (size > KEEP_BYTES) size = (bytes + 4095) & ~4095ull;
    if (arena->count >= MAX_SEGMENTS || arena->bytes + size > MAX_BYTES) return false;
    if (size > FIRST_BYTES && size > spare_memory()) return false;
    struct segment* grown = realloc(arena->segments, (arena->count + 1) * sizeof *grown);
    if (!grown) return false;
    arena->segments = grown;
    struct segment* segment = &grown[arena->count];
    *segment = (struct segment){.id = arena->next_id, .bytes = size, .free_count = 1, .free_space = 16};
    segment->free = malloc(segment->free_space * sizeof *segment->free);
    segment->fd = memfd_create("rsrv-tensors", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    arena->lacks_descriptors = segment->fd < 0 && errno == EMFILE;
    segment->memory = MAP_FAILED;
    if (segment->free && segment->fd >= 0 && ftruncate(segment->fd, (off_t)size) == 0 &&
        fcntl(segment->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        segment->memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, 0);
    if (segment->memory == MAP_FAILED) {
        if (segment->fd >= 0) close(segment->fd);
        free(segment->free);
        return false;
    }
    segment->free[0] = (struct range){0, size};
    arena->count++;
    arena->next_id++;
    arena->bytes += size;
    return true;
}

bool arena_take(struct arena* arena, uint64_t bytes, struct place* place) {
    uint64_t offset = 0;
    if (arena->closed || bytes > MAX_BYTES) return false;
    bytes = aligned(bytes ? bytes : 1);
    for (uint32_t i = 0;; i++) {
        if (i == arena->count && !add_segment(arena, bytes)) return false;
        struct segment* segment = &arena->segments[i];
        if (!take_from(segment, bytes, &offset)) continue;
        *place = (struct place){segment->id, offset, bytes, segment->memory + offset, arena};
        arena->places++;
        return true;
    }
}

bool arena_lacks_descriptors(const struct arena* arena) { return arena->lacks_descriptors; }

// Frees a range. If there is no memory for the list of free ranges, the range stays taken.
static void give_to(struct segment* segment, uint64_t offset, uint64_t bytes) {
    size_t i = 0;
    while (i < segment->free_count && segment->free[i].offset < offset) i++;
    if (segment->free_count == segment->free_space) {
        struct range* grown = realloc(segment->free, 2 * segment->free_space * sizeof *grown);
        if (!grown) return;
        segment->free = grown;
        segment->free_space *= 2;
    }
    struct range* at = segment->free + i;
    memmove(at + 1, at, (segment->free_count++ - i) * sizeof *at);
    *at = (struct range){offset, bytes};
    if (i + 1 < segment->free_count && at->offset + at->bytes == at[1].offset) {
        at->bytes += at[1].bytes;
        memmove(at + 1, at + 2, (--segment->free_count - i - 1) * sizeof *at);
    }
    if (i > 0 && at[-1].offset + at[-1].bytes == at->offset) {
        at[-1].bytes += at->bytes;
        memmove(at, at + 1, (--segment->free_count - i) * sizeof *at);
    }
}

void arena_give(struct place* place) {
    struct arena* arena = place->arena;
    if (!arena) return;
    place->arena = NULL;
    arena->places--;
    for (uint32_t i = 0; i < arena->count; i++) {
        struct segment* segment = &arena->segments[i];
        if (segment->id != place->segment) continue;
        give_to(segment, place->offset, place->bytes);
        bool idle = segment->free_count == 1 && segment->free[0].bytes == segment->bytes;
        if (!idle || arena->bytes <= KEEP_BYTES || arena->closed) break;
        if (segment->fd < 0) {
            uint32_t* grown = realloc(arena->dropped, (arena->dropped_count + 1) * sizeof *grown);
            if (!grown) break;
            arena->dropped = grown;
            grown[arena->dropped_count++] = segment->id;
        }
        arena->bytes -= segment->bytes;
        unmap(segment);
        memmove(segment, segment + 1, (--arena->count - i) * sizeof *segment);
        break;
    }
    if (arena->closed && arena->places == 0) end(arena);
}

bool arena_fresh(struct arena* arena, uint32_t* segment, int* fd) {
    for (uint32_t i = 0; i < arena->count; i++) {
        if (arena->segments[i].fd < 0) continue;
        *segment = arena->segments[i].id;
        *fd = arena->segments[i].fd;
        return true;
    }
    return false;
}

void arena_announced(struct arena* arena) {
    for (uint32_t i = 0; i < arena->count; i++) {
        if (arena->segments[i].fd < 0) continue;
        close(arena->segments[i].fd);
        arena->segments[i].fd = -1;
        return;
    }
}

bool arena_dropped(struct arena* arena, uint32_t* segment) {
    if (arena->dropped_count == 0) return false;
    *segment = arena->dropped[arena->dropped_count - 1];
    return true;
}

void arena_forget(struct arena* arena) { arena->dropped_count--; }
