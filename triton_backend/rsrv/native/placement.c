#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "native.h"

// wire/placement_table.py explains the format. The file is read and not mapped, so that a shrinking file cannot end this
// process.
#define HEADER_AT_GENERATION 16
#define MOVED UINT64_MAX  // generation of a file that was replaced by another one

struct header { char magic[8]; uint32_t capacity, reserved; uint64_t generation; };
struct half { uint64_t generation; uint32_t count, checksum; };
struct entry { uint8_t digest[16]; uint64_t mask; };

// Guards the latest complete table, which all models in this process share.
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
static uint32_t capacity, entry_count;
static uint64_t table_generation;
static struct entry* entries;
static int64_t retry_ns;

uint32_t crc32_of(uint32_t crc, const void* bytes, size_t length) {
    static const uint32_t NIBBLE[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    crc = ~crc;
    for (const uint8_t* at = bytes; length > 0; at++, length--) {
        crc = NIBBLE[(crc ^ *at) & 15] ^ crc >> 4;
        crc = NIBBLE[(crc ^ *at >> 4) & 15] ^ crc >> 4;
    }
    return ~crc;
}

static bool read_at(void* to, size_t bytes, uint64_t at) {
    return pread(file, to, bytes, (off_t)at) == (ssize_t)bytes;
}

static bool read_generation(uint64_t* generation) {
    return file >= 0 && read_at(generation, sizeof *generation, HEADER_AT_GENERATION);
}

static bool open_table(void) {
    char base[PATH_BYTES], own[PATH_BYTES], path[PATH_BYTES + 16];
    struct header header;
    struct stat found;
    if (file >= 0) close(file);
    file = -1;
    if (!runtime_directory(0, base, own)) return false;
    snprintf(path, sizeof path, "%s/placement", own);
    file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0 && fstat(file, &found) == 0 && read_at(&header, sizeof header, 0) &&
        memcmp(header.magic, TABLE_MAGIC, sizeof header.magic) == 0 &&
        (uint64_t)found.st_size ==
            TABLE_HEADER_BYTES + 2 * (sizeof(struct half) + (uint64_t)header.capacity * sizeof(struct entry))) {
        capacity = header.capacity;
        return true;
    }
    if (file >= 0) close(file);
    file = -1;
    return false;
}

// Reads the table of a generation, if it is complete.
static bool take(uint64_t generation) {
    struct half half;
    uint64_t at = TABLE_HEADER_BYTES + generation % 2 * (sizeof half + (uint64_t)capacity * sizeof *entries);
    if (!read_at(&half, sizeof half, at) || half.generation != generation || half.count > capacity) return false;
    size_t bytes = half.count * sizeof *entries;
    struct entry* found = malloc(bytes ? bytes : 1);
    // The checksum covers the generation, the number and the entries.
    if (!found || !read_at(found, bytes, at + sizeof half) ||
        crc32_of(crc32_of(0, &half, sizeof half.generation + sizeof half.count), found, bytes) != half.checksum) {
        free(found);
        return false;
    }
    free(entries);
    entries = found;
    entry_count = half.count;
    table_generation = generation;
    return true;
}

static bool read_table(void) {
    uint64_t generation, before;
    if ((!read_generation(&generation) || generation == MOVED) && (!open_table() || !read_generation(&generation)))
        return false;
    // If the table cannot be read, the writer may have written twice during the read, so try the new generation. If there is
    // no new generation, this half of the file is damaged.
    do {
        if (generation == 0 || generation == MOVED) return false;
        if (take(generation)) return true;
        before = generation;
    } while (read_generation(&generation) && generation != before);
    return false;
}

static int compare(const void* key, const void* entry) { return memcmp(key, ((const struct entry*)entry)->digest, 16); }

uint64_t placement_mask(const uint8_t digest[16]) {
    uint64_t generation;
    pthread_mutex_lock(&table_lock);
    if (table_generation == 0 || !read_generation(&generation) || generation != table_generation) {
        int64_t now = now_ns();
        if (now >= retry_ns && !read_table()) retry_ns = now + TABLE_RETRY_NS;
    }
    const struct entry* found = entries ? bsearch(digest, entries, entry_count, sizeof *entries, compare) : NULL;
    uint64_t mask = found ? found->mask : 0;
    pthread_mutex_unlock(&table_lock);
    return mask;
}
