// Blocks in lists, for policies that know no paths.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/cells.hpp"
#include "policy/numbers.hpp"
#include "policy/pool.hpp"
#include "policy/promise.hpp"

namespace kvtier::policy {

// Each block is in one of kNumLists lists, or in none for a moment.
template <std::size_t kNumLists>
class BlockLists {
 public:
  static constexpr std::uint8_t kNoList = kNumLists;

  struct Block {
    Key key;
    Index newer, older;
    std::uint8_t list;
    std::uint8_t count;  // a policy's own
  };

  Block& operator[](Index block) { return blocks_[block]; }
  const Block& operator[](Index block) const { return blocks_[block]; }

  // kNone where it is in no list.
  Index find(Key key) const {
    return cells_.find(key, [&](Index block) { return blocks_[block].key == key; });
  }
  void prefetch(Key key) const { cells_.prefetch(key); }

  std::size_t size(std::uint8_t list) const { return ends_[list].num; }
  Index newest(std::uint8_t list) const { return ends_[list].newest; }
  Index oldest(std::uint8_t list) const { return ends_[list].oldest; }

  // A new block, in no list yet.
  Index make(Key key) {
    const Index block = blocks_.add({key, kNone, kNone, kNoList, 0});
    cells_.insert(key, block);
    return block;
  }
  // As the newest of the list.
  void put(Index block, std::uint8_t list) {
    Ends& ends = ends_[list];
    Block& it = blocks_[block];
    it.list = list;
    it.newer = kNone;
    it.older = ends.newest;
    (ends.newest == kNone ? ends.oldest : blocks_[ends.newest].newer) = block;
    ends.newest = block;
    ++ends.num;
  }
  void take(Index block) {
    Block& it = blocks_[block];
    Ends& ends = ends_[it.list];
    (it.newer == kNone ? ends.newest : blocks_[it.newer].older) = it.older;
    (it.older == kNone ? ends.oldest : blocks_[it.older].newer) = it.newer;
    it.list = kNoList;
    --ends.num;
  }
  void move(Index block, std::uint8_t list) {
    take(block);
    put(block, list);
  }
  void remove(Index block) {
    take(block);
    cells_.erase(blocks_[block].key, [block](Index other) { return other == block; });
    blocks_.remove(block);
  }

  std::size_t num_bytes() const { return blocks_.num_bytes() + cells_.num_bytes(); }

  void check() const {
    std::size_t num_listed = 0;
    for (std::uint8_t list = 0; list < kNumLists; ++list) {
      std::size_t num = 0;
      Index before = kNone;
      for (Index at = oldest(list); at != kNone; before = at, at = blocks_[at].newer, ++num) {
        promise(blocks_[at].list == list && blocks_[at].older == before, "lists: links disagree");
        promise(find(blocks_[at].key) == at, "lists: a block is not found");
      }
      promise(num == size(list) && before == newest(list), "lists: blocks are miscounted");
      num_listed += num;
    }
    promise(num_listed == blocks_.size(), "lists: some are in none");
  }

 private:
  struct Ends {
    Index newest = kNone;
    Index oldest = kNone;
    std::size_t num = 0;
  };

  Pool<Block> blocks_;
  Cells<std::uint32_t> cells_;  // keys are mixed bits: their own hashes
  std::array<Ends, kNumLists> ends_;
};

}  // namespace kvtier::policy
