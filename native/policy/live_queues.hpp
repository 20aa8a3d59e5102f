// Policies that keep blocks in queues, in a tier of a running cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/promise.hpp"
#include "policy/blocks.hpp"
#include "policy/expected.hpp"
#include "policy/live.hpp"

namespace kvtier::policy {

// The queues choose the next victim. This class knows which blocks can be evicted: those that the
// keeper does not hold and that have no resident block behind them. A victim that cannot be evicted
// is parked beside the queues until it can, and is then the next victim, unless it was used
// meanwhile. A prompt is therefore evicted from its end, and no eviction examines a block twice
// that cannot be evicted.
//
// Only requests use blocks. A request uses them from the last one to the first, so the beginning of
// a prompt counts as used last.
//
// `Queues` has entries for resident blocks, and for evicted blocks that it remembers:
//
//   find(key)             return an entry; kNone if there is none
//   hit(entry)            a resident block is used
//   missed(entry)         an evicted block is requested
//   most_new()            return how many blocks without an entry may replace resident ones
//   turn_away(key)        a block is not admitted, since it would exceed most_new()
//   enter(key, item, at)  a block is resident: return its entry; `at` blocks are in front of it
//   begin_evicting()      the next evictions are for blocks that are about to enter
//   leave(may_leave)      evict the next block with may_leave(item); return its item, or kNone
//   come_back(entry)      a block can be evicted again; unpark it
//   remove(entry)         the owner has removed a block
template <typename Queues>
class LiveQueues final : public Live {
 public:
  LiveQueues(std::size_t capacity, const Keeper& keeper)
      : queues_(capacity), keeper_(keeper), expected_(std::max(kFewest, capacity / kShare)) {}
  LiveQueues(const LiveQueues&) = delete;
  LiveQueues& operator=(const LiveQueues&) = delete;

  void set_capacity(std::size_t capacity) override { queues_.set_capacity(capacity); }
  std::size_t num_blocks() const override { return blocks_.size(); }
  std::size_t num_history() const override { return queues_.num_history(); }
  std::size_t num_bytes() const override {
    return sizeof(*this) + queues_.num_bytes() + blocks_.num_bytes() + expected_.num_bytes();
  }
  Index in_front_of(Index item) const override { return blocks_.in_front_of(item); }

  void asked(std::span<const Key> path, std::span<const Index> found, double) override {
    use(path, found);
    for (std::size_t at = found.size(); at < path.size(); ++at)
      expected_.add(path[at], at > 0 ? path[at - 1] : 0, kNone, 0, static_cast<std::uint32_t>(at));
  }

  void used_state(std::span<const Key> path, std::span<const Index> found, std::uint32_t, Key, bool,
                  double now) override {
    asked(path, found, now);
  }

  // Like `asked`, if `entered` will be given the places of all blocks.
  void use(std::span<const Key> path, std::span<const Index> items) {
    const std::span<const Index> found = blocks_.numbers(items, found_);
    settle(found);
    for (std::size_t at = path.size(); at-- > 0;) {
      if (at >= found.size() + kAhead) queues_.prefetch(path[at - kAhead]);
      const Index entry = at < found.size() ? blocks_[found[at]].run : queues_.find(path[at]);
      if (entry == kNone) continue;
      if (queues_.is_resident(entry))
        queues_.hit(entry);
      else
        queues_.missed(entry);
    }
  }

  void continues(std::span<const Key> names, Key before) override {
    std::uint32_t at = 0;
    if (const Index block = find(before); block != kNone)
      at = place_behind(block);
    else if (const Expected::Entry* const entry = expected_.find(before))
      at = entry->at + 1;
    expected_.add_behind(before, names, at, [this](Key name) { return find(name) != kNone; });
  }

  // If new blocks would replace each other, only the first ones are admitted.
  void admit(std::span<const Key> names, std::size_t num_free, double,
             std::vector<std::uint32_t>& which) override {
    const std::size_t most = queues_.most_new();
    std::size_t end = 0;
    for (std::size_t num_new = 0; end < names.size(); ++end) {
      const Index entry = queues_.find(names[end]);
      num_new += entry == kNone || queues_.is_resident(entry);
      if (num_new > num_free && num_new - num_free > most) break;
      which.push_back(static_cast<std::uint32_t>(end));
    }
    for (std::size_t i = names.size(); i-- > end;) queues_.turn_away(names[i]);
  }

  void entered(Key name, Index item, std::optional<Place> place, Index behind = kNone) override {
    if (!place)
      place = place_of(name, blocks_.number(behind));
    else
      place->parent = blocks_.number(place->parent);
    expected_.take(name);
    const Index block = blocks_.add(place->parent, item);
    blocks_[block].run = queues_.enter(name, block, place->at);
  }

  // The block is the next victim if it was parked.
  void let_go(Index item) override { come_back(blocks_.number(item)); }

  void begin_evicting() override { queues_.begin_evicting(); }
  Index next_victim() override {
    const Index block = queues_.leave([this](Index each) { return may_leave(each); });
    if (block == kNone) return kNone;
    const Index item = blocks_.item(block);
    drop(block);
    return item;
  }

  void left(Index item) override {
    const Index block = blocks_.number(item);
    queues_.remove(blocks_[block].run);
    drop(block);
  }

  void check() const override {
    queues_.check();
    promise(queues_.num_blocks() == blocks_.size(), "queues: a block is lost");
    blocks_.check([this](auto&& visit) { blocks_.each(visit); });
    blocks_.each([this](Index block) {
      const Index entry = blocks_[block].run;
      promise(queues_.is_resident(entry) && queues_.item(entry) == block,
              "queues: a block is another's");
      promise(!queues_.is_parked(entry) || !may_leave(block), "queues: a block waits in vain");
    });
  }

 private:
  static constexpr std::size_t kFewest = std::size_t{1} << 16;  // that may be expected
  static constexpr std::size_t kShare = 16;                     // of the capacity, one in so many
  static constexpr std::size_t kAhead = 8;

  Index find(Key name) const { return blocks_.number(keeper_.find(name)); }
  void come_back(Index block) {
    const Index entry = blocks_[block].run;
    if (entry != kNone && blocks_.is_leaf(block)) queues_.come_back(entry);
  }
  bool may_leave(Index block) const {
    return blocks_.is_leaf(block) && keeper_.may_leave(blocks_.item(block), 0);
  }
  std::uint32_t place_behind(Index block) const { return queues_.place(blocks_[block].run) + 1; }

  // Move blocks to their places in the path. They may lie elsewhere if their place was not known,
  // or if the block in front of them was missing.
  void settle(std::span<const Index> found) {
    Index before = kNone;
    for (const Index block : found) {
      const Index parent = blocks_[block].parent;
      blocks_.hang_below(block, before);
      if (parent != kNone && parent != before) come_back(parent);
      before = block;
    }
  }

  Place place_of(Key name, Index behind) const {
    if (const Expected::Entry* const entry = expected_.find(name))
      return {entry->at > 0 ? find(entry->before) : kNone, entry->at};
    return {behind, behind == kNone ? 0 : place_behind(behind)};
  }

  void drop(Index block) {
    const Index parent = blocks_.remove(block);
    if (parent != kNone) come_back(parent);
  }

  Queues queues_;
  const Keeper& keeper_;
  Blocks blocks_;  // `run` is the entry
  Expected expected_;
  std::vector<Index> found_;  // kept from call to call, to spare allocations
};

}  // namespace kvtier::policy
