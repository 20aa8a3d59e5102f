#include "keys/slot_table.hpp"

#include <cstring>

namespace kvtier::keys {
namespace {

constexpr std::size_t kAhead = 16;  // slots whose keys are fetched at a time

}  // namespace

auto SlotTable::is_at(const std::byte* key) const {
  return [this, key](Slot slot) { return std::memcmp(key_of(slot), key, kKeyBytes) == 0; };
}

void SlotTable::reserve(std::size_t num_keys) { cells_.reserve(num_keys, slot_hash()); }

template <typename Visit>
void SlotTable::for_each(const std::int64_t* slots, std::size_t num, Visit&& visit) const {
  const auto slot_at = [&](std::size_t i) { return static_cast<Slot>(slots[i]); };
  cells_.for_each(
      num,
      [&](std::size_t i) {
        if (i + kAhead < num) __builtin_prefetch(key_of(slot_at(i + kAhead)));
        return key_hash(seed_, key_of(slot_at(i)));
      },
      [](Slot) {}, [&](std::size_t i, std::uint64_t hash) { visit(slot_at(i), hash); });
}

void SlotTable::find(const Key* keys, std::size_t num_keys, std::int64_t* found) const {
  cells_.for_each(
      num_keys, [&](std::size_t i) { return key_hash(seed_, keys[i].data()); },
      [&](Slot slot) { __builtin_prefetch(key_of(slot)); },
      [&](std::size_t i, std::uint64_t hash) {
        const Slot slot = cells_.find(hash, is_at(keys[i].data()));
        found[i] = slot == cells_.kNone ? -1 : static_cast<std::int64_t>(slot);
      });
}

void SlotTable::put(const std::int64_t* slots, std::size_t num) {
  for_each(slots, num, [&](Slot slot, std::uint64_t hash) {
    if (!cells_.replace(hash, is_at(key_of(slot)), slot)) cells_.insert(hash, slot, slot_hash());
  });
}

void SlotTable::remove(const std::int64_t* slots, std::size_t num) {
  for_each(slots, num, [&](Slot slot, std::uint64_t hash) {
    cells_.erase(hash, [slot](Slot other) { return other == slot; }, slot_hash());
  });
}

}  // namespace kvtier::keys
