// libcuda.so.1: the part of CUDA's driver that copying uses. VERSION: 12020, 12080 or 13000.
#include <cstdio>
#include <cstring>

#include "exports.hpp"

using fake::Address;
using fake::Copy;
using fake::Event;
using fake::machine;
using fake::any_stream_of;
using fake::Stream;
using fake::stream_of;
using Place = fake::Machine::Place;

namespace {

enum : int {
    ok = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    invalid_device = 101,
    invalid_context = 201,
    invalid_handle = 400,
    invalid_ptx = 218,
    not_found = 500,
    not_ready = 600,
    illegal_address = 700,
    already_registered = 712,
    not_registered = 713,
    not_supported = 801,
};

std::atomic<bool> initialized{false};
std::atomic<int> generation{0};
thread_local int current_device = -1;
thread_local int current_generation = -1;

struct Context {
    int device;
};
Context contexts[fake::num_devices] = {{0}, {1}};

// The device of the calling thread; -1 without a current context.
int current() { return current_generation == generation ? current_device : -1; }

#define NEED_CONTEXT                          \
    do {                                      \
        if (!initialized) return not_initialized; \
        if (current() < 0) return invalid_context; \
    } while (false)

struct Location {
    int type;
    int id;
};
struct Attributes {
    int order;
    Location src;
    Location dst;
    unsigned flags;
};
static_assert(sizeof(Location) == 8 && sizeof(Attributes) == 24);

struct Memcpy2D {
    std::size_t src_x, src_y;
    int src_type;
    void *src_host;
    unsigned long long src_device;
    void *src_array;
    std::size_t src_pitch, dst_x, dst_y;
    int dst_type;
    void *dst_host;
    unsigned long long dst_device;
    void *dst_array;
    std::size_t dst_pitch, width, height;
};
static_assert(sizeof(Memcpy2D) == 128);

int judge(const Copy &copy, bool to_device, bool &is_pageable) {
    return fake::is_allowed(copy, to_device, current(), is_pageable) ? ok : invalid_value;
}

int copy_async(const std::vector<Copy> &copies, bool to_device, void *handle) {
    Stream *stream = stream_of(handle);
    if (handle == nullptr || handle == reinterpret_cast<void *>(1))
        machine().note_violation("a copy on the legacy stream");
    if (!stream) return invalid_handle;
    bool is_pageable = false;
    for (const Copy &copy : copies)
        if (int code = judge(copy, to_device, is_pageable)) return code;
    if (is_pageable) return machine().copy_now(stream, copies) ? ok : 702;
    machine().submit(stream, copies);
    return ok;
}

[[maybe_unused]] int batch(std::uint64_t *dsts, std::uint64_t *srcs, std::size_t *sizes, std::size_t count,
          Attributes *attributes, std::size_t *indices, std::size_t num_attributes,
          std::size_t *failed, void *handle) {
    if (failed) *failed = SIZE_MAX;
    if (handle == nullptr || handle == reinterpret_cast<void *>(1)) return invalid_value;
    Stream *stream = stream_of(handle);
    if (!stream) return invalid_handle;
    if (!dsts || !srcs || !sizes || count == 0) return invalid_value;
    if (!attributes || !indices || num_attributes == 0 || num_attributes > count)
        return invalid_value;
    if (indices[0] != 0 || indices[num_attributes - 1] >= count) return invalid_value;
    for (std::size_t at = 0; at < num_attributes; ++at) {
        if (at > 0 && indices[at] <= indices[at - 1]) return invalid_value;
        if (attributes[at].order < 1 || attributes[at].order > 3) return invalid_value;
        if (attributes[at].flags > 1) return invalid_value;
    }
    if (count > 51'827) machine().note_violation("more copies in a batch than drivers survive");
    const auto [end, code] = machine().failing_entry(count);
    std::vector<Copy> copies;
    bool is_pageable = false;
    for (std::size_t at = 0; at < end; ++at) {
        const Copy copy{dsts[at], srcs[at], sizes[at]};
        const bool to_device =
            copy.size && machine().place(copy.dst, copy.size, current()) == Place::device;
        const int problem = copy.size == 0 ? invalid_value : judge(copy, to_device, is_pageable);
        if (problem) {
            if (failed) *failed = at;
            return problem;
        }
        if (!to_device && attributes[0].order != 1)
            machine().note_violation("a store that need not wait for what computes its source");
        copies.push_back(copy);
    }
    if (is_pageable) {
        if (!machine().copy_now(stream, copies)) return 702;
    } else if (machine().late_reads()) {
        machine().submit_late(stream, copies, dsts, srcs, sizes);
    } else {
        machine().submit(stream, copies);
    }
    if (code && failed) *failed = end;
    return code;
}

// A loaded program, and its kernel. Only the kernel that copies is known.
constexpr char kernel_name[] = "copy_fragments";
char program, kernel;

// What the kernel does: copies, read from a table in page-locked memory when it runs.
int launch_copies(void **arguments, void *handle) {
    Stream *stream = stream_of(handle);
    if (!stream) return invalid_handle;
    const auto *dsts = *static_cast<const std::uint64_t **>(arguments[0]);
    const auto *srcs = *static_cast<const std::uint64_t **>(arguments[1]);
    const auto *sizes = *static_cast<const std::uint64_t **>(arguments[2]);
    const unsigned count = *static_cast<unsigned *>(arguments[3]);
    for (const auto *column : {dsts, srcs, sizes})
        if (machine().place(reinterpret_cast<Address>(column), count * sizeof *column, current()) !=
            Place::pinned) {
            machine().note_violation("a kernel reads a table that is not page-locked");
            return illegal_address;
        }
    std::vector<Copy> copies;
    for (unsigned at = 0; at < count; ++at) {
        const Copy copy{dsts[at], srcs[at], sizes[at]};
        bool is_pageable = false;
        const bool to_device = machine().place(copy.dst, copy.size, current()) == Place::device;
        if (judge(copy, to_device, is_pageable) || is_pageable) {
            machine().note_violation("a kernel touches memory that is not page-locked");
            return illegal_address;
        }
        if ((copy.dst | copy.src | copy.size) % 16)
            machine().note_violation("a kernel is given addresses that are not aligned");
        copies.push_back(copy);
    }
    if (machine().late_reads())
        machine().submit_late(stream, copies, dsts, srcs, sizes);
    else
        machine().submit(stream, copies);
    return ok;
}

}  // namespace

namespace fake {
void reset_vendor() {
    initialized = false;
    ++generation;
}
}  // namespace fake

FAKE int cuInit(unsigned flags) {
    ENTER("cuInit");
    initialized = true;
    return flags == 0 ? ok : invalid_value;
}
FAKE int cuDriverGetVersion(int *version) {
    ENTER("cuDriverGetVersion");
    *version = VERSION;
    return ok;
}
FAKE int cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount");
    *count = fake::num_devices;
    return ok;
}
FAKE int cuDeviceGet(int *device, int index) {
    ENTER("cuDeviceGet");
    if (!initialized) return not_initialized;
    if (index < 0 || index >= fake::num_devices) return invalid_device;
    *device = index;
    return ok;
}
FAKE int cuDeviceGetName(char *name, int size, int) {
    ENTER("cuDeviceGetName");
    std::snprintf(name, static_cast<std::size_t>(size), "Fake GPU");
    return ok;
}
FAKE int cuDeviceGetPCIBusId(char *id, int size, int device) {
    ENTER("cuDeviceGetPCIBusId");
    std::snprintf(id, static_cast<std::size_t>(size), "0000:0%d:00.0", device + 1);
    return ok;
}
FAKE int cuDeviceGetAttribute(int *value, int, int) {
    ENTER("cuDeviceGetAttribute");
    *value = 1;
    return ok;
}
FAKE int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    *context = &contexts[device];
    return ok;
}
FAKE int cuCtxSetCurrent(void *context) {
    ENTER("cuCtxSetCurrent");
    if (!initialized) return not_initialized;
    current_device = context ? static_cast<Context *>(context)->device : -1;
    current_generation = generation;
    return ok;
}
FAKE int cuStreamCreate(void **stream, unsigned flags) {
    ENTER("cuStreamCreate");
    NEED_CONTEXT;
    if (flags != 1) machine().note_violation("a stream that waits for the legacy one");
    *stream = machine().make_stream(current());
    return ok;
}
FAKE int cuStreamDestroy_v2(void *stream) {
    ENTER("cuStreamDestroy_v2");
    NEED_CONTEXT;
    if (!stream_of(stream)) return invalid_handle;
    machine().destroy_stream(stream_of(stream));
    return ok;
}
FAKE int cuStreamSynchronize(void *stream) {
    ENTER("cuStreamSynchronize");
    NEED_CONTEXT;
    if (!stream_of(stream)) return invalid_handle;
    if (!machine().synchronize(stream_of(stream))) return 702;
    return machine().late_error();
}
FAKE int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER("cuStreamWaitEvent");
    NEED_CONTEXT;
    if (!any_stream_of(stream, current()) || !machine().is_event(event)) return invalid_handle;
    machine().wait(any_stream_of(stream, current()), static_cast<Event *>(event));
    return flags == 0 ? ok : invalid_value;
}
FAKE int cuEventCreate(void **event, unsigned flags) {
    ENTER("cuEventCreate");
    NEED_CONTEXT;
    if (flags & ~7u) return invalid_value;
    *event = machine().make_event(current());
    return ok;
}
FAKE int cuEventDestroy_v2(void *event) {
    ENTER("cuEventDestroy_v2");
    NEED_CONTEXT;
    if (!machine().is_event(event)) return invalid_handle;
    machine().destroy_event(static_cast<Event *>(event));
    return ok;
}
FAKE int cuEventRecord(void *event, void *stream) {
    ENTER("cuEventRecord");
    NEED_CONTEXT;
    Stream *on = any_stream_of(stream, current());
    if (!on || !machine().is_event(event)) return invalid_handle;
    if (on->device != static_cast<Event *>(event)->device) return invalid_handle;
    machine().record(static_cast<Event *>(event), on);
    return ok;
}
FAKE int cuEventQuery(void *event) {
    ENTER("cuEventQuery");
    NEED_CONTEXT;
    if (!machine().is_event(event)) return invalid_handle;
    if (int code = machine().late_error()) return code;
    return machine().is_complete(static_cast<Event *>(event)) ? ok : not_ready;
}
FAKE int cuEventSynchronize(void *event) {
    ENTER("cuEventSynchronize");
    NEED_CONTEXT;
    if (!machine().is_event(event)) return invalid_handle;
    if (!machine().synchronize(static_cast<Event *>(event))) return 702;
    return machine().late_error();
}
FAKE int cuMemAlloc_v2(std::uint64_t *address, std::size_t size) {
    ENTER("cuMemAlloc_v2");
    NEED_CONTEXT;
    *address = machine().allocate(size, current(), fake::Kind::device);
    return *address ? ok : (size ? out_of_memory : invalid_value);
}
FAKE int cuMemFree_v2(std::uint64_t address) {
    ENTER("cuMemFree_v2");
    NEED_CONTEXT;
    return machine().release(address, fake::Kind::device) ? ok : invalid_value;
}
FAKE int cuMemcpyHtoDAsync_v2(std::uint64_t dst, const void *src, std::size_t size, void *stream) {
    ENTER("cuMemcpyHtoDAsync_v2");
    NEED_CONTEXT;
    return copy_async({{dst, reinterpret_cast<Address>(src), size}}, true, stream);
}
FAKE int cuMemcpyDtoHAsync_v2(void *dst, std::uint64_t src, std::size_t size, void *stream) {
    ENTER("cuMemcpyDtoHAsync_v2");
    NEED_CONTEXT;
    return copy_async({{reinterpret_cast<Address>(dst), src, size}}, false, stream);
}
FAKE int cuMemcpy2DAsync_v2(const Memcpy2D *area, void *stream) {
    ENTER("cuMemcpy2DAsync_v2");
    NEED_CONTEXT;
    if (!area || area->width == 0 || area->height == 0) return invalid_value;
    if (area->src_pitch < area->width || area->dst_pitch < area->width) return invalid_value;
    if (area->src_pitch > 0x7fffffff || area->dst_pitch > 0x7fffffff) return invalid_value;
    const bool to_device = area->src_type == 1 && area->dst_type == 2;
    if (!to_device && !(area->src_type == 2 && area->dst_type == 1)) return invalid_value;
    const Address host = reinterpret_cast<Address>(to_device ? area->src_host : area->dst_host);
    const Address dst = to_device ? area->dst_device : host;
    const Address src = to_device ? host : area->src_device;
    return copy_async(
        fake::rows(dst, area->dst_pitch, src, area->src_pitch, area->width, area->height),
        to_device, stream);
}
FAKE int cuMemHostRegister_v2(void *at, std::size_t size, unsigned flags) {
    ENTER("cuMemHostRegister_v2");
    NEED_CONTEXT;
    if (size == 0 || (flags & ~15u)) return invalid_value;
    if (size >= std::size_t{512} << 30) return out_of_memory;
    const auto done = machine().lock(reinterpret_cast<Address>(at), size, current());
    return done == fake::Machine::Lock::ok ? ok : already_registered;
}
FAKE int cuMemHostUnregister(void *at) {
    ENTER("cuMemHostUnregister");
    NEED_CONTEXT;
    return machine().unlock(reinterpret_cast<Address>(at)) ? ok : not_registered;
}
FAKE int cuModuleLoadData(void **module, const char *image) {
    ENTER("cuModuleLoadData");
    NEED_CONTEXT;
    if (!std::strstr(image, kernel_name)) return invalid_ptx;
    *module = &program;
    return ok;
}
FAKE int cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER("cuModuleGetFunction");
    NEED_CONTEXT;
    if (module != &program) return invalid_handle;
    if (std::strcmp(name, kernel_name)) return not_found;
    *function = &kernel;
    return ok;
}
FAKE int cuLaunchKernel(void *function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                        unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared,
                        void *stream, void **arguments, void **extra) {
    ENTER("cuLaunchKernel");
    NEED_CONTEXT;
    if (function != &kernel) return invalid_handle;
    if (blocks_x == 0 || blocks_y != 1 || blocks_z != 1) return invalid_value;
    if (threads_x % 32 || threads_x == 0 || threads_x > 1024) return invalid_value;
    if (threads_y != 1 || threads_z != 1 || shared || !arguments || extra) return invalid_value;
    return launch_copies(arguments, stream);
}
FAKE int cuGetErrorName(int code, const char **name) {
    static const std::map<int, const char *> names = {
        {1, "CUDA_ERROR_INVALID_VALUE"},   {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {201, "CUDA_ERROR_INVALID_CONTEXT"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"},   {801, "CUDA_ERROR_NOT_SUPPORTED"}};
    auto found = names.find(code);
    *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second;
    return ok;
}

#if VERSION >= 12080
FAKE int cuMemcpyBatchAsync(std::uint64_t *dsts, std::uint64_t *srcs, std::size_t *sizes,
                            std::size_t count, Attributes *attributes, std::size_t *indices,
                            std::size_t num_attributes, std::size_t *failed, void *stream) {
    ENTER("cuMemcpyBatchAsync");
    NEED_CONTEXT;
    return batch(dsts, srcs, sizes, count, attributes, indices, num_attributes, failed, stream);
}
#endif
#if VERSION >= 13000
FAKE int cuMemcpyBatchAsync_v2(std::uint64_t *dsts, std::uint64_t *srcs, std::size_t *sizes,
                               std::size_t count, Attributes *attributes, std::size_t *indices,
                               std::size_t num_attributes, void *stream) {
    ENTER("cuMemcpyBatchAsync_v2");
    NEED_CONTEXT;
    return batch(dsts, srcs, sizes, count, attributes, indices, num_attributes, nullptr, stream);
}
#endif
FAKE int cuGetProcAddress_v2(const char *name, void **address, int version, std::uint64_t flags,
                             int *status) {
    ENTER("cuGetProcAddress_v2");
    *address = nullptr;
    if (flags != 0) return invalid_value;
    int found = 1;  // symbol not found
#if VERSION >= 12080
    if (std::strcmp(name, "cuMemcpyBatchAsync") == 0) {
        found = version >= 12080 ? 0 : 2;  // 2: this version does not have it
        if (found == 0) *address = reinterpret_cast<void *>(&cuMemcpyBatchAsync);
    }
#endif
#if VERSION >= 13000
    if (*address && version >= 13000) *address = reinterpret_cast<void *>(&cuMemcpyBatchAsync_v2);
#endif
    (void)name;
    (void)version;
    if (status) *status = found;
    return found == 0 ? ok : (status ? ok : not_found);
}
