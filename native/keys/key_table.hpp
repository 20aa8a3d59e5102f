// Slots by key, with the keys, for blocks without rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cells.hpp"
#include "common/rows.hpp"
#include "keys/key.hpp"

namespace kvtier::keys {

// Takes at most 57 bytes per key at a million keys. Not thread-safe.
class KeyTable {
 public:
  // seed: secret, so that a client cannot choose keys whose hashes collide.
  explicit KeyTable(std::uint64_t seed) : rows_(sizeof(Entry)), seed_(seed) {}
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;

  // Reserve memory for about `num_keys` keys.
  void reserve(std::size_t num_keys);

  // Set found[i] to the slot of keys[i]; -1 if it is unknown.
  void find(const Key* keys, std::size_t num_keys, std::int64_t* found) const;
  // Set the slot of keys[i] to slots[i].
  void put(const Key* keys, const std::int64_t* slots, std::size_t num_keys);
  // Remove keys[i] if it is in slots[i].
  void remove(const Key* keys, const std::int64_t* slots, std::size_t num_keys);

  std::size_t size() const { return cells_.size(); }
  std::size_t num_bytes() const { return cells_.num_bytes() + rows_.num_bytes(); }

 private:
  using Number = std::uint32_t;  // of an entry
  static constexpr Number kNone = Cells<std::uint32_t>::kNone;

  struct Entry {
    Key key;
    std::uint32_t slot;  // of a free entry: the next free one
  };

  Entry& entry(Number number) { return *rows_.at<Entry>(number, 0); }
  const Entry& entry(Number number) const { return *rows_.at<Entry>(number, 0); }
  auto has(const Key& key) const {
    return [&](Number number) { return entry(number).key == key; };
  }
  // Call visit(i, hash) for each key, with the memory that it reads prefetched.
  template <typename Visit>
  void for_each(const Key* keys, std::size_t num_keys, Visit&& visit) const;
  Number make(const Entry& entry);

  Cells<std::uint32_t> cells_;
  Rows rows_;
  std::uint64_t seed_;
  Number num_made_ = 0;  // entries that were ever used
  Number free_ = kNone;
};

}  // namespace kvtier::keys
