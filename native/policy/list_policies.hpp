// Published policies that keep blocks in lists. See `LiveQueues` for the meaning of each call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "policy/block_lists.hpp"

namespace kvtier::policy {

// Common base of the policies below. The first kNumResident lists have resident blocks, the others
// have evicted ones.
template <std::size_t kNumLists, std::size_t kNumResident>
class ListPolicy {
 public:
  Index find(Key key) const { return lists_.find(key); }
  void prefetch(Key key) const { lists_.prefetch(key); }
  bool is_resident(Index entry) const { return lists_[entry].list < kNumResident; }
  bool is_parked(Index entry) const { return lists_[entry].is_parked; }
  Index item(Index entry) const { return lists_[entry].item; }
  std::uint32_t place(Index) const { return 0; }  // not looked at

  std::size_t num_blocks() const { return count(0, kNumResident); }
  std::size_t num_history() const { return count(kNumResident, kNumLists); }
  std::size_t num_bytes() const { return lists_.num_bytes(); }

  void begin_evicting() {}
  std::size_t most_new() const { return ~std::size_t{0}; }
  void turn_away(Key) {}
  void missed(Index entry) { recall(entry); }
  void remove(Index entry) { lists_.remove(entry); }
  void come_back(Index entry) {
    if (is_parked(entry)) lists_.come_back(entry, lists_.oldest(lists_[entry].list));
  }

 protected:
  explicit ListPolicy(std::size_t capacity) : capacity_(capacity) {}

  // Return the entry of an evicted block; kNone if there is none.
  Index find_gone(Key key) const {
    const Index entry = find(key);
    return entry != kNone && !is_resident(entry) ? entry : kNone;
  }
  // Move a requested block to the end of its list, so that it is forgotten last.
  void recall(Index entry) { lists_.move(entry, lists_[entry].list); }
  // Evict a block, and remember it in a list. Return its item.
  Index remember(Index entry, std::uint8_t list) {
    const Index item = lists_[entry].item;
    lists_[entry].item = kNone;
    lists_.move(entry, list);
    return item;
  }
  // Evict a block, and forget it. Return its item.
  Index lose(Index entry) {
    const Index item = lists_[entry].item;
    remove(entry);
    return item;
  }

  std::size_t capacity_;
  BlockLists<kNumLists> lists_;

 private:
  std::size_t count(std::size_t from, std::size_t to) const {
    std::size_t sum = 0;
    for (std::size_t list = from; list < to; ++list)
      sum += lists_.size(static_cast<std::uint8_t>(list));
    return sum;
  }
};

// Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003.
class Arc : public ListPolicy<4, 2> {
 public:
  explicit Arc(std::size_t capacity) : ListPolicy(capacity) {}

  void set_capacity(std::size_t capacity);
  void hit(Index entry) { lists_.move(entry, kOften); }
  void missed(Index entry);
  Index enter(Key key, Index item, std::uint32_t at);
  void begin_evicting() { num_out_ = 0; }
  std::size_t most_new() const;
  void turn_away(Key key);
  void check() const;

  template <typename MayLeave>
  Index leave(MayLeave&& may_leave) {
    while (true) {
      const Index once = lists_.oldest(kOnce), often = lists_.oldest(kOften);
      const auto num_once = static_cast<double>(lists_.size(kOnce) + num_out_);
      const bool is_once = num_once > target_ || (was_often_ && num_once == std::floor(target_));
      const bool from_once = once != kNone && (is_once || often == kNone);
      const Index entry = from_once ? once : often;
      if (entry == kNone) return kNone;
      if (may_leave(item(entry))) {
        const Index item = remember(entry, from_once ? kOnceGone : kOftenGone);
        forget(2 * capacity_);
        ++num_out_;
        return item;
      }
      lists_.park(entry);
    }
  }

 private:
  static constexpr std::uint8_t kOnce = 0, kOften = 1, kOnceGone = 2, kOftenGone = 3;

  void forget_once(std::size_t most);
  void forget(std::size_t most);

  std::size_t num_out_ = 0;  // blocks evicted for the ones that are about to enter
  double target_ = 0.0;     // blocks for kOnce
  bool was_often_ = false;  // list of the last missed block
};

// Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023. A tenth is for new
// blocks.
class S3Fifo : public ListPolicy<3, 2> {
 public:
  explicit S3Fifo(std::size_t capacity) : ListPolicy(capacity) {}

  void set_capacity(std::size_t capacity);
  void hit(Index entry);
  Index enter(Key key, Index item, std::uint32_t at);
  void check() const;

  template <typename MayLeave>
  Index leave(MayLeave&& may_leave) {
    while (true) {
      const Index small = lists_.oldest(kSmall), main = lists_.oldest(kMain);
      const bool is_over = lists_.size(kMain) > num_main();
      const bool from_main = main != kNone && (is_over || small == kNone);
      const Index entry = from_main ? main : small;
      if (entry == kNone) return kNone;
      std::uint8_t& num_uses = lists_[entry].count;
      if (num_uses > (from_main ? 0 : 1)) {  // another round
        num_uses = static_cast<std::uint8_t>(from_main ? num_uses - 1 : 0);
        lists_.move(entry, kMain);
      } else if (!may_leave(item(entry))) {
        lists_.park(entry);
      } else if (from_main) {
        return lose(entry);
      } else {
        const Index item = remember(entry, kGone);
        forget();
        return item;
      }
    }
  }

 private:
  static constexpr std::uint8_t kSmall = 0, kMain = 1, kGone = 2;
  static constexpr std::uint8_t kMaxUses = 3;

  std::size_t num_main() const { return capacity_ - (capacity_ < 20 ? 1 : capacity_ / 10); }
  void forget();
};

// Zhang et al., SIEVE is simpler than LRU, NSDI 2024.
class Sieve : public ListPolicy<1, 1> {
 public:
  explicit Sieve(std::size_t capacity) : ListPolicy(capacity) {}

  void set_capacity(std::size_t capacity) { capacity_ = capacity; }
  void hit(Index entry) { lists_[entry].count = 1; }
  Index enter(Key key, Index item, std::uint32_t at);
  void remove(Index entry);
  void come_back(Index entry);
  void check() const { lists_.check(); }

  template <typename MayLeave>
  Index leave(MayLeave&& may_leave) {
    while (true) {
      if (hand_ == kNone) hand_ = lists_.oldest(0);
      if (hand_ == kNone) return kNone;
      const Index entry = hand_;
      hand_ = lists_[entry].newer;
      if (lists_[entry].count > 0) lists_[entry].count = 0;
      else if (!may_leave(item(entry))) lists_.park(entry);
      else return lose(entry);
    }
  }

 private:
  Index hand_ = kNone;  // kNone: at the oldest
};

}  // namespace kvtier::policy
