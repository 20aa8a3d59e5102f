// Blocks in lists, for policies without knowledge of prompts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/cells.hpp"
#include "common/promise.hpp"
#include "policy/numbers.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// Each block is in one of kNumLists lists, or in none during an update. A parked block belongs to
// its list and counts there, but is not linked into it until `come_back`.
template <std::size_t kNumLists>
class BlockLists {
 public:
  static constexpr std::uint8_t kNoList = kNumLists;

  struct Block {
    Key key;
    Index newer, older;
    Index item;  // its owner's number
    std::uint8_t list;
    std::uint8_t count;  // a policy's own
    bool is_parked;
  };

  Block& operator[](Index block) { return blocks_[block]; }
  const Block& operator[](Index block) const { return blocks_[block]; }

  // kNone where it is not known.
  Index find(Key key) const {
    return cells_.find(key, [&](Index block) { return blocks_[block].key == key; });
  }
  void prefetch(Key key) const { cells_.prefetch(key); }

  std::size_t size(std::uint8_t list) const { return ends_[list].num; }
  Index newest(std::uint8_t list) const { return ends_[list].newest; }
  Index oldest(std::uint8_t list) const { return ends_[list].oldest; }

  // Add a block, in no list yet.
  Index make(Key key, Index item = kNone) {
    const Index block = blocks_.add({key, kNone, kNone, item, kNoList, 0, false});
    cells_.insert(key, block);
    return block;
  }
  // Make a block the newest of a list.
  void put(Index block, std::uint8_t list) {
    blocks_[block].list = list;
    ++ends_[list].num;
    link(block, kNone);
  }
  void take(Index block) {
    if (blocks_[block].is_parked) unpark(block);
    else unlink(block);
    --ends_[blocks_[block].list].num;
    blocks_[block].list = kNoList;
  }
  void park(Index block) {
    unlink(block);
    blocks_[block].is_parked = true;
    ++ends_[blocks_[block].list].num_parked;
  }
  // Unpark a block, and link it before the block `newer`; kNone: as the newest.
  void come_back(Index block, Index newer) {
    unpark(block);
    link(block, newer);
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
      promise(num + ends_[list].num_parked == size(list) && before == newest(list),
              "lists: blocks are miscounted");
      num_listed += size(list);
    }
    promise(num_listed == blocks_.size(), "lists: some are in none");
  }

 private:
  struct Ends {
    Index newest = kNone;
    Index oldest = kNone;
    std::size_t num = 0;
    std::size_t num_parked = 0;  // of these
  };

  void link(Index block, Index newer) {
    Ends& ends = ends_[blocks_[block].list];
    const Index older = newer == kNone ? ends.newest : blocks_[newer].older;
    blocks_[block].newer = newer;
    blocks_[block].older = older;
    (newer == kNone ? ends.newest : blocks_[newer].older) = block;
    (older == kNone ? ends.oldest : blocks_[older].newer) = block;
  }
  void unlink(Index block) {
    const Block& it = blocks_[block];
    Ends& ends = ends_[it.list];
    (it.newer == kNone ? ends.newest : blocks_[it.newer].older) = it.older;
    (it.older == kNone ? ends.oldest : blocks_[it.older].newer) = it.newer;
  }
  void unpark(Index block) {
    blocks_[block].is_parked = false;
    --ends_[blocks_[block].list].num_parked;
  }

  Pool<Block> blocks_;
  Cells<std::uint32_t> cells_;  // keys are mixed bits: their own hashes
  std::array<Ends, kNumLists> ends_;
};

}  // namespace kvtier::policy
