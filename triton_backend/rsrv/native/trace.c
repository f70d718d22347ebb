#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "link.h"

// Maximum number of ended spans of one link that wait to be reported.
#define MAX_WAITING 4096u

struct span {
    struct span* next;
    size_t length;
    char json[];
};

// --- the context ----------------------------------------------------------------------------------------------------

// Reads lower-case digits. False: there are other characters, or all bytes are zero although they must not be.
static bool read_hex(const char* from, uint8_t* to, size_t bytes, bool may_be_zero) {
    static const char DIGITS[] = "0123456789abcdef";
    bool is_zero = true;
    for (size_t i = 0; i < 2 * bytes; i++) {
        const char* digit = from[i] ? strchr(DIGITS, from[i]) : NULL;
        if (!digit) return false;
        uint8_t value = (uint8_t)(digit - DIGITS);
        to[i / 2] = (uint8_t)(i % 2 ? to[i / 2] | value : value << 4);
        is_zero = is_zero && value == 0;
    }
    return may_be_zero || !is_zero;
}

// Reads W3C's Trace Context up to `end`. Later versions may append fields, but version 00 must
// not. False: there is no valid context, or it is not sampled.
static bool read_traceparent(const char* text, char end, struct trace* trace) {
    uint8_t version, flags;
    if (strnlen(text, 55) < 55) return false;
    return read_hex(text, &version, 1, true) && version != 0xff && text[2] == '-' && read_hex(text + 3, trace->trace, 16, false) &&
           text[35] == '-' && read_hex(text + 36, trace->parent, 8, false) && text[52] == '-' &&
           read_hex(text + 53, &flags, 1, true) && (flags & 1) && (text[55] == end || (version && text[55] == '-'));
}

static bool ask_triton(TRITONBACKEND_Request* request, struct trace* trace) {
    static const char NAME[] = "\"traceparent\"";
    TRITONSERVER_InferenceTrace* own = NULL;
    const char* context = NULL;
    TRITONSERVER_Error* error = TRITONBACKEND_RequestTrace(request, &own);
    if (!error && own) error = TRITONSERVER_InferenceTraceContext(own, &context);
    if (error) TRITONSERVER_ErrorDelete(error);
    // The context is a JSON object of texts. The value follows the name.
    const char* at = context ? strstr(context, NAME) : NULL;
    if (error || !at) return false;
    at += sizeof NAME - 1;
    at += strspn(at, " :");
    return *at == '"' && read_traceparent(at + 1, '"', trace);
}

static bool ask_client(TRITONBACKEND_Request* request, struct trace* trace) {
    uint32_t count = 0;
    TRITONSERVER_Error* error = TRITONBACKEND_RequestParameterCount(request, &count);
    for (uint32_t i = 0; i < count && !error; i++) {
        const char* key;
        const void* value;
        int type;
        error = TRITONBACKEND_RequestParameter(request, i, &key, &type, &value);
        // Ignore the case of letters: Triton passes on the names of headers as the client wrote them.
        if (!error && strcasecmp(key, "traceparent") == 0) return type == PARAMETER_STRING && read_traceparent(value, 0, trace);
    }
    if (error) TRITONSERVER_ErrorDelete(error);
    return false;
}

struct trace* trace_begin(TRITONBACKEND_Request* request) {
    struct trace trace, *made;
    if (!ask_triton(request, &trace) && !ask_client(request, &trace)) return NULL;
    if (getrandom(trace.id, sizeof trace.id, 0) != sizeof trace.id || !(made = malloc(sizeof *made))) return NULL;
    *made = trace;
    return made;
}

void trace_mark(const struct trace* trace, uint64_t request, uint8_t mark[MARK_BYTES]) {
    put_u64(mark, request);
    memcpy(mark + 8, trace->trace, sizeof trace->trace);
    memcpy(mark + 24, trace->id, sizeof trace->id);
}

// --- the span -------------------------------------------------------------------------------------------------------

static void add_hex(struct text* text, const uint8_t* bytes, size_t count) {
    text_add(text, "\"");
    for (size_t i = 0; i < count; i++) text_add(text, "%02x", bytes[i]);
    text_add(text, "\",");
}

