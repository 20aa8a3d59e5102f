// How a fake shows its calls, and what the vendors have in common.
#pragma once

#include "machine.hpp"

#define FAKE extern "C" __attribute__((visibility("default")))

namespace fake {

// Set by a vendor's file.
void reset_vendor();
inline std::atomic<bool> vendor_feature{false};

// Counts the call, and leaves it with the code that a test wants instead.
#define ENTER(name)                                          \
    do {                                                     \
        if (const int code_ = fake::machine().enter(name)) { \
            return code_;                                    \
        }                                                    \
    } while (false)

// A stream of ours. Handle 0, the default stream, is none.
inline Stream *stream_of(void *handle) {
    return machine().is_stream(handle) ? static_cast<Stream *>(handle) : nullptr;
}

// For events, handle 0 is a stream, too: engines compute on it.
inline Stream *any_stream_of(void *handle, int device) {
    return handle ? stream_of(handle) : machine().legacy_stream(device);
}

// One copy between host memory and `device`: whether it is allowed, and whether it may wait.
inline bool is_allowed(const Copy &copy, bool to_device, int device, bool &is_pageable) {
    using Place = Machine::Place;
    const Address at_device = to_device ? copy.dst : copy.src;
    const Address at_host = to_device ? copy.src : copy.dst;
    if (machine().place(at_device, copy.size, device) != Place::device) return false;
    const Place host = machine().place(at_host, copy.size, device);
    is_pageable = is_pageable || host == Place::pageable;
    return host == Place::pinned || host == Place::pageable;
}

// The rows of a rectangle, as copies.
inline std::vector<Copy> rows(Address dst, std::size_t dst_pitch, Address src,
                              std::size_t src_pitch, std::size_t width, std::size_t height) {
    std::vector<Copy> copies;
    for (std::size_t row = 0; row < height; ++row)
        copies.push_back({dst + row * dst_pitch, src + row * src_pitch, width});
    return copies;
}

}  // namespace fake
