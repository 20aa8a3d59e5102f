// Policies that keep blocks in queues, in a tier of a running cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policy/blocks.hpp"
#include "policy/expected.hpp"
#include "policy/live.hpp"
#include "policy/promise.hpp"

namespace kvtier::policy {

// Queues decide which block leaves next; here it is known which may: one that nothing holds and that
// has no resident block behind it. What the queues offer and may not leave is parked: it waits beside
// them until that changes, and is the next to leave then, unless it was used meanwhile. So a prompt
// leaves from its end, and no eviction meets a block twice that may not leave.
//
// A use of a block is a request that asks for it, whatever else touches it: from the last block of the
// prompt to the first, so that its beginning counts as used last.
//
// Queues have entries, for resident blocks and for those that have left and are remembered:
//
//   find(key)             an entry, kNone where there is none
//   hit(entry)            a resident block is used
//   missed(entry)         one that has left is asked for
//   most_new()            so many that are not remembered may come for others that leave
//   turn_away(key)        a block that is not resident is one too many
//   enter(key, item, at)  a block is resident: its entry; `at` blocks are in front of it
//   begin_evicting()      those that leave then do so for blocks that are about to come
//   leave(may_leave)      the next to leave for which may_leave(item): its item, kNone for none
//   come_back(entry)      it may leave again, if it was parked
//   remove(entry)         it is gone otherwise
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
  Index in_front_of(Index item) const override {
    const Index parent = blocks_[blocks_.number(item)].parent;
    return parent == kNone || !blocks_[parent].is_resident ? kNone : blocks_.item(parent);
  }

  void asked(std::span<const Key> path, std::span<const Index> found, double) override {
    use(path, found);
    for (std::size_t at = found.size(); at < path.size(); ++at)
      expected_.add(path[at], at > 0 ? path[at - 1] : 0, kNone, 0, static_cast<std::uint32_t>(at));
  }

  // The same, where the places of all blocks that come will be known.
  void use(std::span<const Key> path, std::span<const Index> items) {
    const std::span<const Index> found = blocks_.numbers(items, found_);
    settle(found);
    for (std::size_t at = path.size(); at-- > 0;) {
      if (at >= found.size() + kAhead) queues_.prefetch(path[at - kAhead]);
      const Index entry = at < found.size() ? blocks_[found[at]].run : queues_.find(path[at]);
      if (entry == kNone) continue;
      if (queues_.is_resident(entry)) queues_.hit(entry);
      else queues_.missed(entry);
    }
  }

  void continues(std::span<const Key> names, Key before) override {
    std::uint32_t at = 0;
    if (const Index block = find(before); block != kNone) at = place_behind(block);
    else if (const Expected::Entry* const entry = expected_.find(before)) at = entry->at + 1;
    for (const Key name : names) {
      if (expected_.find(name) == nullptr && keeper_.find(name) == kNone)
        expected_.add(name, before, kNone, 0, at);
      before = name;
      ++at;
    }
  }

  // Where new blocks would take the place of each other, those at the beginning are let in.
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
    if (!place) place = place_of(name, blocks_.number(behind));
    else place->parent = blocks_.number(place->parent);
    expected_.take(name);
    const Index block = blocks_.add(place->parent, item);
    blocks_[block].run = queues_.enter(name, block, place->at);
  }

  // It leaves next, where it was to leave before and might not.
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

  // Blocks whose place nobody knew, or in front of which one was missing, are where the path has
  // them.
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
