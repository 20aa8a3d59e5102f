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

// The rows of a rectangle, as copies.
inline std::vector<Copy> rows(Address dst, std::size_t dst_pitch, Address src,
                              std::size_t src_pitch, std::size_t width, std::size_t height) {
    std::vector<Copy> copies;
    for (std::size_t row = 0; row < height; ++row)
        copies.push_back({dst + row * dst_pitch, src + row * src_pitch, width});
    return copies;
}

}  // namespace fake
