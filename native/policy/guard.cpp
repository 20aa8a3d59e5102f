#include "policy/guard.hpp"

#include <algorithm>

namespace kvtier::policy {

namespace {

// Share of the requested blocks that learning may cost.
constexpr double kFreeShare = 0.0005;
// In capacities: the largest debt, the largest gain that may be lost again, the first rest.
constexpr double kMaxDebt = 0.05;
// Larger if the value depends on depth: one long prompt may then cost the gain of hundreds of
// requests, without showing that LRU is better.
constexpr double kMaxUnevenDebt = 0.2;
constexpr double kMaxCredit = 4.0;
constexpr double kFirstRest = 40.0;
constexpr double kUnitShare = 0.01;  // weight of a request in `unit_`

}  // namespace

void Guard::set_capacity(std::size_t capacity) {
  capacity_ = static_cast<double>(capacity);
  patience_ = kFirstRest * capacity_;
}

void Guard::judge(std::size_t num_asked, double lost, double usual) {
  const auto num = static_cast<double>(num_asked);
  unit_ += kUnitShare * (usual - unit_);
  const double most_debt = (is_uneven_ ? kMaxUnevenDebt : kMaxDebt) * capacity_ * unit_;
  const double most_credit = kMaxCredit * capacity_ * unit_;
  debt_ = std::max(-most_credit, debt_ + lost - kFreeShare * num * usual);
  if (is_lru_) {
    rest_ -= num;
    if (rest_ > 0.0) return;
    is_lru_ = false;
    debt_ = std::min(debt_, 0.0);
  } else if (debt_ > most_debt) {
    is_lru_ = true;
    rest_ = patience_;
    patience_ *= 2.0;
  } else if (debt_ <= -most_credit) {
    patience_ = kFirstRest * capacity_;
  }
}

}  // namespace kvtier::policy
