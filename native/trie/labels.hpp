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

  // Whether `known` is the label of block i. Ids are compared as they are.
  bool is(std::size_t i, Label known) const {
    const std::size_t size = tokens_ == nullptr ? list_[i].size : num_blocks(i) * block_bytes_;
    if (size != known.size) return false;
    if (tokens_ == nullptr) return std::memcmp(list_[i].data, known.data, size) == 0;
    if (packed_ == nullptr || all_packed_) return std::memcmp(bytes(i), known.data, size) == 0;
    const std::size_t num = size / kPacked;
    if (item_bytes_ == 8) return same_tokens<std::uint64_t>(ids(i), num, known.data);
    if (is_signed_) return same_tokens<std::int32_t>(ids(i), num, known.data);
    return same_tokens<std::uint32_t>(ids(i), num, known.data);
  }

  // Brings block i nearer, where there is one.
  void prefetch(std::size_t i) const {
    if (tokens_ == nullptr || i >= size_) return;
    const std::size_t num_bytes = block_bytes_ / kPacked * item_bytes_;
    for (std::size_t at = 0; at < num_bytes; at += kLine) __builtin_prefetch(ids(i) + at);
  }

 private:
  static constexpr std::size_t kPacked = 4;
  static constexpr std::size_t kLine = 64;

  // Of how many blocks the tokens are that name block i.
  std::size_t num_blocks(std::size_t i) const {
    return blocks_per_chunk_ > 1 && (first_ + i) % blocks_per_chunk_ == 0 ? blocks_per_chunk_ : 1;
  }
  const std::byte* ids(std::size_t i) const {
    return tokens_ + (first_ + i) * (block_bytes_ / kPacked) * item_bytes_;
  }
  const std::byte* bytes(std::size_t i) const {
    return packed_ == nullptr ? tokens_ + (first_ + i) * block_bytes_ : packed_ + i * block_bytes_;
  }

  void pack(std::size_t i, std::size_t num_blocks) {
    if (!pack_tokens(ids(i), item_bytes_, is_signed_, num_blocks * (block_bytes_ / kPacked),
                     packed_ + i * block_bytes_))
      throw std::invalid_argument("token ids must lie in 0 .. 2**32 - 1");
  }

  std::span<const Label> list_;
  const std::byte* tokens_ = nullptr;
  std::size_t block_bytes_ = 0;
  std::size_t blocks_per_chunk_ = 1;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
  std::size_t item_bytes_ = 4;
  bool is_signed_ = false;
  std::byte* packed_ = nullptr;  // null where tokens are packed already
  bool all_packed_ = false;
};

}  // namespace kvtier::trie
