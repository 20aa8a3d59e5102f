#include "keys/key_table.hpp"

#include <stdexcept>

namespace kvtier::keys {

void KeyTable::reserve(std::size_t num_keys) { cells_.reserve(num_keys, 0); }

template <typename Visit>
void KeyTable::for_each(const Key* keys, std::size_t num_keys, Visit&& visit) const {
  cells_.for_each(
      num_keys, [&](std::size_t i) { return key_hash(seed_, keys[i].data()); },
      [&](Number number) { rows_.prefetch(number, sizeof(Entry)); }, visit);
}

void KeyTable::find(const Key* keys, std::size_t num_keys, std::int64_t* found) const {
  for_each(keys, num_keys, [&](std::size_t i, std::uint64_t hash) {
    const Number number = cells_.find(hash, has(keys[i]));
    found[i] = number == kNone ? -1 : static_cast<std::int64_t>(entry(number).slot);
  });
}

void KeyTable::put(const Key* keys, const std::int64_t* slots, std::size_t num_keys) {
  for_each(keys, num_keys, [&](std::size_t i, std::uint64_t hash) {
    const auto slot = static_cast<std::uint32_t>(slots[i]);
    if (const Number number = cells_.find(hash, has(keys[i])); number != kNone)
      entry(number).slot = slot;
    else
      cells_.insert(hash, make({keys[i], slot}));
  });
}

void KeyTable::remove(const Key* keys, const std::int64_t* slots, std::size_t num_keys) {
  for_each(keys, num_keys, [&](std::size_t i, std::uint64_t hash) {
    const auto is_in_slot = [&](Number number) {
      return entry(number).slot == static_cast<std::uint32_t>(slots[i]) && has(keys[i])(number);
    };
    const Number number = cells_.erase(hash, is_in_slot);
    if (number == kNone) return;
    entry(number).slot = free_;
    free_ = number;
  });
}

KeyTable::Number KeyTable::make(const Entry& made) {
  Number number = free_;
  if (number != kNone) {
    free_ = entry(number).slot;
  } else {
    if (num_made_ == kNone) throw std::length_error("a table of keys is full");
    rows_.reach(number = num_made_++);
  }
  entry(number) = made;
  return number;
}

}  // namespace kvtier::keys
