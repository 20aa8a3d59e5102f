// libascendcl.so: the part of CANN's runtime that copying uses. VERSION: 803, 805 or 901.
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
    acl_invalid_param = 100000,
    repeat_initialize = 100002,
    param_invalid = 107000,
    context_null = 107002,
    invalid_handle = 107017,
    wait_timeout = 107019,
    not_supported = 207000,
    memory_allocation = 207001,
    stream_sync_timeout = 507046,
};

enum : int { host_to_device = 1, device_to_host = 2 };

std::atomic<bool> initialized{false};
std::atomic<int> generation{0};
thread_local int current_device = -1;
thread_local int current_generation = -1;

int current() { return current_generation == generation ? current_device : -1; }

#define NEED_DEVICE                            \
    do {                                       \
        if (current() < 0) return context_null; \
    } while (false)

struct Location {
    std::uint32_t id;  // the id comes first
    int type;
};
struct Attributes {
    Location dst;  // the destination comes first
    Location src;
    std::uint8_t reserved[16];
};
static_assert(sizeof(Location) == 8 && sizeof(Attributes) == 32);

int judge(const Copy &copy, bool to_device, bool &is_pageable) {
    return fake::is_allowed(copy, to_device, current(), is_pageable) ? ok : param_invalid;
}

int copy_async(const std::vector<Copy> &copies, int kind, void *handle) {
    if (kind != host_to_device && kind != device_to_host) return not_supported;
    if (!handle) machine().note_violation("a copy on the default stream");
    Stream *stream = stream_of(handle);
    if (!stream) return invalid_handle;
    bool is_pageable = false;
    for (const Copy &copy : copies)
        if (int code = judge(copy, kind == host_to_device, is_pageable)) return code;
    if (is_pageable) return machine().copy_now(stream, copies) ? ok : stream_sync_timeout;
    machine().submit(stream, copies);
    return ok;
}

bool is_host(const Location &location) {
    if (VERSION >= 901 && location.type == 4) return true;  // HOST_NUMA
    return location.type == 0;
}

[[maybe_unused]] int batch(std::uint64_t *dsts, std::size_t *room, std::uint64_t *srcs, std::size_t *sizes,
          std::size_t count, Attributes *attributes, std::size_t *indices,
          std::size_t num_attributes, std::size_t *failed, bool needs_failed, void *handle) {
    if (needs_failed && !failed && VERSION < 901) return acl_invalid_param;
    if (!dsts || !room || !srcs || !sizes || !attributes || !indices) return acl_invalid_param;
    if (failed) *failed = SIZE_MAX;
    for (std::size_t at = 0; at < count; ++at)
        if (sizes[at] > room[at]) {
            if (failed) *failed = at;
            return acl_invalid_param;
        }
    for (std::size_t at = 0; at < num_attributes; ++at)
        for (std::uint8_t byte : attributes[at].reserved)
            if (byte) return acl_invalid_param;
    if (count == 0 || num_attributes == 0 || num_attributes > count) return param_invalid;
    if (indices[0] != 0 || indices[num_attributes - 1] >= count) return param_invalid;
    for (std::size_t at = 1; at < num_attributes; ++at)
        if (indices[at] <= indices[at - 1]) return param_invalid;
    if (fake::vendor_feature) return not_supported;
    if (!handle) machine().note_violation("a batch on the default stream");
    Stream *stream = stream_of(handle);
    if (!stream) return invalid_handle;
    if (count > 4096) machine().note_violation("more than 4,096 copies in a batch");

    const auto [end, code] = machine().failing_entry(count);
    std::vector<Copy> copies;
    bool is_pageable = false;
    int problem = ok;
    std::size_t at = 0, attribute = 0;
    for (; at < end && !problem; ++at) {
        while (attribute + 1 < num_attributes && indices[attribute + 1] <= at) ++attribute;
        const Attributes &is = attributes[attribute];
        const bool to_device = is.dst.type == 1 && is_host(is.src);
        const bool to_host = is_host(is.dst) && is.src.type == 1;
        const Location &device = to_device ? is.dst : is.src;
        const Copy copy{dsts[at], srcs[at], sizes[at]};
        if (!(to_device || to_host) || copy.size == 0 ||
            static_cast<int>(device.id) != current() || (to_device ? is.src : is.dst).id != 0) {
            problem = param_invalid;
        } else {
            problem = judge(copy, to_device, is_pageable);
        }
        if (problem) break;
        copies.push_back(copy);
    }
    // The copies before the bad one are under way.
    if (!copies.empty()) {
        if (is_pageable) {
            if (!machine().copy_now(stream, copies)) return stream_sync_timeout;
        } else if (machine().late_reads() && copies.size() == count) {
            machine().submit_late(stream, copies, dsts, srcs, sizes);
        } else {
            machine().submit(stream, copies);
        }
    }
    if ((problem || code) && failed) *failed = at;
    return problem ? problem : code;
}

}  // namespace

