// Blocks that nobody but a policy keeps, found by the names of their prefixes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/cells.hpp"
#include "policy/keeper.hpp"

namespace kvtier::policy {

// An item is the block itself.
class NamedBlocks final : public Keeper {
 public:
  Key key(Index block) const override { return keys_[block]; }
  bool may_leave(Index block, std::uint32_t) const override { return !is_held_[block]; }
  Index find(Key key) const override {
    return cells_.find(key, [&](Index block) { return keys_[block] == key; });
  }

  // The blocks of a prompt that are resident, from its first on.
  void follow(std::span<const Key> path, std::vector<Index>& found) const {
    constexpr std::size_t kAhead = 8;
    found.clear();
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (i + kAhead < path.size()) cells_.prefetch(path[i + kAhead]);
      const Index block = find(path[i]);
      if (block == kNone) return;
      found.push_back(block);
    }
  }

  void add(Key key, Index block) {
    if (block >= keys_.size()) {
      keys_.resize(block + 1);
      is_held_.resize(block + 1, false);
    }
    keys_[block] = key;
    cells_.insert(key, block);
  }
  void remove(Index block) {
    cells_.erase(keys_[block], [&](Index other) { return other == block; });
  }
  void hold(Index block, bool is_held) { is_held_[block] = is_held; }

  std::size_t num_bytes() const { return keys_.capacity() * sizeof(Key) + cells_.num_bytes(); }

 private:
  std::vector<Key> keys_;        // of blocks that are gone, too
  std::vector<bool> is_held_;    // for a moment
  Cells<std::uint32_t> cells_;   // keys are mixed bits: their own hashes
};

}  // namespace kvtier::policy
