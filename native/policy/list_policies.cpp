#include "policy/list_policies.hpp"

#include <algorithm>
#include <cmath>

namespace kvtier::policy {

// -- LRU
// ---------------------------------------------------------------------------------------------

std::size_t LruReplayed::request(std::span<const Key> path, double) {
  path_.clear();
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i + 8 < path.size()) lists_.prefetch(path[i + 8]);
    const Index block = lists_.find(path[i]);
    if (block == kNone) break;
    path_.push_back(block);
  }
  const std::size_t num_hits = path_.size();
  for (const Index block : path_) lists_.take(block);
  for (std::size_t i = num_hits; i < path.size(); ++i) {
    if (path_.size() + lists_.size(0) == capacity_) {
      if (lists_.oldest(0) == kNone) break;
      lists_.remove(lists_.oldest(0));
    }
    path_.push_back(lists_.make(path[i]));
    ++num_stored_;
  }
  for (std::size_t i = path_.size(); i-- > 0;) lists_.put(path_[i], 0);
  return num_hits;
}

void LruReplayed::check() const {
  lists_.check();
  promise(num_blocks() <= capacity_, "lru: more blocks than there is room for");
}

// -- ARC
// ---------------------------------------------------------------------------------------------

void Arc::use(Key key) {
  Index block = lists_.find(key);
  if (is_resident(block)) return lists_.move(block, kOften);
  ++num_stored_;
  const auto num = [&](std::uint8_t list) { return static_cast<double>(lists_.size(list)); };
  if (block != kNone) {
    const bool was_often = lists_[block].list == kOftenGone;
    const double step =
        was_often ? num(kOnceGone) / num(kOftenGone) : num(kOftenGone) / num(kOnceGone);
    target_ = was_often ? std::max(0.0, target_ - std::max(1.0, step))
                        : std::min(static_cast<double>(capacity_), target_ + std::max(1.0, step));
    make_room(was_often);
    return lists_.move(block, kOften);
  }
  const std::size_t num_once = lists_.size(kOnce) + lists_.size(kOnceGone);
  if (num_once >= capacity_) {
    if (lists_.size(kOnce) < capacity_) {
      lists_.remove(lists_.oldest(kOnceGone));
      make_room(false);
    } else {
      lists_.remove(lists_.oldest(kOnce));
    }
  } else if (num_resident() + num_history() >= capacity_) {
    if (num_resident() + num_history() >= 2 * capacity_) lists_.remove(lists_.oldest(kOftenGone));
    make_room(false);
  }
  block = lists_.make(key);
  lists_.put(block, kOnce);
}

void Arc::make_room(bool was_often) {
  const auto num_once = static_cast<double>(lists_.size(kOnce));
  const bool is_once = num_once > target_ || (was_often && num_once == std::floor(target_));
  if (num_once > 0 && (is_once || lists_.size(kOften) == 0))
    lists_.move(lists_.oldest(kOnce), kOnceGone);
  else if (lists_.size(kOften) > 0)
    lists_.move(lists_.oldest(kOften), kOftenGone);
}

void Arc::check() const {
  lists_.check();
  promise(num_blocks() <= capacity_, "arc: more blocks than there is room for");
  promise(num_blocks() + num_history() <= 2 * capacity_, "arc: more is remembered than allowed");
}

// -- S3-FIFO
// ---------------------------------------------------------------------------------------------

void S3Fifo::use(Key key) {
  Index block = lists_.find(key);
  if (is_resident(block)) {
    std::uint8_t& count = lists_[block].count;
    count = std::min<std::uint8_t>(3, static_cast<std::uint8_t>(count + 1));
    return;
  }
  ++num_stored_;
  const bool was_here = block != kNone;
  if (was_here) lists_.take(block);
  while (num_resident() >= capacity_) {
    if (lists_.size(kSmall) >= num_small_ || lists_.size(kMain) == 0)
      leave_small();
    else
      leave_main();
  }
  if (!was_here) block = lists_.make(key);
  lists_[block].count = 0;
  lists_.put(block, was_here ? kMain : kSmall);
}

void S3Fifo::leave_small() {
  const std::size_t num_main = capacity_ - num_small_;
  while (lists_.size(kSmall) > 0) {
    const Index block = lists_.oldest(kSmall);
    const bool was_used = lists_[block].count > 1;
    lists_[block].count = 0;
    lists_.move(block, was_used ? kMain : kGone);
    if (!was_used) {
      if (lists_.size(kGone) > num_main) lists_.remove(lists_.oldest(kGone));
      return;
    }
    if (lists_.size(kMain) > num_main) leave_main();
  }
}

void S3Fifo::leave_main() {
  while (lists_.size(kMain) > 0) {
    const Index block = lists_.oldest(kMain);
    if (lists_[block].count == 0) return lists_.remove(block);
    --lists_[block].count;
    lists_.move(block, kMain);
  }
}

void S3Fifo::check() const {
  lists_.check();
  promise(num_blocks() <= capacity_, "s3fifo: more blocks than there is room for");
  promise(num_history() <= capacity_, "s3fifo: more is remembered than allowed");
}

// -- SIEVE
// ---------------------------------------------------------------------------------------------

void Sieve::use(Key key) {
  if (const Index block = lists_.find(key); block != kNone) {
    lists_[block].count = 1;
    return;
  }
  ++num_stored_;
  if (lists_.size(0) >= capacity_) {
    if (hand_ == kNone) hand_ = lists_.oldest(0);
    while (lists_[hand_].count > 0) {
      lists_[hand_].count = 0;
      hand_ = lists_[hand_].newer == kNone ? lists_.oldest(0) : lists_[hand_].newer;
    }
    const Index leaves = hand_;
    hand_ = lists_[leaves].newer;
    lists_.remove(leaves);
  }
  lists_.put(lists_.make(key), 0);
}

void Sieve::check() const {
  lists_.check();
  promise(num_blocks() <= capacity_, "sieve: more blocks than there is room for");
}

}  // namespace kvtier::policy
