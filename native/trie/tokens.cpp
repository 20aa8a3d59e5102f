#include "trie/tokens.hpp"

#include <bit>
#include <cstring>

namespace kvtier::trie {

static_assert(std::endian::native == std::endian::little, "labels are little-endian");

bool pack_tokens(const std::byte* ids, IdType type, std::size_t num, std::byte* packed) {
  // Both loops have no branch, so that a compiler can use vectors.
  if (type == IdType::int64) {
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < num; ++i) {
      std::uint64_t id;
      std::memcpy(&id, ids + i * sizeof(id), sizeof(id));
      all |= id;
      const auto low = static_cast<std::uint32_t>(id);
      std::memcpy(packed + i * sizeof(low), &low, sizeof(low));
    }
    return all >> 32 == 0;
  }
  std::uint32_t all = 0;
  for (std::size_t i = 0; i < num; ++i) {
    std::uint32_t id;
    std::memcpy(&id, ids + i * sizeof(id), sizeof(id));
    all |= id;
  }
  if (num > 0) std::memcpy(packed, ids, num * sizeof(std::uint32_t));
  return type == IdType::uint32 || all >> 31 == 0;
}

}  // namespace kvtier::trie
