#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "native.h"

// Maximum number of descriptors with one frame. If there are more, the control message is cut, which ends the
// connection.
#define MAX_FDS 4
// Maximum number of tensors of a bundle.
#define MAX_TENSORS 1000u
#define MAX_VARIANTS 1000u
#define MAX_SIZES 1000u
#define MAX_ROWS (1u << 30)
#define MAX_RETRY_NS (INT64_MAX / 2)  // the sum of this value and a time of the clock does not overflow
// Maximum number of bytes of a tensor at the largest batch size. With it, sums of a request's bytes stay far below 64 bits.
#define MAX_TENSOR_BYTES (1ull << 44)

// --- numbers in frames: little-endian, like every machine that this is built for ------------------------------------

void put_u16(uint8_t* at, uint16_t value) { memcpy(at, &value, sizeof value); }
void put_u32(uint8_t* at, uint32_t value) { memcpy(at, &value, sizeof value); }
void put_u64(uint8_t* at, uint64_t value) { memcpy(at, &value, sizeof value); }

static uint16_t u16_at(const uint8_t* at) { uint16_t value; memcpy(&value, at, sizeof value); return value; }
static uint32_t u32_at(const uint8_t* at) { uint32_t value; memcpy(&value, at, sizeof value); return value; }
static uint64_t u64_at(const uint8_t* at) { uint64_t value; memcpy(&value, at, sizeof value); return value; }

void put_header(uint8_t* at, uint16_t kind, uint32_t count) {
    put_u16(at, kind);
    put_u16(at + 2, 0);
    put_u32(at + 4, count);
}

// Returns true if this process may not open another file.
static bool lacks_descriptors(int fd) {
    int spare = dup(fd);
    if (spare < 0) return errno == EMFILE;
    close(spare);
    return false;
}

// --- frames ---------------------------------------------------------------------------------------------------------

int frame_receive(int fd, uint8_t buffer[MAX_FRAME], struct frame* frame, const char** why) {
    union { struct cmsghdr header; char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; } control;
    struct iovec part = {buffer, MAX_FRAME};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t length = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    // If the runtime closed the socket without reading all frames, the kernel reports this error once. The frames that the
    // runtime had sent can be received after that.
    if (length < 0 && errno == ECONNRESET) length = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0) {
        *why = strerror(errno);
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    }
    int found[MAX_FDS], count = 0;
    for (struct cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        count = count < MAX_FDS ? count : MAX_FDS;
        memcpy(found, CMSG_DATA(header), (size_t)count * sizeof(int));
    }
    bool whole = !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && length >= HEADER_BYTES && count < 2;
    if (!whole) {
        // Check first whether descriptors are used up, because closing the received descriptors frees some.
        bool lost = message.msg_flags & MSG_CTRUNC && lacks_descriptors(fd);
        while (count > 0) close(found[--count]);
        *why = lost          ? OUT_OF_DESCRIPTORS
               : length == 0 ? "end of stream"
                             : "a frame breaks the protocol";
        return -1;
    }
    *frame = (struct frame){u16_at(buffer), u32_at(buffer + 4), buffer + HEADER_BYTES, (size_t)length - HEADER_BYTES,
                            count ? found[0] : -1};
    return 1;
}

int frame_send(int fd, const void* bytes, size_t length, int descriptor, int patience_ms) {
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct iovec part = {(void*)bytes, length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    int64_t until = 0;
    while (sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN) return -1;
        int64_t now = now_ns();
        until = until ? until : now + patience_ms * (NS_PER_S / 1000);
        if (now >= until) return 0;
        struct pollfd writable = {fd, POLLOUT, 0};
        poll(&writable, 1, (int)((until - now) / (NS_PER_S / 1000)) + 1);
    }
    return 1;
}

int frame_send_id(int fd, uint16_t kind, uint64_t id) {
    uint8_t frame[HEADER_BYTES + 8];
    put_header(frame, kind, 1);
    put_u64(frame + HEADER_BYTES, id);
    return frame_send(fd, frame, sizeof frame, -1, 0);
}

int frame_send_json(int fd, uint16_t kind, const char* json) {
    uint8_t frame[HEADER_BYTES + TEXT_BYTES];
    size_t length = strnlen(json, TEXT_BYTES);
    put_header(frame, kind, 0);
    memcpy(frame + HEADER_BYTES, json, length);
    return frame_send(fd, frame, HEADER_BYTES + length, -1, 0);
}

