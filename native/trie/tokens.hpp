// Token ids as labels hold them: four bytes each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvtier::trie {

// Writes `num` ids as little-endian uint32; false where one lies outside 0 .. 2**32 - 1. Ids of
// four bytes are copied; negative ones are refused if `is_signed`.
bool pack_tokens(const void* ids, std::size_t item_bytes, bool is_signed, std::size_t num,
                 std::byte* packed);

// Whether `num` ids are those that `packed` holds. No branch, so that a compiler can use vectors.
template <typename Id, typename Wide = std::uint64_t>
inline bool same_tokens(const std::byte* ids, std::size_t num, const std::byte* packed) {
  Wide difference = 0;
  for (std::size_t i = 0; i < num; ++i) {
    Id id;
    std::uint32_t known;
    std::memcpy(&id, ids + i * sizeof(id), sizeof(id));
    std::memcpy(&known, packed + i * sizeof(known), sizeof(known));
    difference |= static_cast<Wide>(id) ^ known;  // an id out of range has bits that `known` has not
  }
  return difference == 0;
}

}  // namespace kvtier::trie
