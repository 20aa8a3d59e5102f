// Fallback of the learned policy to LRU while LRU has more hits.
#pragma once

#include <cstddef>

namespace kvtier::policy {

// Counts, request by request, how much a policy has lost to LRU, in blocks. Above a limit of this
// debt, LRU decides for a while, twice as long each time.
class Guard {
 public:
  explicit Guard(std::size_t capacity) { set_capacity(capacity); }
  void set_capacity(std::size_t capacity);

  // Set whether the value of a block depends on its depth.
  void set_uneven(bool is_uneven) { is_uneven_ = is_uneven; }

  // Count a request. num_asked: its blocks. lost: value of the hits that LRU would have had, less
  // the value of the actual ones. usual: value of a block in its middle.
  void judge(std::size_t num_asked, double lost, double usual);
  bool is_lru() const { return is_lru_; }

 private:
  double capacity_ = 0.0;
  double unit_ = 1.0;  // moving average of the value of a block
  double debt_ = 0.0;  // negative: a gain
  double rest_ = 0.0;  // blocks to be requested until the policy decides again
  double patience_ = 0.0;  // length of the next rest
  bool is_lru_ = false;
  bool is_uneven_ = false;
};

}  // namespace kvtier::policy
