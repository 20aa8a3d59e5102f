// Token ids as labels hold them: four bytes each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::trie {

// How ids came: any integers of four or eight bytes. An id of eight is the same, signed or not, as
// far as it is in range.
enum class IdType : std::uint8_t { uint32, int32, int64 };

inline std::size_t id_bytes(IdType type) { return type == IdType::int64 ? 8 : 4; }

// Writes `num` ids as little-endian uint32; false where one lies outside 0 .. 2**32 - 1.
bool pack_tokens(const std::byte* ids, IdType type, std::size_t num, std::byte* packed);

}  // namespace kvtier::trie
