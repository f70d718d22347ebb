#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "native.h"

const char OUT_OF_DESCRIPTORS[] = "tritonserver " NO_DESCRIPTORS;

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

// Returns the bytes of the character at `at`, or 0 if it is not valid UTF-8. Surrogates and overlong forms are not
// valid.
static size_t character(const char* at, size_t left) {
    const unsigned char* c = (const unsigned char*)at;
    if (left == 0) return 0;
    if (c[0] < 0x80) return 1;
    size_t length = c[0] >= 0xf0 ? 4 : c[0] >= 0xe0 ? 3 : 2;
    if (c[0] < 0xc2 || c[0] > 0xf4 || left < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    if (c[0] == 0xe0 && c[1] < 0xa0) return 0;
    if (c[0] == 0xed && c[1] > 0x9f) return 0;
    if (c[0] == 0xf0 && c[1] < 0x90) return 0;
    if (c[0] == 0xf4 && c[1] > 0x8f) return 0;
    return length;
}

bool is_utf8(const char* text) {
    for (size_t left = strlen(text), length; left > 0; text += length, left -= length)
        if ((length = character(text, left)) == 0) return false;
    return true;
}

void text_clear(struct text* text) {
    text->length = 0;
    text->bytes[0] = 0;
}

static bool append(struct text* text, const char* bytes, size_t length) {
    if (text->length + length >= TEXT_BYTES) return false;
    memcpy(text->bytes + text->length, bytes, length);
    text->length += length;
    text->bytes[text->length] = 0;
    return true;
}

void text_add_bytes(struct text* text, const char* bytes, size_t left) {
    while (left > 0) {
        size_t length = character(bytes, left);
        bool fits = length && *bytes ? append(text, bytes, length) : append(text, "\xef\xbf\xbd", 3);
        if (!fits) return;
        length = length ? length : 1;
        bytes += length;
        left -= length;
    }
}

void text_add(struct text* text, const char* format, ...) {
    char buffer[TEXT_BYTES];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    if (length > 0) text_add_bytes(text, buffer, length < TEXT_BYTES ? (size_t)length : TEXT_BYTES - 1);
}

static size_t escape(char buffer[8], const char* at, size_t length, char quote) {
    unsigned char c = (unsigned char)*at;
    if (length == 0 || c < 0x20 || c == 0x7f) {
        if (c == '\n' || c == '\r' || c == '\t')
            return (size_t)snprintf(buffer, 8, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        return (size_t)snprintf(buffer, 8, "\\x%02x", c);
    }
    if (c == '\\' || c == (unsigned char)quote) return (size_t)snprintf(buffer, 8, "\\%c", c);
    memcpy(buffer, at, length);
    return length;
}

void text_add_quoted(struct text* text, const char* from, size_t most) {
    char quote = strchr(from, '\'') && !strchr(from, '"') ? '"' : '\'';
    size_t shown = 0, left = strlen(from);
    append(text, &quote, 1);
    for (shown = 1; left > 0 && shown < most;) {
        char buffer[8];
        size_t length = character(from, left), escaped = escape(buffer, from, length, quote);
        length = length ? length : 1;
        size_t characters = escaped == length && buffer[0] == *from ? 1 : escaped;
        if (shown + characters > most) escaped = characters = most - shown;
        append(text, buffer, escaped);
        shown += characters;
        from += length;
        left -= length;
    }
    if (shown < most) append(text, &quote, 1);
}

void text_add_json(struct text* text, const char* from) {
    append(text, "\"", 1);
    for (; *from; from++) {
        char buffer[8];
        unsigned char c = (unsigned char)*from;
        size_t length = 1;
        if (c < 0x20)
            length = (size_t)snprintf(buffer, sizeof buffer, "\\u%04x", c);
        else if (c == '"' || c == '\\')
            length = (size_t)snprintf(buffer, sizeof buffer, "\\%c", c);
        else
            buffer[0] = (char)c;
        append(text, buffer, length);
    }
    append(text, "\"", 1);
}

void log_line(int level, const char* model, const char* format, ...) {
    struct text line;
    char buffer[TEXT_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(buffer, sizeof buffer, format, values);
    va_end(values);
    text_clear(&line);
    text_add(&line, "rsrv.native: %s%s%s", model ? model : "", model ? ": " : "", buffer);
    TRITONSERVER_Error* error = TRITONSERVER_LogMessage(level, "native", 0, line.bytes);
    if (error) TRITONSERVER_ErrorDelete(error);
}

// --- digests: blake2b (RFC 7693), little-endian --------------------------------------------------------------------

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t turn(uint64_t value, int bits) { return value >> bits | value << (64 - bits); }

static void mix(uint64_t v[16], int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = turn(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turn(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turn(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turn(v[b] ^ v[c], 63);
}

static void compress(uint64_t h[8], const uint8_t block[128], uint64_t total, bool last) {
    uint64_t m[16], v[16];
    memcpy(m, block, sizeof m);
    memcpy(v, h, 64);
    memcpy(v + 8, IV, 64);
    v[12] ^= total;
    if (last) v[14] = ~v[14];
    for (int round = 0; round < 12; round++) {
        const uint8_t* s = SIGMA[round % 10];
        for (int i = 0; i < 4; i++) mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

void digest_bytes(const void* bytes, size_t left, uint8_t* digest, size_t length) {
    const uint8_t* from = bytes;
    uint64_t h[8], total = 0;
    memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000 ^ length;
    for (; left > 128; from += 128, left -= 128) compress(h, from, total += 128, false);
    uint8_t block[128] = {0};
    memcpy(block, from, left);
    compress(h, block, total + left, true);
    memcpy(digest, h, length);
}

uint64_t request_tag(const char* id) {
    uint64_t tag = 0;
    if (*id) digest_bytes(id, strlen(id), (uint8_t*)&tag, sizeof tag);
    return tag;
}
