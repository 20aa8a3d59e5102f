#include "policy/runs.hpp"

#include "policy/promise.hpp"

namespace kvtier::policy {

Index Runs::add(Run run) {
  run.number = ++num_made_;
  run.older = newest_;
  run.newer = kNone;
  run.place = kNone;
  const Index made = pool_.add(run);
  (newest_ == kNone ? oldest_ : pool_[newest_].newer) = made;
  newest_ = made;
  if (run.is_resident()) list(made);

  num_in_window_ += run.size();
  if (first_ == kNone) first_ = made;
  while (first_ != newest_ && num_in_window_ - pool_[first_].size() >= capacity_) {
    num_in_window_ -= pool_[first_].size();
    first_ = pool_[first_].newer;
  }
  return made;
}

void Runs::remove(Index run) {
  Run& it = pool_[run];
  unlist(run);
  if (is_in_window(it)) num_in_window_ -= it.size();
  if (first_ == run) first_ = it.newer;
  (it.older == kNone ? oldest_ : pool_[it.older].newer) = it.newer;
  (it.newer == kNone ? newest_ : pool_[it.newer].older) = it.older;
  it.number = 0;
  pool_.remove(run);
}

void Runs::take_front(Index run, std::uint32_t to) {
  Run& it = pool_[run];
  if (is_in_window(it)) num_in_window_ -= to - it.lo;
  it.lo = to;
  it.mid = std::max(it.mid, to);
  if (!it.is_resident()) unlist(run);
}

void Runs::forget_ghost(Index run) {
  Run& it = pool_[run];
  if (is_in_window(it)) num_in_window_ -= it.hi - it.mid;
  it.hi = it.mid;
}

void Runs::shorten(Index run, Index new_tail) {
  Run& it = pool_[run];
  it.tail = new_tail;
  --it.mid;
  if (!it.is_resident()) unlist(run);
}

bool Runs::would_be_kept(Index run, std::uint32_t at) const {
  const Run& it = pool_[run];
  if (!is_in_window(it)) return false;
  // Of the first run its first blocks, as far as they fit.
  return run != first_ || at - it.lo < capacity_ - (num_in_window_ - it.size());
}

void Runs::list(Index run) {
  pool_[run].place = static_cast<Index>(residents_.size());
  residents_.push_back(run);
}

void Runs::unlist(Index run) {
  const Index place = pool_[run].place;
  if (place == kNone) return;
  const Index moved = residents_.back();
  residents_[place] = moved;
  pool_[moved].place = place;
  residents_.pop_back();
  pool_[run].place = kNone;
}

void Runs::check() const {
  std::size_t num_runs = 0, num_listed = 0, num_in_window = 0;
  Index before = kNone;
  for (Index run = oldest_; run != kNone; before = run, run = pool_[run].newer) {
    const Run& it = pool_[run];
    promise(it.older == before, "runs: links disagree");
    promise(before == kNone || pool_[before].number < it.number, "runs: out of order");
    promise(it.start <= it.lo && it.lo <= it.mid && it.mid <= it.hi && it.lo < it.hi,
            "runs: one without blocks");
    promise((it.place != kNone) == it.is_resident(), "runs: a resident one is not listed");
    promise(it.place == kNone || residents_[it.place] == run, "runs: listed elsewhere");
    num_listed += it.place != kNone;
    if (is_in_window(it)) num_in_window += it.size();
    ++num_runs;
  }
  promise(before == newest_ && num_runs == pool_.size(), "runs: some are lost");
  promise(num_listed == residents_.size(), "runs: some are listed twice");
  promise(num_in_window == num_in_window_, "runs: the window is miscounted");
}

}  // namespace kvtier::policy