bool completions_check(const struct frame* frame) {
    if (frame->count > MAX_FRAME / COMPLETION_BYTES) return false;
    size_t end = (size_t)frame->count * COMPLETION_BYTES;
    if (end > frame->length) return false;
    for (uint32_t i = 0; i < frame->count; i++) {
        struct completion completion = completion_at(frame, i);
        if (completion.status >= STATUSES || completion.text_bytes > frame->length - end) return false;
        end += completion.text_bytes;
    }
    return end == frame->length;
}

struct completion completion_at(const struct frame* frame, uint32_t index) {
    const uint8_t* at = frame->body + (size_t)index * COMPLETION_BYTES;
    return (struct completion){u64_at(at), u16_at(at + 8), u32_at(at + 20), u64_at(at + 24)};
}

bool nanoseconds_read(const struct frame* frame, int64_t* ns) {
    uint64_t found = frame->length == sizeof found ? u64_at(frame->body) : 0;
    *ns = found > MAX_RETRY_NS ? MAX_RETRY_NS : (int64_t)found;
    return found > 0;
}

bool starting_read(const struct frame* frame, int64_t* least_ns, int64_t* limit_ns, struct text* step) {
    size_t times = 2 * sizeof(uint64_t);
    if (frame->length < times || frame->length > times + MAX_PROGRESS) return false;
    uint64_t least = u64_at(frame->body), limit = u64_at(frame->body + sizeof least);
    *least_ns = least > MAX_RETRY_NS ? MAX_RETRY_NS : (int64_t)least;
    *limit_ns = limit > MAX_RETRY_NS ? MAX_RETRY_NS : (int64_t)limit;
    text_clear(step);
    text_add_bytes(step, (const char*)frame->body + times, frame->length - times);
    return limit > 0;
}

// --- the description of a model -------------------------------------------------------------------------------------

// The element types in the protocol's order. Each entry has Triton's number of the type, and the bytes of an element.
static const struct { uint8_t triton, bytes; } TYPES[] = {
    {1, 1},           // bool
    {6, 1}, {7, 2}, {8, 4}, {9, 8},  // i8 to i64
    {2, 1}, {3, 2}, {4, 4}, {5, 8},  // u8 to u64
    {10, 2}, {14, 2}, {11, 4}, {12, 8},  // f16 bf16 f32 f64
};

struct cursor {
    const uint8_t* at;
    size_t left;
    const char* why;  // NULL: no error so far
};

static const uint8_t* next(struct cursor* from, size_t bytes) {
    static const uint8_t nothing[8];
    if (from->why || bytes > from->left) {
        from->why = from->why ? from->why : "the model's description ends too early";
        return bytes <= sizeof nothing ? nothing : NULL;
    }
    from->at += bytes;
    from->left -= bytes;
    return from->at - bytes;
}

static uint32_t next_u32(struct cursor* from) { return u32_at(next(from, 4)); }
static uint64_t next_u64(struct cursor* from) { return u64_at(next(from, 8)); }

static void refuse(struct cursor* from, bool wrong, const char* why) {
    if (wrong && !from->why) from->why = why;
}

static uint32_t next_count(struct cursor* from, uint32_t most) {
    uint32_t count = next_u32(from);
    refuse(from, count == 0 || count > most, "the model's description has a number out of its range");
    return from->why ? 0 : count;
}

static char* next_text(struct cursor* from) {
    uint32_t length = next_u32(from);
    const uint8_t* bytes = length <= TEXT_BYTES ? next(from, length) : NULL;
    refuse(from, !bytes || memchr(bytes, 0, length), "the model's description has a name that cannot be read");
    char* text = from->why ? NULL : strndup((const char*)bytes, length);
    refuse(from, !text || !is_utf8(text), "the model's description has a name that cannot be read");
    return text;
}

