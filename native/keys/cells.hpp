// Where rows are, by the hash of their keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::keys {

// A hash table in kNumShards parts: when one grows it moves a thousandth of all cells, and nobody
// waits for more. Five bytes a cell, from 7/16 to 7/8 of them used; a tag and a row lie beside each
// other, so that a look-up waits for memory once.
//
//   hash = | shard: 10 bits | tag: 7 bits | ... | home: low bits |      cell = | tag | row |
class Cells {
 public:
  using Index = std::uint32_t;
  static constexpr Index kNone = 0xFFFF'FFFF;

  Cells() : shards_(kNumShards) {}

  // The row under `hash` for which `is_it` says so; kNone where there is none.
  template <typename Test>
  Index find(std::uint64_t hash, Test&& is_it) const {
    const Shard& shard = shards_[hash >> kShardShift];
    const std::size_t at = shard.find(hash, is_it);
    return at == kNowhere ? kNone : shard.cells[at].row;
  }

  void prefetch(std::uint64_t hash) const {
    const Shard& shard = shards_[hash >> kShardShift];
    if (!shard.cells.empty()) __builtin_prefetch(&shard.cells[hash & shard.mask()]);
  }

  // The first row that may be under `hash`, to be fetched before it is compared.
  Index likely(std::uint64_t hash) const {
    return find(hash, [](Index) { return true; });
  }

  // hash_of: of a row that is there already.
  template <typename HashOf>
  void insert(std::uint64_t hash, Index row, HashOf&& hash_of) {
    Shard& shard = shards_[hash >> kShardShift];
    if (8 * (shard.num_used + 1) > 7 * shard.cells.size()) shard.grow(hash_of);
    shard.put(hash, row);
    ++shard.num_used;
  }

  // The row must be there.
  template <typename HashOf>
  void erase(std::uint64_t hash, Index row, HashOf&& hash_of) {
    Shard& shard = shards_[hash >> kShardShift];
    shard.erase(shard.find(hash, [&](Index each) { return each == row; }), hash_of);
    --shard.num_used;
  }

  std::size_t num_bytes() const {
    std::size_t sum = shards_.size() * sizeof(Shard);
    for (const Shard& shard : shards_) sum += shard.cells.capacity() * sizeof(Cell);
    return sum;
  }

 private:
  static constexpr int kShardBits = 10;
  static constexpr std::size_t kNumShards = std::size_t{1} << kShardBits;
  static constexpr int kShardShift = 64 - kShardBits;
  static constexpr int kTagShift = kShardShift - 7;
  static constexpr std::size_t kFirstCells = 8;
  static constexpr std::size_t kNowhere = SIZE_MAX;

  // Never 0, which stands for an empty cell.
  static std::uint8_t tag_of(std::uint64_t hash) {
    return static_cast<std::uint8_t>(hash >> kTagShift | 0x80);
  }

  struct [[gnu::packed]] Cell {
    std::uint8_t tag = 0;  // 0: empty
    Index row = kNone;
  };
  static_assert(sizeof(Cell) == 5);

  struct Shard {
    std::vector<Cell> cells;
    std::size_t num_used = 0;

    std::size_t mask() const { return cells.size() - 1; }

    template <typename Test>
    std::size_t find(std::uint64_t hash, Test&& is_it) const {
      if (num_used == 0) return kNowhere;
      const std::uint8_t tag = tag_of(hash);
      for (std::size_t at = hash & mask(); cells[at].tag != 0; at = (at + 1) & mask())
        if (cells[at].tag == tag && is_it(cells[at].row)) return at;
      return kNowhere;
    }

    void put(std::uint64_t hash, Index row) {
      std::size_t at = hash & mask();
      while (cells[at].tag != 0) at = (at + 1) & mask();
      cells[at] = {tag_of(hash), row};
    }

    // Cells that were pushed on by this one move back, so that no search ends too early.
    template <typename HashOf>
    void erase(std::size_t hole, HashOf&& hash_of) {
      for (std::size_t at = (hole + 1) & mask(); cells[at].tag != 0; at = (at + 1) & mask()) {
        const std::size_t home = hash_of(cells[at].row) & mask();
        if (((at - home) & mask()) >= ((at - hole) & mask())) {
          cells[hole] = cells[at];
          hole = at;
        }
      }
      cells[hole] = {};
    }

    template <typename HashOf>
    void grow(HashOf&& hash_of) {
      std::vector<Cell> before(std::max(kFirstCells, 2 * cells.size()));
      std::swap(before, cells);
      for (const Cell& cell : before)
        if (cell.tag != 0) put(hash_of(cell.row), cell.row);
    }
  };

  std::vector<Shard> shards_;
};

}  // namespace kvtier::keys
