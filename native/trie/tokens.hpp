// Token ids as labels hold them: four bytes each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::trie {

// Writes `num` ids as little-endian uint32; false where one lies outside 0 .. 2**32 - 1. Ids of
// four bytes are copied; negative ones are refused if `is_signed`.
bool pack_tokens(const void* ids, std::size_t item_bytes, bool is_signed, std::size_t num,
                 std::byte* packed);

}  // namespace kvtier::trie
