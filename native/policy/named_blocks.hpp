// Blocks that only a policy keeps, found by the names of their prefixes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/cells.hpp"
#include "policy/keeper.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// Items are the numbers that `add` returns.
class NamedBlocks final : public Keeper {
 public:
  Key key(Index item) const override { return keys_[item]; }
  bool may_leave(Index item, std::uint32_t) const override { return !is_held_[item]; }
  Index find(Key key) const override {
    return cells_.find(key, [&](Index item) { return keys_[item] == key; });
  }

  // Return the resident first blocks of a prompt.
  void follow(std::span<const Key> path, std::vector<Index>& found) const {
    constexpr std::size_t kAhead = 8;
    found.clear();
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (i + kAhead < path.size()) cells_.prefetch(path[i + kAhead]);
      const Index item = find(path[i]);
      if (item == kNone) return;
      found.push_back(item);
    }
  }

  Index add(Key key) {
    const Index item = keys_.add(key);
    if (item >= is_held_.size()) is_held_.resize(item + 1, false);
    cells_.insert(key, item);
    return item;
  }
  void remove(Index item) {
    cells_.erase(keys_[item], [&](Index other) { return other == item; });
    keys_.remove(item);
  }
  void hold(Index item, bool is_held) { is_held_[item] = is_held; }

  std::size_t num_bytes() const { return keys_.num_bytes() + cells_.num_bytes(); }

 private:
  Pool<Key> keys_;               // also of removed items
  std::vector<bool> is_held_;    // for a moment
  Cells<std::uint32_t> cells_;   // keys are mixed bits: their own hashes
};

}  // namespace kvtier::policy
