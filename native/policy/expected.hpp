// Blocks that were requested and are not resident yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "common/cells.hpp"
#include "policy/numbers.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// Maps the name of a block's prefix to the run that the block will join. If there are too many
// entries, the oldest are forgotten; such a block joins the run of the block before it.
class Expected {
 public:
  struct Entry {
    Key key;
    Key before;  // the name of the prefix without its last block
    Index run;
    std::uint32_t number;  // of the run, its low bits
    std::uint32_t at;      // place in the path
    Index older, newer;
  };

  explicit Expected(std::size_t most) : most_(most) {}

  // Return the entry of a block, valid until the next change; null if it is not expected.
  const Entry* find(Key key) const {
    const Index entry = find_entry(key);
    return entry == kNone ? nullptr : &entries_[entry];
  }

  void add(Key key, Key before, Index run, std::uint64_t number, std::uint32_t at) {
    take(key);
    if (entries_.size() == most_) take(entries_[ages_.oldest].key);
    const auto low = static_cast<std::uint32_t>(number);
    const Index entry = entries_.add({key, before, run, low, at, kNone, kNone});
    ages_.append(entries_, entry);
    cells_.insert(key, entry);
  }

  // Expect blocks behind the prefix `before`, of no run, that are neither expected nor resident yet.
  // at: blocks in front of the first one.
  template <typename IsResident>
  void add_behind(Key before, std::span<const Key> names, std::uint32_t at,
                  IsResident&& is_resident) {
    for (const Key name : names) {
      if (find(name) == nullptr && !is_resident(name)) add(name, before, kNone, 0, at);
      before = name;
      ++at;
    }
  }

  void prefetch(Key key) const { cells_.prefetch(key); }
  // Remove and return the entry of a block, if it is expected.
  std::optional<Entry> take(Key key) {
    if (entries_.size() == 0) return std::nullopt;  // reads no memory
    const Index entry =
        cells_.erase(key, [&](Index other) { return entries_[other].key == key; });
    if (entry == kNone) return std::nullopt;
    const Entry it = entries_[entry];
    ages_.unlink(entries_, entry);
    entries_.remove(entry);
    return it;
  }

  std::size_t size() const { return entries_.size(); }
  std::size_t num_bytes() const { return entries_.num_bytes() + cells_.num_bytes(); }

 private:
  Index find_entry(Key key) const {
    return cells_.find(key, [&](Index entry) { return entries_[entry].key == key; });
  }

  std::size_t most_;
  Pool<Entry> entries_;
  Cells<std::uint32_t> cells_;
  Ages ages_;
};

}  // namespace kvtier::policy