static struct tensor* next_tensors(struct cursor* from, uint32_t count, bool batched) {
    struct tensor* tensors = calloc(count ? count : 1, sizeof *tensors);
    refuse(from, !tensors, "no memory");
    for (uint32_t i = 0; i < count && !from->why; i++) {
        struct tensor* tensor = &tensors[i];
        tensor->name = next_text(from);
        uint8_t type = *next(from, 1);
        tensor->rank = *next(from, 1);
        tensor->batch_axis = (int16_t)u16_at(next(from, 2));
        tensor->padded_axis = (int16_t)u16_at(next(from, 2));
        refuse(from, type >= sizeof TYPES / sizeof *TYPES || tensor->rank > MAX_RANK,
               "the model's description has a tensor of an unknown type");
        refuse(from, tensor->batch_axis < -1 || tensor->batch_axis >= (int32_t)tensor->rank,
               "the model's description has a wrong batch axis");
        refuse(from, tensor->padded_axis < -1 || tensor->padded_axis >= (int32_t)tensor->rank,
               "the model's description has a wrong padded axis");
        refuse(from, tensor->padded_axis >= 0 && tensor->padded_axis == tensor->batch_axis,
               "the model's description has a wrong padded axis");
        if (from->why) break;
        tensor->type = TYPES[type].triton;
        tensor->item_bytes = tensor->row_bytes = TYPES[type].bytes;
        for (uint32_t axis = 0; axis < tensor->rank; axis++) {
            int64_t extent = tensor->dims[axis] = (int64_t)next_u64(from);
            bool open = !batched || (int32_t)axis == tensor->batch_axis;
            refuse(from, extent < (open ? -1 : 0), "the model's description has a negative extent");
            if (extent < 0 || from->why) continue;
            refuse(from, extent && tensor->row_bytes > MAX_TENSOR_BYTES / (uint64_t)extent,
                   "the model's description has a tensor that is too large");
            tensor->row_bytes *= (uint64_t)extent;
        }
    }
    return tensors;
}

static void free_tensors(struct tensor* tensors, uint32_t count) {
    for (uint32_t i = 0; tensors && i < count; i++) free(tensors[i].name);
    free(tensors);
}

static void free_interface(struct interface* model) {
    free_tensors(model->client_inputs, model->input_count);
    free_tensors(model->client_outputs, model->output_count);
    for (uint32_t i = 0; model->variants && i < model->variant_count; i++) {
        free(model->variants[i].sizes);
        free_tensors(model->variants[i].inputs, model->input_count);
        free_tensors(model->variants[i].outputs, model->output_count);
    }
    free(model->variants);
    free(model->key);
    free(model->input_of);
    free(model->output_of);
    free(model);
}

static void next_variant(struct cursor* from, struct interface* model, struct variant* variant) {
    uint32_t previous = 0;
    variant->size_count = next_count(from, MAX_SIZES);
    variant->sizes = calloc(variant->size_count, sizeof *variant->sizes);
    refuse(from, !variant->sizes, "no memory");
    for (uint32_t i = 0; i < variant->size_count && !from->why; i++) {
        uint32_t size = variant->sizes[i] = next_u32(from);
        refuse(from, size <= previous || size > MAX_ROWS, "the model's description has batch sizes that do not ascend");
        previous = size;
    }
    variant->inputs = next_tensors(from, model->input_count, true);
    variant->outputs = next_tensors(from, model->output_count, true);
    for (uint32_t i = 0; i < model->input_count + model->output_count && !from->why; i++) {
        const struct tensor* tensor =
            i < model->input_count ? &variant->inputs[i] : &variant->outputs[i - model->input_count];
        refuse(from, tensor->batch_axis >= 0 && tensor->dims[tensor->batch_axis] != -1,
               "the model's description has a batch axis of a fixed size");
        refuse(from, tensor->row_bytes > MAX_TENSOR_BYTES / previous, "the model's description has a tensor that is too large");
        if (tensor->padded_axis < 0 || from->why) continue;
        int64_t length = tensor->dims[tensor->padded_axis];
        refuse(from, length < 1 || length > UINT32_MAX || (variant->length && length != variant->length),
               "the model's description has a wrong padded axis");
        variant->length = (uint32_t)length;
    }
}

