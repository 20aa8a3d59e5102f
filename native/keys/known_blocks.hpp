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
  // Return the hash of the whole key. name: of the key.
  std::uint64_t hash(Key key) const { return trie::prefix_hash(seed_, key); }
  std::uint64_t hash(Key key, std::uint64_t name) const { return has_groups() ? hash(key) : name; }

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
    const auto none = [](std::uint64_t) {};
    for_each(keys, none, [&](std::size_t i, std::uint64_t name) {
      visit(i, keys[i].size == rows_.key_bytes() ? find_row(name, keys[i]) : kNone, name);
    });
  }

  // Reserve memory for about this many blocks. Slow: call it before the first request.
  void expect(std::size_t num_blocks);
  // Call visit(i, row, name) for each key, in order; the row is new if the key is unknown.
  // ahead(name) is called some keys before. Throws std::invalid_argument for a key of another
  // length, before any call.
  template <typename Ahead, typename Visit>
  void make(std::span<const Key> keys, Ahead&& ahead, Visit&& visit) {
    for (const Key key : keys) check_key(key, keys.front());
    for_each(keys, ahead, [&](std::size_t i, std::uint64_t name) {
      if (rows_.key_bytes() == 0) rows_.set_key_bytes(keys[i].size);
      Index row = find_row(name, keys[i]);
      if (row == kNone) {
        row = rows_.allocate(keys[i].data);
        cells_.insert(name, row, name_of_row());
      }
      visit(i, row, name);
    });
  }
  // Forget a block.
  void drop(Index row);
  // Call visit(i) for each block, in order, with the memory that `drop` reads prefetched.
  template <typename Visit>
  void for_each_dropped(std::span<const BlockId> blocks, Visit&& visit) const {
    constexpr std::size_t kAhead = 16;  // blocks whose rows are prefetched at a time
    cells_.for_each(
        blocks.size(),
        [&](std::size_t i) {
          if (i + kAhead < blocks.size()) rows_.prefetch_block(blocks[i + kAhead]);
          return rows_.has(blocks[i]) ? name(row(blocks[i])) : 0;
        },
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
  struct NameOfRow {
    const KnownBlocks& known;

    std::uint64_t operator()(Index row) const { return known.name(row); }
    void prefetch(Index row) const { known.rows_.prefetch(row); }
  };
  NameOfRow name_of_row() const { return {*this}; }
  // Call visit(i, name) for each key, with the memory that it reads prefetched; ahead(name) before.
  template <typename Ahead, typename Visit>
  void for_each(std::span<const Key> keys, Ahead&& ahead, Visit&& visit) const {
    cells_.for_each(
        keys.size(),
        [&](std::size_t i) {
          const std::uint64_t its_name = name(keys[i]);
          ahead(its_name);
          return its_name;
        },
        [&](Index row) { rows_.prefetch(row); }, visit);
  }
  // first: the key whose length others have, if no key is known yet.
  void check_key(Key key, Key first) const;

  std::size_t group_bytes_;
  std::uint64_t seed_;  // secret, so that a client cannot choose keys whose hashes collide
  KeyRows rows_;
  Cells<std::uint16_t> cells_;
};

}  // namespace kvtier::keys
