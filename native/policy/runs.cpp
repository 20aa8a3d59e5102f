#include "policy/runs.hpp"

#include <utility>

#include "common/promise.hpp"

namespace kvtier::policy {

Index Runs::add(Run run) {
  run.number = ++num_made_;
  run.place = kNone;
  const Index made = pool_.add(run);
  ages_.append(pool_, made);
  if (run.is_resident()) list(made);

  num_in_window_ += run.size();
  if (first_ == kNone) first_ = made;
  narrow();
  return made;
}

void Runs::narrow() {
  while (first_ != kNone && first_ != ages_.newest &&
         num_in_window_ - pool_[first_].size() >= capacity_) {
    num_in_window_ -= pool_[first_].size();
    first_ = pool_[first_].newer;
  }
}

void Runs::remove(Index run) {
  Run& it = pool_[run];
  unlist(run);
  if (is_in_window(it)) num_in_window_ -= it.size();
  if (first_ == run) first_ = it.newer;
  ages_.unlink(pool_, run);
  it.number = 0;
  if (is_said(run)) {
    resized(run, -static_cast<std::int64_t>(it.size()));
    num_said_ -= said_[run].words != Retention{};
    num_retained_ -= said_[run].level != kUsual;
    said_[run] = {};
  }
  pool_.remove(run);
}

void Runs::take_front(Index run, std::uint32_t to) {
  Run& it = pool_[run];
  if (is_in_window(it)) num_in_window_ -= to - it.lo;
  resized(run, -static_cast<std::int64_t>(to - it.lo));
  it.lo = to;
  it.mid = std::max(it.mid, to);
  it.tried = std::max(it.tried, it.mid);
  if (!it.is_resident()) unlist(run);
}

void Runs::forget_ghost(Index run) {
  Run& it = pool_[run];
  if (is_in_window(it)) num_in_window_ -= it.hi - it.mid;
  resized(run, -static_cast<std::int64_t>(it.hi - it.mid));
  it.hi = it.mid;
}

void Runs::shorten(Index run, Index new_tail, bool is_inside) {
  Run& it = pool_[run];
  it.tail = new_tail;
  --it.mid;
  if (it.is_resident()) set_inside(run, is_inside);
  else unlist(run);
}

void Runs::grow(Index run, Index new_tail) {
  Run& it = pool_[run];
  it.tail = new_tail;
  set_inside(run, false);
  it.tried = std::max(it.tried, ++it.mid);
  if (it.place == kNone) list(run);
  if (it.mid <= it.hi) return;
  it.hi = it.mid;
  resized(run, 1);
  if (!is_in_window(it)) return;
  ++num_in_window_;
  narrow();
}

void Runs::cut_off(Index run, std::uint32_t end, Index new_tail, bool is_inside) {
  Run& it = pool_[run];
  if (is_in_window(it)) num_in_window_ -= it.hi - end;
  resized(run, -static_cast<std::int64_t>(it.hi - end));
  it.hi = it.mid = end;
  it.tail = new_tail;
  set_inside(run, is_inside);
}

void Runs::set_inside(Index run, bool is_inside) {
  Run& it = pool_[run];
  if (it.is_inside == is_inside) return;
  it.is_inside = is_inside;
  if (it.place != kNone) residents_[level(run)][it.place].is_inside = is_inside;
}

bool Runs::would_be_kept(Index run, std::uint32_t at) const {
  const Run& it = pool_[run];
  if (!is_in_window(it)) return false;
  if (at >= it.tried) return false;
  // Of the window's first run LRU keeps the first blocks, as far as they fit.
  return run != first_ || at - it.lo < capacity_ - (num_in_window_ - it.size());
}

// -- hints on runs
// ---------------------------------------------------------------------------------------------

void Runs::retain(Index run, const Retention& words, double now) {
  const Retention heard = words.at(now);
  if (!is_said(run)) {
    if (heard == Retention{}) return;
    said_.resize(run + 1);
  }
  num_said_ += heard != Retention{};
  num_said_ -= said_[run].words != Retention{};
  const auto size = static_cast<std::int64_t>(pool_[run].size());
  count_raised(said_[run].words, -size);
  count_raised(heard, size);
  said_[run].words = heard;
  move_to(run, heard.level());
  await_end(run);
}

void Runs::count_raised(const Retention& words, std::int64_t num) {
  if (!words.is_raised() || num == 0) return;
  const auto found = raised_.try_emplace(words.tenant, 0).first;
  found->second += num;
  num_raised_ += num;
  if (found->second == 0) raised_.erase(found);
}

std::size_t Runs::room_to_raise(std::uint64_t tenant) const {
  const auto found = raised_.find(tenant);
  const std::size_t of_tenant = found == raised_.end() ? 0 : found->second;
  const std::size_t most = capacity_ / kTenantsShare, most_of_all = capacity_ / kRaisedShare;
  if (of_tenant >= most || num_raised_ >= most_of_all) return 0;
  return std::min(most - of_tenant, most_of_all - num_raised_);
}

void Runs::move_to(Index run, Level level) {
  if (said_[run].level == level) return;
  const bool is_listed = pool_[run].place != kNone;
  unlist(run);
  num_retained_ += level != kUsual;
  num_retained_ -= said_[run].level != kUsual;
  said_[run].level = level;
  if (is_listed) list(run);
}

void Runs::await_end(Index run) {
  const double end = said_[run].words.ends();
  if (end == said_[run].end) return;
  said_[run].end = end;
  if (end == Retention::kNever) return;
  if (ends_.size() > 64 + 2 * num_said_) {
    std::erase_if(ends_, [this](const End& each) { return is_stale(each); });
    std::make_heap(ends_.begin(), ends_.end());
  }
  ends_.push_back({end, pool_[run].number, run});
  std::push_heap(ends_.begin(), ends_.end());
}

void Runs::expire(double now) {
  while (!ends_.empty() && ends_.front().time <= now) {
    const End first = ends_.front();
    std::pop_heap(ends_.begin(), ends_.end());
    ends_.pop_back();
    if (!is_stale(first)) retain(first.run, said_[first.run].words, now);
  }
}

// -- runs with resident blocks
// ---------------------------------------------------------------------------------------------

void Runs::list(Index run) {
  List<Resident>& residents = residents_[level(run)];
  const std::uint32_t end = residents.size();
  residents.push_back({run, pool_[run].is_inside});
  const Index place = random_.below(end + 1);
  std::swap(residents[place], residents[end]);
  pool_[residents[end].run].place = end;
  pool_[run].place = place;
}

void Runs::unlist(Index run) {
  const Index place = pool_[run].place;
  if (place == kNone) return;
  List<Resident>& residents = residents_[level(run)];
  const Resident moved = residents.back();
  residents[place] = moved;
  pool_[moved.run].place = place;
  residents.pop_back();
  pool_[run].place = kNone;
}

void Runs::check() const {
  std::size_t num_runs = 0, num_listed = 0, num_in_window = 0, num_said = 0, num_retained = 0;
  std::size_t num_raised = 0;
  Index before = kNone;
  for (Index run = ages_.oldest; run != kNone; before = run, run = pool_[run].newer) {
    const Run& it = pool_[run];
    promise(it.older == before, "runs: links disagree");
    promise(before == kNone || pool_[before].number < it.number, "runs: out of order");
    promise(it.start <= it.lo && it.lo <= it.mid && it.mid <= it.hi && it.lo < it.hi,
            "runs: one without blocks");
    promise(it.mid <= it.tried, "runs: a block came in unseen");
    promise((it.place != kNone) == it.is_resident(), "runs: a resident one is not listed");
    if (it.place != kNone) {
      const Resident& listed = residents_[level(run)][it.place];
      promise(listed.run == run, "runs: listed elsewhere");
      promise(listed.is_inside == it.is_inside, "runs: listed as another kind");
    }
    num_said += retention(run) != Retention{};
    if (retention(run).is_raised()) num_raised += it.size();
    num_retained += level(run) != kUsual;
    promise(level(run) == retention(run).level(), "runs: not at the level that was said");
    num_listed += it.place != kNone;
    if (is_in_window(it)) num_in_window += it.size();
    ++num_runs;
  }
  promise(before == ages_.newest && num_runs == pool_.size(), "runs: some are lost");
  for (const auto& each : residents_) num_listed -= each.size();
  promise(num_listed == 0, "runs: some are listed twice");
  promise(num_said == num_said_ && num_retained == num_retained_, "runs: words are miscounted");
  for (const auto& [tenant, num] : raised_) num_raised -= num;
  promise(num_raised == 0, "runs: those raised are miscounted");
  promise(ends_.size() <= 65 + 2 * (num_runs + num_said), "runs: ends pile up");
  promise(num_in_window == num_in_window_, "runs: the window is miscounted");
}

}  // namespace kvtier::policy
