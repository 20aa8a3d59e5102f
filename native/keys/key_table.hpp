// Slots by key: what a disk tier has to know of every block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvtier::keys {

inline constexpr std::size_t kKeyBytes = 32;
inline constexpr std::uint32_t kMaxSlot = 0xFFFF'FFFF;

using Key = std::array<std::byte, kKeyBytes>;

// A hash table in kNumShards parts, each with entries and cells of its own: when a part grows, it
// moves a thousandth of all cells, and no entry; and no two grow at the same size, so that hardly
// any keys that are put together have many of them grow. An entry has 36 bytes, a cell 4, and from
// 5/16 to 7/8 of the cells are used: at most 48 bytes for each of a million keys.
//
//   hash = | shard: 10 bits | ... | tag: 10 bits | home: 22 bits |      cell = | tag | entry |
//
// Not safe to be used by several threads at once.
class KeyTable {
 public:
  // seed: secret, so that nobody can name keys that all meet in one place.
  explicit KeyTable(std::uint64_t seed) : shards_(kNumShards), seed_(seed) {}
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

  std::size_t size() const { return num_keys_; }
  std::size_t num_bytes() const;

 private:
  static constexpr std::size_t kNumShards = 1024;
  static constexpr int kShardShift = 64 - 10;
  static constexpr int kEntryBits = 22;
  static constexpr std::uint32_t kEntryMask = (1u << kEntryBits) - 1;
  static constexpr std::uint32_t kEmpty = 0xFFFF'FFFF;  // of the last entry, which is not given out
  static constexpr std::size_t kChunkEntries = 64;
  static constexpr std::size_t kFirstCells = 8;

  struct Entry {
    Key key;
    std::uint32_t slot;  // of a free entry: the next free one
  };

  struct Shard {
    std::vector<std::uint32_t> cells;
    std::vector<std::unique_ptr<Entry[]>> chunks;
    std::uint32_t num_keys = 0;
    std::uint32_t num_made = 0;  // entries that were ever used
    std::uint32_t first_free = kEmpty;

    Entry& entry(std::uint32_t cell) const {
      const std::uint32_t at = cell & kEntryMask;
      return chunks[at / kChunkEntries][at % kChunkEntries];
    }
  };

  static std::uint32_t tag_of(std::uint64_t hash) {
    return static_cast<std::uint32_t>(hash) & ~kEntryMask;
  }
  static std::size_t home_of(std::uint64_t hash) { return hash & kEntryMask; }

  std::uint64_t hash_of(const Key& key) const;
  // Calls `visit(i, hash)` for each key, in order; what it will look at is on its way by then.
  template <typename Visit>
  void for_each(const Key* keys, std::size_t num_keys, Visit&& visit) const;
  static std::size_t cell_of(const Shard& shard, std::uint64_t hash, const Key& key);
  void put_one(std::uint64_t hash, const Key& key, std::uint32_t slot);
  void remove_one(std::uint64_t hash, const Key& key, std::uint32_t slot);
  void resize(Shard& shard, std::size_t num_cells) const;
  static std::uint32_t take_entry(Shard& shard);

  std::vector<Shard> shards_;
  std::uint64_t seed_;
  std::size_t num_keys_ = 0;
};

}  // namespace kvtier::keys
