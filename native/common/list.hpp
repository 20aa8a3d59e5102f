// A stack of items.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/rows.hpp"

namespace kvtier {

// Like a vector, but growing never moves its items.
template <typename Item>
class List {
 public:
  List() : rows_(sizeof(Item)) {}

  std::uint32_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::size_t num_bytes() const { return rows_.num_bytes(); }
  Item& operator[](std::uint32_t at) { return *rows_.at<Item>(at, 0); }
  const Item& operator[](std::uint32_t at) const { return *rows_.at<Item>(at, 0); }
  const Item& back() const { return (*this)[size_ - 1]; }

  void prefetch(std::uint32_t at, std::uint32_t num) const {
    rows_.prefetch(at, num * sizeof(Item));
  }

  // See `Rows::reserve`.
  void reserve(std::size_t num) { rows_.reserve(num); }
  void push_back(const Item& item) {
    rows_.reach(size_);
    (*this)[size_++] = item;
  }
  void pop_back() { --size_; }

 private:
  Rows rows_;
  std::uint32_t size_ = 0;
};

}  // namespace kvtier
