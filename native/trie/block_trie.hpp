// Index of cached blocks and their tiers: one node per block, found by (parent, label).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/cells.hpp"
#include "trie/keys.hpp"
#include "trie/labels.hpp"
#include "trie/live_policy.hpp"
#include "trie/lru.hpp"
#include "trie/nodes.hpp"
#include "trie/types.hpp"

namespace kvtier::trie {

// The meaning of each call is that of kvtier.index.BlockIndex. A column is a tier by its number,
// the fastest one first. Owned by one thread at a time. Misuse throws UnknownBlock or
// BrokenPromise.
class BlockTrie {
 public:
  using Path = std::vector<BlockId>;
  using Key = trie::Key;

  // policies: of each column, `policy::kLru` or one that `make_live` knows.
  explicit BlockTrie(std::span<const std::string_view> policies);
  BlockTrie(const BlockTrie&) = delete;
  BlockTrie& operator=(const BlockTrie&) = delete;

  // -- queries

  struct Found {
    BlockId block;
    std::uint8_t tier;
    bool in_flight;
  };
  void match(std::string_view space, Labels& labels, std::vector<Found>& found);

  // Writes to `slots`, which has room for one of each label; returns how many there are.
  std::size_t match_slots(std::string_view space, Labels& labels, std::size_t column,
                          std::int64_t* slots);

  State state(BlockId block, std::size_t column) const;
  void states(std::string_view space, Labels& labels, std::size_t column,
              std::optional<BlockId> after, std::vector<State>& states);
  Slot slot(BlockId block, std::size_t column) const;
  std::vector<BlockId> prefixes(std::span<const BlockId> blocks, std::size_t column) const;
  std::uint32_t num_uses(BlockId block) const { return nodes_.num_uses(at(block)); }
  std::uint32_t num_leases(BlockId block, std::size_t column) const {
    return nodes_.standing(at(block), column).leases;
  }
  std::size_t num_evictable(std::size_t column) const { return columns_[column].idle; }
  std::size_t num_held(std::size_t column) const { return columns_[column].held; }
  std::size_t size() const { return nodes_.num_live() - roots_.size(); }
  std::size_t num_namespaces() const { return roots_.size(); }
  std::size_t num_bytes() const;

  // -- writing

  void extend(std::string_view space, Labels& labels, std::optional<BlockId> after, Path& path);
  void begin_write(BlockId block, std::size_t column, Slot slot);
  void commit(BlockId block, std::size_t column, double now);
  Slot abort(BlockId block, std::size_t column) { return leave(at(block), column); }

  // Extends, and makes the blocks ready in `column` where they are absent, block i in slots[i].
  // Stops before a block that is being written or evicted there. Where a block was ready, slots[i]
  // becomes the slot that it has. Leases all of `path` if `hold`. Returns how many were absent.
  std::size_t insert(std::string_view space, Labels& labels, std::optional<BlockId> after,
                     std::size_t column, std::span<Slot> slots, double now, bool hold, Path& path);

  // -- requests

  void asked(std::string_view space, Labels& labels, double now);
  // See `Live::used_state`. The first `num_before` of `labels` belong to the prompt.
  void used_state(std::string_view space, Labels& labels, std::uint32_t num_before, BlockId front,
                  bool at_end, double now);
  void retain(std::string_view space, Labels& labels, const policy::BlockHint& said, double now);
  void admit(std::span<const BlockId> blocks, std::size_t column, std::size_t num_free,
             double least_chance, Path& admitted);
  void set_room(std::size_t column, std::size_t num_blocks) {
    if (Column& it = columns_[column]; it.learned) it.learned->live().set_capacity(num_blocks);
  }
  void set_doubling(double doubles_at_blocks) {
    for (Column& it : columns_)
      if (it.learned) it.learned->live().set_doubling(doubles_at_blocks);
  }

  // -- use

  // The blocks of one request, in prompt order.
  void touch(std::span<const BlockId> blocks, double now);
  void lease(BlockId block, std::size_t column);
  void release(BlockId block, std::size_t column);

  // -- eviction

  void evict(std::size_t column, std::size_t num_blocks, Path& chosen);
  // Appends the slots that are free now.
  void forget(std::span<const BlockId> blocks, std::size_t column, std::vector<Slot>& slots);
  void keep(BlockId block, std::size_t column);
  // A ready block is gone, leaf or not; nothing while it is leased.
  std::optional<Slot> lose(BlockId block, std::size_t column);

  struct Origin {
    Label space;
    std::uint32_t depth;  // 0 for the first block of a prompt
  };
  Origin origin(BlockId block) const;

  // -- keys: computed by the caller, kept here

  struct Unnamed {
    BlockId block;
    Label label;
  };
  // The blocks from the first without a key to `block`, in prompt order, and the key before them:
  // the namespace where there is none.
  std::string_view missing_keys(BlockId block, std::vector<Unnamed>& missing) const;
  void set_key(BlockId block, const Key& key);
  // Null where it was not computed yet.
  const Key* known_key(BlockId block) const;

  // -- for tests

  // Calls visit(index) for every node, roots included, in the order of their places.
  template <typename Visit>
  void each(Visit&& visit) const {
    for (Index index = 0; index < nodes_.end(); ++index)
      if (nodes_[index].parent != kFree) visit(index);
  }
  const Nodes& nodes() const { return nodes_; }
  Label label(Index index) const { return nodes_.label(index); }
  // Throws BrokenPromise where counts, links, queues and tables disagree. O(all blocks).
  void check_invariants() const;

 private:
  struct Column {
    Lru queue;
    std::unique_ptr<LivePolicy> learned;  // in the place of the queue
    std::size_t held = 0;
    std::size_t idle = 0;
  };

  Index at(BlockId block) const;
  Index root(std::string_view space) const;
  Index child(Index parent, Label label);
  template <typename Visit>
  void walk(Index index, Labels& labels, Visit&& visit);
  Index make(Index parent, std::uint64_t hash, Label label);
  void look_ahead(Index above, Labels& labels, std::size_t i);
  void prefetch_path(Index begin, Index end) const;
  Index begin(std::string_view space, std::optional<BlockId> after) const;
  std::uint64_t hash_of(std::string_view space) const;
  Index make_root(std::string_view space, Labels& labels);
  template <typename Test>
  Index find_or_make(std::string_view space, Labels& labels, std::optional<BlockId> after,
                     Test&& is_open);
  template <typename Tell>
  void tell_of_prompt(std::string_view space, Labels& labels, Tell&& tell);
  bool is_child(Index index, Index parent, Label label) const;
  bool is_cached(Index index) const;
  void move(Index index, std::size_t column, State to);
  void review(Index index, std::size_t column);
  void enter(Index index, std::size_t column);
  void count_in_parent(Index index, std::size_t column, bool added);
  Slot leave(Index index, std::size_t column);
  void prune(Index index);

  void check_node(Index index) const;
  void check_column(std::size_t column) const;

  std::uint64_t seed_;
  Nodes nodes_;
  Cells<std::uint32_t> table_;
  std::unordered_map<std::string, Index> roots_;
  mutable Index last_root_ = kNone;
  std::vector<Column> columns_;
  Keys keys_;
  // Kept from call to call, to spare allocations.
  std::vector<Index> places_;         // of the path that is being extended
  std::vector<std::uint64_t> ahead_;  // hashes of the prefixes that are about to be made
};

}  // namespace kvtier::trie