static void add_short(struct text* text, const char* prefix, const char* from, size_t length) {
    struct text shown;
    text_clear(&shown);
    text_add(&shown, "%s", prefix);
    size_t room = MAX_SPAN_TEXT - shown.length;
    // If a character is cut, U+FFFD replaces it, which has three bytes.
    text_add_bytes(&shown, from, length < room ? length : room);
    text_add_json(text, shown.bytes);
}

void trace_end(struct link* link, const struct pending* pending) {
    struct text text;
    const struct trace* trace = pending->trace;
    const char *key = pending->interface->key, *at = strrchr(key, '@'), *id = "";
    size_t name = at ? (size_t)(at - key) : strlen(key);
    TRITONSERVER_Error* error = TRITONBACKEND_RequestId(pending->request, &id);
    if (error) TRITONSERVER_ErrorDelete(error);
    text_clear(&text);
    text_add(&text, "[");
    add_hex(&text, trace->trace, sizeof trace->trace);
    add_hex(&text, trace->parent, sizeof trace->parent);
    add_hex(&text, trace->id, sizeof trace->id);
    add_short(&text, "infer ", key, name);
    text_add(&text, ",%" PRId64 ",%" PRId64 ",", pending->begun_ns, now_ns());
    const char* failure = pending->failure ? pending->failure->bytes : status_name(pending->status);
    if (pending->status == OK) failure = "";
    add_short(&text, "", failure, strlen(failure));
    text_add(&text, ",{\"rsrv.model\":");
    add_short(&text, "", key, name);
    text_add(&text, ",\"rsrv.version\":");
    add_short(&text, "", at ? at + 1 : "", at ? strlen(at + 1) : 0);
    if (pending->input_bytes) text_add(&text, ",\"rsrv.rows\":%" PRIu32, pending->rows);
    if (*id && is_utf8(id)) {
        text_add(&text, ",\"rsrv.request_id\":");
        add_short(&text, "", id, strlen(id));
    }
    if (pending->status != OK) text_add(&text, ",\"rsrv.status\":\"%s\"", status_name(pending->status));
    text_add(&text, "}]");
    // Drop a span whose text was cut, because it is not valid JSON.
    struct span* span = text.length + 1 < TEXT_BYTES ? malloc(sizeof *span + text.length) : NULL;
    if (span) {
        span->next = NULL;
        span->length = text.length;
        memcpy(span->json, text.bytes, text.length);
    }
    pthread_mutex_lock(&link->lock);
    if (span && link->span_count < MAX_WAITING) {
        *(link->last_span ? &link->last_span->next : &link->first_span) = span;
        link->last_span = span;
        link->span_count++;
        span = NULL;
    } else
        link->dropped_spans++;
    pthread_mutex_unlock(&link->lock);
    free(span);
}

void trace_report(struct link* link) {
    char* frame = link->first_span || link->dropped_spans ? malloc(MAX_FRAME) : NULL;
    while (frame && (link->first_span || link->dropped_spans)) {
        struct span* span = link->first_span;
        size_t length = HEADER_BYTES;
        uint32_t count = 0;
        put_header((uint8_t*)frame, FRAME_SPANS, 0);
        length += (size_t)snprintf(frame + length, MAX_FRAME - length, "{\"dropped\":%u,\"spans\":[", link->dropped_spans);
        for (; span && count < MAX_SPANS && length + span->length + 3 < MAX_FRAME; span = span->next, count++) {
            if (count) frame[length++] = ',';
            memcpy(frame + length, span->json, span->length);
            length += span->length;
        }
        memcpy(frame + length, "]}", 2);
        // If the runtime does not read now, keep the spans for the next report.
        if (frame_send(link->fd, frame, length + 2, -1, 0) <= 0) break;
        trace_forget(link, count);
        link->dropped_spans = 0;
    }
    free(frame);
}

void trace_forget(struct link* link, uint32_t count) {
    for (struct span* span; count > 0 && (span = link->first_span); count--) {
        link->first_span = span->next;
        if (!span->next) link->last_span = NULL;
        link->span_count--;
        free(span);
    }
}
