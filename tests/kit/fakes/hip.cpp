// libamdhip64.so: the part of HIP's runtime that copying uses. VERSION: as hipRuntimeGetVersion.
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
    invalid_device = 101,
    invalid_handle = 400,
    not_ready = 600,
    timeout = 702,
    already_registered = 712,
    not_registered = 713,
    not_supported = 801,
};

enum : int { host_to_device = 1, device_to_host = 2 };
constexpr int takes_attributes = 71'300'000;

std::atomic<int> generation{0};
thread_local int current_device = 0;
thread_local int current_generation = -1;
thread_local int last_error = 0;

// Like CUDA's runtime, a thread begins with device 0.
int current() { return current_generation == generation ? current_device : 0; }

int noted(int code) {
    if (code && code != not_ready) last_error = code;
    return code;
}

struct Attributes {
    int order;
    int locations[4];
    unsigned flags;
};
static_assert(sizeof(Attributes) == 24);

int judge(const Copy &copy, bool to_device, bool &is_pageable) {
    return fake::is_allowed(copy, to_device, current(), is_pageable) ? ok : invalid_value;
}

int copy_async(const std::vector<Copy> &copies, int kind, void *handle) {
    if (kind != host_to_device && kind != device_to_host) return invalid_value;
    if (!handle) machine().note_violation("a copy on the default stream");
    Stream *stream = stream_of(handle);
    if (!stream) return invalid_handle;
    if (stream->device != current()) return invalid_handle;
    bool is_pageable = false;
    for (const Copy &copy : copies)
        if (int code = judge(copy, kind == host_to_device, is_pageable)) return code;
    if (is_pageable) return machine().copy_now(stream, copies) ? ok : timeout;
    machine().submit(stream, copies);
    return ok;
}

[[maybe_unused]] int batch(std::uint64_t *dsts, std::uint64_t *srcs, std::size_t *sizes,
                           std::size_t count, Attributes *attributes, std::size_t *indices,
                           std::size_t num_attributes, std::size_t *failed, void *handle) {
    if (failed) *failed = SIZE_MAX;
    if (!handle || !stream_of(handle)) return invalid_value;
    if (!dsts || !srcs || !sizes || count == 0) return invalid_value;
    if (num_attributes > 0 && VERSION < takes_attributes) return not_supported;
    if (VERSION >= takes_attributes) {
        if (!attributes || !indices || num_attributes == 0 || num_attributes > count)
            return invalid_value;
        if (indices[0] != 0) return invalid_value;
        for (std::size_t at = 0; at < num_attributes; ++at) {
            if (at > 0 && indices[at] <= indices[at - 1]) return invalid_value;
            if (attributes[at].order < 1 || attributes[at].order > 3) return invalid_value;
        }
    }
    if (count > 8192) machine().note_violation("more than 8,192 copies in a batch");
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
        copies.push_back(copy);
    }
    if (is_pageable) {
        if (!machine().copy_now(stream_of(handle), copies)) return timeout;
    } else if (machine().late_reads()) {
        machine().submit_late(stream_of(handle), copies, dsts, srcs, sizes);
    } else {
        machine().submit(stream_of(handle), copies);
    }
    if (code && failed) *failed = end;
    return code;
}

}  // namespace

namespace fake {
void reset_vendor() {
    vendor_feature = false;
    ++generation;
}
}  // namespace fake

FAKE int hipInit(unsigned flags) {
    ENTER("hipInit");
    return noted(flags == 0 ? ok : invalid_value);
}
FAKE int hipRuntimeGetVersion(int *version) {
    ENTER("hipRuntimeGetVersion");
    *version = VERSION;
    return ok;
}
FAKE int hipGetDeviceCount(int *count) {
    ENTER("hipGetDeviceCount");
    *count = fake::num_devices;
    return ok;
}
FAKE int hipSetDevice(int device) {
    ENTER("hipSetDevice");
    if (device < 0 || device >= fake::num_devices) return noted(invalid_device);
    current_device = device;
    current_generation = generation;
    return ok;
}
FAKE int hipDeviceGetName(char *name, int size, int) {
    ENTER("hipDeviceGetName");
    std::snprintf(name, static_cast<std::size_t>(size), "Fake Instinct");
    return ok;
}
FAKE int hipDeviceGetPCIBusId(char *id, int size, int device) {
    ENTER("hipDeviceGetPCIBusId");
    std::snprintf(id, static_cast<std::size_t>(size), "0000:0%d:00.0", device + 1);
    return ok;
}
FAKE const char *hipGetErrorName(int code) {
    return code == not_supported ? "hipErrorNotSupported" : "hipErrorUnknown";
}
FAKE int hipGetLastError() {
    const int code = last_error;
    last_error = 0;
    return code;
}
// What torch would find, and blame on its own next call.
FAKE int fake_pending_error() { return last_error; }

