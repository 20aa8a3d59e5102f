// When to stop learning: where least recently used first has more hits.
#pragma once

#include <cstddef>

namespace kvtier::policy {

// Counts, request by request, what a policy has lost to LRU, in blocks. Past a debt it says that
// LRU should decide for a while, twice as long each time.
class Guard {
 public:
  explicit Guard(std::size_t capacity) { set_capacity(capacity); }
  void set_capacity(std::size_t capacity);

  // Whether blocks are worth more or less than each other.
  void set_uneven(bool is_uneven) { is_uneven_ = is_uneven; }

  // num_asked: blocks of the request. lost: what the hits of LRU would have been worth, less what
  // those were that there were. usual: what a block of its middle is worth.
  void judge(std::size_t num_asked, double lost, double usual);
  bool is_lru() const { return is_lru_; }

 private:
  double capacity_ = 0.0;
  double unit_ = 1.0;  // what a block is worth, lately
  double debt_ = 0.0;  // below zero: gained
  double rest_ = 0.0;  // blocks to be asked for until the policy may try again
  double patience_ = 0.0;  // the next rest
  bool is_lru_ = false;
  bool is_uneven_ = false;
};

}  // namespace kvtier::policy
