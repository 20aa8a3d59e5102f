// BLAKE3 of what fits into one of its chunks: enough for the key of a block.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace kvtier::blake3 {

inline constexpr std::size_t kHashBytes = 32;
inline constexpr std::size_t kChunkBytes = 1024;

using Hash = std::array<std::byte, kHashBytes>;

// The hash of `text`, which has kChunkBytes at most.
// Source: BLAKE3, one function, fast everywhere (O'Connor, Aumasson, Neves, Wilcox-O'Hearn), 2.
Hash hash(std::span<const std::byte> text);

}  // namespace kvtier::blake3
