#include "keys/slot_table.hpp"

#include <cstring>

namespace kvtier::keys {
namespace {

constexpr std::size_t kAhead = 16;  // slots whose keys are fetched at a time

}  // namespace

auto SlotTable::slot_hash() const {
  return [this](Slot slot) { return key_hash(seed_, key_of(slot)); };
}

SlotTable::SlotTable(const std::byte* keys, std::size_t stride, std::size_t num_slots,
                     std::uint64_t seed)
    : keys_(keys), stride_(stride), num_slots_(num_slots), seed_(seed) {
  cells_.reserve(num_slots, 0, slot_hash());
}

auto SlotTable::is_at(const std::byte* key) const {
  return [this, key](Slot slot) { return std::memcmp(key_of(slot), key, kKeyBytes) == 0; };
}

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
    cells_.put(hash, is_at(key_of(slot)), slot, slot_hash());
  });
}

void SlotTable::remove(const std::int64_t* slots, std::size_t num) {
  for_each(slots, num, [&](Slot slot, std::uint64_t hash) {
    cells_.erase(hash, [slot](Slot other) { return other == slot; }, slot_hash());
  });
}

}  // namespace kvtier::keys