// Returns, for each tensor of `wanted`, the index of the tensor with its name in `known`.
static uint32_t* find_all(struct cursor* from, const struct tensor* wanted, const struct tensor* known, uint32_t count) {
    uint32_t* found = calloc(count, sizeof *found);
    refuse(from, !found, "no memory");
    for (uint32_t i = 0; i < count && !from->why; i++) {
        while (found[i] < count && strcmp(known[found[i]].name, wanted[i].name) != 0) found[i]++;
        refuse(from, found[i] == count || known[found[i]].type != wanted[i].type,
               "the model's description has tensors that do not match the clients' tensors");
    }
    return found;
}

struct interface* interface_read(const uint8_t* bytes, size_t length, const char** why) {
    struct cursor from = {bytes, length, NULL};
    struct interface* model = calloc(1, sizeof *model);
    if (!model) {
        *why = "no memory";
        return NULL;
    }
    atomic_init(&model->users, 1);
    refuse(&from, next_u32(&from) != FLAT_MAGIC, "the model's description has another version");
    uint32_t flags = next_u32(&from);
    model->batched = flags & 1;
    model->exact = flags & 2;
    model->traced = flags & 4;
    model->input_count = next_count(&from, MAX_TENSORS);
    model->output_count = next_count(&from, MAX_TENSORS);
    model->variant_count = next_count(&from, MAX_VARIANTS);
    model->slot = next_u32(&from);
    model->cost_ns = next_u64(&from);
    uint64_t retry_ns = next_u64(&from);
    model->retry_ns = retry_ns < MAX_RETRY_NS ? (int64_t)retry_ns : MAX_RETRY_NS;
    model->key = next_text(&from);
    refuse(&from, model->slot >= BOARD_BYTES / 8, "the model's description has a cell outside of the board");
    model->client_inputs = next_tensors(&from, model->input_count, false);
    model->client_outputs = next_tensors(&from, model->output_count, false);
    model->variants = from.why ? NULL : calloc(model->variant_count, sizeof *model->variants);
    refuse(&from, !model->variants, "no memory");
    for (uint32_t i = 0; i < model->variant_count && !from.why; i++) next_variant(&from, model, &model->variants[i]);
    refuse(&from, from.left != 0, "the model's description has bytes after its end");
    if (!from.why) {
        const struct variant* first = &model->variants[0];
        model->input_of = find_all(&from, first->inputs, model->client_inputs, model->input_count);
        model->output_of = find_all(&from, model->client_outputs, first->outputs, model->output_count);
    }
    for (uint32_t i = 0; i < model->input_count && !from.why; i++)
        refuse(&from, model->batched && model->client_inputs[i].rank == 0, "the model's description has an input without rows");
    for (uint32_t v = 1; v < model->variant_count && !from.why; v++) {
        uint32_t shorter = model->variants[v - 1].length, longer = model->variants[v].length;
        refuse(&from, shorter || longer ? shorter == 0 || shorter >= longer : false,
               "the model's description has lengths that do not ascend");
        for (uint32_t i = 0; i < model->input_count + model->output_count && !from.why; i++) {
            bool is_input = i < model->input_count;
            uint32_t at = is_input ? i : i - model->input_count;
            const struct variant *variant = &model->variants[v], *first = &model->variants[0];
            const struct tensor* mine = is_input ? &variant->inputs[at] : &variant->outputs[at];
            const struct tensor* its = is_input ? &first->inputs[at] : &first->outputs[at];
            refuse(&from, mine->type != its->type || mine->rank != its->rank || mine->padded_axis != its->padded_axis,
                   "the model's description has variants that differ in more than extents");
        }
    }
    *why = from.why;
    if (!from.why) return model;
    free_interface(model);
    return NULL;
}

void interface_hold(struct interface* model) { atomic_fetch_add(&model->users, 1); }

void interface_drop(struct interface* model) {
    if (model && atomic_fetch_sub(&model->users, 1) == 1) free_interface(model);
}

uint64_t tensor_bytes(const struct tensor* tensor, uint64_t rows, uint64_t length) {
    uint64_t bytes = tensor->row_bytes;
    if (tensor->padded_axis >= 0) bytes = bytes / (uint64_t)tensor->dims[tensor->padded_axis] * length;
    return tensor->batch_axis < 0 ? bytes : bytes * rows;
}

uint64_t block_bytes(const struct tensor* tensors, uint32_t count, uint64_t rows, uint64_t length) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) bytes += aligned(tensor_bytes(&tensors[i], rows, length));
    return bytes;
}