namespace fake {
void reset_vendor() {
    initialized = false;
    vendor_feature = false;
    ++generation;
}
}  // namespace fake

FAKE int aclInit(const char *) {
    ENTER("aclInit");
    return initialized.exchange(true) ? repeat_initialize : ok;
}
FAKE const char *aclGetRecentErrMsg() { return "EZ9999: the fake says no"; }
FAKE const char *aclrtGetSocName() { return "Ascend910B-fake"; }
FAKE int aclrtSetDevice(int device) {
    ENTER("aclrtSetDevice");
    if (!initialized) return acl_invalid_param;
    if (device < 0 || device >= fake::num_devices) return param_invalid;
    current_device = device;
    current_generation = generation;
    return ok;
}
FAKE int aclrtCreateStreamWithConfig(void **stream, std::uint32_t priority, std::uint32_t flag) {
    ENTER("aclrtCreateStreamWithConfig");
    NEED_DEVICE;
    if (priority > 7 || flag > 3) return param_invalid;
    *stream = machine().make_stream(current());
    return ok;
}
FAKE int aclrtDestroyStream(void *stream) {
    ENTER("aclrtDestroyStream");
    NEED_DEVICE;
    if (!stream_of(stream)) return invalid_handle;
    machine().destroy_stream(stream_of(stream));
    return ok;
}
FAKE int aclrtSynchronizeStream(void *stream) {
    ENTER("aclrtSynchronizeStream");
    NEED_DEVICE;
    if (!stream_of(stream)) return invalid_handle;
    if (!machine().synchronize(stream_of(stream))) return stream_sync_timeout;
    return machine().late_error();
}
FAKE int aclrtStreamWaitEvent(void *stream, void *event) {
    ENTER("aclrtStreamWaitEvent");
    NEED_DEVICE;
    Stream *on = any_stream_of(stream, current());
    if (!on || !machine().is_event(event)) return invalid_handle;
    if (!(static_cast<Event *>(event)->flags & 1)) return param_invalid;  // not made to be waited for
    machine().wait(on, static_cast<Event *>(event));
    return ok;
}
FAKE int aclrtCreateEventExWithFlag(void **event, std::uint32_t flag) {
    ENTER("aclrtCreateEventExWithFlag");
    NEED_DEVICE;
    if (flag == 0 || (flag & ~0xbu)) return param_invalid;
    Event *made = machine().make_event(current());
    made->flags = flag;
    *event = made;
    return ok;
}
FAKE int aclrtDestroyEvent(void *event) {
    ENTER("aclrtDestroyEvent");
    NEED_DEVICE;
    if (!machine().is_event(event)) return invalid_handle;
    machine().destroy_event(static_cast<Event *>(event));
    return ok;
}
FAKE int aclrtRecordEvent(void *event, void *stream) {
    ENTER("aclrtRecordEvent");
    NEED_DEVICE;
    Stream *on = any_stream_of(stream, current());
    if (!on || !machine().is_event(event)) return invalid_handle;
    machine().record(static_cast<Event *>(event), on);
    return ok;
}
FAKE int aclrtQueryEventStatus(void *event, int *status) {
    ENTER("aclrtQueryEventStatus");
    NEED_DEVICE;
    if (!machine().is_event(event)) return invalid_handle;
    if (int code = machine().late_error()) return code;
    *status = machine().is_complete(static_cast<Event *>(event)) ? 1 : 0;
    return ok;
}
FAKE int aclrtSynchronizeEvent(void *event) {
    ENTER("aclrtSynchronizeEvent");
    NEED_DEVICE;
    if (!machine().is_event(event)) return invalid_handle;
    if (!machine().synchronize(static_cast<Event *>(event))) return wait_timeout;
    return machine().late_error();
}
FAKE int aclrtMalloc(void **at, std::size_t size, int policy) {
    ENTER("aclrtMalloc");
    NEED_DEVICE;
    if (size == 0 || policy < 0) return param_invalid;
    *at = reinterpret_cast<void *>(machine().allocate(size, current(), fake::Kind::device));
    return *at ? ok : memory_allocation;
}
FAKE int aclrtFree(void *at) {
    ENTER("aclrtFree");
    NEED_DEVICE;
    return machine().release(reinterpret_cast<Address>(at), fake::Kind::device) ? ok
                                                                               : param_invalid;
}
FAKE int aclrtMemcpyAsync(void *dst, std::size_t room, const void *src, std::size_t size, int kind,
                          void *stream) {
    ENTER("aclrtMemcpyAsync");
    NEED_DEVICE;
    if (!dst || !src || size == 0 || size > room) return acl_invalid_param;
    return copy_async({{reinterpret_cast<Address>(dst), reinterpret_cast<Address>(src), size}},
                      kind, stream);
}
FAKE int aclrtMemcpy2dAsync(void *dst, std::size_t dst_pitch, const void *src,
                            std::size_t src_pitch, std::size_t width, std::size_t height, int kind,
                            void *stream) {
    ENTER("aclrtMemcpy2dAsync");
    NEED_DEVICE;
    if (!dst || !src || width == 0 || height == 0) return acl_invalid_param;
    if (width > dst_pitch || width > src_pitch) return param_invalid;
    return copy_async(fake::rows(reinterpret_cast<Address>(dst), dst_pitch,
                                 reinterpret_cast<Address>(src), src_pitch, width, height),
                      kind, stream);
}
FAKE int aclrtHostRegister(void *at, std::uint64_t size, int type, void **mapped) {
    ENTER("aclrtHostRegister");
    NEED_DEVICE;
    if (type != 0 || !mapped) return acl_invalid_param;
    if (reinterpret_cast<Address>(at) % 4096 || size % 4096 || size == 0) return param_invalid;
    const auto done = machine().lock(reinterpret_cast<Address>(at), size, current());
    if (done != fake::Machine::Lock::ok) return param_invalid;
    *mapped = at;
    return ok;
}
FAKE int aclrtHostUnregister(void *at) {
    ENTER("aclrtHostUnregister");
    NEED_DEVICE;
    return machine().unlock(reinterpret_cast<Address>(at)) ? ok : param_invalid;
}
#if VERSION >= 805
FAKE int aclrtHostRegisterV2(void *at, std::uint64_t size, std::uint32_t flag) {
    ENTER("aclrtHostRegisterV2");
    NEED_DEVICE;
    if (flag == 0 || (flag & ~0x1000000eu)) return param_invalid;
    if (reinterpret_cast<Address>(at) % 4096 || size % 4096 || size == 0) return param_invalid;
    const auto done = machine().lock(reinterpret_cast<Address>(at), size, current());
    return done == fake::Machine::Lock::ok ? ok : param_invalid;
}
FAKE int aclrtMemcpyBatchAsync(void **dsts, std::size_t *room, void **srcs, std::size_t *sizes,
                               std::size_t count, Attributes *attributes, std::size_t *indices,
                               std::size_t num_attributes, std::size_t *failed, void *stream) {
    ENTER("aclrtMemcpyBatchAsync");
    NEED_DEVICE;
    return batch(reinterpret_cast<std::uint64_t *>(dsts), room,
                 reinterpret_cast<std::uint64_t *>(srcs), sizes, count, attributes, indices,
                 num_attributes, failed, true, stream);
}
#endif
#if VERSION >= 901
FAKE int aclrtMemcpyBatchAsyncV2(void **dsts, std::size_t *room, void **srcs, std::size_t *sizes,
                                 std::size_t count, Attributes *attributes, std::size_t *indices,
                                 std::size_t num_attributes, void *stream) {
    ENTER("aclrtMemcpyBatchAsyncV2");
    NEED_DEVICE;
    return batch(reinterpret_cast<std::uint64_t *>(dsts), room,
                 reinterpret_cast<std::uint64_t *>(srcs), sizes, count, attributes, indices,
                 num_attributes, nullptr, false, stream);
}
#endif
