// Slots by key, for a disk tier. The keys lie in the rows of the slots.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cells.hpp"
#include "keys/key.hpp"

namespace kvtier::keys {

// Not thread-safe.
class SlotTable {
 public:
  // keys: of `num_slots` slots, `stride` bytes apart; not owned. A listed slot keeps its key.
  // seed: secret, so that a client cannot choose keys whose hashes collide.
  // Memory for all slots is allocated at once.
  SlotTable(const std::byte* keys, std::size_t stride, std::size_t num_slots, std::uint64_t seed);
  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;

  // Set found[i] to the slot that is listed with keys[i]; -1 if there is none.
  void find(const Key* keys, std::size_t num_keys, std::int64_t* found) const;
  // List slots, each below `num_slots`, by the keys in their rows. They replace slots with the same
  // keys.
  void put(const std::int64_t* slots, std::size_t num);
  // Remove slots from the table.
  void remove(const std::int64_t* slots, std::size_t num);

  std::size_t size() const { return cells_.size(); }
  std::size_t num_slots() const { return num_slots_; }
  std::size_t num_bytes() const { return cells_.num_bytes(); }

 private:
  using Slot = std::uint32_t;

  const std::byte* key_of(Slot slot) const { return keys_ + slot * stride_; }
  auto slot_hash() const;
  auto is_at(const std::byte* key) const;
  // Call visit(slot, hash) for each slot, with the memory that it reads prefetched.
  template <typename Visit>
  void for_each(const std::int64_t* slots, std::size_t num, Visit&& visit) const;

  Cells<std::uint8_t> cells_;
  const std::byte* keys_;
  std::size_t stride_;
  std::size_t num_slots_;
  std::uint64_t seed_;
};

}  // namespace kvtier::keys
