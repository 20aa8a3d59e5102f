#include "policy/list_policies.hpp"

#include <algorithm>

#include "common/promise.hpp"

namespace kvtier::policy {

// -- ARC
// ---------------------------------------------------------------------------------------------

void Arc::set_capacity(std::size_t capacity) {
  capacity_ = capacity;
  target_ = std::min(target_, static_cast<double>(capacity));
  forget(2 * capacity_);
}

void Arc::missed(Index entry) {
  const auto num = [&](std::uint8_t list) { return static_cast<double>(lists_.size(list)); };
  was_often_ = lists_[entry].list == kOftenGone;
  const double step =
      was_often_ ? num(kOnceGone) / num(kOftenGone) : num(kOftenGone) / num(kOnceGone);
  target_ = was_often_ ? std::max(0.0, target_ - std::max(1.0, step))
                       : std::min(static_cast<double>(capacity_), target_ + std::max(1.0, step));
  recall(entry);
}

Index Arc::enter(Key key, Index item, std::uint32_t) {
  was_often_ = false;
  Index entry = find_gone(key);
  if (entry != kNone) {
    lists_[entry].item = item;
    lists_.move(entry, kOften);
    return entry;
  }
  forget_once(capacity_ - 1);
  forget(2 * capacity_ - 1);
  entry = lists_.make(key, item);
  lists_.put(entry, kOnce);
  return entry;
}

// Returns the capacity for blocks requested once; more of them would replace each other.
std::size_t Arc::most_new() const {
  return std::max(lists_.size(kOnce), static_cast<std::size_t>(target_) + 1);
}

// Remembers the block as if it had entered and been evicted at once.
void Arc::turn_away(Key key) {
  const Index entry = find(key);
  if (entry == kNone) lists_.put(lists_.make(key), kOnceGone);
  else if (!is_resident(entry)) recall(entry);
  forget_once(capacity_);
  forget(2 * capacity_);
}

// Forgets evicted blocks until at most `most` entries are of blocks requested once.
void Arc::forget_once(std::size_t most) {
  while (lists_.size(kOnceGone) > 0 && lists_.size(kOnce) + lists_.size(kOnceGone) > most)
    lists_.remove(lists_.oldest(kOnceGone));
}

// Forgets evicted blocks until there are at most `most` entries.
void Arc::forget(std::size_t most) {
  while (num_history() > 0 && num_blocks() + num_history() > most)
    lists_.remove(lists_.oldest(lists_.size(kOftenGone) > 0 ? kOftenGone : kOnceGone));
}

void Arc::check() const {
  lists_.check();
  promise(num_history() <= 2 * capacity_, "arc: more is remembered than allowed");
}

// -- S3-FIFO
// ---------------------------------------------------------------------------------------------

void S3Fifo::set_capacity(std::size_t capacity) {
  capacity_ = capacity;
  forget();
}

void S3Fifo::hit(Index entry) {
  std::uint8_t& num_uses = lists_[entry].count;
  if (num_uses < kMaxUses) ++num_uses;
}

Index S3Fifo::enter(Key key, Index item, std::uint32_t) {
  Index entry = find_gone(key);
  const bool was_here = entry != kNone;
  if (was_here) lists_.take(entry);
  else entry = lists_.make(key);
  lists_[entry].item = item;
  lists_[entry].count = 0;
  lists_.put(entry, was_here ? kMain : kSmall);
  return entry;
}

void S3Fifo::forget() {
  while (lists_.size(kGone) > num_main()) lists_.remove(lists_.oldest(kGone));
}

void S3Fifo::check() const {
  lists_.check();
  promise(num_history() <= capacity_, "s3fifo: more is remembered than allowed");
}

// -- SIEVE
// ---------------------------------------------------------------------------------------------

Index Sieve::enter(Key key, Index item, std::uint32_t) {
  const Index entry = lists_.make(key, item);
  lists_.put(entry, 0);
  return entry;
}

void Sieve::remove(Index entry) {
  if (entry == hand_) hand_ = lists_[entry].newer;
  lists_.remove(entry);
}

// Puts an unparked block where the hand is.
void Sieve::come_back(Index entry) {
  if (!is_parked(entry)) return;
  if (hand_ == kNone) hand_ = lists_.oldest(0);
  lists_.come_back(entry, hand_);
  hand_ = entry;
}

}  // namespace kvtier::policy
