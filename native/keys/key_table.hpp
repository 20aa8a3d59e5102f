// Slots by key, with the keys: what is known of blocks that have no rows yet.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cells.hpp"
#include "common/rows.hpp"
#include "keys/key.hpp"

namespace kvtier::keys {

// At most 57 bytes for each of a million keys. Not safe to be used by several threads at once.
class KeyTable {
 public:
  // seed: secret, so that nobody can name keys that all meet in one place.
  explicit KeyTable(std::uint64_t seed) : rows_(sizeof(Entry)), seed_(seed) {}
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;

  // There will be about `num_keys` of them.
  void reserve(std::size_t num_keys);

  // found[i]: the slot of keys[i], -1 where it is not there.
  void find(const Key* keys, std::size_t num_keys, std::int64_t* found) const;
  // keys[i] is in slots[i] from now on.
  void put(const Key* keys, const std::int64_t* slots, std::size_t num_keys);
  // keys[i] is in slots[i] no more; one that is elsewhere stays there.
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
  // Calls visit(i, hash) for each key; by then what it will look at has come near.
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
