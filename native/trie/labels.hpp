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
// packed yet are packed while a walk goes on, a few blocks at first and then more: a miss reads
// little.
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

  // `packed` has room for all blocks and whole chunks. Blocks are
  // then asked for in ascending order.
  void unpacked(IdType type, std::byte* packed) {
    type_ = type;
    packed_ = packed;
  }

  std::size_t size() const { return size_; }

  // How long most of them are; there must be one.
  std::size_t usual_bytes() const { return tokens_ == nullptr ? list_.back().size : block_bytes_; }

  // So that no id is found out of range half-way through a change.
  void pack_all() {
    if (packed_ == nullptr || size_ == 0) return;
    const std::size_t end = first_ + size_ + blocks_per_chunk_ - 1;
    pack(0, end / blocks_per_chunk_ * blocks_per_chunk_ - first_);
    all_packed_ = true;
  }

  Label operator[](std::size_t i) {
    if (tokens_ == nullptr) return list_[i];
    if (packed_ != nullptr && !all_packed_) pack(i, num_blocks(i));
    return {bytes(i), num_blocks(i) * block_bytes_};
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
    const bool are_packed = packed_ == nullptr || all_packed_;
    return {are_packed ? bytes(i) : ids(i), are_packed ? IdType::uint32 : type_,
            block_bytes_ / kPacked,
            blocks_per_chunk_ > 1 && in_chunk < rest ? in_chunk : rest};
  }

 private:
  static constexpr std::size_t kPacked = 4;

  // Of how many blocks the tokens are that name block i.
  std::size_t num_blocks(std::size_t i) const {
    return blocks_per_chunk_ > 1 && (first_ + i) % blocks_per_chunk_ == 0 ? blocks_per_chunk_ : 1;
  }
  const std::byte* ids(std::size_t i) const {
    return tokens_ + (first_ + i) * (block_bytes_ / kPacked) * id_bytes(type_);
  }
  const std::byte* bytes(std::size_t i) const {
    return packed_ == nullptr ? tokens_ + (first_ + i) * block_bytes_ : packed_ + i * block_bytes_;
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
  bool all_packed_ = false;
};

}  // namespace kvtier::trie