FAKE int hipStreamCreateWithFlags(void **stream, unsigned flags) {
    ENTER("hipStreamCreateWithFlags");
    if (flags != 1) machine().note_violation("a stream that waits for the default one");
    *stream = machine().make_stream(current());
    return ok;
}
FAKE int hipStreamDestroy(void *stream) {
    ENTER("hipStreamDestroy");
    if (!stream_of(stream)) return noted(invalid_handle);
    machine().destroy_stream(stream_of(stream));
    return ok;
}
FAKE int hipStreamSynchronize(void *stream) {
    ENTER("hipStreamSynchronize");
    if (!stream_of(stream)) return noted(invalid_handle);
    if (!machine().synchronize(stream_of(stream))) return noted(timeout);
    return noted(machine().late_error());
}
FAKE int hipStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER("hipStreamWaitEvent");
    Stream *on = any_stream_of(stream, current());
    if (!on || !machine().is_event(event)) return noted(invalid_handle);
    machine().wait(on, static_cast<Event *>(event));
    return noted(flags == 0 ? ok : invalid_value);
}
FAKE int hipEventCreateWithFlags(void **event, unsigned flags) {
    ENTER("hipEventCreateWithFlags");
    if (flags & ~3u) return noted(invalid_value);
    *event = machine().make_event(current());
    return ok;
}
FAKE int hipEventDestroy(void *event) {
    ENTER("hipEventDestroy");
    if (!machine().is_event(event)) return noted(invalid_handle);
    machine().destroy_event(static_cast<Event *>(event));
    return ok;
}
FAKE int hipEventRecord(void *event, void *stream) {
    ENTER("hipEventRecord");
    Stream *on = any_stream_of(stream, current());
    if (!on || !machine().is_event(event)) return noted(invalid_handle);
    if (on->device != static_cast<Event *>(event)->device) return noted(invalid_handle);
    machine().record(static_cast<Event *>(event), on);
    return ok;
}
FAKE int hipEventQuery(void *event) {
    ENTER("hipEventQuery");
    if (!machine().is_event(event)) return noted(invalid_handle);
    if (int code = machine().late_error()) return noted(code);
    return machine().is_complete(static_cast<Event *>(event)) ? ok : not_ready;
}
FAKE int hipEventSynchronize(void *event) {
    ENTER("hipEventSynchronize");
    if (!machine().is_event(event)) return noted(invalid_handle);
    if (!machine().synchronize(static_cast<Event *>(event))) return noted(timeout);
    return noted(machine().late_error());
}
FAKE int hipMalloc(void **at, std::size_t size) {
    ENTER("hipMalloc");
    *at = reinterpret_cast<void *>(machine().allocate(size, current(), fake::Kind::device));
    return noted(*at ? ok : out_of_memory);
}
FAKE int hipFree(void *at) {
    ENTER("hipFree");
    return noted(machine().release(reinterpret_cast<Address>(at), fake::Kind::device)
                     ? ok
                     : invalid_value);
}
FAKE int hipMemcpyAsync(void *dst, const void *src, std::size_t size, int kind, void *stream) {
    ENTER("hipMemcpyAsync");
    return noted(
        copy_async({{reinterpret_cast<Address>(dst), reinterpret_cast<Address>(src), size}}, kind,
                   stream));
}
FAKE int hipMemcpy2DAsync(void *dst, std::size_t dst_pitch, const void *src, std::size_t src_pitch,
                          std::size_t width, std::size_t height, int kind, void *stream) {
    ENTER("hipMemcpy2DAsync");
    if (width == 0 || height == 0) return noted(invalid_value);
    if (width > dst_pitch || width > src_pitch) return noted(invalid_value);
    return noted(copy_async(fake::rows(reinterpret_cast<Address>(dst), dst_pitch,
                                       reinterpret_cast<Address>(src), src_pitch, width, height),
                            kind, stream));
}
FAKE int hipHostRegister(void *at, std::size_t size, unsigned flags) {
    ENTER("hipHostRegister");
    if (size == 0 || (flags & ~15u)) return noted(invalid_value);
    if (size >= std::size_t{512} << 30) return noted(out_of_memory);
    const auto done = machine().lock(reinterpret_cast<Address>(at), size, current());
    return noted(done == fake::Machine::Lock::ok ? ok : already_registered);
}
FAKE int hipHostUnregister(void *at) {
    ENTER("hipHostUnregister");
    return noted(machine().unlock(reinterpret_cast<Address>(at)) ? ok : not_registered);
}
#if VERSION >= 70'100'000
FAKE int hipMemcpyBatchAsync(void **dsts, void **srcs, std::size_t *sizes, std::size_t count,
                             Attributes *attributes, std::size_t *indices,
                             std::size_t num_attributes, std::size_t *failed, void *stream) {
    ENTER("hipMemcpyBatchAsync");
    return noted(batch(reinterpret_cast<std::uint64_t *>(dsts),
                       reinterpret_cast<std::uint64_t *>(srcs), sizes, count, attributes, indices,
                       num_attributes, failed, stream));
}
#endif
