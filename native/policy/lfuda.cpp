#include "policy/lfuda.hpp"

#include "common/promise.hpp"

namespace kvtier::policy {

namespace {

constexpr std::size_t kFewGone = 64;  // least number of removed blocks whose entries may stay

}  // namespace

Index Lfuda::enter(Key, Index item, std::uint32_t at) {
  const Index block = blocks_.add({last_worth_ + 1, num_entered_++, 1, at, item, false});
  push(block);
  return block;
}

void Lfuda::come_back(Index block) {
  if (!is_parked(block)) return;
  blocks_[block].is_parked = false;
  push(block);
}

void Lfuda::remove(Index block) {
  discard(block);
  if (heap_.size() <= kFewGone + 2 * blocks_.size()) return;
  std::erase_if(heap_, [this](const Waiting& it) { return !is_of(it); });
  std::make_heap(heap_.begin(), heap_.end(), leaves_later);
}

void Lfuda::push(Index block) {
  const Block& it = blocks_[block];
  heap_.push_back({it.worth, it.number, it.at, block});
  std::push_heap(heap_.begin(), heap_.end(), leaves_later);
}

void Lfuda::discard(Index block) {
  blocks_[block].number = kGone;
  blocks_.remove(block);
}

void Lfuda::check() const {
  std::size_t num_waiting = 0;
  for (const Waiting& it : heap_) {
    if (!is_of(it)) continue;
    ++num_waiting;
    promise(it.worth <= blocks_[it.block].worth, "lfuda: an entry is worth more than its block");
    promise(!is_parked(it.block), "lfuda: a parked block waits");
  }
  std::size_t num_parked = 0;
  for (Index block = 0; block < blocks_.end(); ++block)
    num_parked += is_resident(block) && is_parked(block);
  promise(num_waiting + num_parked == blocks_.size(), "lfuda: a block is lost");
}

}  // namespace kvtier::policy
