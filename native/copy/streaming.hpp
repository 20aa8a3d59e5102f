// Copying with stores that go around the cache.
#pragma once

#include "copy/fragments.hpp"

namespace kvtier::copy {

#if defined(__x86_64__) || defined(_M_X64)
inline constexpr bool kStreamingBuilt = true;
#else
inline constexpr bool kStreamingBuilt = false;
#endif

// Copies `part` with non-temporal stores, two fragments in turn. Plain copies where
// kStreamingBuilt is false.
void copy_part_streaming(const Fragments& list, const Part& part);

// Copies `part` with memcpy, one fragment after the other.
void copy_part_plain(const Fragments& list, const Part& part);

// Copies `num_bytes` from the cache with non-temporal stores. They may not be visible before
// `end_streaming`. Plain stores if kStreamingBuilt is false.
void stream_out(std::byte* dst, const std::byte* src, std::size_t num_bytes);
void end_streaming();

}  // namespace kvtier::copy
