// Resident blocks, each below the one before it in its prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "common/promise.hpp"
#include "common/rows.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// All zeros: no block.
struct Block {
  Index parent;                // kNone: the first of a prompt, or the one in front is not resident
  std::uint32_t num_children : 30;  // resident ones
  std::uint32_t is_fork : 1;  // prompts were seen to go on from here in more than one way
  std::uint32_t is_resident : 1;
  Index run;  // or the queue's entry; kNone: none, since the block is being updated or is removed
};
static_assert(sizeof(Block) == 12);

// A block's number is its item, which is the owner's number, so no table translates them. If a
// block is removed before its children, its row stays until they release it, so no link ever points
// to another block. An item that is reused meanwhile gets a row and a number in `elsewhere_`. That
// is rare: blocks are evicted from the end of a prompt, unless the owner removes them.
class Blocks {
 public:
  Blocks() : rows_(sizeof(Block)) {}

  Block& operator[](Index block) {
    return block < kElsewhere ? *rows_.at<Block>(block, 0) : elsewhere_[block - kElsewhere].block;
  }
  const Block& operator[](Index block) const {
    return block < kElsewhere ? *rows_.at<Block>(block, 0) : elsewhere_[block - kElsewhere].block;
  }
  void reserve(std::size_t num_items) { rows_.reserve(num_items); }
  bool is_leaf(Index block) const { return (*this)[block].num_children == 0; }
  std::size_t size() const { return num_resident_; }
  std::size_t num_bytes() const { return rows_.num_bytes() + elsewhere_.num_bytes(); }

  // Return the number of a resident item; kNone for kNone.
  Index number(Index item) const {
    if (numbers_.empty()) return item;
    const auto it = numbers_.find(item);
    return it == numbers_.end() ? item : it->second;
  }
  // Return the numbers of resident items. They are written to `room` if they differ from the items.
  std::span<const Index> numbers(std::span<const Index> items, std::vector<Index>& room) const {
    if (numbers_.empty()) return items;
    room.clear();
    for (const Index item : items) room.push_back(number(item));
    return room;
  }
  Index item(Index block) const {
    return block < kElsewhere || block == kNone ? block : elsewhere_[block - kElsewhere].item;
  }

  // Return the item in front of a resident one; kNone if that is not resident.
  Index in_front_of(Index item) const {
    const Index parent = (*this)[number(item)].parent;
    return parent == kNone || !(*this)[parent].is_resident ? kNone : this->item(parent);
  }

  Index add(Index parent, Index item) {
    if (item >= kElsewhere) throw std::length_error("a policy knows 2**31 blocks");
    rows_.reach_alone(item);
    const Block made{parent, 0, 0, 1, kNone};
    Index block = item;
    if (is_leaf(item)) {
      (*this)[item] = made;
    } else {
      block = kElsewhere + elsewhere_.add({made, item});
      numbers_[item] = block;
    }
    ++num_resident_;
    if (parent != kNone) ++(*this)[parent].num_children;
    return block;
  }

  // Returns its parent.
  Index remove(Index block) {
    Block& it = (*this)[block];
    const Index parent = it.parent;
    it.parent = it.run = kNone;
    it.is_resident = 0;
    --num_resident_;
    if (block >= kElsewhere) numbers_.erase(item(block));
    if (it.num_children == 0) free(block);
    let_go(parent);
    return parent;
  }

  void hang_below(Index block, Index parent) {
    Block& it = (*this)[block];
    if (it.parent == parent) return;
    if (parent != kNone) ++(*this)[parent].num_children;
    let_go(it.parent);
    it.parent = parent;
  }

  // Calls visit(block) for each resident one.
  template <typename Visit>
  void each(Visit&& visit) const {
    rows_.each([&](Index block) {
      if ((*this)[block].is_resident) visit(block);
    });
    for (const auto& [item, block] : numbers_) visit(block);
  }

  // Throws BrokenPromise where links and counts disagree. resident(visit): calls visit for each
  // resident block.
  template <typename Each>
  void check(Each&& resident) const {
    std::unordered_map<Index, std::uint32_t> num_children;
    std::size_t num = 0;
    resident([&](Index block) {
      ++num;
      promise((*this)[block].is_resident, "blocks: one that is gone is resident");
      promise(number(item(block)) == block, "blocks: one is not found by its item");
      if (const Index parent = (*this)[block].parent; parent != kNone) ++num_children[parent];
    });
    promise(num == size(), "blocks: some are of no run");
    std::size_t num_links = 0, num_gone = 0;
    rows_.each([&](Index block) { num_links += (*this)[block].num_children; });
    for (const auto& [block, counted] : num_children) {
      promise((*this)[block].num_children == counted, "blocks: children are miscounted");
      const bool is_elsewhere = block >= kElsewhere;
      num_links -= is_elsewhere ? 0 : counted;
      num_gone += is_elsewhere && !(*this)[block].is_resident;
    }
    promise(num_links == 0, "blocks: one has children that nobody knows");
    promise(elsewhere_.size() == numbers_.size() + num_gone, "blocks: a place is lost");
  }

 private:
  static constexpr Index kElsewhere = 0x8000'0000;  // numbers from here on

  struct Placed {
    Block block;
    Index item;
  };

  void let_go(Index parent) {
    if (parent == kNone || --(*this)[parent].num_children > 0 || (*this)[parent].is_resident) return;
    free(parent);
  }
  // A row that is indexed by its item needs no release.
  void free(Index block) {
    if (block >= kElsewhere) elsewhere_.remove(block - kElsewhere);
  }

  Rows rows_;  // by item
  Pool<Placed> elsewhere_;
  std::unordered_map<Index, Index> numbers_;  // numbers in `elsewhere_` by item
  std::size_t num_resident_ = 0;
};

}  // namespace kvtier::policy
