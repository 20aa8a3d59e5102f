// Where nodes are, by the hash of their prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "trie/types.hpp"

namespace kvtier::trie {

// Open addressing with linear probing; eight bytes an entry, at most three quarters of them used.
// Half of the hash is in the entry, so the table grows without asking the nodes.
class Table {
 public:
  // The node under `hash` for which `is_it` says so; kNone where there is none.
  template <typename Test>
  Index find(std::uint64_t hash, Test&& is_it) const {
    if (num_entries_ == 0) return kNone;
    const std::uint32_t tag = tag_of(hash);
    for (std::size_t at = tag & mask_; entries_[at].index != kNone; at = (at + 1) & mask_)
      if (entries_[at].tag == tag && is_it(entries_[at].index)) return entries_[at].index;
    return kNone;
  }

  void prefetch(std::uint64_t hash) const {
    if (num_entries_ > 0) __builtin_prefetch(&entries_[tag_of(hash) & mask_]);
  }

  void insert(std::uint64_t hash, Index index) {
    if (4 * (num_entries_ + 1) > 3 * entries_.size()) grow();
    put({tag_of(hash), index});
    ++num_entries_;
  }

  // The entry must be there.
  void erase(std::uint64_t hash, Index index) {
    std::size_t hole = tag_of(hash) & mask_;
    while (entries_[hole].index != index) hole = (hole + 1) & mask_;
    // Entries that were pushed on by this one move back, so that no search ends too early.
    for (std::size_t at = (hole + 1) & mask_; entries_[at].index != kNone; at = (at + 1) & mask_) {
      const std::size_t home = entries_[at].tag & mask_;
      if (((at - home) & mask_) >= ((at - hole) & mask_)) {
        entries_[hole] = entries_[at];
        hole = at;
      }
    }
    entries_[hole].index = kNone;
    --num_entries_;
  }

  std::size_t size() const { return num_entries_; }
  std::size_t num_bytes() const { return entries_.size() * sizeof(Entry); }

 private:
  struct Entry {
    std::uint32_t tag;
    Index index;
  };

  static std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }

  void put(Entry entry) {
    std::size_t at = entry.tag & mask_;
    while (entries_[at].index != kNone) at = (at + 1) & mask_;
    entries_[at] = entry;
  }

  void grow() {
    const std::size_t size = entries_.empty() ? 64 : 2 * entries_.size();
    std::vector<Entry> before(size, Entry{0, kNone});
    std::swap(before, entries_);
    mask_ = size - 1;
    for (const Entry& entry : before)
      if (entry.index != kNone) put(entry);
  }

  std::vector<Entry> entries_;
  std::size_t mask_ = 0;
  std::size_t num_entries_ = 0;
};

}  // namespace kvtier::trie
