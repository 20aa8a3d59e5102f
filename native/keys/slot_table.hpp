// Slots by key, where the keys lie in the slots' own rows: what a disk tier needs to find a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "keys/key_table.hpp"

namespace kvtier::keys {

// A hash table of slot numbers in kNumShards parts. A cell has five bytes: a tag of the key's hash,
// and the slot; up to 7/8 of them are used, and from 7/10 on after a part has grown. Parts begin
// with sizes of their own, and so don't grow together.
//
//   hash = | shard: 10 bits | home: 32 bits | ... | tag: 8 bits |
//
// Not safe to be used by several threads at once.
class SlotTable {
 public:
  // keys: of `num_slots` slots, `stride` bytes apart; not owned. A listed slot keeps its key.
  // seed: secret, so that nobody can name keys that all meet in one place.
  SlotTable(const std::byte* keys, std::size_t stride, std::size_t num_slots, std::uint64_t seed)
      : shards_(kNumShards), keys_(keys), stride_(stride), num_slots_(num_slots), seed_(seed) {}
  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;

  // There will be about `num_keys` of them.
  void reserve(std::size_t num_keys);

  // found[i]: the slot that is listed with keys[i], -1 where none is.
  void find(const Key* keys, std::size_t num_keys, std::int64_t* found) const;
  // List slots, each below `num_slots`, with the keys that they have: in the place of others with
  // the same keys.
  void put(const std::int64_t* slots, std::size_t num);
  // These slots are listed no more.
  void remove(const std::int64_t* slots, std::size_t num);

  std::size_t size() const { return num_listed_; }
  std::size_t num_slots() const { return num_slots_; }
  std::size_t num_bytes() const;

 private:
  static constexpr std::size_t kNumShards = 1024;
  static constexpr int kShardShift = 64 - 10;

  struct Shard {
    std::vector<std::uint8_t> tags;  // 0: empty
    std::vector<std::uint32_t> slots;
    std::size_t num_listed = 0;

    std::size_t next(std::size_t at) const { return at + 1 == tags.size() ? 0 : at + 1; }
    std::size_t home(std::uint64_t hash) const {
      return static_cast<std::size_t>((hash >> 22 & 0xFFFF'FFFF) * tags.size() >> 32);
    }
  };

  static std::uint8_t tag_of(std::uint64_t hash) {
    return static_cast<std::uint8_t>(1 + (hash & 0xFF) % 255);
  }

  const std::byte* key_of(std::uint32_t slot) const { return keys_ + slot * stride_; }
  std::uint64_t hash_of(const std::byte* key) const;
  template <typename KeyAt, typename Visit>
  void for_each(std::size_t num, KeyAt&& key_at, Visit&& visit) const;
  // The cell of a key, or the empty one behind those where it could be.
  std::size_t cell_of(const Shard& shard, std::uint64_t hash, const std::byte* key) const;
  void put_one(std::uint64_t hash, std::uint32_t slot);
  void remove_one(std::uint64_t hash, std::uint32_t slot);
  void resize(Shard& shard, std::size_t num_cells) const;

  std::vector<Shard> shards_;
  const std::byte* keys_;
  std::size_t stride_;
  std::size_t num_slots_;
  std::uint64_t seed_;
  std::size_t num_listed_ = 0;
};

}  // namespace kvtier::keys
