// The labels of one prompt, as the caller has them.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>

#include "trie/tokens.hpp"
#include "trie/types.hpp"

namespace kvtier::trie {

// Either blocks of one token buffer, or a list of byte strings. Owns nothing. Ids that are not
// packed yet are compared as they are, and packed block by block where a hash is needed: a miss
// reads little.
//
// In a token buffer block i has bytes [i * block_bytes, (i + 1) * block_bytes), except that the
// first block of a chunk is named by the bytes of the whole chunk.
class Labels {
 public:
  explicit Labels(std::span<const Label> list) : list_(list), size_(list.size()) {}
  Labels(const std::byte* tokens, std::size_t block_bytes, std::size_t blocks_per_chunk,
         std::size_t first, std::size_t size)
      : tokens_(tokens),
        block_bytes_(block_bytes),
        blocks_per_chunk_(blocks_per_chunk),
        first_(first),
        size_(size) {}

  // `packed` has room for all blocks and whole chunks.
  void unpacked(IdType type, std::byte* packed) {
    type_ = type;
    packed_ = packed;
  }

  std::size_t size() const { return size_; }

  // How long most of them are; there must be one.
  std::size_t usual_bytes() const { return tokens_ == nullptr ? list_.back().size : block_bytes_; }

  // Packs block i and all after it, so that no id is found out of range half-way through a change.
  void pack_from(std::size_t i) {
    if (packed_ == nullptr || i >= size_) return;
    const std::size_t end = first_ + size_ + blocks_per_chunk_ - 1;
    pack(i, end / blocks_per_chunk_ * blocks_per_chunk_ - first_ - i);
    packed_from_ = i;
  }

  Label operator[](std::size_t i) {
    if (tokens_ == nullptr) return list_[i];
    const std::size_t num = num_blocks(i);
    if (packed_ == nullptr) return {ids(i), num * block_bytes_};
    if (i < packed_from_) pack(i, num);
    return {packed_ + i * block_bytes_, num * block_bytes_};
  }

  // Blocks that lie in one piece, each named by its own ids only; unpacked ids are as they came.
  struct Run {
    const std::byte* ids;
    IdType type;
    std::size_t tokens_per_block;
    std::size_t num_blocks;
  };
  // From block i on; of no blocks where that one is named otherwise.
  Run run(std::size_t i) const {
    if (tokens_ == nullptr || num_blocks(i) != 1 || block_bytes_ % kPacked != 0) return {};
    const std::size_t rest = size_ - i;
    const std::size_t in_chunk = blocks_per_chunk_ - (first_ + i) % blocks_per_chunk_;
    return {ids(i), type_, block_bytes_ / kPacked,
            blocks_per_chunk_ > 1 && in_chunk < rest ? in_chunk : rest};
  }

 private:
  static constexpr std::size_t kPacked = 4;

  // Of how many blocks the tokens are that name block i.
  std::size_t num_blocks(std::size_t i) const {
    return blocks_per_chunk_ > 1 && (first_ + i) % blocks_per_chunk_ == 0 ? blocks_per_chunk_ : 1;
  }
  const std::byte* ids(std::size_t i) const {
    return tokens_ + (first_ + i) * block_bytes_ * id_bytes(type_) / kPacked;
  }
  void pack(std::size_t i, std::size_t num_blocks) {
    if (!pack_tokens(ids(i), type_, num_blocks * (block_bytes_ / kPacked),
                     packed_ + i * block_bytes_))
      throw std::invalid_argument("token ids must lie in 0 .. 2**32 - 1");
  }

  std::span<const Label> list_;
  const std::byte* tokens_ = nullptr;
  std::size_t block_bytes_ = 0;
  std::size_t blocks_per_chunk_ = 1;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
  IdType type_ = IdType::uint32;
  std::byte* packed_ = nullptr;  // null where tokens are packed already
  std::size_t packed_from_ = static_cast<std::size_t>(-1);
};

}  // namespace kvtier::trie
