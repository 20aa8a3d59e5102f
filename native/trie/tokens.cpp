#include "trie/tokens.hpp"

#include <bit>
#include <cstring>

namespace kvtier::trie {

static_assert(std::endian::native == std::endian::little, "labels are little-endian");

bool pack_tokens(const void* ids, std::size_t item_bytes, bool is_signed, std::size_t num,
                 std::byte* packed) {
  // Both loops have no branch, so that a compiler can use vectors.
  if (item_bytes == sizeof(std::uint64_t)) {
    const auto* const from = static_cast<const std::uint64_t*>(ids);
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < num; ++i) {
      all |= from[i];
      const auto id = static_cast<std::uint32_t>(from[i]);
      std::memcpy(packed + i * sizeof(id), &id, sizeof(id));
    }
    return all >> 32 == 0;
  }
  const auto* const from = static_cast<const std::uint32_t*>(ids);
  std::uint32_t all = 0;
  for (std::size_t i = 0; i < num; ++i) all |= from[i];
  if (num > 0) std::memcpy(packed, ids, num * sizeof(std::uint32_t));
  return !is_signed || all >> 31 == 0;
}

}  // namespace kvtier::trie
