#include "keys/key_table.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "trie/hash.hpp"

namespace kvtier::keys {
namespace {

constexpr std::size_t kNowhere = SIZE_MAX;
constexpr std::size_t kAhead = 16;  // keys whose cells are fetched at a time

// From 5/8 of the cells on in the first part, to 7/8 in the last.
bool is_full(std::size_t num_keys, std::size_t num_cells, std::size_t shard) {
  return 4096 * num_keys > (2560 + shard) * num_cells;
}

}  // namespace

std::uint64_t KeyTable::hash_of(const Key& key) const {
  return trie::prefix_hash(seed_, {key.data(), key.size()});
}

template <typename Visit>
void KeyTable::for_each(const Key* keys, std::size_t num_keys, Visit&& visit) const {
  std::array<std::uint64_t, kAhead> hashes;
  for (std::size_t begin = 0; begin < num_keys; begin += kAhead) {
    const std::size_t num = std::min(kAhead, num_keys - begin);
    for (std::size_t i = 0; i < num; ++i) {
      hashes[i] = hash_of(keys[begin + i]);
      const Shard& shard = shards_[hashes[i] >> kShardShift];
      if (!shard.cells.empty())
        __builtin_prefetch(&shard.cells[home_of(hashes[i]) & (shard.cells.size() - 1)]);
    }
    for (std::size_t i = 0; i < num; ++i) visit(begin + i, hashes[i]);
  }
}

std::size_t KeyTable::cell_of(const Shard& shard, std::uint64_t hash, const Key& key) {
  if (shard.num_keys == 0) return kNowhere;
  const std::size_t mask = shard.cells.size() - 1;
  const std::uint32_t tag = tag_of(hash);
  for (std::size_t at = home_of(hash) & mask; shard.cells[at] != kEmpty; at = (at + 1) & mask)
    if ((shard.cells[at] & ~kEntryMask) == tag && shard.entry(shard.cells[at]).key == key)
      return at;
  return kNowhere;
}

void KeyTable::find(const Key* keys, std::size_t num_keys, std::int64_t* found) const {
  for_each(keys, num_keys, [&](std::size_t i, std::uint64_t hash) {
    const Shard& shard = shards_[hash >> kShardShift];
    const std::size_t at = cell_of(shard, hash, keys[i]);
    found[i] = at == kNowhere ? -1 : static_cast<std::int64_t>(shard.entry(shard.cells[at]).slot);
  });
}

void KeyTable::put(const Key* keys, const std::int64_t* slots, std::size_t num_keys) {
  for_each(keys, num_keys, [&](std::size_t i, std::uint64_t hash) {
    put_one(hash, keys[i], static_cast<std::uint32_t>(slots[i]));
  });
}

void KeyTable::put_one(std::uint64_t hash, const Key& key, std::uint32_t slot) {
  Shard& shard = shards_[hash >> kShardShift];
  if (const std::size_t at = cell_of(shard, hash, key); at != kNowhere) {
    shard.entry(shard.cells[at]).slot = slot;
    return;
  }
  if (is_full(shard.num_keys + 1, shard.cells.size(), hash >> kShardShift))
    resize(shard, std::max(kFirstCells, 2 * shard.cells.size()));
  const std::uint32_t entry = take_entry(shard);
  shard.entry(entry) = {key, slot};
  const std::size_t mask = shard.cells.size() - 1;
  std::size_t at = home_of(hash) & mask;
  while (shard.cells[at] != kEmpty) at = (at + 1) & mask;
  shard.cells[at] = tag_of(hash) | entry;
  ++shard.num_keys;
  ++num_keys_;
}

void KeyTable::remove(const Key* keys, const std::int64_t* slots, std::size_t num_keys) {
  for_each(keys, num_keys, [&](std::size_t i, std::uint64_t hash) {
    remove_one(hash, keys[i], static_cast<std::uint32_t>(slots[i]));
  });
}

void KeyTable::remove_one(std::uint64_t hash, const Key& key, std::uint32_t slot) {
  Shard& shard = shards_[hash >> kShardShift];
  std::size_t hole = cell_of(shard, hash, key);
  if (hole == kNowhere || shard.entry(shard.cells[hole]).slot != slot) return;
  const std::uint32_t entry = shard.cells[hole] & kEntryMask;
  shard.entry(entry).slot = shard.first_free;
  shard.first_free = entry;
  // Cells that were pushed on by this one move back, so that no search ends too early.
  const std::size_t mask = shard.cells.size() - 1;
  for (std::size_t at = (hole + 1) & mask; shard.cells[at] != kEmpty; at = (at + 1) & mask) {
    const std::size_t home = home_of(hash_of(shard.entry(shard.cells[at]).key)) & mask;
    if (((at - home) & mask) >= ((at - hole) & mask)) {
      shard.cells[hole] = shard.cells[at];
      hole = at;
    }
  }
  shard.cells[hole] = kEmpty;
  --shard.num_keys;
  --num_keys_;
}

void KeyTable::reserve(std::size_t num_keys) {
  // Parts are not alike: most of them have less than a quarter more than the mean.
  const std::size_t in_shard = num_keys / kNumShards + num_keys / (4 * kNumShards);
  if (in_shard == 0) return;
  for (std::size_t i = 0; i < kNumShards; ++i) {
    std::size_t num_cells = std::max(kFirstCells, std::bit_ceil(in_shard));
    if (is_full(in_shard, num_cells, i)) num_cells *= 2;
    if (shards_[i].cells.size() < num_cells) resize(shards_[i], num_cells);
  }
}

void KeyTable::resize(Shard& shard, std::size_t num_cells) const {
  std::vector<std::uint32_t> before(num_cells, kEmpty);
  std::swap(before, shard.cells);
  const std::size_t mask = num_cells - 1;
  for (const std::uint32_t cell : before) {
    if (cell == kEmpty) continue;
    std::size_t at = home_of(hash_of(shard.entry(cell).key)) & mask;
    while (shard.cells[at] != kEmpty) at = (at + 1) & mask;
    shard.cells[at] = cell;
  }
}

std::uint32_t KeyTable::take_entry(Shard& shard) {
  if (shard.first_free != kEmpty) {
    const std::uint32_t entry = shard.first_free;
    shard.first_free = shard.entry(entry).slot;
    return entry;
  }
  if (shard.num_made == kEntryMask) throw std::length_error("a table of keys is full");
  if (shard.num_made % kChunkEntries == 0)
    shard.chunks.push_back(std::make_unique_for_overwrite<Entry[]>(kChunkEntries));
  return shard.num_made++;
}

std::size_t KeyTable::num_bytes() const {
  std::size_t sum = sizeof(*this) + shards_.size() * sizeof(Shard);
  for (const Shard& shard : shards_)
    sum += shard.cells.capacity() * sizeof(std::uint32_t) +
           shard.chunks.capacity() * sizeof(shard.chunks[0]) +
           shard.chunks.size() * kChunkEntries * sizeof(Entry);
  return sum;
}

}  // namespace kvtier::keys
