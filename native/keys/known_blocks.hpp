// Blocks that engines name by keys: a row per block, found by key and by name.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "common/cells.hpp"
#include "keys/key_rows.hpp"
#include "trie/hash.hpp"
#include "trie/types.hpp"

namespace kvtier::keys {

// A block is known from `make` until `drop`. All keys have the length of the first one. Their last
// `group_bytes` bytes distinguish the blocks of one place in a prompt.
class KnownBlocks {
 public:
  using Key = trie::Label;

  // have_links: see KeyRows.
  explicit KnownBlocks(const std::vector<bool>& have_links, std::size_t group_bytes = 0);
  KnownBlocks(const KnownBlocks&) = delete;
  KnownBlocks& operator=(const KnownBlocks&) = delete;

  KeyRows& rows() { return rows_; }
  const KeyRows& rows() const { return rows_; }
  std::size_t num_bytes() const { return rows_.num_bytes() + cells_.num_bytes(); }

  Key key(Index row) const { return {rows_.key(row), rows_.key_bytes()}; }
  // Whether several blocks may have one name.
  bool has_groups() const { return group_bytes_ > 0; }
  // Return the name of a block for policies: the hash of its key without the group.
  std::uint64_t name(Key key) const {
    return trie::prefix_hash(seed_, {key.data, key.size - std::min(group_bytes_, key.size)});
  }
  std::uint64_t name(Index row) const { return name(key(row)); }
  // Return the hash of the whole key.
  std::uint64_t hash(Key key) const { return trie::prefix_hash(seed_, key); }

  // Throws UnknownBlock.
  Index row(BlockId block) const {
    if (!rows_.has(block)) throw trie::UnknownBlock(block);
    return static_cast<Index>(block);
  }
  // Return a row with this name for which is_it(row); kNone if there is none.
  template <typename Test>
  Index named(std::uint64_t name, Test&& is_it) const {
    return cells_.find(name, [&](Index row) { return this->name(row) == name && is_it(row); });
  }
  // Call visit(i, row, name) for each key, in order; row is kNone if the key is unknown.
  template <typename Visit>
  void find(std::span<const Key> keys, Visit&& visit) const {
    for_each(keys, [&](std::size_t i, std::uint64_t name) {
      visit(i, keys[i].size == rows_.key_bytes() ? find_row(name, keys[i]) : kNone, name);
    });
  }

  // Reserve memory for about this many blocks. Slow: call it before the first request.
  void expect(std::size_t num_blocks);
  // Append the block of each key, new if it is unknown. Throws std::invalid_argument for a key of
  // another length.
  void make(std::span<const Key> keys, std::vector<BlockId>& blocks);
  // Forget a block.
  void drop(Index row);
  // Call visit(i) for each block, in order, with the memory that `drop` reads prefetched.
  template <typename Visit>
  void for_each_dropped(std::span<const BlockId> blocks, Visit&& visit) const {
    cells_.for_each(
        blocks.size(),
        [&](std::size_t i) { return rows_.has(blocks[i]) ? name(row(blocks[i])) : 0; },
        [&](Index row) { rows_.prefetch(row); }, [&](std::size_t i, std::uint64_t) { visit(i); });
  }

  // Throw BrokenPromise if a block is not found by its key. O(all blocks).
  void check() const;

 private:
  Index find_row(std::uint64_t name, Key key) const {
    return cells_.find(name, [&](Index row) {
      return std::memcmp(rows_.key(row), key.data, rows_.key_bytes()) == 0;
    });
  }
  auto name_of_row() const {
    return [this](Index row) { return name(row); };
  }
  // Call visit(i, name) for each key, with the memory that it reads prefetched.
  template <typename Visit>
  void for_each(std::span<const Key> keys, Visit&& visit) const {
    cells_.for_each(
        keys.size(), [&](std::size_t i) { return name(keys[i]); },
        [&](Index row) { rows_.prefetch(row); }, visit);
  }
  void check_key(Key key) const;

  std::size_t group_bytes_;
  std::uint64_t seed_;  // secret, so that a client cannot choose keys whose hashes collide
  KeyRows rows_;
  Cells<std::uint16_t> cells_;
};

}  // namespace kvtier::keys
