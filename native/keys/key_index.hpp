// Index of cached blocks and their tiers, for engines that name whole prefixes by keys: a flat
// table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "keys/key_rows.hpp"
#include "keys/known_blocks.hpp"
#include "keys/learned_column.hpp"
#include "policy/live.hpp"
#include "trie/types.hpp"

namespace kvtier::keys {

// Calls mean the same as in kvtier.index.KeyIndex; columns are numbers here. Every call takes
// constant time per block. Owned by one thread at a time. Misuse throws trie::UnknownBlock,
// BrokenPromise, or std::invalid_argument for a key of another length.
class KeyIndex {
 public:
  // policies: of each column, `policy::kLru` or one that `make_live` knows. group_bytes: trailing
  // bytes of a key that name the block's KV group.
  explicit KeyIndex(std::span<const std::string_view> policies, std::size_t group_bytes = 0);
  KeyIndex(const KeyIndex&) = delete;
  KeyIndex& operator=(const KeyIndex&) = delete;

  using Key = KnownBlocks::Key;

  // -- queries

  // Set rows[i] to the row of keys[i]; kNone if it is unknown.
  void find(std::span<const Key> keys, std::vector<Index>& rows) const;
  // Append the positions of the keys that are not in a column, each key once, and the blocks that
  // are ready there.
  void missing(std::span<const Key> keys, std::size_t column, std::vector<std::uint32_t>& which,
               std::vector<BlockId>& ready) const;
  // Remove repeated keys.
  void leave_each_once(std::vector<Key>& keys) const;
  // Return a number that is probably unique to a key. It is seeded secretly, so a client cannot
  // choose keys whose hashes collide.
  std::uint64_t hash(BlockId block) const { return known_.hash(key(block)); }
  std::uint64_t hash(Key key) const { return known_.hash(key); }
  State state_at(Index row, std::size_t column) const { return rows_.at(row, column).state; }
  BlockId id(Index row) const { return rows_.id(row); }

  State state(BlockId block, std::size_t column) const;
  Slot slot(BlockId block, std::size_t column) const { return rows_.at(row(block), column).slot; }
  std::uint32_t num_uses(BlockId block) const { return rows_.num_uses(row(block)); }
  std::uint32_t num_leases(BlockId block, std::size_t column) const {
    return rows_.at(row(block), column).num_leases;
  }
  std::uint32_t depth(BlockId block) const { return rows_.depth(row(block)); }
  void set_depth(BlockId block, std::uint32_t depth) { rows_.depth(row(block)) = depth; }
  Key key(BlockId block) const { return known_.key(row(block)); }
  std::size_t num_evictable(std::size_t column) const { return orders_[column].num_idle; }
  std::size_t num_held(std::size_t column) const { return orders_[column].num_held; }
  std::size_t size() const { return rows_.num_live(); }
  std::size_t num_bytes() const;

  // -- writing

  // Reserve memory for about this many blocks. Slow: call it before the first request.
  void expect(std::size_t num_blocks);
  // Append the block of each key; unknown keys get new blocks.
  void make(std::span<const Key> keys, std::vector<BlockId>& blocks);
  // before: the block in front of it in its prompt, if known.
  void begin_write(BlockId block, std::size_t column, Slot slot, Index before = kNone);
  // Append the block of each key, new if it is unknown, and its hash, and begin to write it. It
  // counts as used. keys: of one prompt, in its order.
  void write_new(std::span<const Key> keys, std::size_t column, std::span<const Slot> slots,
                 std::vector<BlockId>& blocks, std::vector<std::uint64_t>& hashes);
  void commit(BlockId block, std::size_t column);
  Slot abort(BlockId block, std::size_t column) { return leave(row(block), column); }

  // -- requests

