// Slots by key, where the keys lie in the slots' own rows: what a disk tier needs to find a block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cells.hpp"
#include "keys/key.hpp"

namespace kvtier::keys {

// Not safe to be used by several threads at once.
class SlotTable {
 public:
  // keys: of `num_slots` slots, `stride` bytes apart; not owned. A listed slot keeps its key.
  // seed: secret, so that nobody can name keys that all meet in one place.
  // It has room for all slots at once.
  SlotTable(const std::byte* keys, std::size_t stride, std::size_t num_slots, std::uint64_t seed);
  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;

  // found[i]: the slot that is listed with keys[i], -1 where none is.
  void find(const Key* keys, std::size_t num_keys, std::int64_t* found) const;
  // List slots, each below `num_slots`, with the keys that they have: in the place of others with
  // the same keys.
  void put(const std::int64_t* slots, std::size_t num);
  // These slots are listed no more.
  void remove(const std::int64_t* slots, std::size_t num);

  std::size_t size() const { return cells_.size(); }
  std::size_t num_slots() const { return num_slots_; }
  std::size_t num_bytes() const { return cells_.num_bytes(); }

 private:
  using Slot = std::uint32_t;

  const std::byte* key_of(Slot slot) const { return keys_ + slot * stride_; }
  auto slot_hash() const;
  auto is_at(const std::byte* key) const;
  // Calls visit(slot, hash) for each slot; by then what it will look at has come near.
  template <typename Visit>
  void for_each(const std::int64_t* slots, std::size_t num, Visit&& visit) const;

  Cells<std::uint8_t> cells_;
  const std::byte* keys_;
  std::size_t stride_;
  std::size_t num_slots_;
  std::uint64_t seed_;
};

}  // namespace kvtier::keys
