// Blocks that engines name by keys: a row each, found by key and by name.
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

// A block is known from `make` until `drop`. All keys have as many bytes as the first one; the last
// `group_bytes` of them say which of the blocks of one place in a prompt is meant.
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
  // What policies call a block: the hash of its key, but for its group.
  std::uint64_t name(Key key) const {
    return trie::prefix_hash(seed_, {key.data, key.size - std::min(group_bytes_, key.size)});
  }
  std::uint64_t name(Index row) const { return name(key(row)); }
  // Of the whole key.
  std::uint64_t hash(Key key) const { return trie::prefix_hash(seed_, key); }

  // Throws UnknownBlock.
  Index row(BlockId block) const {
    if (!rows_.has(block)) throw trie::UnknownBlock(block);
    return static_cast<Index>(block);
  }
  // A row with this name for which is_it(row), kNone where there is none.
  template <typename Test>
  Index named(std::uint64_t name, Test&& is_it) const {
    return cells_.find(name, [&](Index row) { return this->name(row) == name && is_it(row); });
  }
  // Calls visit(i, row, name) for each key, in order; row is kNone where it is not known.
  template <typename Visit>
  void find(std::span<const Key> keys, Visit&& visit) const {
    for_each(keys, [&](std::size_t i, std::uint64_t name) {
      visit(i, keys[i].size == rows_.key_bytes() ? find_row(name, keys[i]) : kNone, name);
    });
  }

  // There will be about so many. Before any request comes: it takes a while.
  void expect(std::size_t num_blocks);
  // Appends a block for each key, new where it was not known. Throws std::invalid_argument for a
  // key of another length.
  void make(std::span<const Key> keys, std::vector<BlockId>& blocks);
  // Nobody needs it any more.
  void drop(Index row);
  // Calls visit(i) for each block, in order; by then what `drop` looks at has come near.
  template <typename Visit>
  void for_each_dropped(std::span<const BlockId> blocks, Visit&& visit) const {
    cells_.for_each(
        blocks.size(),
        [&](std::size_t i) { return rows_.has(blocks[i]) ? name(row(blocks[i])) : 0; },
        [&](Index row) { rows_.prefetch(row); }, [&](std::size_t i, std::uint64_t) { visit(i); });
  }

  // Throws BrokenPromise where a block is not found by its key. O(all blocks).
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
  // Calls visit(i, name) for each key; by then what it will look at has come near.
  template <typename Visit>
  void for_each(std::span<const Key> keys, Visit&& visit) const {
    cells_.for_each(
        keys.size(), [&](std::size_t i) { return name(keys[i]); },
        [&](Index row) { rows_.prefetch(row); }, visit);
  }
  void check_key(Key key) const;

  std::size_t group_bytes_;
  std::uint64_t seed_;  // secret, so that nobody can name keys that all meet in one place
  KeyRows rows_;
  Cells<std::uint16_t> cells_;
};

}  // namespace kvtier::keys
