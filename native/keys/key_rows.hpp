// Blocks that are named by keys, with their state per column: one row per block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/rows.hpp"
#include "trie/types.hpp"

namespace kvtier::keys {

using trie::BlockId;
using trie::Index;
using trie::kNone;
using trie::Slot;
using trie::State;

// One block in one column.
struct Standing {
  Slot slot;
  std::uint16_t num_leases;
  State state;
  bool is_linked : 1;
  bool was_used : 1;  // since its write began
};
static_assert(sizeof(Standing) == 8);

// Links of one block in a column with an order: the blocks evicted just before and just after it,
// among the linked ones. In a learned column: see `Places`.
struct Links {
  Index before;
  Index after;
};

// Rows of one size, each with a block's header, a standing per column, links in some columns, and
// the key. They grow in chunks, so rows never move and growth copies nothing.
class KeyRows {
 public:
  // have_links: whether each column has links.
  explicit KeyRows(const std::vector<bool>& have_links)
      : num_columns_(have_links.size()), rows_(sizeof(Block)) {
    std::size_t at = sizeof(Block) + num_columns_ * sizeof(Standing);
    for (const bool has_links : have_links) {
      links_at_.push_back(at);
      if (has_links) at += sizeof(Links);
    }
    key_at_ = at;
  }

  std::size_t num_columns() const { return num_columns_; }
  std::size_t key_bytes() const { return key_bytes_; }
  std::size_t num_live() const { return num_live_; }
  Index end() const { return end_; }  // rows used at any time are below
  std::size_t num_bytes() const { return rows_.num_bytes(); }

  // Set the length of all keys. Called before the first row is made.
  void set_key_bytes(std::size_t num_bytes) {
    constexpr std::size_t kWord = alignof(Block);
    key_bytes_ = num_bytes;
    rows_.set_row_bytes(key_at_ + (num_bytes + kWord - 1) / kWord * kWord);
  }
  // Reserve memory for about `num` rows. It assumes keys of the usual length, since the length is
  // not known before the first key.
  void reserve(std::size_t num) {
    if (key_bytes_ > 0) return;  // rows have their size
    rows_.set_row_bytes(key_at_ + kUsualKeyBytes);
    rows_.reserve(num);
  }

  Standing& at(Index row, std::size_t column) {
    return *rows_.at<Standing>(row, sizeof(Block) + column * sizeof(Standing));
  }
  const Standing& at(Index row, std::size_t column) const {
    return *rows_.at<Standing>(row, sizeof(Block) + column * sizeof(Standing));
  }
  // Return the links in a column that has them.
  Links& links(Index row, std::size_t column) {
    return *rows_.at<Links>(row, links_at_[column]);
  }
  const Links& links(Index row, std::size_t column) const {
    return *rows_.at<Links>(row, links_at_[column]);
  }
  std::uint32_t& num_uses(Index row) { return block(row).num_uses; }
  std::uint32_t num_uses(Index row) const { return block(row).num_uses; }
  std::uint32_t& depth(Index row) { return block(row).depth; }
  std::uint32_t depth(Index row) const { return block(row).depth; }
  const std::byte* key(Index row) const { return rows_.at<std::byte>(row, key_at_); }

  BlockId id(Index row) const {
    return static_cast<BlockId>(block(row).generation & ~kFree) << 32 | row;
  }
  bool is_live(Index row) const { return !(block(row).generation & kFree); }
  bool has(BlockId block) const {
    const auto row = static_cast<Index>(block);
    return row < end_ && is_live(row) && id(row) == block;
  }
  void prefetch(Index row) const { rows_.prefetch(row, key_at_ + key_bytes_); }
  // Prefetch the row of a block, if it is known.
  void prefetch_block(BlockId block) const {
    if (static_cast<Index>(block) < end_) prefetch(static_cast<Index>(block));
  }

  Index allocate(const std::byte* key) {
    Index row = free_;
    if (row != kNone) {
      free_ = block(row).depth;
    } else {
      if (end_ >= kNone) throw std::length_error("the index holds 2**32 blocks");
      row = end_++;
      rows_.reach(row);
      block(row).generation = 0;
    }
    block(row).generation &= ~kFree;
    block(row).num_uses = 0;
    block(row).depth = 0;
    for (std::size_t column = 0; column < num_columns_; ++column)
      at(row, column) = {0, 0, State::absent, false, false};
    std::memcpy(rows_.at<std::byte>(row, key_at_), key, key_bytes_);
    ++num_live_;
    return row;
  }

  void free(Index row) {
    --num_live_;
    const std::uint32_t generation = block(row).generation + 1;
    block(row).generation = generation | kFree;
    if (generation == kFree) return;  // not reused: its block number would repeat
    block(row).depth = free_;
    free_ = row;
  }

 private:
  struct Block {
    std::uint32_t generation;  // how often the row was used before; kFree: it is not used now
    std::uint32_t num_uses;
    std::uint32_t depth;  // of a free row: the next free one
  };
  static constexpr std::uint32_t kFree = 0x8000'0000;
  static constexpr std::size_t kUsualKeyBytes = 36;  // a SHA-256, and a number

  Block& block(Index row) { return *rows_.at<Block>(row, 0); }
  const Block& block(Index row) const { return *rows_.at<Block>(row, 0); }

  std::size_t num_columns_;
  std::vector<std::size_t> links_at_;  // per column
  std::size_t key_at_ = 0;
  std::size_t key_bytes_ = 0;
  Rows rows_;
  Index end_ = 0;
  Index free_ = kNone;
  std::size_t num_live_ = 0;
};

}  // namespace kvtier::keys
