// Items of one type, found by number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "common/list.hpp"
#include "common/rows.hpp"

namespace kvtier::policy {

using Index = std::uint32_t;
inline constexpr Index kNone = 0xFFFF'FFFF;

// Numbers of removed items are reused, last in, first out. Items do not move.
template <typename Item>
class Pool {
 public:
  Pool() : rows_(sizeof(Item)) {}

  Item& operator[](Index index) { return *rows_.at<Item>(index, 0); }
  const Item& operator[](Index index) const { return *rows_.at<Item>(index, 0); }

  Index add(const Item& item) {
    Index index = end_;
    if (free_.empty()) {
      if (end_ == kNone) throw std::length_error("a policy knows 2**32 things");
      rows_.reach(end_++);
    } else {
      index = free_.back();
      free_.pop_back();
    }
    (*this)[index] = item;
    return index;
  }
  void remove(Index index) { free_.push_back(index); }
  void reserve(std::size_t num) { rows_.reserve(num); }
  // Prefetches an item.
  void prefetch(Index index) const { rows_.prefetch(index, sizeof(Item)); }

  std::size_t size() const { return end_ - free_.size(); }
  Index end() const { return end_; }  // numbers used at any time are below
  std::size_t num_bytes() const { return rows_.num_bytes() + free_.num_bytes(); }

 private:
  Rows rows_;
  List<Index> free_;
  Index end_ = 0;
};

// Order of items by age. Each has links `older` and `newer`.
struct Ages {
  Index oldest = kNone;
  Index newest = kNone;

  // Make an item the newest.
  template <typename Items>
  void append(Items& items, Index item) {
    items[item].older = newest;
    items[item].newer = kNone;
    (newest == kNone ? oldest : items[newest].newer) = item;
    newest = item;
  }
  template <typename Items>
  void unlink(Items& items, Index item) {
    const auto [older, newer] = std::pair{items[item].older, items[item].newer};
    (older == kNone ? oldest : items[older].newer) = newer;
    (newer == kNone ? newest : items[newer].older) = older;
  }
};

}  // namespace kvtier::policy
