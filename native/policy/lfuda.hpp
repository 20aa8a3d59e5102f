// Least frequently used first, with ageing. See `LiveQueues` for the meaning of each call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/numbers.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// The value of a block is its number of uses since it entered, plus the value of the last victim at
// its last use. The block of the least value is evicted first; among equals the deepest, then the
// oldest. Source: Arlitt et al., Evaluating content management techniques for Web proxy caches,
// 2000.
//
// A heap has an entry per block that is not parked. A use does not move the entry: its value is a
// lower bound, and is corrected when the entry is at the top. The entry of a removed block also
// stays until then.
class Lfuda {
 public:
  explicit Lfuda(std::size_t) {}

  void set_capacity(std::size_t) {}
  Index find(Key) const { return kNone; }  // nothing is remembered
  void prefetch(Key) const {}
  bool is_resident(Index block) const { return blocks_[block].number != kGone; }
  bool is_parked(Index block) const { return blocks_[block].is_parked; }
  Index item(Index block) const { return blocks_[block].item; }
  std::uint32_t place(Index block) const { return blocks_[block].at; }

  std::size_t num_blocks() const { return blocks_.size(); }
  std::size_t num_history() const { return 0; }
  std::size_t num_bytes() const {
    return blocks_.num_bytes() + heap_.capacity() * sizeof(Waiting);
  }
  void check() const;

  void hit(Index block) {
    Block& it = blocks_[block];
    it.worth = last_worth_ + ++it.num_uses;
  }
  void begin_evicting() {}
  void missed(Index) {}
  std::size_t most_new() const { return ~std::size_t{0}; }
  void turn_away(Key) {}
  Index enter(Key key, Index item, std::uint32_t at);
  void come_back(Index block);
  void remove(Index block);

  template <typename MayLeave>
  Index leave(MayLeave&& may_leave) {
    while (!heap_.empty()) {
      const Index block = heap_.front().block;
      const bool is_known = is_of(heap_.front());
      const bool is_right = is_known && heap_.front().worth == blocks_[block].worth;
      std::pop_heap(heap_.begin(), heap_.end(), leaves_later);
      heap_.pop_back();
      if (!is_known) continue;
      if (!is_right) {
        push(block);
      } else if (may_leave(item(block))) {
        last_worth_ = std::max(last_worth_, blocks_[block].worth);
        const Index its = item(block);
        discard(block);
        return its;
      } else {
        blocks_[block].is_parked = true;
      }
    }
    return kNone;
  }

 private:
  static constexpr std::uint64_t kGone = ~std::uint64_t{0};

  struct Block {
    std::uint64_t worth;
    std::uint64_t number;  // order of arrival among all blocks; kGone: no block
    std::uint32_t num_uses;
    std::uint32_t at;  // blocks in front of it
    Index item;
    bool is_parked;
  };
  struct Waiting {
    std::uint64_t worth;
    std::uint64_t number;
    std::uint32_t at;
    Index block;
  };

  static bool leaves_later(const Waiting& one, const Waiting& other) {
    if (one.worth != other.worth) return one.worth > other.worth;
    return one.at != other.at ? one.at < other.at : one.number > other.number;
  }
  bool is_of(const Waiting& it) const { return blocks_[it.block].number == it.number; }
  void push(Index block);
  void discard(Index block);

  Pool<Block> blocks_;
  std::vector<Waiting> heap_;
  std::uint64_t last_worth_ = 0;
  std::uint64_t num_entered_ = 0;
};

}  // namespace kvtier::policy
