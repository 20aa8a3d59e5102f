// The labels of one prompt, as the caller has them.
#pragma once

#include <cstddef>
#include <span>

#include "trie/types.hpp"

namespace kvtier::trie {

// Either blocks of one token buffer, or a list of byte strings. Owns nothing.
//
// In a token buffer block i has bytes [i * block_bytes, (i + 1) * block_bytes), except that the first
// block of a chunk is named by the bytes of the whole chunk.
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

  std::size_t size() const { return size_; }

  Label operator[](std::size_t i) const {
    if (tokens_ == nullptr) return list_[i];
    const std::size_t at = first_ + i;
    const bool begins_chunk = blocks_per_chunk_ > 1 && at % blocks_per_chunk_ == 0;
    return {tokens_ + at * block_bytes_, begins_chunk ? block_bytes_ * blocks_per_chunk_ : block_bytes_};
  }

 private:
  std::span<const Label> list_;
  const std::byte* tokens_ = nullptr;
  std::size_t block_bytes_ = 0;
  std::size_t blocks_per_chunk_ = 1;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace kvtier::trie
