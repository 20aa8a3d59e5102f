// The labels of one prompt, as the caller has them.
#pragma once

#include <cstddef>
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

  // The ids have `item_bytes` each; `packed` has room for all blocks and whole chunks. Blocks are
  // then asked for in ascending order.
  void unpacked(std::size_t item_bytes, bool is_signed, std::byte* packed) {
    item_bytes_ = item_bytes;
    is_signed_ = is_signed;
    packed_ = packed;
  }

  std::size_t size() const { return size_; }

  // So that no id is found out of range half-way through a change.
  void pack_all() {
    if (packed_ != nullptr && size_ > 0) pack(0, size_);
  }

  Label operator[](std::size_t i) {
    if (tokens_ == nullptr) return list_[i];
    const std::size_t at = first_ + i;
    const bool begins_chunk = blocks_per_chunk_ > 1 && at % blocks_per_chunk_ == 0;
    const std::size_t size = begins_chunk ? block_bytes_ * blocks_per_chunk_ : block_bytes_;
    if (packed_ == nullptr) return {tokens_ + at * block_bytes_, size};
    if (i >= num_packed_) pack(i, i == 0 ? 1 : i < 16 ? 16 : 64);
    return {packed_ + i * block_bytes_, size};
  }

 private:
  void pack(std::size_t i, std::size_t num) {
    constexpr std::size_t kPacked = 4;
    std::size_t end = first_ + (i + num < size_ ? i + num : size_);
    end = (end + blocks_per_chunk_ - 1) / blocks_per_chunk_ * blocks_per_chunk_;
    const std::size_t begin = first_ + i;
    if (!pack_tokens(tokens_ + begin * (block_bytes_ / kPacked * item_bytes_), item_bytes_,
                     is_signed_, (end - begin) * (block_bytes_ / kPacked),
                     packed_ + i * block_bytes_))
      throw std::invalid_argument("token ids must lie in 0 .. 2**32 - 1");
    num_packed_ = end - first_;
  }

  std::span<const Label> list_;
  const std::byte* tokens_ = nullptr;
  std::size_t block_bytes_ = 0;
  std::size_t blocks_per_chunk_ = 1;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
  std::size_t item_bytes_ = 4;
  bool is_signed_ = false;
  std::byte* packed_ = nullptr;
  std::size_t num_packed_ = 0;
};

}  // namespace kvtier::trie