  // Set how many of the last places of a prompt are kept; see kvtier.index.KeyIndex.
  void set_num_last(std::size_t num_places) { num_last_ = num_places; }
  // Report a request. keys: of its prompt, without repetition; keys of one place are neighbours.
  void asked(std::span<const Key> keys, double now);
  // Apply a retention hint to a prompt.
  void retain(std::span<const Key> keys, const policy::BlockHint& said, double now);
  // Report keys that follow `before` and were in no request.
  void continues(std::span<const Key> keys, Key before);
  // Append the positions of the blocks to admit to a column. None of them is there.
  void admit(std::span<const Key> keys, std::size_t column, std::size_t num_free,
             double least_chance, std::vector<std::uint32_t>& which);
  void set_room(std::size_t column, std::size_t num_blocks);
  // Set the depth, in blocks, at which a block is worth twice the first one of its prompt.
  void set_doubling(double doubles_at_blocks);

  // -- use

  void touch(std::span<const BlockId> blocks);
  void lease(BlockId block, std::size_t column);
  void release(BlockId block, std::size_t column);
  void release(std::span<const BlockId> blocks, std::size_t column);
  // Lease the blocks that are ready in a column. states[i]: of keys[i] there, absent if unknown.
  // slots: of the leased blocks, in order. With `all_or_none`, all blocks are leased or none.
  void lease_ready(std::span<const Key> keys, std::size_t column, bool all_or_none,
                   std::vector<State>& states, std::vector<Slot>& slots);

  // -- eviction

  void evict(std::size_t column, std::size_t num_blocks, std::vector<BlockId>& chosen);
  // Remove evicted blocks from a column. Append their slots.
  void forget(std::span<const BlockId> blocks, std::size_t column, std::vector<Slot>& slots);
  void keep(BlockId block, std::size_t column);
  std::optional<Slot> lose(BlockId block, std::size_t column);

  // -- for tests

  // Calls visit(row) for every block, in the order of their rows.
  template <typename Visit>
  void each(Visit&& visit) const {
    for (Index row = 0; row < rows_.end(); ++row)
      if (rows_.is_live(row)) visit(row);
  }
  const KeyRows& rows() const { return rows_; }
  // Return the rows of a column in order of eviction.
  std::vector<Index> order(std::size_t column) const;
  // Throw BrokenPromise if counts, links and cells disagree. O(all blocks).
  void check_invariants() const;

 private:
  // The blocks of a column in order of eviction. Blocks that an eviction has skipped, since they
  // are held or being written, are unlinked, so that no eviction examines them twice.
  struct Order {
    Index first = kNone;
    Index last = kNone;
    std::size_t num_held = 0;
    std::size_t num_idle = 0;
    std::unique_ptr<LearnedColumn> learned;  // used instead of the order
  };

  Index row(BlockId block) const { return known_.row(block); }
  void move(Index row, std::size_t column, State to);
  void begin_write(Index row, std::size_t column, Slot slot, Index before, policy::Key name);
  void enter(Index row, std::size_t column, Index before, policy::Key name);
  template <typename Tell>
  void tell_of_prompt(std::span<const Key> keys, Tell&& tell);
  void read_names(std::span<const Key> keys);
  void evict_learned(std::size_t column, std::size_t num_blocks, std::vector<BlockId>& chosen);
  void check_column(std::size_t column) const;
  void link_first(Index row, std::size_t column);
  void link_last(Index row, std::size_t column);
  void unlink(Index row, std::size_t column);
  void come_back(Index row, std::size_t column);
  Slot leave(Index row, std::size_t column);

  KnownBlocks known_;
  KeyRows& rows_;  // of the known blocks
  std::vector<Order> orders_;
  std::size_t num_last_ = static_cast<std::size_t>(-1);
  // Kept from call to call, to spare allocations.
  std::vector<policy::Key> names_;
  std::vector<policy::Key> path_;
  std::vector<Index> asked_;       // rows of a prompt
  std::vector<std::size_t> ends_;  // of its places, in `asked_`
  std::vector<Index> found_;
  std::vector<Index> leaving_;
};

}  // namespace kvtier::keys
