// Resident blocks, each below the one before it in its prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/pool.hpp"
#include "policy/promise.hpp"

namespace kvtier::policy {

struct Block {
  Index parent;                // kNone: the first of a prompt, or the one in front is not resident
  std::uint32_t num_children : 31;  // resident ones
  std::uint32_t is_fork : 1;  // prompts were seen to go on from here in more than one way
  Index run;                   // or an entry; kNone: of none, for a moment, or for good, being gone
  Index item;                  // its owner's number
};

// A block that leaves before its children is gone, but its place stays until they let go of it: no
// link points to another block than it was made to.
class Blocks {
 public:
  Block& operator[](Index block) { return pool_[block]; }
  const Block& operator[](Index block) const { return pool_[block]; }
  void prefetch(Index block) const { pool_.prefetch(block); }
  bool is_leaf(Index block) const { return pool_[block].num_children == 0; }
  std::size_t size() const { return pool_.size() - num_gone_; }
  std::size_t num_bytes() const { return pool_.num_bytes(); }

  Index add(Index parent, Index item) {
    const Index block = pool_.add({parent, 0, 0, kNone, item});
    if (parent != kNone) ++pool_[parent].num_children;
    return block;
  }

  // Returns its parent.
  Index remove(Index block) {
    Block& it = pool_[block];
    const Index parent = it.parent;
    it.parent = it.run = it.item = kNone;
    if (it.num_children > 0) ++num_gone_;
    else pool_.remove(block);
    let_go(parent);
    return parent;
  }

  void hang_below(Index block, Index parent) {
    Block& it = pool_[block];
    if (it.parent == parent) return;
    if (parent != kNone) ++pool_[parent].num_children;
    let_go(it.parent);
    it.parent = parent;
  }

  // Calls visit(block) for each resident one.
  template <typename Visit>
  void each(Visit&& visit) const {
    for (Index block = 0; block < pool_.end(); ++block)
      if (pool_[block].item != kNone) visit(block);
  }

  // Throws std::logic_error where links and counts disagree. resident(visit): calls visit for each
  // resident block.
  template <typename Each>
  void check(Each&& resident) const {
    std::vector<std::uint32_t> num_children(pool_.end(), 0);
    std::size_t num = 0;
    resident([&](Index block) {
      ++num;
      promise(pool_[block].item != kNone, "blocks: one that is gone is resident");
      if (const Index parent = pool_[block].parent; parent != kNone) ++num_children[parent];
    });
    promise(num == size(), "blocks: some are of no run");
    resident([&](Index block) {
      promise(pool_[block].num_children == num_children[block], "blocks: children are miscounted");
    });
  }

 private:
  void let_go(Index parent) {
    if (parent == kNone || --pool_[parent].num_children > 0 || pool_[parent].item != kNone) return;
    --num_gone_;
    pool_.remove(parent);
  }

  Pool<Block> pool_;
  std::size_t num_gone_ = 0;  // whose places stay
};

}  // namespace kvtier::policy
