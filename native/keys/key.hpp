// Key of a block in storage.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "trie/hash.hpp"

namespace kvtier::keys {

inline constexpr std::size_t kKeyBytes = 32;
inline constexpr std::uint32_t kMaxSlot = 0xFFFF'FFFF;

using Key = std::array<std::byte, kKeyBytes>;

inline std::uint64_t key_hash(std::uint64_t seed, const std::byte* key) {
  return trie::prefix_hash(seed, {key, kKeyBytes});
}

}  // namespace kvtier::keys
