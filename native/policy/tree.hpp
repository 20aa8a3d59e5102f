// Resident blocks, each below the one before it in its prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/cells.hpp"
#include "policy/numbers.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// Mark: what a policy keeps of a block. A block leaves before its parent does.
template <typename Mark>
class Tree {
 public:
  struct Block {
    Key key;
    Index parent;  // kNone: the first of a prompt
    std::uint32_t num_children;
    Mark mark;
  };

  Block& operator[](Index block) { return blocks_[block]; }
  const Block& operator[](Index block) const { return blocks_[block]; }
  void prefetch(Index block) const { blocks_.prefetch(block); }
  bool is_leaf(Index block) const { return blocks_[block].num_children == 0; }

  std::size_t size() const { return blocks_.size(); }
  std::size_t num_bytes() const { return blocks_.num_bytes() + cells_.num_bytes(); }

  // kNone where it is not resident.
  Index find(Key key) const {
    return cells_.find(key, [&](Index block) { return blocks_[block].key == key; });
  }

  // The blocks of a prompt that are resident, from its first on.
  void follow(std::span<const Key> path, std::vector<Index>& found) const {
    found.clear();
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (i + kAhead < path.size()) cells_.prefetch(path[i + kAhead]);
      const Index block = find(path[i]);
      if (block == kNone) return;
      found.push_back(block);
    }
  }

  Index add(Key key, Index parent, const Mark& mark) {
    const Index block = blocks_.add({key, parent, 0, mark});
    cells_.insert(key, block);
    if (parent != kNone) ++blocks_[parent].num_children;
    return block;
  }

  // A leaf. Its parent.
  Index remove(Index leaf) {
    const Block block = blocks_[leaf];
    cells_.erase(block.key, [&](Index other) { return other == leaf; });
    blocks_.remove(leaf);
    if (block.parent != kNone) --blocks_[block.parent].num_children;
    return block.parent;
  }

 private:
  static constexpr std::size_t kAhead = 8;

  Pool<Block> blocks_;
  Cells<std::uint32_t> cells_;  // keys are mixed bits: their own hashes
};

}  // namespace kvtier::policy
