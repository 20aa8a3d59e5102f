#include "keys/slot_table.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "trie/hash.hpp"

namespace kvtier::keys {
namespace {

constexpr std::size_t kAhead = 16;  // keys whose cells are fetched at a time
constexpr std::size_t kFewestCells = 8;

bool is_full(std::size_t num, std::size_t num_cells) { return 8 * num > 7 * num_cells; }

}  // namespace

std::uint64_t SlotTable::hash_of(const std::byte* key) const {
  return trie::prefix_hash(seed_, {key, kKeyBytes});
}

template <typename KeyAt, typename Visit>
void SlotTable::for_each(std::size_t num, KeyAt&& key_at, Visit&& visit) const {
  std::array<std::uint64_t, kAhead> hashes;
  for (std::size_t begin = 0; begin < num; begin += kAhead) {
    const std::size_t count = std::min(kAhead, num - begin);
    for (std::size_t i = 0; i < count; ++i) __builtin_prefetch(key_at(begin + i));
    for (std::size_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(key_at(begin + i));
      const Shard& shard = shards_[hashes[i] >> kShardShift];
      if (shard.tags.empty()) continue;
      const std::size_t home = shard.home(hashes[i]);
      __builtin_prefetch(&shard.tags[home]);
      __builtin_prefetch(&shard.slots[home]);
    }
    for (std::size_t i = 0; i < count; ++i) visit(begin + i, hashes[i]);
  }
}

std::size_t SlotTable::cell_of(const Shard& shard, std::uint64_t hash, const std::byte* key) const {
  const std::uint8_t tag = tag_of(hash);
  std::size_t at = shard.home(hash);
  for (; shard.tags[at] != 0; at = shard.next(at))
    if (shard.tags[at] == tag && std::memcmp(key_of(shard.slots[at]), key, kKeyBytes) == 0) break;
  return at;
}

void SlotTable::find(const Key* keys, std::size_t num_keys, std::int64_t* found) const {
  for_each(
      num_keys, [&](std::size_t i) { return keys[i].data(); },
      [&](std::size_t i, std::uint64_t hash) {
        found[i] = -1;
        const Shard& shard = shards_[hash >> kShardShift];
        if (shard.num_listed == 0) return;
        const std::size_t at = cell_of(shard, hash, keys[i].data());
        if (shard.tags[at] != 0) found[i] = shard.slots[at];
      });
}

void SlotTable::put(const std::int64_t* slots, std::size_t num) {
  for_each(
      num, [&](std::size_t i) { return key_of(static_cast<std::uint32_t>(slots[i])); },
      [&](std::size_t i, std::uint64_t hash) {
        put_one(hash, static_cast<std::uint32_t>(slots[i]));
      });
}

void SlotTable::put_one(std::uint64_t hash, std::uint32_t slot) {
  Shard& shard = shards_[hash >> kShardShift];
  if (is_full(shard.num_listed + 1, shard.tags.size()))
    resize(shard, shard.tags.empty() ? kFewestCells + (hash >> kShardShift) % kFewestCells
                                     : shard.tags.size() + shard.tags.size() / 4);
  const std::size_t at = cell_of(shard, hash, key_of(slot));
  if (shard.tags[at] == 0) {
    shard.tags[at] = tag_of(hash);
    ++shard.num_listed;
    ++num_listed_;
  }
  shard.slots[at] = slot;
}

void SlotTable::remove(const std::int64_t* slots, std::size_t num) {
  for_each(
      num, [&](std::size_t i) { return key_of(static_cast<std::uint32_t>(slots[i])); },
      [&](std::size_t i, std::uint64_t hash) {
        remove_one(hash, static_cast<std::uint32_t>(slots[i]));
      });
}

void SlotTable::remove_one(std::uint64_t hash, std::uint32_t slot) {
  Shard& shard = shards_[hash >> kShardShift];
  if (shard.num_listed == 0) return;
  std::size_t hole = cell_of(shard, hash, key_of(slot));
  if (shard.tags[hole] == 0 || shard.slots[hole] != slot) return;
  // Cells that were pushed on by this one move back, so that no search ends too early.
  const std::size_t num_cells = shard.tags.size();
  const auto distance = [&](std::size_t from, std::size_t to) {
    return to >= from ? to - from : to + num_cells - from;
  };
  for (std::size_t at = shard.next(hole); shard.tags[at] != 0; at = shard.next(at)) {
    const std::size_t home = shard.home(hash_of(key_of(shard.slots[at])));
    if (distance(home, at) >= distance(hole, at)) {
      shard.tags[hole] = shard.tags[at];
      shard.slots[hole] = shard.slots[at];
      hole = at;
    }
  }
  shard.tags[hole] = 0;
  --shard.num_listed;
  --num_listed_;
}

void SlotTable::reserve(std::size_t num_keys) {
  if (num_keys == 0) return;
  // Parts are not alike: hardly any has three standard deviations more than the mean.
  const double mean = static_cast<double>(num_keys) / static_cast<double>(kNumShards);
  const auto in_shard = static_cast<std::size_t>(mean + 3 * std::sqrt(mean)) + 1;
  const std::size_t num_cells = std::max(kFewestCells, 8 * in_shard / 7 + 1);
  for (Shard& shard : shards_)
    if (shard.tags.size() < num_cells) resize(shard, num_cells);
}

void SlotTable::resize(Shard& shard, std::size_t num_cells) const {
  std::vector<std::uint8_t> tags(num_cells, 0);
  std::vector<std::uint32_t> slots(num_cells);
  std::swap(tags, shard.tags);
  std::swap(slots, shard.slots);
  for (std::size_t before = 0; before < tags.size(); ++before) {
    if (tags[before] == 0) continue;
    std::size_t at = shard.home(hash_of(key_of(slots[before])));
    while (shard.tags[at] != 0) at = shard.next(at);
    shard.tags[at] = tags[before];
    shard.slots[at] = slots[before];
  }
}

std::size_t SlotTable::num_bytes() const {
  std::size_t sum = sizeof(*this) + shards_.size() * sizeof(Shard);
  for (const Shard& shard : shards_)
    sum += shard.tags.capacity() + shard.slots.capacity() * sizeof(std::uint32_t);
  return sum;
}

}  // namespace kvtier::keys
